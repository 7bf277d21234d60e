"""Quantization and its inverse: exact decoding, error bounds, edges, errors, and other libraries' tensors."""

import dataclasses
import re
import types
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from jax_splitk import quantized_matmul
from jax_splitk.quantized import QuantizedArray, dequantize, prepack, quantize, unpack
from tests.exhaustive import thinned
from tests.formats import (
    BITS,
    CASES,
    E8M0,
    FLOAT_DTYPES,
    GROUPS,
    INTEGERS,
    NF4,
    SCALE_DTYPES,
    Foreign,
    elements,
    every_code,
    rounded_once,
    table,
)
from tests.problems import on_device, ones

FORMS = [(name, True) for name in BITS if name != "uint4"] + [(name, False) for name in INTEGERS]


def normals(*shape: int, seed: int = 0) -> jax.Array:
    return on_device(np.random.default_rng(seed).standard_normal(shape), "float32")


def steps(name: str) -> np.ndarray:
    values = table(name)
    return np.unique(values[np.isfinite(values)])


def effective(q: QuantizedArray) -> np.ndarray:
    """Scales times channel scales, in float64."""
    scale = np.asarray(q.scale).astype(np.float64)
    return scale if q.channel_scale is None else scale * np.asarray(q.channel_scale, np.float64)


def dtype_of_values(scale_dtype: str, *, channel: bool = False) -> str:
    return "float32" if channel else scale_dtype if scale_dtype in FLOAT_DTYPES else "bfloat16"


def half_steps(q: QuantizedArray, value: np.ndarray) -> np.ndarray:
    """The largest allowed distance of `value` from its quantized neighbour: half the gap between neighbours, times the
    scale."""
    grid = steps(str(q.qtype))
    scale = np.repeat(effective(q), q.group_size, axis=0)
    position = value / scale
    if q.zero_point is not None:
        return 0.5 * scale
    above = np.clip(np.searchsorted(grid, position), 1, len(grid) - 1)
    gap = grid[above] - grid[above - 1]
    beyond = np.maximum(np.abs(position) - np.abs(grid[np.where(position < 0, 0, -1)]), 0)
    return np.maximum(gap / 2, beyond) * scale


@pytest.mark.parametrize(
    ("name", "zero", "group", "scale_dtype"), thinned([(*case, *group) for case in CASES for group in GROUPS], 5)
)
def test_every_code_decodes_exactly(name: str, zero: str | None, group: int, scale_dtype: str) -> None:
    q, expected = every_code(name, 384, 5, group, zero, scale_dtype)
    assert len(np.unique(np.asarray(q.qvalue).astype(np.float64))) == len(steps(name))
    assert q.group_size == group
    np.testing.assert_array_equal(dequantize(q, jnp.float32), expected.astype(np.float32))
    out = dtype_of_values(scale_dtype)
    assert dequantize(q).dtype == q.dtype == out
    np.testing.assert_array_equal(dequantize(q), expected.astype(np.float32).astype(out))


def test_nf4_is_the_published_table() -> None:
    q = QuantizedArray(elements("nf4", np.arange(16)[:, None]), jnp.ones((1, 1)), None, "nf4")
    np.testing.assert_array_equal(dequantize(q)[:, 0], np.array(NF4, np.float32))


def test_every_byte_of_e8m0_is_a_power_of_two() -> None:
    """2**(byte - 127), and 255 is NaN. XLA:CPU may take the subnormal 2**-127 for 0."""
    octets = np.arange(256, dtype=np.uint8)
    scale = jnp.asarray(octets.view(E8M0))[None]
    found = np.asarray(dequantize(QuantizedArray(jnp.ones((16, 256), jnp.int8), scale), jnp.float32))[0]
    np.testing.assert_array_equal(found[1:], [*np.exp2(np.arange(1, 255) - 127.0), np.nan])
    assert found[0] in (0, 2.0**-127)


def test_channel_scales_multiply_scales() -> None:
    q, expected = every_code("float4_e2m1fn", 64, 5, 16, None, "float8_e4m3fn", channel=True)
    assert (q.dtype, q.group_size, q.channel_scale.shape) == (jnp.float32, 16, (1, 5))
    np.testing.assert_array_equal(dequantize(q), expected)
    whole = dataclasses.replace(q, channel_scale=jnp.full((1, 1), 0.5))
    one = dataclasses.replace(q, channel_scale=jnp.full((1, 5), 0.5))
    np.testing.assert_array_equal(dequantize(whole), dequantize(one))
    assert q.nbytes == 64 * 5 // 2 + 4 * 5 + 4 * 5


