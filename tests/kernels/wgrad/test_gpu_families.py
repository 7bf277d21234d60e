"""Properties of every family of weight gradients on Hopper, on a GPU: exactness, XLA's accuracy, repeatability, and NaN
only where it belongs."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from benchmarks import cases
from benchmarks.cases import Case
from jax_splitk.kernels import Family
from jax_splitk.kernels.contraction import halo
from jax_splitk.kernels.contraction import wgrad as im2col
from jax_splitk.kernels.depthwise import wgrad as depthwise
from jax_splitk.kernels.depthwise import wgrad_any as depthwise_any
from jax_splitk.kernels.gather import wgrad as gather
from jax_splitk.kernels.grouped import wgrad as grouped
from jax_splitk.kernels.tf32 import wgrad as tf32
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime import compiler
from tests import on_gpu, poison
from tests.grouped import DEPTHWISE, GROUPED, NETWORKS, SEQUENCES
from tests.problems import conv
from tests.random_problems import FLOATS, HALVES, OUT_DTYPES, TF32

pytestmark = pytest.mark.gpu


@dataclasses.dataclass(frozen=True)
class Tried:
    """A family's problems.

    Attributes:
      suite: large problems, tried with the best config; also for accuracy, unless `accurate` gives others.
      small: odd problems, each with one combination of `dtypes` and results, or two if there are few problems.
      tiles: how many configs with different device code a small problem is tried with.
    """

    family: Family
    suite: Sequence[ConvWgradProblem]
    small: Sequence[ConvWgradProblem]
    dtypes: Sequence[tuple[str, str]] = HALVES
    accurate: Sequence[ConvWgradProblem] = ()
    tiles: int = 3

    @property
    def odd(self) -> Iterator[ConvWgradProblem]:
        """The small problems, with dtypes and results in turns."""
        types = list(itertools.product(self.dtypes, OUT_DTYPES))
        turns = (0, 1 + len(types) // 2)[: 1 if len(self.small) > 40 else 2]
        for (index, p), turn in itertools.product(enumerate(self.small), turns):
            (dtype, precision), out_dtype = types[(index + turn) % len(types)]
            yield dataclasses.replace(p, dtype=dtype, precision=precision, out_dtype=out_dtype)

    def configs(self, p: ConvWgradProblem) -> list[Any]:
        return on_gpu.some_configs(self.family, p, self.tiles)


def problems(found: Iterable[Case]) -> list[ConvWgradProblem]:
    """The problems with results of the inputs' dtype, and with float32 results."""
    return list(dict.fromkeys(case.problem(out_dtype) for case in found for out_dtype in (None, "float32")))


def of_suite(family: Family, *tags: str) -> list[ConvWgradProblem]:
    return [p for p in problems(cases.find(tags)) if family.refusal(p) is None]


