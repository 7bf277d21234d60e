"""Grouped products with packed weights on Hopper, without a GPU: exact in the emulator for group sizes of all kinds,
machine code, refusals and candidates."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from jax_splitk.kernels.quantized import experts as family
from jax_splitk.kernels.quantized.experts import FAMILY, Config, split_tiles
from jax_splitk.problems.quantized_ragged import QuantizedRaggedDotProblem
from jax_splitk.runtime.target import DEFAULT_CUDA
from jax_splitk.tuning.options import DEFAULT_WORKSPACE_LIMIT
from tests import emulator, every_kernel, experts, formats, products, ragged_dots
from tests.exhaustive import thinned
from tests.kernels.test_machine_code import check_all
from tests.problems import seeded

HALF = products.HALF
# Layers that decode and one that is trained on: int4 in groups of 128, and the two products of gpt-oss-20b.
LAYERS = (
    (8, 128, 4096, 7168, "int4", 128),
    (8, 8192, 4096, 7168, "int4", 128),
    (32, 4, 2880, 5760, "float4_e2m1fn", 32),
    (32, 64, 2880, 2880, "float4_e2m1fn", 32),
)


def layer(groups: int, m: int, k: int, n: int, qtype: str, group_size: int) -> QuantizedRaggedDotProblem:
    return experts.problem(groups, products.Case(m, k, n, qtype, group_size))


def check(p: QuantizedRaggedDotProblem, config: Config, seed: int, sizes: Any = None) -> None:
    """Results are exact. Rows of no group, and scales of weights without rows, are NaN."""
    assert FAMILY.refusal(p, config) is None, FAMILY.refusal(p, config)
    operands, exact = experts.exact(p, seed, sizes)
    out = np.zeros(exact.shape, exact.dtype)
    emulator.run(FAMILY.plan(p, config), operands, [out], seed=seed)
    np.testing.assert_array_equal(out, exact, err_msg=f"{p} {config} {operands[-1 - p.has_offset :]}")


# ---- group sizes -----------------------------------------------------------------------------------------------------

PLAIN = experts.problem(5, products.Case(70, 384, 136))
CONFIGS = {
    "whole": Config(64, 16, 2, 3),
    "cut": Config(64, 16, 2, 4, cut=True),
    "one block": Config(128, 32, 2, 1, cut=True),
    "more blocks than tiles": Config(128, 32, 2, 40, cut=True),
    "clusters": split_tiles(PLAIN, Config(64, 16, 3, 0), 2),
}
SIZES = {
    "none": [0] * 5,
    "one row": [0, 0, 1, 0, 0],
    "ones": [1] * 5,
    "few": [3, 0, 2, 0, 1],
    "around a tile": [15, 16, 17, 0, 1],
    "all in the first": [70, 0, 0, 0, 0],
    "all in the last": [0, 0, 0, 0, 70],
    "all": [14] * 5,
    "more than m": [30, 0, 90, 5, 5],
    "far more than m": [2**31 - 1] * 5,
    "negative": [-5, 20, -1, 30, -(2**31)],
}


@pytest.mark.parametrize(("config", "sizes"), thinned(itertools.product(CONFIGS, SIZES), 7))
def test_group_sizes(config: str, sizes: str) -> None:
    for seed in range(2):
        check(PLAIN, CONFIGS[config], seed, SIZES[sizes])


@pytest.mark.parametrize("offset", thinned([-(2**31), -3, -1, 0, 1, 2, 3, 4, 7, 2**31 - 1], 3))
def test_group_offset(offset: int) -> None:
    """Three weights of seven groups, of which some may not exist."""
    p = experts.problem(3, products.Case(70, 384, 136), 7)
    for config in (Config(64, 16, 2, 3), Config(64, 16, 2, 4, cut=True), split_tiles(p, Config(64, 16, 3, 0), 2)):
        operands, _ = experts.exact(p, 3, poison=False)
        operands[-2:] = np.array([9, 0, 20, 1, 16, 0, 20], np.int32), np.array([offset], np.int32)
        lhs, leaves, rest = operands[0], operands[1:-2], operands[-2:]
        rows = ragged_dots.group_rows(p.m, rest[0], offset, p.groups)
        want = np.zeros(p.out_shape)
        for i, of in enumerate(rows):
            _, weight = products.exact_weight(experts.case_of(p.product), 3 + i)
            want[of] = lhs[of].astype(np.float64) @ weight
        out = np.zeros(p.out_shape, lhs.dtype)
        emulator.run(FAMILY.plan(p, config), [lhs, *leaves, *rest], [out])
        np.testing.assert_array_equal(out.astype(np.float64), want.astype(np.float32).astype(out.dtype))


def test_results_are_the_same_for_every_order_of_threads() -> None:
    """Results of a sum that rounds."""
    p = experts.problem(4, products.Case(40, 1024, 72, "nf4", 64, None, "float32", out_dtype="float32"))
    rng = np.random.default_rng(5)
    operands, _ = experts.exact(p, 1, [7, 0, 20, 5])
    operands[0] = rng.standard_normal(operands[0].shape).astype(operands[0].dtype)
    for config in (Config(64, 16, 2, 5, cut=True), split_tiles(p, Config(64, 16, 4, 0), 4)):
        found = []
        for seed in range(4):
            out = np.zeros(p.out_shape, np.float32)
            emulator.run(FAMILY.plan(p, config), operands, [out], seed=seed)
            found.append(out)
        assert all(np.array_equal(found[0], other) for other in found[1:])


# ---- types -----------------------------------------------------------------------------------------------------------


def _kinds() -> list[Any]:
    """Every format with groups of every size, odd k and n, and x of each dtype."""
    found = []
    for i, (qtype, (k, group)) in enumerate(
        itertools.product(formats.BITS, ((208, 16), (352, 32), (320, 64), (384, 128), (301, 301)))
    ):
        zero = ("own", "bfloat16", None)[i % 3] if qtype in formats.INTEGERS else None
        bytes_ = ({"scale_dtype": formats.E8M0}, {"scale_dtype": experts.E4M3, "channel": True})
        types = (*products.TYPES, {"x_dtype": experts.E4M3}, *bytes_)[i % 8]
        found.append(products.Case(33, k, (70, 136, 65)[i % 3], qtype, group, zero, **types))
    return found


@pytest.mark.parametrize("case", thinned(_kinds(), 5), ids=str)
def test_formats(case: products.Case) -> None:
    with seeded(90) as rng:
        p = experts.problem(4, case)
        tile_n = int(rng.choice([16, 32]))
        configs = [Config(64, tile_n, 2, 3, cut=bool(rng.integers(2))), Config(128, tile_n, 2, 2)]
        check(p, configs[rng.integers(2)], int(rng.integers(100)))


# ---- epilogues -------------------------------------------------------------------------------------------------------

WITH_BIAS = experts.problem(5, products.Case(70, 384, 144, bias="bfloat16", activation="swiglu"), 7)


@pytest.mark.parametrize("config", [
    Config(64, 16, 2, 3), Config(128, 32, 2, 3, cut=True), split_tiles(WITH_BIAS, Config(64, 16, 3, 0), 2),
], ids=str)  # fmt: skip
def test_each_row_has_its_weights_bias(config: Config) -> None:
    """Rows of no group are zeros, and half as many columns as a weight's are cleared."""
    for seed in range(2):
        check(WITH_BIAS, config, seed)


