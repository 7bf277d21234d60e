"""Patches of several planes and many rows: where the windows of a plane are in TMA's view of the input."""

from typing import Any

import pytest

from jax_splitk.kernels.contraction import patch
from jax_splitk.problems.conv_passes import ConvFpropProblem
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from tests.problems import conv_of

FAMILIES = ((patch.FPROP, ConvFpropProblem), (patch.WGRAD, ConvWgradProblem))


@pytest.mark.parametrize(("family", "kind"), FAMILIES)
@pytest.mark.parametrize(("size", "kernel", "batch", "reason"), [
    ((16, 224, 224), (2, 16, 16), 4, None),
    ((8, 256, 256), (2, 16, 16), 1, None),  # 16 windows of a column
    ((5, 32, 32), (2, 16, 16), 1, None),  # a plane beyond the windows
    ((5, 32, 32), (2, 16, 16), 2, "an input of 5 and 32; accepted: windows that cover it"),
    ((4, 40, 32), (2, 16, 16), 1, "an input of 4 and 40; accepted: windows that cover it"),
    ((1, 40, 32), (1, 16, 16), 2, None),
    ((4, 272, 272), (2, 16, 16), 1, "2 planes and 16 rows in 272 rows of the input; accepted: up to 8 planes and rows"),
    ((6, 224, 224), (3, 16, 16), 1, "3 planes and 16 rows in 224 rows of the input; accepted: up to 8 planes and rows"),
    ((2, 36, 36), (1, 18, 18), 1, "1 planes and 18 rows in 36 rows of the input; accepted: up to 8 planes and rows"),
])  # fmt: skip
def test_refusals(
    family: patch.Patch,
    kind: type[Any],
    size: tuple[int, ...],
    kernel: tuple[int, ...],
    batch: int,
    reason: str | None,
) -> None:
    out = tuple(n // k for n, k in zip(size, kernel, strict=True))
    p = conv_of(kind, size, kernel, (4, 64), stride=kernel, batch=batch)
    assert p.output_spatial == out
    served = family.refusal(p)
    assert (served is None) if reason is None else (reason in str(served)), served