IM2COL_SMALL = [
    *(case.problem() for case in cases.SMALL_CASES),
    conv((100,), (3,), (72, 136), batch=3, padding=1),
    conv((201,), (7,), batch=5, stride=2, padding=((5, 1),), rhs_dilation=3),
    conv((7, 8, 9), (3, 3, 3), (72, 136), padding=1),
    conv((11, 6, 10), (2, 3, 1), (24, 200), batch=3, stride=(2, 1, 3), padding=((1, 0), (2, 1), (0, 4)),
         rhs_dilation=(3, 2, 1)),
    conv((40, 3, 5), (5, 1, 2), (64, 8), batch=1, stride=(1, 2, 1), padding=((16, 16), (0, 0), (-1, 1)),
         rhs_dilation=(7, 1, 1)),
    conv((6, 9, 8), (1, 3, 3), padding=((0, 0), (1, 1), (1, 1))),
    conv((9, 6, 8), (3, 1, 1), (136, 64), padding=((2, 0), (0, 0), (0, 0))),
    conv((5, 6, 7), (1, 1, 1), (72, 200)),
    conv((12, 9), (1, 5), (72, 64), batch=3, padding=((0, 0), (2, 2))),
    conv((9, 11), (3, 3), (128, 384), padding=1, groups=2),
    conv((9, 11), (1, 1), (192, 192), groups=3),
    conv((4, 9, 5), (3, 2, 3), (256, 128), padding=1, groups=2),
]  # fmt: skip
HALO_SMALL = [
    conv((10, 24), (3, 3), (72, 136), batch=3, padding=1),  # pairs of rows
    conv((7, 16), (3, 3), padding=1),
    conv((12, 40), (5, 5), (128, 64), padding=2),
    conv((20, 16), (7, 7), (64, 72), batch=1, padding=3),
    conv((9, 48), (2, 4), padding=((0, 1), (2, 1))),
    conv((20, 32), (3, 3), padding=((2, 2), (3, 3)), rhs_dilation=(2, 3)),
    conv((16, 16), (1, 2), (200, 72), batch=1, padding=((0, 0), (1, 0))),
    conv((30, 130), (3, 3)),
    conv((8, 16), (3, 3), (16, 24), padding=((3, 4), (9, 9))),
    conv((20, 34), (3, 3), padding=((-2, 0), (1, -1))),
]
TF32_SMALL = [
    conv((3, 8), (1, 1), (4, 4), padding=1),
    conv((28, 28), (3, 3), (72, 128), batch=5, padding=1),
    conv((14, 14), (3, 3), (68, 64), batch=6, padding=1),
    conv((14, 14), (3, 3), (64, 100), batch=9, padding=1, stride=2),
    conv((13, 21), (3, 3), (68, 100), batch=3, padding=1),
    conv((17, 27), (3, 3), (68, 36), batch=3, padding=1, stride=2),
    conv((20, 24), (5, 5), (12, 40), padding=((4, 4), (6, 6)), rhs_dilation=(2, 3)),
    conv((40, 44), (7, 7), (8, 32), padding=3, stride=3),
    conv((9, 50), (1, 3), (16, 200), padding=((0, 0), (1, 1)), stride=(1, 4)),
    conv((14, 14), (1, 1), (260, 132), batch=7),
    conv((28, 28), (1, 1), (128, 256), batch=4, stride=2),
    conv((12, 12), (2, 3), (192, 96), batch=4, padding=((0, 1), (3, -1))),
    conv((7, 7), (2, 2), (128, 128), batch=9, padding=((0, 1), (0, 1))),
]
GATHER_SMALL = [
    conv((28, 28), (5, 5), (1, 32), batch=16, padding=2),
    conv((32, 32), (3, 3), (3, 64), batch=4, padding=1),
    conv((37, 29), (7, 7), (3, 64), stride=2, padding=3),
    conv((40, 40), (7, 7), (3, 64), stride=2, padding=((2, 3), (2, 3))),
    conv((47, 47), (11, 11), (3, 96), stride=4, padding=2),
    conv((17, 19), (3, 3), (12, 10), padding=1),
    conv((15, 13), (3, 3), (65, 100), padding=1),
    conv((9, 9), (3, 3), (100, 65), padding=1),
    conv((11, 11), (1, 1), (7, 9)),
    conv((12, 12), (3, 3), (200, 24), padding=1, stride=2),
    conv((16, 16), (3, 3), (30, 33), padding=1, rhs_dilation=(2, 3)),
    conv((9, 10), (3, 2), (5, 8), padding=1, lhs_dilation=(2, 3), stride=(2, 1)),
    conv((12, 12), (3, 3), (10, 16), padding=((-1, 2), (4, -3))),
    conv((300,), (9,), (2, 40), padding=4, stride=2),
    conv((200,), (2,), (16, 8), padding=1, rhs_dilation=64),
    conv((6, 7, 8), (3, 3, 3), (5, 12), padding=1),
    conv((8, 8, 8), (2, 3, 2), (3, 192), padding=1, stride=(2, 1, 2)),
    conv((1, 1), (1, 1), (48, 72), batch=333),
    conv((2, 3), (2, 2), (9, 256), batch=70, padding=1),
    conv((5, 5), (3, 3), (24, 320), batch=3, padding=1),
]
GATHER_ACCURATE = [
    conv((56, 56), (7, 7), (3, 64), batch=32, stride=2, padding=3, out_dtype="bfloat16"),
    *(
        conv((28, 28), (3, 3), batch=32, padding=1, dtype="float32", precision=precision)
        for precision in ("default", "high", "highest")
    ),
]
DEPTHWISE_ANY = [
    conv(size, kernel, (channels, channels), groups=channels, padding=pads, **changes)
    for size, kernel, channels, pads, changes in (
        ((16, 56, 56), (3, 3, 3), 64, 1, {"batch": 4, "dtype": "float32"}),
        ((16, 28, 28), (3, 3, 3), 128, 1, {"batch": 8}),
        ((8, 56, 56), (3, 3, 3), 32, 1, {"batch": 4, "stride": 2, "dtype": "float16"}),
        ((56, 56), (7, 7), 96, 3, {"batch": 32, "dtype": "float32"}),
        ((56, 57), (5, 5), 140, 2, {"batch": 16, "stride": 2, "out_dtype": "bfloat16"}),
        ((4096,), (4,), 512, ((3, 0),), {"batch": 8}),
        ((9001,), (3,), 63, ((4, 0),), {"batch": 8, "rhs_dilation": 2, "dtype": "float32"}),
    )
]
DEPTHWISE_ANY_SMALL = [
    *SEQUENCES,
    conv((5, 6, 7), (3, 3, 3), (6, 6), padding=1, groups=6),
    conv((12, 11), (5, 3), (3, 9), padding=((4, 1), (3, 2)), stride=(2, 3), rhs_dilation=(3, 2), groups=3),
    conv((7, 8, 9), (3, 2, 3), (2, 2), padding=((0, 2), (1, 1), (2, 0)), stride=(3, 2, 1), groups=2),
    conv((60, 9), (3, 3), (4, 4), padding=((9, 10), (1, 1)), rhs_dilation=(19, 1), groups=4),
    conv((20, 6, 7), (3, 7, 2), (33, 66), padding=((2, 2), (3, 3), (1, 0)), rhs_dilation=(2, 1, 3), groups=33),
    conv((9, 31), (7, 7), (4, 4), batch=9, padding=3, groups=4),
    conv((14, 14), (5, 5), (36, 36), padding=2, stride=2, groups=36),
    conv((6, 8, 9), (3, 1, 1), (16, 16), padding=((1, 1), (0, 0), (0, 0)), groups=16),
]
TRIED = (
    Tried(
        depthwise.FAMILY, problems(NETWORKS), [*(case.problem() for case in DEPTHWISE), *SEQUENCES],
        tiles=len(depthwise.CHANNELS) * len(depthwise.SEGMENTS),
    ),
    Tried(
        grouped.FAMILY, of_suite(grouped.FAMILY, "grouped"),
        [
            *(case.problem() for case in GROUPED.values()),
            *(conv((200,), (taps,), (32, 32), batch=3, padding=1, groups=8) for taps in (1, 5)),
        ],
    ),
    Tried(
        tf32.FAMILY, of_suite(tf32.FAMILY, "float32"), TF32_SMALL, TF32,
        problems(dataclasses.replace(case, batch=64) for case in cases.find(["float32"])),
    ),
    Tried(halo.FAMILY, of_suite(halo.FAMILY), HALO_SMALL, accurate=[p for p in of_suite(halo.FAMILY) if p.batch > 8]),
    Tried(
        gather.FAMILY, of_suite(gather.FAMILY, "stem", "float32"), GATHER_SMALL, (*HALVES, *FLOATS), GATHER_ACCURATE
    ),
    Tried(im2col.FAMILY, of_suite(im2col.FAMILY), IM2COL_SMALL),
    Tried(
        depthwise_any.FAMILY, DEPTHWISE_ANY,
        DEPTHWISE_ANY_SMALL, (*HALVES, *FLOATS),
    ),
)  # fmt: skip


