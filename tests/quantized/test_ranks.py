"""Weights of three and more dimensions, and stacks of weights: quantized, packed, indexed, reshaped and multiplied."""

import dataclasses
import re
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import jax_splitk
from jax_splitk.quantized import PackedWeight, QuantizedArray, dequantize, prepack, quantize, unpack
from jax_splitk.quantized.matrix import from_matrix, group_tile, to_matrix
from tests.exhaustive import thinned
from tests.problems import on_device, seeded

# Shape of a weight, the axes that a product contracts, the group size, and how many leading axes count weights.
KERNELS = [
    ((96, 3, 40), (0,), 32, 0),
    ((3, 64, 40), (0, 1), 32, 0),
    ((4, 32, 40), (0, 1), 64, 0),
    ((4, 32, 40), (0, 1), None, 0),
    ((3, 96, 40), (1,), 96, 0),
    ((2, 64, 70), (1,), 64, 1),
    ((2, 3, 64, 2, 32), (2,), 32, 2),
    ((2, 2, 96, 40), (1, 2), None, 1),
    ((128,), (0,), 64, 0),
]


def weight(shape: tuple[int, ...], axes: tuple[int, ...], group: int | None, seed: int = 0) -> QuantizedArray:
    with seeded(seed) as rng:
        w = on_device(rng.standard_normal(shape), jnp.float32)
        return quantize(w, "uint4", group_size=group, axis=axes, symmetric=False, scale_dtype=jnp.bfloat16)


def packed(shape: tuple[int, ...], axes: tuple[int, ...], group: int | None, stack: int) -> PackedWeight:
    return prepack(weight(shape, axes, group), axis=axes, stack=stack)


@pytest.mark.parametrize(("shape", "axes", "group", "stack"), thinned(KERNELS, 2))
def test_groups_are_runs_of_the_contracted_axes(
    shape: tuple[int, ...], axes: tuple[int, ...], group: int | None, stack: int
) -> None:
    q = weight(shape, axes, group)
    with seeded(0) as rng:
        values = on_device(rng.standard_normal(shape), jnp.float32)
    for at in np.ndindex(*shape[:stack]):
        own = tuple(axis - stack for axis in axes)
        matrix = quantize(
            to_matrix(values[at], own), "uint4", group_size=group, symmetric=False, scale_dtype="bfloat16"
        )
        np.testing.assert_array_equal(
            dequantize(q)[at], from_matrix(dequantize(matrix), shape[stack:], own), err_msg=str(at)
        )


@pytest.mark.parametrize(("shape", "axes", "group", "stack"), KERNELS)
def test_packing_is_exact_both_ways(
    shape: tuple[int, ...], axes: tuple[int, ...], group: int | None, stack: int
) -> None:
    q = weight(shape, axes, group)
    w = prepack(q, axis=axes, stack=stack)
    assert (w.shape, w.stack, w.ndim) == (shape, shape[:stack], len(shape))
    assert repr(w).startswith(f"PackedWeight(shape={shape}, ")
    unpacked = unpack(w)
    assert jax.tree.structure(unpacked) == jax.tree.structure(q)
    for leaf, given in zip(jax.tree.leaves(unpacked), jax.tree.leaves(q), strict=True):
        assert (leaf.shape, leaf.dtype) == (given.shape, given.dtype)
        np.testing.assert_array_equal(leaf, given)


