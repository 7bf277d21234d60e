"""Products with the transpose of a packed weight: candidates, refusals and plans of their kernel family, and its
arithmetic in the emulator."""

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
from jax import numpy as jnp

from jax_splitk import kernels
from jax_splitk.kernels.base import xla
from jax_splitk.kernels.quantized import tiled, tiles
from jax_splitk.kernels.quantized.transposed import FAMILY, Config
from jax_splitk.problems.quantized_transposed import QuantizedTransposedProblem
from jax_splitk.quantized import QuantizedArray, prepack
from jax_splitk.runtime import plan
from jax_splitk.runtime.target import DEFAULT_CUDA, Target
from tests import emulator, float64, formats, products
from tests.exhaustive import drawn, thinned
from tests.problems import seeded
from tests.products import E4M3, HALF, Case

SIZES = ((1, 64, 1), (8, 8192, 3584), (9, 333, 77), (64, 4096, 14336), (65, 1088, 200), (1024, 14336, 4096))
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"qtype": "uint4", "zero_dtype": "bfloat16"},
    {"qtype": "nf4", "scale_dtype": "float16", **HALF},
    {"qtype": "int8", "group_size": 0, "scale_dtype": "float32"},
    {"qtype": E4M3, "group_size": 16},
    {"qtype": "float4_e2m1fn", "group_size": 128, "x_dtype": "float16"},
    {"qtype": "float4_e2m1fn", "group_size": 16, "scale_dtype": E4M3, "channel_dtype": "float32"},
)


def of(problem: Any, **changes: Any) -> QuantizedTransposedProblem:
    return dataclasses.replace(QuantizedTransposedProblem(**vars(problem)), **changes)


def valid(rows: int, k: int, features: int, **changes: Any) -> QuantizedTransposedProblem:
    return of(products.valid_problem(rows, k, features, **changes))


PROBLEMS = [of(p) for p in products.problems(SIZES, KINDS)]
PLAIN = Config(128, 64, 4, 8, 1)


# ---- the problem ---------------------------------------------------------------------------------------------------


def test_the_weight_is_that_of_the_forward_product() -> None:
    p = valid(20, 320, 136, qtype="uint4", zero_dtype="bfloat16")
    assert (p.x_shape, p.out_shape, p.m, p.contracted) == ((20, 136), (20, 320), 320, 136)
    assert p.operand_types[1:] == p.forward.operand_types[1:]
    assert (p.flops, p.forward.m, p.forward.contracted) == (p.forward.flops, 136, 320)
    assert type(p.representatives()[0]) is QuantizedTransposedProblem
    assert str(p) == (
        "quantized_matmul_transposed bfloat16->bfloat16 x 20x136 w 320x136 uint4 group 64 scale bfloat16 zero bfloat16"
    )
    assert p.brief == "quantized_matmul_transposed 20, 136 -> 320, uint4 by 64 with zero points, bf16"
    assert p != p.forward


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "reason"), [
    ({"x_dtype": E4M3}, f"x of dtype {E4M3}; accepted: bfloat16, float16"),
    ({"x_dtype": "float32"}, "x of dtype float32; accepted: bfloat16, float16"),
    ({"out_dtype": "float32"}, "preferred_element_type float32 of x and weights in bfloat16, to which weights are "
     "rounded; accepted: dtypes with no longer mantissas"),
    ({"out_dtype": "float16"}, "preferred_element_type float16 of x and weights in bfloat16, to which weights are "
     "rounded; accepted: dtypes with no longer mantissas"),
    ({"rows": 0}, f"0 rows of x; accepted: 1 to {2**31 - 257}"),
    ({"rows": 128, "k": 2**24, "features": 2**20},
     f"{2**30} blocks of 128 k, 128 rows and 128 features; accepted: at most {2**30 - 1}"),
    ({"rows": 2**30 - 128, "k": 64, "features": 129},
     f"{2**31 + 256} blocks of 128 k of x with features=129 (no multiple of 8); accepted: at most {2**31 - 1}"),
])  # fmt: skip
def test_problems_that_are_refused(changes: dict[str, Any], reason: str) -> None:
    p = valid(64, 1024, 1024)
    assert FAMILY.refusal(p) is None
    assert FAMILY.refusal(dataclasses.replace(p, **changes)) == reason


def test_results_with_fewer_bits_than_x_are_served() -> None:
    assert FAMILY.refusal(valid(64, 1024, 1024, x_dtype="float16")) is None
    refused = FAMILY.refusal(valid(64, 1024, 1024), None, Target("cuda", "NVIDIA A100", "8.0", 108))
    assert refused == "needs a GPU of compute capability 9.0 (Hopper), not NVIDIA A100 (8.0)"