def test_astype_leaves_scales_of_a_byte() -> None:
    q, _ = every_code("float4_e2m1fn", 64, 5, 16, None, E8M0)
    assert q.astype(jnp.float32).scale.dtype == E8M0
    assert dequantize(q.astype(jnp.float32)).dtype == jnp.bfloat16


@pytest.mark.parametrize(("name", "symmetric", "group", "scale_dtype"), thinned([
    (*form, *group)
    for form in FORMS
    for group in (
        *((32, "bfloat16"), (64, "float16"), (128, "float32"), (None, "bfloat16")),
        *((32, E8M0), (16, "float8_e4m3fn"), (None, E8M0)),
    )
], 5))  # fmt: skip
def test_error_is_at_most_half_a_step(name: str, symmetric: bool, group: int | None, scale_dtype: str) -> None:
    w = normals(256, 9) * jnp.exp2(jnp.arange(-4.0, 5.0)) + (0 if symmetric else 1)
    how = {"group_size": group, "symmetric": symmetric, "scale_dtype": scale_dtype}
    q = jax.jit(lambda w: quantize(w, name, **how), compiler_options=rounded_once(name))(w)
    channel = scale_dtype == "float8_e4m3fn"
    assert (q.shape, q.qtype, q.group_size, q.scale.dtype) == ((256, 9), name, group or 256, scale_dtype)
    assert q.dtype == dtype_of_values(scale_dtype, channel=channel)
    assert (q.scale.shape, q.channel_scale is not None) == ((256 // (group or 256), 9), channel)
    assert (q.zero_point is None) == symmetric
    exact = np.asarray(w, np.float64)
    error = np.abs(np.asarray(dequantize(q, jnp.float32), np.float64) - exact)
    assert np.all(error <= half_steps(q, exact) * (1 + 1e-5) + 1e-6 * np.abs(exact))
    if symmetric and name in INTEGERS:  # the scale is as small as the bound allows
        largest = np.abs(exact).reshape(-1, q.group_size, 9).max(1)
        rounding = {E8M0: 1, "float8_e4m3fn": 2**-3}.get(scale_dtype, 2**-7)
        assert np.all(effective(q) <= largest / (2 ** (BITS[name] - 1) - 0.5) * (1 + rounding))


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float4_e2m1fn", "nf4"])
def test_floats_round_to_the_nearest(name: str) -> None:
    grid = steps(name)
    middles = (grid[1:] + grid[:-1]) / 2
    close = np.concatenate([grid, np.nextafter(np.float32(middles), -9e9), np.nextafter(np.float32(middles), 9e9)])
    w = jnp.asarray(close, jnp.float32)[:, None]
    how = {"group_size": None, "scale_dtype": jnp.float32}
    q = jax.jit(lambda w: quantize(w, name, **how), compiler_options=rounded_once(name))(w)
    np.testing.assert_array_equal(q.scale, 1)
    expected = [grid[np.argmin(np.abs(grid - value))] for value in np.asarray(w, np.float64)[:, 0]]
    np.testing.assert_array_equal(dequantize(q)[:, 0], expected)


@pytest.mark.parametrize(("name", "symmetric"), FORMS)
def test_zero_is_kept(name: str, symmetric: bool) -> None:
    w = normals(128, 6).at[::5].set(0).at[:, 3].set(0)
    q = quantize(w, name, group_size=32, symmetric=symmetric)
    decoded = dequantize(q)
    assert not np.any(decoded[w == 0])
    np.testing.assert_array_equal(q.scale[:, 3], 1)


def test_one_sided_weights_use_all_steps() -> None:
    q = quantize(jnp.linspace(1, 2, 64)[:, None], jnp.uint4, group_size=None, symmetric=False)
    assert int(q.zero_point[0, 0]) == 0
    assert int(q.qvalue.max()) == 15
    q = quantize(jnp.linspace(-2, -1, 64)[:, None], jnp.uint4, group_size=None, symmetric=False)
    assert int(q.zero_point[0, 0]) == 15
    assert int(q.qvalue.min()) == 0


@pytest.mark.parametrize(
    ("name", "symmetric", "scale_dtype"), thinned([(*form, dtype) for form in FORMS for dtype in SCALE_DTYPES], 4)
)
def test_extreme_weights(name: str, symmetric: bool, scale_dtype: str) -> None:
    """From below the smallest float32 that XLA:CPU does not flush to the largest: with powers of two as scales a tenth
    of it, since elements may be up to twice as large."""
    sizes = np.array([1e-44, 1e-38, 1e-7, 1e4, 3e37 if scale_dtype == E8M0 else 3e38])
    w = np.random.default_rng(3).uniform(-1, 1, (64, 5))
    w[0], w[1] = -1, 1
    w = jnp.asarray(w * sizes, jnp.float32)
    q = quantize(w, name, group_size=None, symmetric=symmetric, scale_dtype=scale_dtype)
    scale, grid = effective(q)[0], steps(name)
    largest = 2.0**126 if scale_dtype == "float8_e4m3fn" else min(float(jnp.finfo(scale_dtype).max), 2.0**126)
    saturated = sizes / (grid[-1] if symmetric else (grid[-1] - grid[0]) / 2) > largest
    rounding = 2.0**-23 if q.channel_scale is not None else 0  # of a product of two scales
    np.testing.assert_allclose(scale[saturated], largest, rtol=rounding)
    assert np.all((scale > 0) & (scale <= largest * (1 + rounding)))
    decoded, exact = np.asarray(dequantize(q, jnp.float32), np.float64), np.asarray(w, np.float64)
    assert np.all(np.sign(decoded[:2, saturated]) == [[-1], [1]])
    bound = half_steps(q, exact) * (1 + 1e-5) + 1e-6 * np.abs(exact) + 2e-38
    assert np.all((np.abs(decoded - exact) <= bound)[:, ~saturated])


@pytest.mark.parametrize(
    ("name", "symmetric", "scale_dtype"),
    thinned([(*form, dtype) for form in FORMS for dtype in (*FLOAT_DTYPES, E8M0)], 3),
)
def test_a_group_with_a_bad_number_is_nan_and_the_others_are_as_they_were(
    name: str, symmetric: bool, scale_dtype: str
) -> None:
    w = normals(96, 6)
    quantized = jax.jit(lambda w: quantize(w, name, group_size=32, symmetric=symmetric, scale_dtype=scale_dtype))
    clean, bad = quantized(w), quantized(w.at[35, 1].set(jnp.nan).at[40, 3].set(jnp.inf).at[63, 4].set(-jnp.inf))
    expected = np.asarray(dequantize(clean, jnp.float32)).copy()
    expected[32:64, [1, 3, 4]] = np.nan
    np.testing.assert_array_equal(dequantize(bad, jnp.float32), expected)
    # The elements are zeros, the same on every platform.
    zeros = quantized(w.at[32:64, jnp.array([1, 3, 4])].set(0))
    np.testing.assert_array_equal(bad.qvalue, zeros.qvalue)
    if not symmetric:
        np.testing.assert_array_equal(bad.zero_point, zeros.zero_point)


@pytest.mark.parametrize(("name", "symmetric"), thinned(FORMS, 3))
def test_quantize_keeps_no_copy_of_the_weight(name: str, symmetric: bool) -> None:
    """Scratch memory is far smaller than the weight: one that fills most of the memory can be quantized."""
    w = jax.ShapeDtypeStruct((4, 512, 256), jnp.float32)
    quantized = jax.jit(lambda w: quantize(w, name, group_size=64, axis=1, symmetric=symmetric))
    memory: Any = quantized.lower(w).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.1 * w.size * w.dtype.itemsize


@pytest.mark.parametrize(("scale_dtype", "scale"), [
    *(("float16", scale) for scale in (2.0**-24, 2.0**-14, 65504.0)),
    *(("bfloat16", scale) for scale in (2.0**-126, 2.0**120)),
    *(("float32", scale) for scale in (2.0**-126, 2.0**120)),
])  # fmt: skip
def test_extreme_scales_decode_exactly(scale_dtype: str, scale: float) -> None:
    q, expected = every_code("int8", 256, 3, 64)
    q = dataclasses.replace(q, scale=jnp.full((4, 3), scale, scale_dtype))
    expected = np.asarray(q.qvalue, np.float64) * scale
    np.testing.assert_array_equal(dequantize(q, jnp.float32), expected.astype(np.float32))


@pytest.mark.parametrize(("k", "axis"), [(96, 0), (7, 1), (1, 0)])
@pytest.mark.parametrize("name", ["int4", "nf4"])
def test_a_group_of_all_elements_is_one_for_each_channel(name: str, k: int, axis: int) -> None:
    w = jnp.moveaxis(normals(k, 3), 0, axis)
    q, same = (quantize(w, name, group_size=group, axis=axis) for group in (k, None))
    assert q.group_size == same.group_size == k
    for leaf, other in zip(jax.tree.leaves(q), jax.tree.leaves(same), strict=True):
        np.testing.assert_array_equal(leaf, other)
    if axis == 0:
        assert prepack(q).group_size == k


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_axis(axis: int) -> None:
    w = normals(64, 96, 32)
    q = quantize(w, "int4", group_size=32, axis=axis)
    moved = quantize(jnp.moveaxis(w, axis, 0), "int4", group_size=32, axis=0)
    assert q.group_size == 32
    np.testing.assert_array_equal(jnp.moveaxis(dequantize(q), axis, 0), dequantize(moved))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", E8M0])
def test_weights_of_8_bits(dtype: str, symmetric: bool) -> None:
    """A group has numbers of one sign where the dtype has no other."""
    w = jnp.abs(normals(64, 3)).astype(dtype) if dtype == E8M0 else normals(64, 3).astype(dtype)
    q, wide = (quantize(w, "int8", group_size=64, symmetric=symmetric) for w in (w, w.astype(jnp.float32)))
    assert q.dtype == jnp.float32
    np.testing.assert_array_equal(dequantize(q), dequantize(wide))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_scales_have_the_weights_dtype(dtype: str) -> None:
    q = quantize(normals(64, 3).astype(dtype), jnp.int4, group_size=64)
    assert q.dtype == q.scale.dtype == dtype
    assert dequantize(q).dtype == dtype


def test_float64_weights() -> None:
    with jax.enable_x64(True):
        q = quantize(jnp.ones((64, 3), jnp.float64), jnp.int8, group_size=64, symmetric=False)
        assert q.dtype == jnp.float32
        np.testing.assert_allclose(dequantize(q), 1, rtol=1e-6)


@pytest.mark.parametrize(("name", "symmetric"), FORMS)
def test_no_features(name: str, symmetric: bool) -> None:
    q = quantize(jnp.ones((128, 0)), name, group_size=64, symmetric=symmetric)
    assert (q.shape, q.scale.shape, q.group_size, q.nbytes) == ((128, 0), (2, 0), 64, 0)
    assert dequantize(q).shape == (128, 0)


def test_transformations() -> None:
    w = normals(3, 128, 7)
    batched = jax.vmap(lambda w: quantize(w, "uint4", group_size=64, symmetric=False))(w)
    decoded = jax.jit(jax.vmap(dequantize))(batched)
    for i in range(3):
        q = jax.tree.map(lambda leaf, i=i: leaf[i], batched)
        assert isinstance(q, QuantizedArray)
        alone = quantize(w[i], "uint4", group_size=64, symmetric=False)
        jax.tree.map(np.testing.assert_array_equal, q, alone)
        np.testing.assert_array_equal(decoded[i], dequantize(alone))
    _, scanned = jax.lax.scan(lambda carry, q: (carry, dequantize(q)), 0, batched)
    np.testing.assert_array_equal(scanned, decoded)
    shapes = jax.eval_shape(lambda w: quantize(w, "nf4", group_size=32), w[0])
    assert (shapes.shape, shapes.scale.shape, shapes.group_size) == ((128, 7), (4, 7), 32)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(batched)]
    assert paths == [".qvalue-uint4", ".scale", ".zero_point"]  # the first key says what no dtype does


def test_gradients() -> None:
    q, _ = every_code("int4", 64, 5, 32, "float32", "float32")
    g = normals(64, 5)
    grads = jax.grad(lambda q: jnp.sum(dequantize(q) * g), allow_int=True)(q)
    assert grads.qvalue.dtype == jax.dtypes.float0
    difference = np.asarray(q.qvalue, np.float32) - np.repeat(q.zero_point, 32, axis=0)
    np.testing.assert_allclose(grads.scale, (difference * g).reshape(2, 32, 5).sum(1), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(grads.zero_point, -q.scale * g.reshape(2, 32, 5).sum(1), rtol=1e-4, atol=1e-4)
    constant = jax.grad(lambda w: jnp.sum(dequantize(quantize(w, "int4", group_size=32))))(g)
    np.testing.assert_array_equal(constant, 0)


# ---- tensors of other libraries --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "zero"), CASES)
def test_qwix_arrays(name: str, zero: str | None) -> None:
    q, expected = every_code(name, 128, 4, 64, zero)
    qtype = "nf4" if name == "nf4" else q.qvalue.dtype
    foreign = Foreign(q.qvalue, q.scale, q.zero_point, qtype)
    np.testing.assert_array_equal(dequantize(foreign, jnp.float32), expected.astype(np.float32))


def test_qwix_names_of_the_same_storage() -> None:
    q, expected = every_code("float4_e2m1fn", 128, 4, 32)
    foreign = Foreign(q.qvalue, q.scale, None, "mxfp4")
    np.testing.assert_array_equal(dequantize(foreign, jnp.float32), expected.astype(np.float32))


def test_aqt_tensors() -> None:
    q, expected = every_code("int8", 128, 4, 128)
    halves = [q.scale * 0.5, jnp.full((1, 1), 2, q.scale.dtype)]
    np.testing.assert_array_equal(dequantize(Foreign(q.qvalue, halves), jnp.float32), expected.astype(np.float32))
    for wrong in ({"bias": [q.scale]}, {"tiling_state": object()}, {"scale": []}):
        with pytest.raises(ValueError, match="accepted: one with scales only"):
            dequantize(dataclasses.replace(Foreign(q.qvalue, [q.scale]), **wrong))
    for scale in (q.scale, [q.scale]):
        with pytest.raises(ValueError, match="with a sparsity_mask; accepted: None"):
            dequantize(Foreign(q.qvalue, scale, sparsity_mask=jnp.ones(q.shape, bool)))


def test_leaves_of_qwix_post_training_quantization() -> None:
    """WithAux(array=QArray, how=...)."""
    q, expected = every_code("int8", 128, 4, 64)
    leaf = types.SimpleNamespace(array=Foreign(q.qvalue, q.scale), how=object())
    np.testing.assert_array_equal(dequantize(leaf, jnp.float32), expected.astype(np.float32))
    for taken in (leaf, prepack(leaf)):
        product = quantized_matmul(jnp.eye(128), taken)
        np.testing.assert_allclose(product, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("zero", [16, 100, -3])
def test_zero_points_beyond_the_elements(zero: int) -> None:
    """GPTQ has zero points of 16. uint4 cannot hold them, so their dtype has 8 bits."""
    q = QuantizedArray(jnp.full((64, 3), 3, jnp.uint4), jnp.ones((2, 3)), jnp.full((2, 3), zero, jnp.int8))
    packed = prepack(q)
    for weight in (q, packed):
        np.testing.assert_array_equal(quantized_matmul(jnp.eye(64), weight), np.full((64, 3), 3.0 - zero))
    np.testing.assert_array_equal(unpack(packed).zero_point, q.zero_point)
    narrow = dataclasses.replace(q, zero_point=jnp.full((2, 3), 15, jnp.uint4))
    changed = dataclasses.replace(prepack(narrow), zero_point=packed.zero_point)
    with pytest.raises(ValueError, match=r"zero_point from .* with zero_dtype=uint4; accepted: integers from 0 to 15"):
        unpack(changed)


def test_tiles_along_two_axes() -> None:
    qvalue = jnp.arange(8 * 6).reshape(8, 6).astype(jnp.int8)
    scale = jnp.arange(1.0, 7.0).reshape(2, 3)
    q = QuantizedArray(qvalue, scale)
    assert (q.qtype, q.ndim, q.group_size) == ("int8", 2, 8)
    np.testing.assert_array_equal(dequantize(q), np.asarray(qvalue) * np.kron(scale, np.ones((4, 2))))


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"dtype": "int3"}, TypeError, "dtype='int3'; accepted: int4, uint4, int8, float8_e4m3fn, float4_e2m1fn, nf4"),
    ({"dtype": jnp.float32}, TypeError, "accepted: int4"),
    ({"dtype": 3}, TypeError, "dtype=3; accepted: int4, uint4, int8, float8_e4m3fn, float4_e2m1fn, nf4"),
    ({"group_size": "32"}, ValueError, "group_size='32' of 96 elements along axis 0; accepted: a multiple o"),
    ({"group_size": 32.0}, ValueError, "group_size=32.0 of 96 elements along axis 0; accepted: a multiple o"),
    ({"axis": 0.0}, ValueError, "axis=0.0 of an array of rank 2; accepted: -2 to -1 or 0 to 1"),
    ({"w": ones(()), "group_size": None}, ValueError, "w of rank 0; accepted: a rank of at least 1"),
    ({"symmetric": 1}, TypeError, "symmetric=1; accepted: True or False"),
    ({"scale_dtype": "foo"}, TypeError, "scale_dtype='foo'; accepted: bfloat16, float16, float32"),
    ({"group_size": 40}, ValueError, "group_size=40 of 96 elements along axis 0; accepted: a multiple"),
    ({"group_size": 64}, ValueError, "group_size=64 of 96 elements"),
    ({"group_size": 32, "axis": 1}, ValueError, "group_size=32 of 5 elements along axis 1"),
    ({"axis": 2}, ValueError, "axis=2 of an array of rank 2; accepted: -2 to -1 or 0 to 1"),
    ({"dtype": "uint4"}, ValueError, "symmetric=True with uint4, which has no negative values; accepted: symmetric=F"),
    ({"dtype": "nf4", "symmetric": False}, ValueError, "symmetric=False with nf4; accepted: symmetric=True"),
    ({"scale_dtype": jnp.float8_e5m2}, TypeError,
     "accepted: bfloat16, float16, float32, float8_e8m0fnu, float8_e4m3fn"),
    ({"w": ones((96, 5), jnp.int32)}, TypeError, "w of dtype int32; accepted: a floating dtype"),
    ({"w": ones((0, 5)), "group_size": None}, ValueError, "of 0 elements"),
    ({"w": {"kernel": ones((96, 5))}}, TypeError, "w of type dict; accepted: an array (jax.tree.map quantizes ea"),
    ({"w": None}, TypeError, "w of type NoneType; accepted: an array"),
])  # fmt: skip
def test_quantize_errors(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"w": ones((96, 5)), "dtype": "int4", "group_size": 32, **change}
    with pytest.raises(error, match=re.escape(message)):
        quantize(arguments.pop("w"), arguments.pop("dtype"), **arguments)


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"qvalue": ones((64, 5))}, TypeError, "qvalue of dtype float32"),
    ({"qvalue": ones((64, 5), jnp.int8), "qtype": "nf4"}, TypeError, "(uint4 for 'nf4')"),
    ({"scale": ones((2, 5), jnp.int8)}, TypeError, "scale of dtype int8; accepted: bfloat16, float16, float32"),
    ({"scale": ones((2, 3))}, ValueError, "scale (2, 3) of qvalue (64, 5); accepted: the same rank"),
    ({"scale": ones(5)}, ValueError, "scale (5,) of qvalue (64, 5)"),
    ({"scale": ones((0, 5))}, ValueError, "scale (0, 5) of qvalue (64, 5)"),
    ({"zero_point": ones((1, 5), jnp.int4)}, ValueError, "zero_point of shape (1, 5); accepted: scale's shape (2"),
    ({"zero_point": ones((2, 5), jnp.int32)}, TypeError, "zero_point of dtype int32; accepted: int4, uint4"),
    ({"qvalue": ones((64, 5), jnp.float8_e4m3fn), "zero_point": ones((2, 5))}, ValueError, "accepted: None"),
    ({"channel_scale": ones((1, 3))}, ValueError, "channel_scale (1, 3) of scale (2, 5)"),
    ({"channel_scale": ones((1, 5), jnp.bfloat16)}, TypeError, "channel_scale of dtype bfloat16"),
])  # fmt: skip
def test_errors_of_parts(change: dict[str, Any], error: type[Exception], message: str) -> None:
    parts = {"qvalue": ones((64, 5), jnp.int4), "scale": ones((2, 5)), **change}
    with pytest.raises(error, match=re.escape(message)):
        dequantize(QuantizedArray(**parts))


def test_other_errors() -> None:
    with pytest.raises(TypeError, match="a weight of type list; accepted: QuantizedArray"):
        dequantize([1, 2])
    for dtype, shown in ((jnp.int8, r"<class 'jax\.numpy\.int8'>"), ("foo", "'foo'")):
        with pytest.raises(TypeError, match=f"dtype={shown}; accepted: a floating dtype"):
            dequantize(QuantizedArray(jnp.ones((64, 5), jnp.int4), jnp.ones((2, 5))), dtype)