@pytest.mark.parametrize(("shape", "axes", "group", "stack"), KERNELS)
def test_products_contract_these_axes(
    shape: tuple[int, ...], axes: tuple[int, ...], group: int | None, stack: int
) -> None:
    q = weight(shape, axes, group)
    w = prepack(q, axis=axes, stack=stack)
    with seeded(1) as rng:
        x = on_device(rng.integers(-2, 3, (*shape[:stack], 2, 3, *[shape[i] for i in axes])), jnp.float32)
        kept = [n for i, n in enumerate(shape) if i not in axes]
        bias = on_device(rng.standard_normal(kept), jnp.float32)
    letters = "abcdefgh"[: len(shape)]
    rows = "".join([*letters[:stack], "yz", *[letters[i] for i in axes]])
    out = "".join(
        [*letters[:stack], "yz", *[letter for i, letter in enumerate(letters) if i not in axes + tuple(range(stack))]]
    )
    spec = f"{rows},{letters}->{out}"
    want = np.einsum(spec, np.asarray(x, np.float64), np.asarray(dequantize(q, jnp.float32), np.float64))
    for got in (
        jax_splitk.quantized_matmul(x, w),
        x @ w,
        np.asarray(x) @ w,
        jax_splitk.quantized_einsum(spec, x, w),
        jax_splitk.quantized_einsum(spec.replace(rows + ",", "").replace("->", f",{rows}->"), w, x),
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)
    rank = x.ndim
    numbers = (
        (tuple(range(rank - len(axes), rank)), axes),
        (tuple(range(stack)), tuple(range(stack))),
    )
    np.testing.assert_allclose(jax_splitk.quantized_dot_general(x, w, numbers), want, rtol=1e-5, atol=1e-4)
    swapped = jax_splitk.quantized_dot_general(w, x, (numbers[0][::-1], numbers[1]))
    kept_sizes = len(shape) - len(axes) - stack
    order = [*range(stack), *range(stack + kept_sizes, stack + kept_sizes + 2), *range(stack, stack + kept_sizes)]
    np.testing.assert_allclose(swapped.transpose(order), want, rtol=1e-5, atol=1e-4)
    biased = jax_splitk.quantized_matmul(x, w, bias=bias)
    shaped = np.asarray(bias).reshape(*shape[:stack], 1, 1, *kept[stack:])
    np.testing.assert_allclose(biased, want + shaped, rtol=1e-5, atol=1e-4)


def test_a_stack_is_the_layers_of_a_scan() -> None:
    layers = packed((5, 64, 64), (1,), 32, 1)
    x = jnp.ones((3, 64))

    def step(x: jax.Array, w: PackedWeight) -> tuple[jax.Array, Any]:
        assert w.shape == (64, 64)
        return jnp.tanh(x @ w), None

    scanned, _ = jax.lax.scan(step, x, layers)
    looped = x
    for i in range(5):
        looped = jnp.tanh(looped @ layers[i])
    np.testing.assert_allclose(scanned, looped, rtol=1e-6)
    indexed = jax.jit(lambda w, i: x @ w[i])(layers, 3)
    np.testing.assert_array_equal(indexed, x @ layers[3])
    np.testing.assert_array_equal(
        jax.vmap(jnp.matmul)(jnp.ones((5, 3, 64)), dequantize(unpack(layers))).shape, (5, 3, 64)
    )


@pytest.mark.parametrize("index", [
    1, -1, slice(1, 3), (0, slice(64, 128)), (..., slice(0, 64)), (slice(None), slice(64, None), slice(64, 192)),
    (slice(0, 2), slice(128, 192)), ..., (2, ..., slice(192, 200)),
])  # fmt: skip
def test_indices(index: Any) -> None:
    q = weight((3, 192, 200), (1,), 64)
    w = prepack(q, axis=1, stack=1)
    expected = np.asarray(dequantize(q))[index]
    np.testing.assert_array_equal(dequantize(unpack(w[index])), expected)
    assert w[index].shape == expected.shape


def test_slices_of_heads() -> None:
    q = weight((128, 4, 32), (0,), 64)
    w = prepack(q, axis=0)
    np.testing.assert_array_equal(dequantize(unpack(w[:, 2:4])), dequantize(q)[:, 2:4])
    with pytest.raises(
        IndexError, match=re.escape("1:4:1 of axis 1 of a PackedWeight of dims (128, 4, 32); accepted: m")
    ):
        w[:, 1:]
    with pytest.raises(
        IndexError, match=re.escape("0:16:1 of axis 2 of a PackedWeight of dims (128, 4, 32); accepted: a")
    ):
        w[..., :16]