@pytest.mark.parametrize("seed", thinned(range(12), 4))
def test_random_epilogues(seed: int) -> None:
    p, config = experts.random_epilogue(seed, small=True)
    check(p, config, seed)


# ---- machine code ----------------------------------------------------------------------------------------------------


def test_epilogues_do_not_spill() -> None:
    """Compiles the most sums, and the fewest registers."""
    p = experts.problem(
        8, products.Case(4096, 4096, 4096, "float4_e2m1fn", 32, bias="float32", activation="geglu", channel=True)
    )
    check_all([every_kernel.Run(FAMILY, p, config) for config in (Config(128, 256, 3, 132), Config(64, 16, 3, 396))])


def test_zero_points_in_clusters_do_not_spill() -> None:
    """A producer has few registers, and finds the groups' tiles, copies weights and sums of x."""
    p = experts.problem(8, products.Case(128, 4096, 7168, "uint4", 128, "bfloat16"))
    check_all([every_kernel.Run(FAMILY, p, split_tiles(p, Config(128, 64, 8, 0), 2))])


# ---- configs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", LAYERS, ids=str)
def test_candidates_are_legal_and_few(given: Any) -> None:
    p = layer(*given)
    found = FAMILY.candidates(p, DEFAULT_CUDA)
    assert 8 <= len(found) <= 64
    assert len(set(found)) == len(found)
    for config in found:
        assert FAMILY.refusal(p, config) is None
        assert FAMILY.workspace_bytes(p, config) <= DEFAULT_WORKSPACE_LIMIT
    assert {config.cut for config in found} == {False, True}
    assert {config.splits > 1 for config in found} == {False, True}


