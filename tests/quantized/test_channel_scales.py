"""Weights with a second scale for each feature, and scales of a byte: every way to pack, cut, place and store them."""

import copy
import dataclasses
import pathlib
import pickle
import re
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import serialization
from jax import numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_splitk
from jax_splitk.quantized import PackedWeight, QuantizedArray, dequantize, prepack, quantize, unpack
from tests.formats import E8M0, every_code
from tests.problems import on_device

E4M3 = "float8_e4m3fn"


def weight(seed: int = 0, k: int = 128, features: int = 192, scale_dtype: str = E4M3) -> QuantizedArray:
    return every_code("float4_e2m1fn", k, features, 16, None, scale_dtype, seed, channel=True)[0]


def stack() -> QuantizedArray:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *(weight(seed) for seed in range(3)))


def values(w: Any) -> np.ndarray:
    return np.asarray(dequantize(unpack(w) if isinstance(w, PackedWeight) else w, jnp.float32))


def same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("scale_dtype", [E4M3, E8M0])
def test_packing_and_its_inverse(scale_dtype: str) -> None:
    q = weight(k=96, features=70, scale_dtype=scale_dtype)
    packed = prepack(q)
    assert packed.channel_scale.shape == (2, 1, 64)
    assert packed.nbytes == 4 * packed.words.size + packed.scale.size + 4 * 128
    same(unpack(packed), q)
    one = dataclasses.replace(q, channel_scale=jnp.full((1, 1), 0.25))
    np.testing.assert_array_equal(values(prepack(one)), values(one))
    x = on_device(np.random.default_rng(1).integers(-3, 4, (5, 96)), jnp.bfloat16)
    exact = np.asarray(x, np.float64) @ values(q).astype(np.float64)
    for w in (q, packed, packed.with_shards((1, 4))):
        np.testing.assert_allclose(x.astype(jnp.float32) @ w, exact, rtol=1e-6, atol=1e-4)


def test_a_channel_scale_that_changes_along_k_is_refused() -> None:
    q = dataclasses.replace(weight(), channel_scale=jnp.ones((2, 192)))
    dequantize(q)
    with pytest.raises(ValueError, match=r"channel_scale of shape \(2, 192\) .* accepted: size 1 along these axes"):
        prepack(q)
    with pytest.raises(ValueError, match="accepted: size 1 along these axes"):
        jnp.ones((3, 128)) @ q


def test_parts_of_a_stack() -> None:
    q = stack()
    packed = prepack(q, stack=1)
    assert packed.channel_scale.shape == (3, 3, 1, 64)
    same(unpack(packed), q)
    for i in range(3):
        np.testing.assert_array_equal(values(packed[i]), values(q)[i])
    np.testing.assert_array_equal(values(packed[1][:, 64:]), values(q)[1][:, 64:])
    np.testing.assert_array_equal(values(packed[1][64:, :128]), values(q)[1][64:, :128])
    heads = packed[0].reshape(128, 3, 64)
    np.testing.assert_array_equal(values(heads), values(q)[0].reshape(128, 3, 64))
    np.testing.assert_array_equal(values(packed[0].T), values(q)[0].T)
    again = jax.lax.map(lambda w: w, packed)
    same(again, packed)


def test_joined_weights_keep_their_scales() -> None:
    each = [weight(seed, features=64) for seed in range(3)]
    packed = [prepack(q) for q in each]
    joined = dataclasses.replace(
        packed[0],
        **{name: jnp.concatenate([getattr(w, name) for w in packed]) for name in ("words", "scale", "channel_scale")},
        dims=(128, 192),
    )
    np.testing.assert_array_equal(values(joined), np.concatenate([values(q) for q in each], axis=1))


def test_shardings_divide_channel_scales_with_features() -> None:
    packed, plain = prepack(stack(), stack=1), stack()
    found = jax_splitk.shardings(packed, P("e", "k", "f"))
    assert (found.scale, found.channel_scale) == (P("e", "f", "k"), P("e", "f", None))
    found = jax_splitk.shardings(plain, P("e", "k", "f"))
    assert (found.scale, found.channel_scale) == (P("e", "k", "f"), P("e", None, "f"))