@pytest.mark.parametrize(("index", "message"), [
    ((0, 0), "index 0 of axis 0 of a PackedWeight of dims (192, 200); accepted: a slice"),
    ((slice(None), slice(32, None)), "32:192:1 of axis 0 of a PackedWeight of dims (192, 200); accepted: mul"),
    ((0, slice(None), slice(0, 100)), "0:100:1 of axis 1 of a PackedWeight of dims (192, 200); accepted: mul"),
    ((0, slice(None, None, 2)), "0:192:2 of axis 0"),
    ((0, 0, 0, 0), "index (0, 0, 0, 0) of a PackedWeight of shape (3, 192, 200); accepted: at most 3 indices"),
    ((..., ...), "accepted: at most 3 indices"),
    (None, "accepted: at most 3 indices"),
])  # fmt: skip
def test_indices_between_tiles(index: Any, message: str) -> None:
    w = packed((3, 192, 200), (1,), 64, 1)
    with pytest.raises(IndexError, match=re.escape(message)):
        w[index]


def test_one_scale_for_all_of_k_is_not_cut() -> None:
    w = packed((192, 64), (0,), None, 0)
    with pytest.raises(IndexError, match="accepted: all of 192, since one scale serves all of k"):
        w[:64]


@pytest.mark.parametrize(("shape", "axes", "stack", "target"), [
    ((128, 96), (0,), 0, (128, 3, 32)),
    ((128, 96), (0,), 0, (2, 64, 96)),
    ((128, 3, 32), (0,), 0, (128, -1)),
    ((4, 32, 64), (0, 1), 0, (128, 64)),
    ((6, 64, 64), (1,), 1, (2, 3, 64, 64)),
    ((2, 3, 64, 64), (2,), 2, (-1, 64, 64)),
    ((3, 128, 32), (1,), 0, (3, 2, 64, 32)),
])  # fmt: skip
def test_reshape(shape: tuple[int, ...], axes: tuple[int, ...], stack: int, target: tuple[int, ...]) -> None:
    q = weight(shape, axes, 32)
    w = prepack(q, axis=axes, stack=stack).reshape(*target)
    want = dequantize(q).reshape(target)
    assert w.shape == want.shape
    np.testing.assert_array_equal(dequantize(unpack(w)), want)
    assert w.reshape(shape).shape == shape


@pytest.mark.parametrize("target", [(64, 192), (128, 96, 2), (12288,), (-1, -1), (128.0, 96), (96, 128)])
def test_other_shapes(target: Any) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"shape {target} of a PackedWeight of shape (128, 96), contracted (0,)")
    ):
        packed((128, 96), (0,), 32, 0).reshape(target)


def test_groups_that_no_kernel_has_are_repeated() -> None:
    for group, kept in ((256, 128), (96, 32), (192, 64)):
        q = weight((768, 40), (0,), group)
        w = prepack(q)
        assert w.group_size == kept
        np.testing.assert_array_equal(dequantize(unpack(w)), dequantize(q))


def test_scales_that_heads_share_are_repeated() -> None:
    """qwix tiles the last contracted axis alone, so that all heads share a scale."""
    with seeded(3) as rng:
        qvalue = on_device(rng.integers(-8, 8, (4, 64, 40)), jnp.int4)
        q = QuantizedArray(qvalue, on_device(rng.uniform(1, 2, (1, 2, 40)), jnp.float32))
    w = prepack(q, axis=(0, 1))
    assert (w.group_size, w.matrix) == (32, (256, 40))
    np.testing.assert_array_equal(dequantize(unpack(w)), dequantize(q))


def test_tiles_of_groups() -> None:
    assert group_tile((4, 32), 32) == (1, 32)
    assert group_tile((4, 32), 16) == (1, 16)
    assert group_tile((4, 32), 64) == (2, 32)
    assert group_tile((4, 32), 128) == (4, 32)
    assert group_tile((3, 32), 64) is None
    assert group_tile((4, 48), 32) is None
    assert group_tile((2, 0), 32) is None