def each(tried: Iterable[tuple[Tried, ConvWgradProblem]]) -> list[Any]:
    return [pytest.param(t, p, id=f"{t.family.name} {p} {p.precision}") for t, p in tried]


SUITES = [(t, p) for t in TRIED for p in t.suite]
ACCURATE = [(t, p) for t in TRIED for p in t.accurate or t.suite]
ODD = [(t, p) for t in TRIED for p in t.odd]


def device_code() -> set[compiler.Source]:
    large = {t.family.source(p, c) for t, p in (*SUITES, *ACCURATE) for c in on_gpu.best_configs(t.family, p, 2)}
    return large | {t.family.source(p, c) for t, p in ODD for c in t.configs(p)}


@pytest.mark.parametrize(("tried", "p"), each(SUITES))
def test_suite_is_exact_on_integers(tried: Tried, p: ConvWgradProblem) -> None:
    on_gpu.check_exact(tried.family, p, on_gpu.best_configs(tried.family, p, 1), limit=1)


@pytest.mark.parametrize(("tried", "p"), each(ODD))
def test_odd_shapes_are_exact(tried: Tried, p: ConvWgradProblem) -> None:
    on_gpu.check_exact(tried.family, p, tried.configs(p), seed=1)


@pytest.mark.parametrize(("tried", "p"), each(ACCURATE))
def test_as_accurate_as_xla_and_the_same_every_time(tried: Tried, p: ConvWgradProblem) -> None:
    """For tf32 it also runs products of one sign, which would show one-sided rounding."""
    for draw in (jax.random.normal, jax.random.uniform)[: 2 if tried.family is tf32.FAMILY else 1]:
        configs = on_gpu.best_configs(tried.family, p, 1)
        on_gpu.check_accuracy_and_repeats(tried.family, p, configs, *on_gpu.normals(p, draw=draw))


@pytest.mark.parametrize(("tried", "p"), each(ODD[::2]))
def test_what_is_not_finite_reaches_only_what_depends_on_it(tried: Tried, p: ConvWgradProblem) -> None:
    on_gpu.check_not_finite(tried.family, p, tried.configs(p)[:4])


@pytest.mark.parametrize("family", [tf32.FAMILY, gather.FAMILY], ids=lambda family: family.name)
def test_the_largest_floats_stay_finite(family: Family) -> None:
    """Rounded to nearest they would become infinite in tf32, and in bfloat16, which gather's parts have."""
    p = conv((4, 8), (1, 1), (8, 8), batch=1, dtype="float32")
    largest = np.finfo(np.float32).max
    lhs, g = np.zeros(p.lhs_shape, np.float32), np.zeros(p.g_shape, np.float32)
    lhs[0, 1, 2], g[0, 1, 2] = largest, 0.5
    (config, *_) = on_gpu.best_configs(family, p, 1)
    out = poison.run(on_gpu.plan(family, p, config), p, jnp.asarray(lhs), jnp.asarray(g))
    np.testing.assert_allclose(out, largest / 2, rtol=1e-3)


def test_a_measurement_chooses_between_the_cuda_cores_and_xla() -> None:
    on_gpu.check_measured(DEPTHWISE_ANY)
