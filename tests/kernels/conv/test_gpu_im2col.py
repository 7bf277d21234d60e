"""Dense forward passes and input gradients on a GPU."""

import concurrent.futures
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jax_splitk.kernels import Family
from jax_splitk.kernels.conv import im2col
from jax_splitk.kernels.conv.im2col import Config
from jax_splitk.problems.conv_wgrad import ConvProblem
from jax_splitk.runtime import compiler
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import every_kernel, few_kernels, gpu_wgrad, poison
from tests.kernels.conv import on_gpu
from tests.kernels.conv.test_im2col import BOTH, DTYPES, FAMILIES, problem, random_problem
from tests.problems import seeded
from tests.random_problems import device_plan

pytestmark = pytest.mark.gpu

CASES: list[tuple[Any, Any]] = [(r.problem, r.config) for r in every_kernel.RUNS if r.family in FAMILIES.values()]
RANDOM, KERNELS = 500, 90  # of a pass
THREADS = 8  # XLA compiles what surrounds the kernels
NETWORKS = [
    problem(kind, size, kernel, *channels, batch=batch, **more)
    for kind in BOTH
    for batch, size, kernel, channels, more in (
        (8, (28, 28), (3, 3), (128, 128), {"padding": 1}),
        (2, (14, 14), (3, 3), (512, 256), {"padding": 1, "out_dtype": "float32"}),
        (4, (56, 56), (3, 3), (64, 128), {"padding": 1, "stride": 2, "dtype": "float16", "out_dtype": "float16"}),
        (4, (28, 28), (1, 1), (256, 128), {"stride": 2}),
        (8, (28, 28), (1, 1), (512, 128), {}),
        (2, (16, 16, 16), (3, 3, 3), (64, 64), {"padding": 1}),
        (2, (16, 16, 16), (4, 4, 4), (64, 64), {"padding": 1, "stride": 2}),
        (4, (2000,), (7,), (64, 128), {"padding": 9, "rhs_dilation": 3}),
        (2, (16, 32, 32), (3, 3, 3), (32, 32), {"padding": 1}),
        (4, (64, 64), (3, 3), (16, 32), {"padding": 1, "stride": 2}),
        (4, (64, 64), (5, 5), (16, 16), {"padding": 2, "dtype": "float16", "out_dtype": "float16"}),
        (8, (28, 28), (3, 3), (192, 192), {"padding": 1, "groups": 3}),
        (8, (28, 28), (3, 3), (128, 96), {"padding": 1, "groups": 2, "stride": 2}),
    )
]  # fmt: skip


def configs(p: ConvProblem) -> list[Config]:
    """The best of each reduction, number of taps in a stage and orientation by the model."""
    family, found = FAMILIES[p.op], {}
    for config in sorted(family.candidates(p, DEFAULT_CUDA), key=lambda c: family.estimate(p, c, DEFAULT_CUDA)):
        found.setdefault((config.reduction, config.taps, config.swap, config.workers > 0), config)
    # Thread blocks of several tiles each, where there would be one.
    fewer = [dataclasses.replace(c, workers=-(-c.workers // 3)) for c in found.values() if c.workers > 1]
    return [*found.values(), *fewer]


@functools.cache
def random_runs() -> list[tuple[Family, Any, Any]]:
    """Other ones in each run of the tests."""

    def drawn(rng: np.random.Generator, kind: type[Any]) -> Iterator[tuple[Family, Any]]:
        while True:
            p = random_problem(rng, kind, scale=2)
            yield FAMILIES[p.op], p

    with seeded(85) as rng:
        return [run for kind in BOTH for run in few_kernels.runs(drawn(rng, kind), rng, RANDOM, KERNELS)]


def device_code() -> set[compiler.Source]:
    pairs = [*CASES, *((p, config) for p in NETWORKS for config in configs(p))]
    return {FAMILIES[p.op].source(p, c) for p, c in pairs} | {few_kernels.source(*run) for run in random_runs()}


@pytest.mark.parametrize(("p", "given"), [*CASES, *((p, None) for p in NETWORKS)], ids=str)
def test_integers_are_exact_whatever_the_results_memory_held(p: ConvProblem, given: Any) -> None:
    on_gpu.check_integers(FAMILIES[p.op], p, [given] if given else configs(p))


@pytest.mark.parametrize("p", NETWORKS, ids=str)
def test_error_is_at_most_twice_xlas_and_runs_repeat(p: ConvProblem) -> None:
    on_gpu.check_error_and_repeats(FAMILIES[p.op], p, configs(p))


def test_random_problems_are_of_every_kind() -> None:
    runs = random_runs()
    assert len(runs) == 2 * RANDOM and len({few_kernels.source(*run) for run in runs}) <= 2 * KERNELS
    for kind in BOTH:
        of = [(p, c) for _, p, c in runs if p.op == kind.op]
        assert len(of) == RANDOM
        assert {p.rank for p, _ in of} == {1, 2, 3} and {p.out_dtype for p, _ in of} == set(DTYPES)
        assert {p.dtype for p, _ in of} == set(FAMILIES[kind.op].dtypes)
        assert {c.reduction for _, c in of} == {"none", "workspace", "cluster"}
        assert {im2col.row_bytes(p) for p, _ in of} == {32, 64, 128} and {c.tile_n for _, c in of} >= {16, 32, 64}
        assert sum(c.taps > 1 for _, c in of) > RANDOM / 20
        assert sum(p.feature_group_count > 1 for p, _ in of) > RANDOM / 20
        for field in ("window_strides", "lhs_dilation", "rhs_dilation"):
            assert sum(max(getattr(p, field)) > 1 for p, _ in of) > RANDOM / 20, field


def wrong(number: int, family: Family, p: Any, config: Any) -> str | None:
    """Against float64: on integers every other time, else the error, which is that of the last rounding, of fp32 sums
    and of tf32."""
    integers = number % 2 == 0
    x, w = on_gpu.operands(p, integers, seed=number)
    out, want = poison.run(device_plan(family, p, config), p, x, w), on_gpu.exact(p, x, w)
    if integers:
        differ = int((out != gpu_wgrad.rounded(want, p.out_dtype)).sum())
        return f"{p} {p.padding} {config}: {differ} of {out.size} differ" if differ else None
    most = max({"bfloat16": 2**-8, "float16": 2**-11}.get(p.out_dtype, 2**-15), 2**-9 if p.dtype == "float32" else 0)
    error = gpu_wgrad.error(out, want) if want.any() else float(np.abs(out.astype(np.float64)).max())
    return None if error <= most else f"{p} {p.padding} {config}: error {error:.3e}, at most {most:.3e} is right"


def test_random_problems_against_float64() -> None:
    runs = random_runs()
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        failures = [
            text for text in pool.map(lambda numbered: wrong(numbered[0], *numbered[1]), enumerate(runs)) if text
        ]
    assert not failures, f"{len(failures)} of {len(runs)}\n" + "\n".join(failures[:20])


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(("p", "config"), [CASES[i] for i in (0, 1, 2, 4, 10, 17, 19, 23, 29)], ids=str)
def test_what_is_not_finite_reaches_what_depends_on_it(p: ConvProblem, config: Any, value: float) -> None:
    on_gpu.check_not_finite(FAMILIES[p.op], p, config, value)


@pytest.mark.parametrize("p", [p for p in NETWORKS if p.op == "conv_fprop"][::2], ids=str)
def test_a_measurement_chooses_between_it_and_xla(p: ConvProblem) -> None:
    on_gpu.check_measured(p)