@pytest.mark.parametrize(("changes", "reason"), [
    ({"tile_m": 192}, "tile_m 192; accepted: 64, 128, 256"),
    ({"tile_m": 256, "tile_n": 96, "blocks": 4}, "tile_n 96 with tile_m 256 and scaling 'weight'; at most 64"),
    ({"stages": 9}, "stages 9; accepted with this tile: 2 to 8"),
    ({"blocks": 9}, "whole_tiles 1 of 9 workers; accepted for 8 tiles: 0 to 0"),
])  # fmt: skip
def test_configs_that_are_refused(changes: dict[str, Any], reason: str) -> None:
    """There are 8 tiles of 128 k by 64 rows."""
    p = valid(64, 1024, 1024)
    assert FAMILY.refusal(p, PLAIN) is None
    assert FAMILY.refusal(p, dataclasses.replace(PLAIN, **changes)) == reason


# ---- search --------------------------------------------------------------------------------------------------------


def test_candidates_are_legal_unique_and_few() -> None:
    for p in PROBLEMS:
        found = FAMILY.candidates(p, DEFAULT_CUDA)
        assert 1 <= len(set(found)) == len(found) <= 60, p
        for config in found:
            assert type(config) is Config
            assert FAMILY.refusal(p, config, DEFAULT_CUDA) is None, (p, config)
        seconds = FAMILY.estimates(p, found, DEFAULT_CUDA)
        assert seconds == sorted(seconds)
        assert p.bytes_moved / 4.8e12 < seconds[0] < 1, p
        near = FAMILY.neighbours(p, found[0], DEFAULT_CUDA)
        assert found[0] not in near
        assert len(set(near)) == len(near)


def test_scales_in_floats_and_formats_with_more_instructions_cost_more() -> None:
    config = Config(128, 256, 2, 32, 1)
    plain, floats, nf4 = (
        FAMILY.estimate(valid(256, 4096, 4096, **kind), config, DEFAULT_CUDA)
        for kind in ({}, {"scale_dtype": "float32"}, {"qtype": "nf4"})
    )
    assert plain < min(floats, nf4)
    mirrored = products.valid_problem(256, 4096, 4096)
    assert plain > tiled.FAMILY.estimate(mirrored, tiled.Config(128, 256, 2, 32, 1), DEFAULT_CUDA)


def test_xla_is_estimated_by_its_own_times_where_there_are_some() -> None:
    """Else as for the forward product. Times are of 256 to 4,096 rows."""
    for p, is_own in (
        (valid(1024, 4096, 14336), True),
        (valid(4096, 14336, 4096, qtype="nf4"), True),
        (valid(1, 4096, 14336), False),
        (valid(1024, 4096, 14336, qtype="int8"), False),
    ):
        found = xla.estimate(p, DEFAULT_CUDA)
        assert found is not None
        assert (found != xla.estimate(p.forward, DEFAULT_CUDA)) == is_own
    assert FAMILY.uncertainty(PROBLEMS[0], DEFAULT_CUDA) == tiled.FAMILY.uncertainty(PROBLEMS[0], DEFAULT_CUDA) < 1
    assert kernels.families("quantized_matmul_transposed") == (FAMILY,)


# ---- plans ---------------------------------------------------------------------------------------------------------


def test_plans_are_those_of_the_custom_call() -> None:
    for p in PROBLEMS:
        for config in FAMILY.candidates(p, DEFAULT_CUDA)[::4]:
            made = FAMILY.plan(p, config)
            shapes = [(p.x_shape, p.x_dtype), (p.words_shape, "uint32"), (p.scale_shape, p.scale_dtype)]
            shapes += [(p.scale_shape, p.zero_dtype)] * (p.zero_dtype != "none")
            shapes += [((p.feature_tiles, 64), p.channel_dtype)] * (p.channel_dtype != "none")
            shapes += [(p.out_shape, p.out_dtype)]
            sizes = [math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in shapes]
            assert [b.bytes for b in made.buffers] == [*sizes, FAMILY.workspace_bytes(p, config)]
            assert all(stride % 16 == 0 for tensor_map in made.maps for stride in tensor_map.strides)
            for launch in made.launches:
                assert launch.shared_bytes <= 227 * 1024
            main = next(launch for launch in made.launches if launch.kernel == FAMILY.kernel_name(p))
            assert FAMILY.blocks_per_sm(p, config) * (main.shared_bytes + 1024) <= 228 * 1024
            made.words()


