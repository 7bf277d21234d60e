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
from tests import every_kernel, on_gpu, poison
from tests.grouped import DEPTHWISE, GROUPED, LONG_SEQUENCES, NETWORKS, SEQUENCES
from tests.problems import conv
from tests.random_problems import FLOATS, HALVES, OUT_DTYPES, TF32

pytestmark = pytest.mark.gpu


@dataclasses.dataclass(frozen=True)
class Tried:
    """A family's problems.

    Attributes:
      suite: large problems, tried with the best config; also for accuracy, unless `accurate` gives others.
      more: odd problems beside those of tests/every_kernel.py, each tried with one combination of `dtypes` and results,
        or two if there are few problems.
      tiles: how many configs with different device code a small problem is tried with.
    """

    family: Family
    suite: Sequence[ConvWgradProblem]
    more: Sequence[ConvWgradProblem] = ()
    dtypes: Sequence[tuple[str, str]] = HALVES
    accurate: Sequence[ConvWgradProblem] = ()
    tiles: int = 3

    @property
    def odd(self) -> Iterator[ConvWgradProblem]:
        """The odd problems, with dtypes and results in turns."""
        runs: list[Any] = [run.problem for run in every_kernel.RUNS if run.family is self.family]
        small, types = dict.fromkeys([*self.more, *runs]), list(itertools.product(self.dtypes, OUT_DTYPES))
        turns = (0, 1 + len(types) // 2)[: 1 if len(small) > 40 else 2]
        for (index, p), turn in itertools.product(enumerate(small), turns):
            (dtype, precision), out_dtype = types[(index + turn) % len(types)]
            yield dataclasses.replace(p, dtype=dtype, precision=precision, out_dtype=out_dtype)

    def configs(self, p: ConvWgradProblem) -> list[Any]:
        return on_gpu.some_configs(self.family, p, self.tiles)


def problems(found: Iterable[Case]) -> list[ConvWgradProblem]:
    """The problems with results of the inputs' dtype, and with float32 results."""
    return list(dict.fromkeys(case.problem(out_dtype) for case in found for out_dtype in (None, "float32")))


def of_suite(family: Family, *tags: str) -> list[ConvWgradProblem]:
    return [p for p in problems(cases.find(tags)) if family.refusal(p) is None]


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
TRIED = (
    Tried(
        depthwise.FAMILY, problems(NETWORKS),
        [*(case.problem() for case in DEPTHWISE), *SEQUENCES, *LONG_SEQUENCES],
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
        tf32.FAMILY, of_suite(tf32.FAMILY, "float32"), dtypes=TF32,
        accurate=problems(dataclasses.replace(case, batch=64) for case in cases.find(["float32"])),
    ),
    Tried(halo.FAMILY, of_suite(halo.FAMILY), accurate=[p for p in of_suite(halo.FAMILY) if p.batch > 8]),
    Tried(
        gather.FAMILY, of_suite(gather.FAMILY, "stem", "float32"), dtypes=(*HALVES, *FLOATS), accurate=GATHER_ACCURATE
    ),
    Tried(im2col.FAMILY, of_suite(im2col.FAMILY), [case.problem() for case in cases.SMALL_CASES]),
    Tried(
        depthwise_any.FAMILY, DEPTHWISE_ANY, [*SEQUENCES, *(p for p in LONG_SEQUENCES if p.rank == 1)],
        (*HALVES, *FLOATS),
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
