"""The matrix product's kernel family without a GPU: the problems that it serves, its candidates, its plans."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from jax_splitk.kernels.contraction import products as tma
from jax_splitk.kernels.contraction.products import FAMILY, Config
from jax_splitk.kernels.cpu import dot as as_wgrad
from jax_splitk.kernels.device import split_k
from jax_splitk.problems.dot_general import E4M3, LHS_ORDERS, RHS_ORDERS, DotProblem
from jax_splitk.problems.problem import nbytes
from jax_splitk.runtime.plan import Pointer, TiledMap
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import dots, emulator, tf32
from tests.problems import seeded

LONG = DotProblem(1, 128, 256, 65536, "bkm", "bkn", "bfloat16", "float32")
SLIGHT = DotProblem(1, 16, 1280, 320, "bmk", "bkn", "bfloat16", "bfloat16")

FLOAT32 = {"dtype": "float32", "lhs_order": "bmk", "rhs_order": "bnk"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float64"}, "dtype float64; accepted: float32, bfloat16, float16, float8_e4m3fn"),
        ({"dtype": E4M3}, "preferred_element_type float32; accepted: bfloat16, float16"),
        ({"dtype": E4M3, "out_dtype": "bfloat16"}, "float8_e4m3fn with m and n contiguous; accepted: k in both"),
        (
            {"dtype": E4M3, "out_dtype": "bfloat16", "lhs_order": "bmk", "rhs_order": "bnk", "k": 65544},
            "k=65544, which is contiguous; accepted: multiples of 16",
        ),
        ({"out_dtype": "float64"}, "preferred_element_type float64; accepted"),
        ({"dtype": "float32"}, "float32 with m and n contiguous; accepted: k in both"),
        ({**FLOAT32, "precision": "highest"}, "precision 'highest'"),
        ({"m": 100}, "m=100, which is contiguous; accepted: multiples of 8"),
        ({"rhs_order": "bnk", "n": 6}, "n=6; accepted: multiples of 4"),
        ({"rhs_order": "bnk", "k": 65532}, "k=65532, which is contiguous; accepted: multiples of 8"),
        ({"bias": "n", "bias_dtype": "float64"}, "bias_dtype float64; accepted: float32, bfloat16, float16"),
        ({**FLOAT32, "m": 1}, "float32 with m=1, which XLA computes without tf32; accepted: at least 2"),
        ({**FLOAT32, "m": 4, "n": 20, "k": 4}, "float32 with (m + n) * k = 96: XLA computes it without tf32"),
        ({"residual_dtype": "float64"}, "residual_dtype float64; accepted: float32, bfloat16, float16"),
        ({"batch": 70000, "k": 8, "m": 8, "n": 8}, "batch 70000; accepted: at most 65535"),
    ],
)
def test_refuses_what_it_cannot_compute(changes: dict[str, object], reason: str) -> None:
    refusal = FAMILY.problem_refusal(dataclasses.replace(LONG, **changes))  # pyright: ignore[reportArgumentType]
    assert refusal is not None and refusal.startswith(reason)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Config(96, 64, 4), "tile 96x64; accepted"),
        (Config(64, 64, 1), "stages 1; accepted: 2 to 8"),
        (Config(64, 64, 8, 2, "none"), "reduction 'none' of 2 splits"),
        (Config(64, 64, 8, 1, "cluster"), "reduction 'cluster' of 1 splits"),
        (Config(64, 64, 8, 9, "cluster"), "splits 9 in a cluster; accepted: at most 8"),
        (Config(64, 64, 8, 2000, "workspace"), "splits 2000; accepted for 1024 blocks of k"),
        (Config(64, 64, 8, 2, "turns"), "reduction turns; accepted: none, workspace, cluster"),
    ],
)
def test_refuses_configs(config: Config, reason: str) -> None:
    refusal = FAMILY.config_refusal(LONG, config)
    assert refusal is not None and refusal.startswith(reason)


def test_tf32_is_for_what_xla_computes_in_it() -> None:
    """Products that XLA computes in float32 are refused: outer products, vectors, the smallest ones."""
    for m, n, k, served in ((1, 44, 8, False), (12, 8, 4, False), (12, 8, 8, True), (2, 44, 4, True)):
        problem = DotProblem(1, m, n, k, "bmk", "bnk", "float32", "float32")
        assert (FAMILY.problem_refusal(problem) is None) == served
        problem = dataclasses.replace(problem, lhs_order="bkm", rhs_order="bkn")
        assert as_wgrad.HOST.problem_refusal(problem) is None
        halves = dataclasses.replace(problem, m=8, n=48, dtype="bfloat16")
        assert FAMILY.problem_refusal(halves) is None


def test_float32_is_rounded_to_nearest() -> None:
    """Otherwise the tensor cores would truncate, with an error 2.6 times as large."""
    problem = DotProblem(1, 72, 64, 1032, "bmk", "bnk", "float32", "float32")
    with seeded(73) as rng:
        operands = [rng.normal(size=shape).astype(np.float32) for shape in (problem.lhs_shape, problem.rhs_shape)]
        operands[0][0, 0, :4] = np.uint32([0x3F801000, 0x3F803000, 0x3FFFFFFF, 0x00000FFF]).view(np.float32)
        out = np.zeros(problem.out_shape, np.float32)
        emulator.run(FAMILY.plan(problem, Config(64, 64, 4, 2, "cluster")), operands, [out])
    nearest = dots.exactly(problem, *(tf32.nearest(x) for x in operands))
    assert np.linalg.norm(out - nearest) <= 1e-6 * np.linalg.norm(nearest)
    exact = dots.exactly(problem, *(x.astype(np.float64) for x in operands))
    # Each operand's error is uniform in half a unit of 2**-10 to both sides, relative to values of 1 to 2.
    assert 1e-4 < np.linalg.norm(out - exact) / np.linalg.norm(exact) < 2**-11


def test_sums_of_e4m3_are_held_twice() -> None:
    problem = dataclasses.replace(LONG, dtype=E4M3, out_dtype="bfloat16", lhs_order="bmk", rhs_order="bnk")
    assert FAMILY.config_refusal(problem, Config(128, 128, 6)) is None
    for config, sums, most in (
        (Config(128, 192, 5), 96, 64),
        (Config(192, 192, 4), 96, 64),
        (Config(64, 128, 4), 64, 32),
    ):
        assert FAMILY.config_refusal(LONG, dataclasses.replace(config, splits=4, reduction="cluster")) is None
        tile = f"tile {config.tile_m}x{config.tile_n} of {config.stages} stages"
        refusal = f"{tile}, {sums} sums a thread, with float8_e4m3fn; accepted: at most {most}"
        assert FAMILY.config_refusal(problem, config) == refusal


def test_long_float32_sums_leave_the_tensor_cores() -> None:
    """So such a product needs no splits for its accuracy: it is one launch."""
    problem = DotProblem(1, 1024, 2048, 50304, "bkm", "bkn", "bfloat16", "float32")
    whole, wide = Config(128, 128, 7), Config(64, 256, 5)
    assert whole in FAMILY.candidates(problem, DEFAULT_CUDA)
    assert FAMILY.macros(problem, whole)["CHAIN"] == tma.FLOAT32_CHAIN
    # With 393 blocks a split, the tensor cores may add all of them. Also a tile whose sums a thread cannot hold twice.
    assert FAMILY.macros(problem, dataclasses.replace(whole, splits=2, reduction="cluster"))["CHAIN"] == 0
    assert FAMILY.macros(problem, wide)["CHAIN"] == 0
    assert (FAMILY.least_splits(problem, whole), FAMILY.least_splits(problem, wide)) == (1, 2)
    unsplit = [c for c in FAMILY.candidates(problem, DEFAULT_CUDA) if c.splits == 1]
    assert all(FAMILY.macros(problem, config)["CHAIN"] for config in unsplit)
    assert FAMILY.macros(dataclasses.replace(problem, out_dtype="bfloat16"), whole)["CHAIN"] == 0


MAX_FLOPS = 2e9  # small enough for NumPy


def random_problem(rng: np.random.Generator) -> DotProblem:
    """Random sizes. Contiguous dimensions are multiples of 16 bytes, as TMA requires, and n is a multiple of four."""
    dtype, out = str(rng.choice(tuple(tma.ELEMENT_CODES))), str(rng.choice(tuple(split_k.OUT_CODES)))
    if dtype == E4M3 and out == "float32":
        out = "bfloat16"
    contiguous = {"float32": 4, E4M3: 16}.get(dtype, 8)
    k_major = contiguous != 8
    lhs, rhs = ("bmk", "bnk") if k_major else (str(rng.choice(LHS_ORDERS)), str(rng.choice(RHS_ORDERS)))

    def size(letter: str, most: int) -> int:
        multiple = contiguous if letter in (lhs[-1], rhs[-1]) else 4 if letter == "n" else 1
        multiple = 64 if rng.random() < 0.25 else multiple  # the kernel loads such operands in another way
        return multiple * max(1, int(2 ** rng.uniform(0, math.log2(most))) // multiple)

    while True:
        batch = int(rng.integers(1, 4))
        problem = DotProblem(batch, size("m", 2048), size("n", 2048), size("k", 65536), lhs, rhs, dtype, out)
        if problem.flops <= MAX_FLOPS and tma._tf32_refusal(problem) is None:
            return problem


def test_candidates_are_legal_and_stay_within_the_workspace() -> None:
    with seeded(71) as rng:
        for problem in (random_problem(rng) for _ in range(40)):
            assert FAMILY.refusal(problem, None, DEFAULT_CUDA) is None
            candidates = FAMILY.candidates(problem, DEFAULT_CUDA)
            assert candidates
            assert len(set(candidates)) == len(candidates)
            for config in candidates:
                assert FAMILY.config_refusal(problem, config) is None
                assert FAMILY.estimate(problem, config, DEFAULT_CUDA) > 0
                splits = config.splits if config.reduction == "workspace" else 0
                tiles = math.prod(tma.tile_counts(problem, config)) * problem.batch
                assert FAMILY.workspace_bytes(problem, config) == splits * tiles * config.tile_m * config.tile_n * 4


def test_a_plan_covers_the_product() -> None:
    """Its maps describe the operands in memory, and its grid covers every block of k once."""
    with seeded(72) as rng:
        for problem in (random_problem(rng) for _ in range(40)):
            config = FAMILY.candidates(problem, DEFAULT_CUDA)[int(rng.integers(3))]
            plan = FAMILY.plan(problem, config)
            for tensor_map, shape in zip(plan.maps, (problem.lhs_shape, problem.rhs_shape), strict=True):
                assert isinstance(tensor_map, TiledMap)
                assert math.prod(tensor_map.dims) == math.prod(shape)
                assert all(stride % 16 == 0 for stride in tensor_map.strides)
                assert len(tensor_map.dims) == len(tensor_map.box) == len(tensor_map.strides) + 1
            main = plan.launches[0]
            rows, columns = tma.tile_counts(problem, config)
            assert main.grid == (rows, columns, config.splits * problem.batch)
            each, longer = divmod(tma.k_blocks(problem), config.splits)
            assert each >= 1 and each * config.splits + longer == tma.k_blocks(problem)
            assert (len(plan.launches) == 2) == (config.reduction == "workspace")


@pytest.mark.parametrize("after", dots.epilogues(), ids=str)
def test_what_stores_the_result_takes_the_epilogues_operands(after: dict[str, Any]) -> None:
    problem = DotProblem(2, 128, 256, 4096, "bkm", "bkn", "bfloat16", "float32", **after)
    assert problem.epilogue
    for config in (Config(64, 64, 6), Config(64, 64, 6, 4, "cluster"), Config(64, 64, 6, 4, "workspace")):
        plan = FAMILY.plan(problem, config)
        *given, out, workspace = (buffer.bytes for buffer in plan.buffers)
        assert given == [nbytes(*array) for array in problem.operand_types]
        assert (out, workspace) == (4 * 2 * 128 * 256, FAMILY.workspace_bytes(problem, config))
        first, last = plan.launches[0], plan.launches[-1]
        pointers = [[p.buffer for p in launch.params if isinstance(p, Pointer)] for launch in (first, last)]
        count = len(problem.operand_types)
        bias, residual = 2 if "bias" in after else 0, count - 1 if "residual_dtype" in after else 0
        assert pointers[1][-3 if first is last else 1 :] == [count, bias, residual]
        assert first is last or pointers[0] == [count + 1]
        plain = FAMILY.source(problem.product, config)
        assert set(plan.source.defines) - set(plain.defines) == {(n, v) for n, v in plan.source.defines if n in MACROS}


MACROS = ("EPILOGUE", "BIAS", "BIAS_TYPE", "ACTIVATION", "RESIDUAL_TYPE")


def test_without_a_measurement_xla_is_preferred_where_it_is_not_known_to_lose() -> None:
    assert FAMILY.why_xla_untuned(dataclasses.replace(LONG, k=16384)) is None
    for problem in (dataclasses.replace(LONG, m=8192, n=8192), dataclasses.replace(LONG, m=1024, n=2048, k=50304)):
        assert "was not measured" in str(FAMILY.why_xla_untuned(problem))
    assert "was not measured" in str(FAMILY.why_xla_untuned(SLIGHT))
    assert FAMILY.why_xla_untuned(dataclasses.replace(SLIGHT, k=4096)) is None


def test_a_measurement_is_worth_its_time_where_splits_may_help() -> None:
    """The limits come from measurements: see benchmarks/notes/dot.md."""
    few, many = dataclasses.replace(LONG, m=1024, n=256, k=16384), dataclasses.replace(LONG, m=8192, n=8192)
    assert FAMILY.why_not_tuned(few) is None
    assert "its 4096 tiles of 128x128 fill the GPU" in str(FAMILY.why_not_tuned(many))
    long = dataclasses.replace(few, m=96, n=384, k=401408)
    assert "it takes 90 us at the GPU's rates" in str(FAMILY.why_not_tuned(long))
    # Not if there are as many tiles as multiprocessors.
    assert FAMILY.why_not_tuned(dataclasses.replace(LONG, m=1024, n=2048, k=50304)) is None
    assert "its reduction of 320 is short" in str(FAMILY.why_not_tuned(SLIGHT))
    assert FAMILY.why_not_tuned(dataclasses.replace(SLIGHT, k=4096)) is None
    # Not measured on any GPU.
    for unknown in ({"dtype": "float32"}, {"activation": "relu"}):
        assert FAMILY.why_not_tuned(dataclasses.replace(many, **unknown)) is None