@pytest.mark.parametrize(("change", "message"), [
    ({"axis": None}, "axis=None with w of rank 3; accepted: the axis or axes that a product contracts"),
    ({"axis": (0, 0)}, "axis=(0, 0) of an array of rank 3; accepted: -3 to -1 or 0 to 2"),
    ({"axis": ()}, "axis=() of an array of rank 3"),
    ({"axis": (0, 1), "group_size": 64}, "group_size=64 of 144 elements along axes (0, 1) of sizes (3, 48); accepted"),
    ({"axis": (0, 1), "group_size": 32}, "group_size=32 of 144 elements along axes (0, 1) of sizes (3, 48); accepted"),
])  # fmt: skip
def test_quantize_asks_for_the_axes(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        quantize(jnp.ones((3, 48, 5)), "int4", **{"group_size": None, **change})


@pytest.mark.parametrize(("arguments", "message"), [
    ({}, "axis=None with a weight of rank 3; accepted: the axis or axes"),
    ({"axis": 0, "stack": 1}, "axis=0 of an array of rank 3; accepted: -2 to -1 or 1 to 2"),
    ({"stack": 3}, "stack=3 of a weight of shape (2, 64, 5); accepted: 0 to 2"),
    ({"stack": 1.0}, "stack=1.0 of a weight of shape (2, 64, 5)"),
    ({"axis": 2}, "groups of 1 along axis 2 of a weight of shape (2, 64, 5), scales of shape (2, 2, 5); accepted: m"),
])  # fmt: skip
def test_prepack_asks_for_the_axes(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        prepack(weight((2, 64, 5), (1,), 32), **arguments)


@pytest.mark.parametrize(("spec", "x", "message"), [
    ("abk,kn->abn", (2, 3, 64), "subscripts 'abk,kn->abn': 'kn' of an operand of rank 3"),
    ("ank,knm->am", (2, 3, 64), "contracts axes (0, 1) and maps axes () of a PackedWeight of shape (64, 3, 32)"),
    ("bnk,knm->bnm", (2, 3, 64), "contracts axes (0,) and maps axes (1,) of a PackedWeight of shape (64, 3, 32)"),
    ("bk,knm->bn", (2, 64), "accepted: a result with all axes that are not contracted"),
    ("bk,knm,c->bnm", (2, 64), "accepted: activations and one packed weight"),
    ("kk,knm->nm", (64, 64), "no letter twice"),
])  # fmt: skip
def test_einsum_errors(spec: str, x: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        jax_splitk.quantized_einsum(spec, jnp.ones(x), packed((64, 3, 32), (0,), 32, 0))


def test_einsum_forms() -> None:
    w = packed((64, 3, 32), (0,), 32, 0)
    x = jnp.ones((2, 5, 64))
    dense = dequantize(unpack(w), jnp.float32)
    want = jnp.einsum("abk,knm->abnm", x, dense)
    for spec, order in (
        ("abk,knm->abnm", (0, 1, 2, 3)), ("...k,knm->...nm", (0, 1, 2, 3)), ("...k,knm", (0, 1, 3, 2)),
        ("abk, knm -> mabn", (3, 0, 1, 2)), ("abk,knm", (0, 1, 3, 2)),
    ):  # fmt: skip
        np.testing.assert_allclose(jax_splitk.quantized_einsum(spec, x, w), want.transpose(order), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(jnp.einsum("abk,knm", x, dense), want.transpose(0, 1, 3, 2), rtol=1e-5, atol=1e-5)


def test_other_uses_say_what_to_call() -> None:
    w = packed((64, 32), (0,), 32, 0)
    for function in (jnp.asarray, np.asarray, jnp.array):
        with pytest.raises(
            TypeError, match=r"PackedWeight used as an array; accepted: x @ w, jax_splitk\.quantized_mat"
        ):
            function(w)
    with pytest.raises(TypeError, match=r"PackedWeight @ .*; accepted: x @ w, the activations x first"):
        w @ jnp.ones((32, 4))
    with pytest.raises(TypeError, match="operands of types ArrayImpl and ArrayImpl; accepted: an array of activations"):
        jax_splitk.quantized_einsum("ab,bc->ac", jnp.ones((2, 3)), jnp.ones((3, 4)))
    with pytest.raises(
        ValueError, match=re.escape("x of shape (2, 64) and w of shape (3, 64, 32); accepted: x of [3, ..., 64]")
    ):
        jnp.ones((2, 64)) @ packed((3, 64, 32), (1,), 32, 1)
    with pytest.raises(ValueError, match=re.escape("bias of shape (64,); accepted: (32,)")):
        jax_splitk.quantized_matmul(jnp.ones((2, 64)), w, bias=jnp.ones(64))


def test_gradients_of_stacks_and_biases() -> None:
    w = packed((2, 3, 32, 40), (1, 2), 32, 1)
    x = jnp.ones((2, 5, 3, 32))
    bias = jnp.ones((2, 40))
    dense = dequantize(unpack(w), jnp.float32)

    def ours(x: jax.Array, bias: jax.Array, scale: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(jax_splitk.quantized_matmul(x, dataclasses.replace(w, scale=scale), bias=bias)))

    def plain(x: jax.Array, bias: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(jnp.einsum("lbhd,lhdk->lbk", x, dense) + bias[:, None]))

    scale = w.scale.astype(jnp.float32)
    got, want = jax.grad(ours, (0, 1))(x, bias, scale), jax.grad(plain, (0, 1))(x, bias)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    assert jax.grad(ours, 2)(x, bias, scale).shape == w.scale.shape


def test_transposes_move_axes_and_no_bytes() -> None:
    w = packed((64, 32), (0,), 32, 0)
    assert (w.T.shape, w.T.contracted) == ((32, 64), (1,))
    assert w.T.words is w.words
    np.testing.assert_array_equal(dequantize(unpack(w.T)), dequantize(unpack(w)).T)
    np.testing.assert_array_equal(dequantize(unpack(w.T.T)), dequantize(unpack(w)))
    stacked = packed((2, 3, 64, 32), (2,), 32, 1)
    moved = stacked.transpose(0, 2, 1, 3)
    assert (moved.shape, moved.stack, moved.contracted) == ((2, 64, 3, 32), (2,), (0,))
    np.testing.assert_array_equal(dequantize(unpack(moved)), dequantize(unpack(stacked)).transpose(0, 2, 1, 3))
    for axes in ((1, 0, 2, 3), (0, 1, 3, 2), (0, 1, 2), (0, 1, 1, 2), (0, 1.0, 2, 3)):
        with pytest.raises(ValueError, match=r"axes .* of a PackedWeight of shape .*; accepted: all axes, the stack"):
            (stacked if axes != (0, 1, 3, 2) else packed((2, 64, 3, 32), (1,), 32, 1)).transpose(axes)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_astype_converts_scales_and_zero_points(dtype: str) -> None:
    """Layers convert their parameters to the dtype in which they compute."""
    q = weight((64, 32), (0,), 32)
    for w in (q, prepack(q)):
        other = w.astype(dtype)
        assert other.dtype == dtype and other.shape == w.shape and type(other) is type(w)
        np.testing.assert_array_equal(other.scale, w.scale.astype(dtype))
    assert prepack(q).astype(dtype).zero_point.dtype == dtype
    exact = dequantize(q, jnp.float32)
    np.testing.assert_allclose(dequantize(unpack(prepack(q).astype(dtype)), jnp.float32), exact, rtol=2**-8)
    with pytest.raises(TypeError, match="dtype='int8'; accepted: bfloat16, float16, float32"):
        q.astype("int8")


def test_iteration_goes_over_the_stack() -> None:
    stacked = packed((3, 64, 32), (1,), 32, 1)
    weights = list(stacked)
    assert [w.shape for w in weights] == [(64, 32)] * 3
    np.testing.assert_array_equal(dequantize(unpack(weights[2])), dequantize(unpack(stacked))[2])
    for one in (weights[0], unpack(weights[0])):
        with pytest.raises(TypeError, match=r"iteration over a PackedWeight of shape|index 0 of a QuantizedArray"):
            list(one)
