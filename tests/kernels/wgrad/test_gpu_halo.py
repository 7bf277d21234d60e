"""The halo family on a GPU: exactness, accuracy, determinism, and NaN that stays where it belongs."""

import dataclasses

import pytest

from benchmarks import cases
from benchmarks.cases import Case
from jax_splitk.kernels.wgrad import halo
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import gpu_wgrad

pytestmark = pytest.mark.gpu

SUITE = [case for case in cases.WGRAD_CASES if halo.FAMILY.refusal(case.problem()) is None]
ODD = (
    Case("pairs_of_rows", 3, 10, 24, 72, 136, (3, 3)),
    Case("odd_height", 2, 7, 16, 64, 64, (3, 3)),
    Case("5x5", 2, 12, 40, 128, 64, (5, 5)),
    Case("7x7_narrow", 1, 20, 16, 64, 72, (7, 7)),
    Case("even_filter", 2, 9, 48, 64, 64, (2, 4), padding=((0, 1), (2, 1))),
    Case("dilated", 2, 20, 32, 64, 64, (3, 3), dilation=(2, 3)),
    Case("1x2", 1, 16, 16, 200, 72, (1, 2), padding=((0, 0), (1, 0))),
    Case("no_padding", 2, 30, 130, 64, 64, (3, 3), padding=((0, 0), (0, 0))),
    Case("wide_padding", 2, 8, 16, 16, 24, (3, 3), padding=((3, 4), (9, 9))),
    Case("cropped", 2, 20, 34, 64, 64, (3, 3), padding=((-2, 0), (1, -1))),
)


def device_code():
    problems = [case.problem(out) for case in (*SUITE, *ODD) for out in ("float32", None)]
    problems += [dataclasses.replace(case, dtype="float16").problem() for case in ODD]
    return {halo.FAMILY.source(p, c) for p in problems for c in some_configs(p)}


def some_configs(problem, count=6):
    """Of every strip and schedule some, the model's best first."""
    found = sorted(
        halo.FAMILY.candidates(problem, DEFAULT_CUDA), key=lambda c: halo.FAMILY.estimate(problem, c, DEFAULT_CUDA)
    )
    found = [c for c in found if halo.FAMILY.workspace_bytes(problem, c) <= 2**28]
    return [*found[: count // 2], *found[-(count // 2) :]]


@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", SUITE, ids=lambda case: case.name)
def test_suite_is_exact_on_integers(case, out_dtype):
    problem = case.problem(out_dtype)
    gpu_wgrad.check_exact(halo.FAMILY, problem, some_configs(problem)[:1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", ODD, ids=lambda case: case.name)
def test_odd_shapes_are_exact(case, dtype):
    problem = dataclasses.replace(case, dtype=dtype).problem("float32" if dtype == "bfloat16" else None)
    gpu_wgrad.check_exact(halo.FAMILY, problem, some_configs(problem), seed=1)


@pytest.mark.parametrize("case", SUITE[:4], ids=lambda case: case.name)
def test_is_as_accurate_as_xla_and_the_same_every_time(case):
    problem = case.problem("float32")
    gpu_wgrad.check_accuracy_and_repeats(halo.FAMILY, problem, some_configs(problem, 4), *gpu_wgrad.normals(problem))


@pytest.mark.parametrize("case", ODD[:6], ids=lambda case: case.name)
def test_nan_reaches_what_depends_on_it_and_nothing_else(case):
    problem = case.problem("float32")
    gpu_wgrad.check_nan_in_corners(halo.FAMILY, problem, some_configs(problem, 4))