def test_plan_of_tiles() -> None:
    p = valid(64, 1024, 512)
    made = FAMILY.plan(p, PLAIN)
    assert [buffer.bytes for buffer in made.buffers] == [64 * 1024, 512 * 512, 8 * 1024 * 2, 64 * 2048, 0]
    assert (made.maps[0].dims, made.maps[0].strides, made.maps[0].box) == ((512, 64), (1024,), (64, 64))
    (main,) = made.launches
    assert (main.kernel, main.grid, main.block) == ("quantized_transposed_int4", (8, 1, 1), (384, 1, 1))
    assert {("TRANSPOSED", 1), ("SCALING", 0)} <= set(made.source.defines)


def test_plan_with_everything() -> None:
    """x has rows that TMA cannot load, weights have factors, and tiles are cut."""
    p = valid(70, 333, 201, qtype="uint4", group_size=333, zero_dtype="float32", scale_dtype="float32", **HALF)
    config = Config(128, 32, 2, 4, 1)
    assert FAMILY.refusal(p, config) is None
    made = FAMILY.plan(p, config)
    roles = ("_prepare", "_factors", "", "_reduce")
    assert [launch.kernel for launch in made.launches] == [f"quantized_transposed_uint4{role}" for role in roles]
    assert [launch.programmatic for launch in made.launches] == [False, False, True, True]
    copy, slots = -(-70 * 208 * 2 // 256) * 256, 2 * 4 * 128 * 32 * 4
    assert made.workspace_bytes == copy + 256 + slots
    _, finds, main, _ = made.launches
    workspace = len(made.buffers) - 1
    assert finds.grid == (1, 1, 1)
    assert plan.Pointer(workspace, copy) in finds.params
    offsets = [param.offset for param in main.params if isinstance(param, plan.Pointer) and param.buffer == workspace]
    assert offsets == [copy, copy + 256]


# ---- arithmetic ----------------------------------------------------------------------------------------------------


def emulated(case: Case, config: Config, x: Any, q: QuantizedArray, seed: int = 0) -> np.ndarray:
    p = case.problem
    assert FAMILY.refusal(p, config) is None
    out = np.empty(p.out_shape, jnp.dtype(p.out_dtype))
    given = tuple(np.asarray(array) for array in products.operands(prepack(q), x, case.x_dtype))
    emulator.run(FAMILY.plan(p, config), given, [out], seed=seed)
    return out


def config_for(case: Case, tile_m: int = 64, tile_n: int = 16) -> Config:
    return tiles.whole_tiles(case.problem, Config(tile_m, tile_n, 2, 0))


DECODED = [
    Case(40, 384, 40, qtype, group, zero, scale_dtype, **({}, HALF)[(i + j) % 2], transposed=True)
    for i, (qtype, zero) in enumerate(formats.CASES)
    for j, (group, scale_dtype) in enumerate(formats.GROUPS)  # each with both dtypes of x
]
DECODED += [
    Case(40, 384, 40, qtype, 16, None, scale_dtype, **types, channel=channel, transposed=True)
    for (qtype, scale_dtype), channel, types in itertools.product(
        (("float4_e2m1fn", E4M3), ("float4_e2m1fn", formats.E8M0), ("int4", "bfloat16")), (True, False), ({}, HALF)
    )
]
DECODED = list(dict.fromkeys(DECODED))


@pytest.mark.parametrize("case", thinned(drawn(DECODED, 3, 65), 5, lambda case: str(case.problem)))
def test_one_hot_activations_give_the_weight_rounded_once(case: Case) -> None:
    """The weight by its definition in float32, then rounded to x's dtype."""
    q, weight = case.every_code(case.operand)
    out = emulated(case, config_for(case), np.eye(40), q)
    np.testing.assert_array_equal(out, float64.rounded(weight.T, case.x_dtype))


@pytest.mark.parametrize("sizes", [(1e-30,), (1e30,), (2.0**-24, 1.0, 65504.0)], ids=str)
@pytest.mark.parametrize("qtype", ["int4", "int8"])
def test_float16_takes_scales_of_any_size(qtype: str, sizes: tuple[float, ...]) -> None:
    """Weights beyond float16's range: their groups have factors. The sums fit because x is as small as they are
    large."""
    case = Case(8, 128, 40, qtype, 64, None, "float32", **HALF, transposed=True)
    q, _ = case.every_code(case.operand)
    groups = np.arange(2) % len(sizes)
    scale = np.abs(np.asarray(q.scale)) * np.asarray(sizes, np.float32)[groups][:, None]
    q = dataclasses.replace(q, scale=jnp.asarray(scale))
    case = dataclasses.replace(case, out_dtype="bfloat16")
    weight = products.elements(q, case.operand) * np.repeat(scale.astype(np.float64), 64, axis=0)
    x = products.integers(case, 2, 3)
    out = emulated(case, config_for(case), x, q).astype(np.float64)
    exact = x @ weight.T
    assert (np.abs(out - exact) <= 2**-8 * np.abs(exact) + 2**-11 * (np.abs(x) @ np.abs(weight.T))).all()


def test_as_accurate_as_the_product_with_the_rounded_weight() -> None:
    for case in (
        Case(24, 192, 840, transposed=True),
        Case(24, 192, 840, "nf4", 64, None, "float32", transposed=True),
        Case(24, 192, 840, "uint4", 64, "bfloat16", "float16", **HALF, transposed=True),
    ):
        q, weight = case.every_code(case.operand)
        x = products.normal(case)
        exact = np.asarray(x.astype(jnp.float32), np.float64) @ weight.T
        theirs = products.error(products.as_float32_product(case, x, weight), exact)
        mine = products.error(emulated(case, config_for(case, 64, 32), x, q), exact)
        assert mine <= 2 * theirs, (case, mine, theirs)


def test_the_order_of_threads_changes_no_bit() -> None:
    case = Case(24, 192, 1100, transposed=True)
    q, _ = case.every_code(case.operand)
    x = products.normal(case)
    for config in (
        products.without_idle(case.problem, Config(64, 32, 2, 5)),
        tiles.split_tiles(case.problem, Config(64, 32, 4, 0, k_warpgroups=2), 3),
    ):
        first, *others = (emulated(case, config, x, q, seed=seed) for seed in range(4))
        for other in others:
            np.testing.assert_array_equal(first, other)


@pytest.mark.parametrize("case", [
    Case(20, 256, 136, transposed=True),
    Case(20, 200, 100, "int8", 200, None, "float16", **HALF, transposed=True),
], ids=str)  # fmt: skip
def test_nan_reaches_only_what_depends_on_it(case: Case) -> None:
    """In x it reaches its row. In a scale it reaches the k of its group."""
    with seeded(81):
        q, weight = products.exact_weight(case, 4, case.operand)
    x = products.integers(case, 2, 5)
    expected, config = float64.rounded(x @ weight.T, case.out_dtype), config_for(case)
    spoiled = x.copy()
    spoiled[3, case.features // 2] = np.nan
    out = emulated(case, config, spoiled, q).astype(np.float32)
    assert np.isnan(out[3]).all()
    rows = np.arange(case.rows) != 3
    np.testing.assert_array_equal(out[rows], expected[rows].astype(np.float32))
    q = dataclasses.replace(q, scale=q.scale.at[0, case.features // 3].set(jnp.nan))
    out = emulated(case, config, x, q).astype(np.float32)
    in_group = np.arange(case.k) < case.group_size
    assert np.isnan(out[:, in_group]).all()
    np.testing.assert_array_equal(out[:, ~in_group], expected[:, ~in_group].astype(np.float32))


def test_words_of_transposed_fragments() -> None:
    """`first_word` and `load_transposed` of the device code: the words of the 16 k of a warp, by 16 features."""
    for qtype in ("int4", "int8"):
        q, _ = formats.every_code(qtype, 64, 64, 64)
        values = np.asarray(q.qvalue.astype(jnp.float32), np.float64)
        memory = np.asarray(prepack(q).words)[0].reshape(-1).view(np.uint8)
        eight = qtype == "int8"
        for warp, lane, block in itertools.product(range(4), range(32), range(4)):
            g, t = divmod(lane, 4)
            first = lane * 16 + (warp // 2 * 512 + warp % 2 * 8 if eight else warp * 4)
            start = first + block * (64 * 64 // (1 if eight else 2) // 4)
            k = warp * 16 + 2 * t + np.array([0, 8, 1, 9])
            for half in range(2):
                if eight:
                    found = memory[start + 4 * half : start + 4 * half + 4].view(np.int8)
                else:
                    found = (memory[start : start + 4] >> 4 * half & 15).astype(int) - 8
                np.testing.assert_array_equal(found, values[k, block * 16 + half * 8 + g])
