"""Scales of a byte in the kernels for Hopper, in the emulator: every byte is decoded exactly."""

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from jax import numpy as jnp

from jax_splitk.kernels import Family
from jax_splitk.kernels.quantized import fp8, stream, tiled
from jax_splitk.quantized import QuantizedArray, prepack
from tests import emulator
from tests.exhaustive import crossed
from tests.formats import E8M0
from tests.products import E4M3, Case, operands, parts_bound
from tests.random_problems import device_plan

E2M1 = "float4_e2m1fn"
STREAM = (stream.FAMILY, stream.Config(8, 1, 1, 3, 1, 1))
TILED = (tiled.FAMILY, tiled.Config(64, 16, 2, 1))
CONFIGS = {"stream": STREAM, "tiled": TILED, "fp8": (fp8.FAMILY, fp8.Config(128, 32, 2, 1))}


def arrays(q: QuantizedArray, x: np.ndarray, case: Case) -> list[np.ndarray]:
    return [np.asarray(operand) for operand in operands(prepack(q), x, case.x_dtype)]


@pytest.mark.parametrize(("scale_dtype", "name", "qtype", "group", "x_dtype", "out_dtype"), crossed([E8M0, E4M3], [
    ("stream", E2M1, 16, "bfloat16", "float32"),
    ("stream", E2M1, 16, "float16", "float32"),
    ("stream", E2M1, 32, E4M3, "bfloat16"),
    ("tiled", E2M1, 16, "bfloat16", "float32"),  # the scales multiply sums
    ("tiled", E2M1, 32, "bfloat16", "bfloat16"),  # and from here on weights
    ("tiled", "int4", 32, "bfloat16", "bfloat16"),
    ("tiled", "int8", 16, "bfloat16", "bfloat16"),
    ("fp8", E2M1, 32, E4M3, "bfloat16"),
]))  # fmt: skip
def test_every_byte_is_a_scale(
    scale_dtype: str, name: str, qtype: str, group: int, x_dtype: str, out_dtype: str
) -> None:
    """A group of k for each of 64 features makes 256 scales. Row i of x picks an element of group i, whose product with
    the scale is exact."""
    case = Case(4, 4 * group, 64, qtype, group, None, scale_dtype, x_dtype, out_dtype)
    family, config = CONFIGS[name]
    value = 1.5 if case.qtype == E2M1 else 1
    octets = np.arange(256, dtype=np.uint8).reshape(4, 64)
    scale = octets.view(getattr(ml_dtypes, case.scale_dtype))
    q = QuantizedArray(jnp.full((case.k, 64), value, case.qtype), jnp.asarray(scale))
    x = np.zeros((4, case.k))
    x[np.arange(4), np.arange(4) * case.group_size + 3] = 1
    assert family.refusal(case.problem, config) is None
    out = np.empty((4, 64), jnp.dtype(case.out_dtype))
    emulator.run(device_plan(family, case.problem, config), arrays(q, x, case), [out])
    expected = (value * scale.astype(np.float64)).astype(np.float32)
    found = out.astype(np.float32)
    nan = np.isnan(expected)
    # A NaN makes its feature's other sums NaN, too: 0 times NaN.
    others = ~nan.any(0)
    assert np.isnan(found[nan]).all()
    assert 62 <= others.sum() <= 63
    wanted, finite = expected[:, others], found[:, others]
    if family is fp8.FAMILY or case.x_dtype == E4M3:  # a power of two moves out of the elements and back
        smallest = np.abs(wanted) < 2.0**-110
        np.testing.assert_allclose(finite[smallest], wanted[smallest], atol=2.0**-126)
        np.testing.assert_array_equal(finite[~smallest], wanted[~smallest])
    else:
        np.testing.assert_array_equal(finite, wanted)


@pytest.mark.parametrize("family, config", [STREAM, TILED])
def test_channel_scales_multiply_the_sums_over_all_k(family: Family, config: Any) -> None:
    """A factor that bfloat16 does not hold, and sums that only the result's factor brings into float16's range."""
    case = Case(4, 128, 64, "float4_e2m1fn", 16, None, E4M3, "float16", "float16", True)
    rng = np.random.default_rng(5)
    value = rng.choice([-6.0, -1.0, 0.5, 4.0], (128, 64))
    scale = rng.choice([448.0, 256.0, 2.0**-9], (8, 64))
    channel = (rng.uniform(0.5, 2, (1, 64)) * 2.0**-9).astype(np.float32)
    q = QuantizedArray(
        jnp.asarray(value, jnp.float4_e2m1fn), jnp.asarray(scale, E4M3), channel_scale=jnp.asarray(channel)
    )
    x = rng.integers(-4, 5, (4, 128)).astype(np.float64)
    sums = x @ (value * np.repeat(scale, 16, axis=0))
    assert np.abs(sums).max() > 65504
    out = np.empty((4, 64), np.float16)
    emulator.run(device_plan(family, case.problem, config), arrays(q, x, case), [out])
    expected = (sums.astype(np.float32) * channel).astype(np.float16)
    np.testing.assert_array_equal(out, expected)


def test_the_bytes_of_a_stage_follow_from_the_scales() -> None:
    """64 scales of a byte are 64 bytes, so that all copies and all parts of a stage are multiples of 16 bytes."""
    for group in (16, 32, 64, 128):
        wide = Case(16, 1024, 256, "float4_e2m1fn", group).problem
        for scale in (E8M0, E4M3):
            p = dataclasses.replace(wide, scale_dtype=scale)
            saved = 256 * 1024 // group
            assert p.bytes_moved == wide.bytes_moved - saved
            narrow = tiled.FAMILY.stage_bytes(p, TILED[1])
            assert tiled.FAMILY.stage_bytes(wide, TILED[1]) - narrow == 64 * 128 // group
            assert narrow % 64 == 0
            assert stream.stage_bytes(p, STREAM[1]) % 64 == 0


@pytest.mark.parametrize(("qtype", "zero", "scale_dtype"), [
    ("uint4", "bfloat16", "float32"),
    ("int4", "bfloat16", "bfloat16"),
    ("int8", "float32", "float16"),
    ("int8", "own", "float32"),
    ("nf4", None, "float32"),
])  # fmt: skip
def test_weights_of_wide_tiles_are_rounded_once(qtype: str, zero: str | None, scale_dtype: str) -> None:
    """Rounding the parts of scales and zero points that bfloat16 does not hold adds little."""
    case, config = Case(96, 96, 64, qtype, 32, zero, scale_dtype), tiled.Config(64, 96, 2, 1, 1)
    assert tiled.FAMILY.refusal(case.problem, config) is None
    assert tiled.in_parts(case.problem, config.tile_n)
    q, weight = case.every_code(case.operand)
    out = np.empty((96, 64), jnp.bfloat16)
    emulator.run(device_plan(tiled.FAMILY, case.problem, config), arrays(q, np.eye(96), case), [out])
    assert (np.abs(out.astype(np.float64) - weight) <= parts_bound(case, q, weight)).all()