def test_few_rows_take_narrow_tiles_and_many_wide_ones() -> None:
    few, many = (FAMILY.candidates(layer(*given), DEFAULT_CUDA) for given in (LAYERS[2], LAYERS[1]))
    assert {config.tile_n for config in few} <= {16, 32}
    assert {config.tile_n for config in many} >= {128, 256}


def test_time_grows_with_active_experts_only() -> None:
    """The estimate does not depend on experts without rows."""
    some, more = (layer(groups, 4, 2880, 5760, "float4_e2m1fn", 32) for groups in (4, 128))
    config = FAMILY.candidates(some, DEFAULT_CUDA)[0]
    config = split_tiles(more, config, config.splits) if config.splits > 1 else config
    assert some.bytes_moved == pytest.approx(more.bytes_moved, rel=1e-3)
    assert FAMILY.estimate(some, config, DEFAULT_CUDA) == pytest.approx(
        FAMILY.estimate(more, config, DEFAULT_CUDA), 1e-2
    )


@pytest.mark.parametrize(("changes", "reason"), [
    ({"groups": 1025}, "1025 groups; accepted: at most 1024"),
    ({"total_groups": 2000}, "2000 groups; accepted: at most 1024"),
    ({"dtype": "float32"}, "x of dtype float32; accepted: bfloat16, float16, float8_e4m3fn"),
    ({"n": 2**28, "groups": 1000}, "tiles of 64 features of all weights; accepted"),
])  # fmt: skip
def test_problems_that_are_refused(changes: dict[str, Any], reason: str) -> None:
    assert reason in str(FAMILY.refusal(dataclasses.replace(layer(*LAYERS[0]), **changes)))


@pytest.mark.parametrize(("config", "reason"), [
    (Config(96, 16, 2, 3), "tile_m 96; accepted: 64, 128, 256"),
    (Config(64, 8, 2, 3), "tile_n 8; accepted: 16, 32"),
    (Config(64, 16, 40, 3), "stages 40; accepted with this tile: 2 to 8"),
    (Config(64, 16, 2, 0), "blocks 0; accepted: 1 to 1024"),
    (Config(64, 16, 4, 3, splits=2), "blocks 3 with splits 2; accepted: "),
    (Config(64, 16, 4, 3, cut=True, splits=2), "cut True with splits 2; accepted: False"),
    (Config(64, 16, 2, 3, k_warpgroups=2), "k_warpgroups 2 without splits; accepted: 1"),
])  # fmt: skip
def test_configs_that_are_refused(config: Config, reason: str) -> None:
    assert reason in str(FAMILY.refusal(layer(*LAYERS[0]), config))


def test_splits_with_empty_ranges_are_refused() -> None:
    p = experts.problem(4, products.Case(16, 1152, 64))
    reason = FAMILY.refusal(p, split_tiles(p, Config(64, 16, 8, 0), 8))
    assert reason == "splits 8 leaves some of 9 k blocks' ranges empty; use 5"


def test_a_cluster_has_room_for_every_tile() -> None:
    """No group sizes make more tiles than `most_tiles`."""
    with seeded(91) as rng:
        for _ in range(300):
            groups, m, tile_n = int(rng.integers(1, 40)), int(rng.integers(1, 200)), int(rng.choice([16, 32, 64]))
            p = experts.problem(groups, products.Case(m, 128, 64))
            sizes = rng.multinomial(m, rng.dirichlet(np.full(groups, rng.choice([0.05, 0.5, 10.0]))))
            count = sum(-(-size // tile_n) for size in sizes)
            assert count <= family.most_tiles(p, Config(64, tile_n, 2, 1))
