"""Random dense forward passes and input gradients on a GPU, by few kernels."""

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from jax_splitk.kernels import Family
from jax_splitk.kernels.contraction import im2col, im2col_config
from jax_splitk.kernels.contraction.im2col import Config
from jax_splitk.runtime import compiler
from tests import few_kernels, float64, on_gpu, poison, random_problems
from tests.kernels.conv.tried import BOTH, IM2COL, draw_im2col
from tests.problems import conv_of, seeded
from tests.random_problems import OUT_DTYPES, device_plan

pytestmark = pytest.mark.gpu

LARGE = dataclasses.replace(IM2COL, draw=functools.partial(draw_im2col, scale=2))
RANDOM, KERNELS, PARTS = 500, 150, 25  # of a pass: problems, by so many kernels; of both passes: tests
MOST = 8e8  # operations of a problem
# What is rare among them, of problems and of configs, has a share of both.
SHARE = 45, 20
Wanted = tuple[Callable[[Any], bool], Callable[[Any], bool]]
ANY: Wanted = (lambda p: True, lambda config: True)


def _has_long_rows(p: Any) -> bool:
    """Whether no stage may have all taps of a filter row."""
    return len(im2col.shared_taps(p)) > 1 and max(im2col.shared_taps(p)) < p.kernel_spatial[-1]


RARE: tuple[Wanted, ...] = (
    (lambda p: len(im2col.shared_taps(p)) > 1, lambda config: config.taps > 1),
    (_has_long_rows, lambda config: config.taps > 1),
    (lambda p: p.feature_group_count > 1, ANY[1]),
    (lambda p: max(p.window_strides) > 1, ANY[1]),
    (lambda p: max(p.lhs_dilation) > 1, ANY[1]),
    (lambda p: p.dtype == "float32", ANY[1]),
)
THREADS = 4  # XLA compiles what surrounds the kernels


@functools.cache
def random_runs() -> list[tuple[Family, Any, Any]]:
    """Random problems with configs, other ones in each run of the tests."""

    def drawn(rng: np.random.Generator, kind: type[Any], wanted: Callable[[Any], bool]) -> Iterator[tuple[Family, Any]]:
        while True:
            p = LARGE.random(rng, kind, most=MOST)
            if wanted(p):
                yield LARGE.of(p), p

    def sibling(rng: np.random.Generator, p: Any, wanted: Callable[[Any], bool]) -> Any:
        """The problem with other sizes, and often with other channels."""
        while True:
            other = random_problems.resized(rng, p)
            if rng.random() < 0.5:
                each = (max(1, c + 8 * int(rng.integers(-3, 4))) for c in p.group_channels)
                channels = (c * p.feature_group_count for c in each)
                other = dataclasses.replace(other, **dict(zip(("in_channels", "out_channels"), channels, strict=True)))
            if other.flops <= MOST and LARGE.of(other).refusal(other) is None and wanted(other):
                return other

    found = []
    rest = (total - len(RARE) * share for total, share in zip((RANDOM, KERNELS), SHARE, strict=True))
    shares = [(ANY, *rest), *((wanted, *SHARE) for wanted in RARE)]
    with seeded(85) as rng:
        for kind in BOTH:
            for (of_problem, of_config), count, most in shares:
                another = functools.partial(sibling, wanted=of_problem)
                found += few_kernels.runs(drawn(rng, kind, of_problem), rng, count, most, of_config, another)
    return found


def device_code() -> set[compiler.Source]:
    return {few_kernels.source(*run) for run in random_runs()}


def test_random_problems_are_of_every_kind() -> None:
    runs = random_runs()
    assert len(runs) == 2 * RANDOM and len({few_kernels.source(*run) for run in runs}) <= 2 * KERNELS
    for kind in BOTH:
        of = [(p, c) for _, p, c in runs if p.op == kind.op]
        assert len(of) == RANDOM
        assert {p.rank for p, _ in of} == {1, 2, 3} and {p.out_dtype for p, _ in of} == set(OUT_DTYPES)
        assert {p.dtype for p, _ in of} == {"bfloat16", "float16", "float32"}
        assert {c.reduction for _, c in of} == {"none", "cluster", "workspace"}
        assert {im2col.row_bytes(p) for p, _ in of} == {32, 64, 128} and {c.tile_n for _, c in of} >= {16, 32, 64}
        assert sum(c.taps > 1 for _, c in of) > RANDOM / 20
        assert sum(p.feature_group_count > 1 for p, _ in of) > RANDOM / 20
        for field in ("window_strides", "lhs_dilation", "rhs_dilation"):
            assert sum(max(getattr(p, field)) > 1 for p, _ in of) > RANDOM / 20, field


def wrong(number: int, family: Family, p: Any, config: Any) -> str | None:
    """What is wrong with a result, or None: every other time on integers against the exact result, else by the error
    against float64."""
    integers = number % 2 == 0
    x, w = (on_gpu.integers if integers else on_gpu.normals)(p, number)
    out, want = poison.run(device_plan(family, p, config), p, x, w), on_gpu.exactly(p, x, w)
    if integers:
        differ = int((out != float64.rounded(want, p.out_dtype)).sum())
        return f"{p} {p.padding} {config}: {differ} of {out.size} differ" if differ else None
    most = max({"bfloat16": 2**-8, "float16": 2**-11}.get(p.out_dtype, 2**-15), 2**-9 if p.dtype == "float32" else 0)
    error = on_gpu.error(out, want) if want.any() else float(np.abs(out.astype(np.float64)).max())
    return None if error <= most else f"{p} {p.padding} {config}: error {error:.3e}, at most {most:.3e} is right"


@pytest.mark.parametrize(("channels", "groups", "config"), [
    (80, 1, Config(128, 80, 3, workers=5)),
    (72, 4, Config(192, 80, 3, taps=3)),
    (144, 1, Config(192, 144, 3, workers=7)),
    (80, 2, Config(64, 64, 4, 3, "workspace")),
])  # fmt: skip
def test_weights_that_are_transposed_to_load_fewer_rows(
    channels: int, groups: int, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of large passes, and here of a small one."""
    monkeypatch.setattr(im2col_config, "_TRANSPOSED_FLOPS", 0)
    shape: dict[str, Any] = {"groups": groups, "padding": 1, "batch": 5, "out_dtype": "bfloat16"}
    p = conv_of(BOTH[0], (19, 21), (3, 3), (channels * groups,) * 2, **shape)
    assert im2col.transposes(p) and im2col.FPROP.refusal(p, config) is None
    for number in range(2):
        assert wrong(number, im2col.FPROP, p, config) is None


@pytest.mark.parametrize("part", range(PARTS))
def test_random_problems_against_float64(part: int) -> None:
    runs = list(enumerate(random_runs()))[part::PARTS]
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        failures = [text for text in pool.map(lambda numbered: wrong(numbered[0], *numbered[1]), runs) if text]
    assert not failures, f"{len(failures)} of {len(runs)}\n" + "\n".join(failures[:20])
