"""Weights that quantized_fp8 rounds to e4m3, in the emulator: their values, and NaN and infinities."""

import dataclasses

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from jax_splitk.kernels.quantized import fp8
from jax_splitk.quantized import PackedWeight, QuantizedArray, prepack
from tests import emulator, formats
from tests.float64 import rounded
from tests.products import (
    E4M3,
    HALF,
    Case,
    e4m3_bound,
    error,
    exact_weight,
    in_e4m3,
    integers,
    operands,
    random,
    without_idle,
)

CASES = [
    Case(20, 256, 72, x_dtype=E4M3), Case(33, 192, 130, "uint4", 32, "bfloat16"), Case(20, 256, 72, "int4", 64, "own"),
    Case(20, 256, 72, "int8", 64, "float32", **HALF), Case(70, 128, 72, "nf4", 128, None, "float32"),
    Case(20, 208, 72, "float4_e2m1fn", 16, None, E4M3, E4M3, channel=True), Case(20, 208, 72, "int8", 208),
    Case(20, 192, 72, E4M3, 64, None, formats.E8M0), Case(9, 192, 72, "uint4", 192, "float16", "float16"),
]  # fmt: skip
CASES = [dataclasses.replace(case, compute=E4M3) for case in CASES]
by_case = pytest.mark.parametrize("case", CASES, ids=str)


def product(case: Case, packed: PackedWeight, x: np.ndarray) -> np.ndarray:
    """The result with two ranges of k for some tiles, in float64."""
    p = case.problem
    config = without_idle(p, fp8.Config(128, 32, 2, 5))
    assert fp8.FAMILY.refusal(p, config) is None
    out = np.empty(p.out_shape, jnp.dtype(p.out_dtype))
    given = [np.asarray(array) for array in operands(packed, x, case.x_dtype)]
    emulator.run(fp8.FAMILY.plan(p, config), given, (out,))
    return out.astype(np.float64)


@by_case
def test_one_hot_activations_decode_every_weight(case: Case) -> None:
    q, weight = case.every_code("float16")
    bound, packed = e4m3_bound(case, q, weight), prepack(q)
    for first in range(0, case.k, 4 * case.rows):
        ks = (first + 3 * np.arange(case.rows)) % case.k
        x = np.zeros((case.rows, case.k))
        x[np.arange(case.rows), ks] = 1
        assert (np.abs(product(case, packed, x) - weight[ks]) <= bound[ks]).all()


@by_case
def test_as_accurate_as_operands_in_e4m3(case: Case) -> None:
    q, weight = case.every_code("float16")
    x = random(5).standard_normal((case.rows, case.k)).astype(jnp.dtype(case.x_dtype)).astype(np.float64)
    exact = x @ weight
    theirs = error(in_e4m3(x, 1) @ in_e4m3(weight, 0), exact)
    assert error(product(case, prepack(q), x), exact) <= 1.25 * theirs


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@by_case
def test_bad_scales_reach_their_feature(case: Case, value: float) -> None:
    if case.scale_dtype in (E4M3, formats.E8M0) and not np.isnan(value):
        pytest.skip("a scale of a byte is not infinite")
    q, weight = exact_weight(case, 4)
    check_feature(case, dataclasses.replace(q, scale=q.scale.at[1 % q.scale.shape[0], 3].set(value)), weight)


@pytest.mark.parametrize("case", [case for case in CASES if case.zero not in (None, "own")], ids=str)
def test_bad_zero_points_reach_their_feature(case: Case) -> None:
    q, weight = exact_weight(case, 4)
    assert q.zero_point is not None
    check_feature(case, dataclasses.replace(q, zero_point=q.zero_point.at[0, 3].set(jnp.nan)), weight)


def check_feature(case: Case, spoiled: QuantizedArray, weight: np.ndarray) -> None:
    """Feature 3 is not finite, all others are exact."""
    x = integers(case, 1, 5)
    found, wanted = product(case, prepack(spoiled), x), rounded(x @ weight, case.out_dtype).astype(np.float64)
    others = np.arange(case.features) != 3
    np.testing.assert_array_equal(found[:, others], wanted[:, others])
    assert not np.isfinite(found[:, 3]).any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@by_case
def test_bad_activations_reach_their_row(case: Case, value: float) -> None:
    q, weight = exact_weight(case, 4)
    x = integers(case, 1, 5)
    wanted = rounded(x @ weight, case.out_dtype).astype(np.float64)
    x[3, case.k // 2] = value  # e4m3 has NaN only
    found, others = product(case, prepack(q), x), np.arange(case.rows) != 3
    np.testing.assert_array_equal(found[others], wanted[others])
    assert not np.isfinite(found[3][weight[case.k // 2] != 0]).any()


def test_a_zero_weight_stays_zero() -> None:
    """Also where its group's scale has more bits than the kernel keeps, and with zero points."""
    for case in (CASES[0], CASES[2]):
        q, _ = case.every_code()
        zero = 0 if q.zero_point is None else jnp.repeat(q.zero_point.astype(jnp.int32), case.group_size, axis=0)
        q = dataclasses.replace(q, qvalue=jnp.broadcast_to(jnp.asarray(zero), q.qvalue.shape).astype(q.qvalue.dtype))
        x = np.abs(random(6).standard_normal((case.rows, case.k)))
        assert (product(case, jax.jit(prepack)(q), x) == 0).all()
