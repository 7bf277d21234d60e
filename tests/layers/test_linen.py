"""Models and layers of Flax linen on packed weights."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen
from jax import numpy as jnp

import jax_splitk
from benchmarks import language_models as models
from benchmarks.quantized_models import dequantized
from jax_splitk.layers import flax_linen
from jax_splitk.quantized import PackedWeight
from tests.exhaustive import crossed
from tests.layers.compared import check_close, check_products, filled, relative, tokens
from tests.problems import seeded

INT4 = jax_splitk.QuantizationRule("kernel$", "int4", group_size=32)


def variables_of(model: linen.Module, x: Any, rng: np.random.Generator) -> Any:
    return filled(jax.eval_shape(model.init, jax.random.key(0), x), rng)


@pytest.mark.parametrize(("name", "remat"), [
    ("llama", False), ("qwen", True), pytest.param("gemma", False, marks=pytest.mark.exhaustive)
])  # fmt: skip
def test_scanned_models_run_on_packed_weights(name: str, remat: bool) -> None:
    _, layer, tied, products = models.MODELS[name]
    with seeded(0) as rng:
        model, x = models.LinenModel(layer, tied, models.SMALL, remat), tokens(rng)
        variables = variables_of(model, x, rng)
        packed = flax_linen.quantize(model, variables, INT4, x)  # the change of the user's code
        with flax_linen.intercept():  # and this
            logits = jax.jit(model.apply)(packed, x)
            check_products(model.apply, packed, x, products=products + (not tied))
        stacked = packed["params"]["layers"]["o"]["kernel"]
        assert stacked.stack == (4,)
        assert isinstance(packed["params"]["embed"]["embedding"], jax.Array)
        plain = jax.jit(model.apply)(dequantized(packed), x)
        in_float32 = model.clone(size=dataclasses.replace(models.SMALL, dtype=jnp.float32))
        exact = jax.jit(in_float32.apply)(dequantized(packed, jnp.float32), x)
        check_close(logits, plain, exact)


# ---- layers --------------------------------------------------------------------------------------------------------

ONES = {"bias_init": linen.initializers.ones}
LAYERS = {
    "dense": (linen.Dense(48, **ONES), (2, 64)),
    "dense, no bias": (linen.Dense(48, use_bias=False), (2, 64)),
    "general": (linen.DenseGeneral((3, 16), **ONES), (2, 5, 64)),
    "several": (linen.DenseGeneral(24, axis=(-2, -1), **ONES), (5, 2, 32)),
    "first": (linen.DenseGeneral(24, axis=0, **ONES), (64, 3)),
    "batch": (linen.DenseGeneral((2, 8), batch_dims=(0,), **ONES), (3, 5, 64)),
    "einsum": (linen.Einsum((3, 64, 16), "btd,ndh->btnh", **ONES), (2, 5, 64)),
    "ellipsis": (linen.Einsum((2, 64, 16), "...d,cdf->c...f", **ONES), (2, 5, 64)),
    "experts": (linen.Einsum((3, 64, 16), "etd,edf->etf", **ONES), (3, 5, 64)),
    "remat": (linen.remat(linen.Dense)(48, **ONES), (2, 64)),
    "jit": (linen.jit(linen.Dense)(48, **ONES), (2, 64)),
    "vmap": (linen.vmap(linen.Dense, variable_axes={"params": 0}, split_rngs={"params": True})(48, **ONES), (3, 5, 64)),
}


@pytest.mark.parametrize(("name", "dtype"), crossed([*LAYERS], ["bfloat16", None]))
def test_layers_add_biases_and_promote_as_before(name: str, dtype: Any) -> None:
    layer, shape = LAYERS[name]
    layer = layer.clone(dtype=dtype)
    with seeded(1) as rng:
        x = jnp.asarray(rng.integers(-3, 4, shape), jnp.bfloat16)
        variables = variables_of(layer, x, rng)
        packed = flax_linen.quantize(layer, variables, INT4, x)
        assert isinstance(packed["params"]["kernel"], PackedWeight)
        with flax_linen.intercept():
            y = jax.jit(layer.apply)(packed, x)
        expected = jax.jit(layer.apply)(dequantized(packed), x)
        assert (y.dtype, y.shape) == (expected.dtype, expected.shape)
        assert relative(y, expected) <= (0.01 if dtype is not None else 1e-6)


def test_attention_runs_on_packed_weights() -> None:
    """Its layers are DenseGeneral of [k, heads, size] and [heads, size, k]."""
    with seeded(2) as rng:
        model = linen.MultiHeadDotProductAttention(num_heads=2, qkv_features=64)
        x = jnp.asarray(rng.standard_normal((2, 3, 64)), jnp.float32)
        variables = variables_of(model, x, rng)
        packed = flax_linen.quantize(model, variables, INT4, x, deterministic=True)
        kernels = {name: layer["kernel"].contracted for name, layer in packed["params"].items()}
        assert kernels == {"query": (0,), "key": (0,), "value": (0,), "out": (0, 1)}
        with flax_linen.intercept():
            y = jax.jit(model.apply)(packed, x)
        assert relative(y, jax.jit(model.apply)(dequantized(packed), x)) < 1e-5


def test_layers_that_are_not_packed_stay_as_they_are() -> None:
    class Net(linen.Module):
        @linen.compact
        def __call__(self, tokens: Any) -> Any:
            embed = linen.Embed(16, 64)
            x = linen.Conv(64, (3,))(embed(tokens))
            return embed.attend(linen.LayerNorm()(linen.Dense(64)(x)))

    model, x = Net(), jnp.asarray([[1, 2, 3, 4]])
    with seeded(3) as rng:
        variables = variables_of(model, x, rng)
        with flax_linen.intercept():
            np.testing.assert_array_equal(model.apply(variables, x), model.apply(variables, x))
        packed = flax_linen.quantize(model, variables, INT4, x)
        flat = jax.tree_util.tree_leaves_with_path(packed, is_leaf=lambda leaf: isinstance(leaf, PackedWeight))
        kinds = {jax.tree_util.keystr(path): type(leaf) for path, leaf in flat}
        assert [path for path, kind in kinds.items() if kind is PackedWeight] == ["['params']['Dense_0']['kernel']"]
        quantized = jax.tree.map(lambda w: w, packed)
        dense = quantized["params"]["Dense_0"]
        dense["kernel"] = jax_splitk.unpack(dense["kernel"])  # a QuantizedArray multiplies, too
        with flax_linen.intercept():
            assert relative(model.apply(packed, x), model.apply(quantized, x)) < 1e-5


def test_boxes_are_removed_and_shapes_suffice() -> None:
    kernel_init = linen.with_partitioning(linen.initializers.ones, (None, "tp"))
    model, x = linen.Dense(128, kernel_init=kernel_init), jax.ShapeDtypeStruct((2, 64), jnp.float32)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    assert isinstance(variables["params"]["kernel"], linen.Partitioned)
    packed = flax_linen.quantize(model, variables, INT4, x)
    assert isinstance(packed["params"]["kernel"].words, jax.ShapeDtypeStruct)
    assert packed["params"]["kernel"].shape == (64, 128)


def test_without_intercept_linen_refuses_packed_kernels() -> None:
    """The row of the failures: linen compares shapes before the layer multiplies."""
    model, x = linen.Dense(64), jnp.ones((2, 64))
    packed = flax_linen.quantize(model, model.init(jax.random.key(0), x), INT4, x)
    with pytest.raises(Exception, match="kernel"):
        model.apply(packed, x)

    @flax_linen.intercept()
    def apply(variables: Any, x: Any) -> Any:
        return model.apply(variables, x)

    assert jax.jit(apply)(packed, x).shape == (2, 64)
    assert apply(packed, x).shape == (2, 64), "a decorator serves more than once"


def test_kernels_of_other_axes_are_refused() -> None:
    model, x = linen.DenseGeneral(64, axis=(-2, -1)), jnp.ones((2, 2, 64))
    variables = model.init(jax.random.key(0), x)
    rule = jax_splitk.QuantizationRule("kernel", "int4", group_size=64, axis=1)
    packed = flax_linen.quantize(model, variables, rule, x)
    with flax_linen.intercept(), pytest.raises(ValueError, match=r"contracts axes \(0, 1\).*accepted: contracted axes"):
        model.apply(packed, x)
    with pytest.raises(ValueError, match=r"pattern='nothing' of rule 0 applies to no kernel of a layer; .*'kernel'"):
        flax_linen.quantize(model, variables, jax_splitk.QuantizationRule("nothing", "int4"), x)


class Own(linen.Module):
    """A layer of a user: Gemma's einsum."""

    shape: tuple[int, ...]

    @linen.compact
    def __call__(self, subscripts: str, x: Any) -> Any:
        return jnp.einsum(subscripts, x, self.param("w", linen.initializers.normal(), self.shape))