@pytest.mark.skipif(jax.device_count() < 4, reason="needs several devices")
@pytest.mark.parametrize("spec", [P(None, "tp"), P("tp", None)], ids=["columns", "rows"])
@pytest.mark.parametrize("scale_dtype", [E4M3, E8M0])
def test_products_over_devices_gather_no_weight(scale_dtype: str, spec: Any) -> None:
    q = weight(k=256, features=256, scale_dtype=scale_dtype)
    packed, x = prepack(q), on_device(np.random.default_rng(2).integers(-2, 3, (5, 256)), jnp.bfloat16)
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    placed = jax.device_put(packed, jax_splitk.shardings(packed, NamedSharding(mesh, spec)))
    alone = NamedSharding(mesh, P())
    product = jax.jit(
        lambda x, w: jax_splitk.quantized_matmul(x, w, preferred_element_type=jnp.float32), out_shardings=alone
    )
    text = str(product.lower(jax.device_put(x, alone), placed).compile().as_text())
    assert not re.search(r"(u32|f8\w+)\[[^]]*\]\S* all-gather", text)
    exact = np.asarray(x, np.float64) @ values(q).astype(np.float64)
    np.testing.assert_allclose(product(x, placed), exact, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("scale_dtype", [E4M3, E8M0])
def test_files_and_states(packed: bool, scale_dtype: str, tmp_path: pathlib.Path) -> None:
    q = weight(scale_dtype=scale_dtype)
    tree = {"up": prepack(q) if packed else q}
    jax_splitk.save_file(tree, tmp_path / "w.safetensors")
    same(jax_splitk.load_file(tmp_path / "w.safetensors", tree), tree)
    state = jax_splitk.to_state(tree)
    assert list(state["up"])[-1] == "channel_scale"
    same(jax_splitk.from_state(state, tree), tree)
    same(pickle.loads(pickle.dumps(tree)), tree)
    wrong = {"up": dataclasses.replace(tree["up"], channel_scale=None)}
    with pytest.raises(ValueError, match="channel_scale"):
        jax_splitk.load_file(tmp_path / "w.safetensors", wrong)
    with pytest.raises(ValueError, match="channel_scale"):
        jax_splitk.from_state(state, wrong)
    exported = jax.export.export(jax.jit(lambda w: w))(tree["up"])
    again = jax.export.deserialize(exported.serialize())
    same(again.call(tree["up"]), tree["up"])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", tree)
        checkpointer.wait_until_finished()
        same(checkpointer.restore(tmp_path / "orbax", jax.eval_shape(lambda: tree)), tree)
        same(jax_splitk.from_state(checkpointer.restore(tmp_path / "orbax")), tree)
    jax_splitk.register_flax_serialization()
    same(serialization.from_bytes(tree, serialization.to_bytes(tree)), tree)


def test_trees_without_values_keep_their_places() -> None:
    for w in (weight(), prepack(weight()), quantize(jnp.ones((64, 64)), "int4", group_size=32)):
        empty = jax.tree.map(lambda _: None, w)
        leaves = jax.tree.leaves(empty, is_leaf=lambda x: x is None)
        zero_point = 1  # which these weights do not have
        assert len(leaves) == len(jax.tree.leaves(w)) + zero_point
        jax.tree.map(lambda leaf, none: leaf, w, empty, is_leaf=lambda x: x is None)


def test_weights_of_earlier_versions_are_read() -> None:
    """Their pickles have no channel scales, and neither have their trees a place for them."""
    q = quantize(jnp.ones((64, 64)), "int4", group_size=32)
    for w in (q, prepack(q)):
        fields = {name: value for name, value in w.__dict__.items() if name != "channel_scale"}
        old = copy.copy(w)
        object.__setattr__(old, "__dict__", {})
        old.__setstate__(fields)
        same(old, w)
        assert len(jax.tree.leaves(w)) == 2 + isinstance(w, PackedWeight)


def test_quantize_makes_channel_scales_for_e4m3() -> None:
    """Weights of any size: the largest scale of each feature is 448, also along several contracted axes."""
    w = jax.random.normal(jax.random.key(3), (4, 32, 6)) * jnp.exp2(jnp.arange(6.0) * 8 - 24)
    q = quantize(w, "float4_e2m1fn", group_size=16, axis=(0, 1), scale_dtype=E4M3)
    assert (q.scale.shape, q.scale.dtype, q.channel_scale.shape) == ((4, 2, 6), E4M3, (1, 1, 6))
    np.testing.assert_array_equal(q.scale.astype(jnp.float32).max((0, 1)), 448)
    wide = quantize(w, "float4_e2m1fn", group_size=16, axis=(0, 1), scale_dtype=jnp.float32)
    error, least = (np.abs(np.asarray(dequantize(one, jnp.float32) - w)).mean((0, 1)) for one in (q, wide))
    assert (error < 1.2 * least).all()
    packed = prepack(q, axis=(0, 1))
    np.testing.assert_array_equal(values(packed), values(q))
