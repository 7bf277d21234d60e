"""tests/float64.py: the reference in parts of a batch."""

import numpy as np
import pytest

from benchmarks import cases
from tests import float64
from tests.exhaustive import thinned
from tests.grouped import DEPTHWISE
from tests.problems import seeded


@pytest.mark.parametrize("case", thinned([*DEPTHWISE[::4], *cases.SMALL_CASES[:10:2]], 8, lambda case: case.name))
def test_parts_of_a_batch_are_the_whole(case: cases.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    p = case.problem()
    with seeded(61) as rng:
        lhs, g = (rng.integers(-2, 3, shape).astype(np.float64) for shape in (p.lhs_shape, p.g_shape))
        want = float64.conv_wgrad_on_host(p, lhs, g)
        for part_bytes in (1, 20_000, float64.PART_BYTES):
            monkeypatch.setattr(float64, "PART_BYTES", part_bytes)
            np.testing.assert_array_equal(float64.conv_wgrad(p, lhs, g), want)


@pytest.mark.parametrize("case", thinned([*DEPTHWISE, *cases.SMALL_CASES[:10]], 3, lambda case: case.name))
def test_the_passes_are_each_others_transposes(case: cases.Case) -> None:
    p = case.problem()
    with seeded(62) as rng:
        lhs, g, rhs = (rng.integers(-2, 3, shape).astype(np.float64) for shape in (p.lhs_shape, p.g_shape, p.rhs_shape))
        of_fprop = (float64.conv_fprop_on_host(p, lhs, rhs) * g).sum()
        assert (float64.conv_dgrad_on_host(p, g, rhs) * lhs).sum() == of_fprop
        assert (float64.conv_wgrad_on_host(p, lhs, g) * rhs).sum() == of_fprop