class OwnBlock(linen.Module):
    def setup(self) -> None:
        self.w = self.param("w", linen.initializers.normal(), (64, 64))
        self.gain = self.param("gain", linen.initializers.normal(), (64,))
        self.einsum = Own((4, 64, 32))

    def __call__(self, x: Any, _: Any = None) -> Any:
        return self.scaled(x @ self.w), self.einsum("btd,ndh->btnh", x)

    def scaled(self, x: Any) -> Any:
        return x * self.gain


def test_layers_of_users_multiply_by_packed_weights() -> None:
    """Parameters of `setup` and of a compact method, under scan, too."""
    with seeded(4) as rng:
        x = jnp.asarray(rng.standard_normal((2, 3, 64)), jnp.float32)
        scan = linen.scan(OwnBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        for model, stack in ((OwnBlock(), 0), (scan(), 1)):
            arguments = (x, None) if stack else (x,)
            variables = filled(jax.eval_shape(model.init, jax.random.key(0), *arguments), rng)
            rules = [
                jax_splitk.QuantizationRule("^w$", "int4", group_size=32, axis=stack, stack=stack),
                jax_splitk.QuantizationRule("einsum/w", "int4", group_size=32, axis=stack + 1, stack=stack),
            ]
            packed = {"params": jax_splitk.quantize_params(variables["params"], rules)}
            with flax_linen.intercept(), jax_splitk.intercept():
                y, heads = jax.jit(model.apply)(packed, *arguments)
            exact, of_heads = jax.jit(model.apply)(dequantized(packed), *arguments)
            assert relative(y, exact) < 1e-5 and relative(heads, of_heads) < 1e-5
