"""Models and layers of Flax nnx on packed weights."""

import copy
import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax import numpy as jnp

import jax_splitk
from benchmarks import language_models as models
from benchmarks.quantized_models import dequantized
from jax_splitk.layers import flax_nnx
from jax_splitk.quantized import PackedWeight
from tests.exhaustive import crossed
from tests.layers.compared import check_close, check_products, filled, relative, tokens
from tests.problems import seeded

INT4 = jax_splitk.QuantizationRule("kernel$", "int4", group_size=32)
TWO_LAYERS = dataclasses.replace(models.SMALL, layers=2)


def made(rng: np.random.Generator, *args: Any, of: type = models.Model) -> Any:
    graph, shapes = nnx.split(nnx.eval_shape(lambda: of(*args, nnx.Rngs(0))))
    return nnx.merge(graph, filled(shapes, rng))


def with_weights(of: type, args: Any, weights: Any) -> Any:
    model = nnx.eval_shape(lambda: of(*args, nnx.Rngs(0)))
    nnx.update(model, weights)
    return model


@nnx.jit
def run(model: Any, x: Any) -> Any:
    return model(x)


def check_model(of: type, args: Any, size: models.Size, products: int) -> None:
    with seeded(0) as rng:
        model, x = made(rng, *args, size, of=of), tokens(rng)
        before = nnx.state(model)
        flax_nnx.quantize(model, INT4)  # the change of the user's code
        graph, packed = nnx.split(model)
        check_products(lambda state, x: nnx.merge(graph, state)(x), packed, x, products=products)
        assert not any(
            type(leaf) is nnx.Param and isinstance(leaf[...], PackedWeight) for leaf in nnx.iter_graph(model)
        )
        report = jax_splitk.quantization_report(nnx.eval_shape(lambda: before), packed)
        assert report.bytes_before > 2 * report.bytes_after
        plain = with_weights(of, (*args, size), dequantized(nnx.to_pure_dict(packed)))
        in_float32 = (*args, dataclasses.replace(size, dtype=jnp.float32))
        exact = run(with_weights(of, in_float32, dequantized(nnx.to_pure_dict(packed), jnp.float32)), x)
        check_close(run(model, x), run(plain, x), exact)


@pytest.mark.parametrize(("name", "layers"), [
    pytest.param("llama", 4, marks=pytest.mark.exhaustive), ("qwen", 2), ("gemma", 2)
])  # fmt: skip
def test_models_run_on_packed_weights(name: str, layers: int) -> None:
    layer, _, tied, products = models.MODELS[name]
    size = dataclasses.replace(models.SMALL, layers=layers)
    check_model(models.Model, (layer, tied), size, layers * products + (not tied))


def test_a_scanned_stack_of_layers_runs_on_a_stack_of_weights() -> None:
    check_model(models.ScannedModel, (models.GemmaLayer,), models.SMALL, 5)


# ---- layers --------------------------------------------------------------------------------------------------------

LAYERS = {
    "linear": (lambda: nnx.Linear(64, 48, rngs=nnx.Rngs(0)), (2, 64)),
    "general": (lambda: nnx.LinearGeneral(64, (3, 16), rngs=nnx.Rngs(0)), (2, 5, 64)),
    "several": (lambda: nnx.LinearGeneral((2, 32), 24, axis=(-2, -1), rngs=nnx.Rngs(0)), (5, 2, 32)),
    "first": (lambda: nnx.LinearGeneral(64, 24, axis=0, rngs=nnx.Rngs(0)), (64, 3)),
    "batch": (lambda: nnx.LinearGeneral(64, (2, 8), batch_axis={0: 3}, rngs=nnx.Rngs(0)), (3, 5, 64)),
    "einsum": (lambda: nnx.Einsum("btd,ndh->btnh", (3, 64, 16), (3, 16), rngs=nnx.Rngs(0)), (2, 5, 64)),
    "ellipsis": (lambda: nnx.Einsum("...d,cdf->c...f", (2, 64, 16), (2, 16), rngs=nnx.Rngs(0)), (2, 5, 64)),
    "experts": (lambda: nnx.Einsum("etd,edf->etf", (3, 64, 16), (3, 16), rngs=nnx.Rngs(0)), (3, 5, 64)),
}


@pytest.mark.parametrize(("name", "dtype"), crossed([*LAYERS], ["bfloat16", None]))
def test_layers_add_biases_and_promote_as_before(name: str, dtype: Any) -> None:
    """Exact on integers. A layer of no dtype computes in that of inputs, bias and scales together."""
    make, shape = LAYERS[name]
    with seeded(1) as rng:
        layer = make()
        integers = lambda shape: jnp.asarray(rng.integers(-3, 4, shape), jnp.float32)  # noqa: E731
        kernel = integers(layer.kernel.shape).at[..., 0].set(7.5)  # the scale is 1
        layer.kernel.set_value(kernel)
        layer.bias.set_value(integers(layer.bias.shape))
        layer.dtype = dtype
        x = integers(shape).astype(jnp.bfloat16)
        plain = copy.deepcopy(layer)
        flax_nnx.quantize(layer, jax_splitk.QuantizationRule("kernel", "int8", group_size=32, scale_dtype="float32"))
        weight = layer.kernel.get_raw_value()
        assert isinstance(weight, PackedWeight)
        plain.kernel.set_value(dequantized(weight))
        y, expected = run(layer, x), run(plain, x)
        assert (y.dtype, y.shape) == (expected.dtype, expected.shape)
        assert relative(y, expected) <= (0.01 if dtype is not None else 1e-6)


def test_layers_take_packed_weights() -> None:
    with seeded(2) as rng:
        x = jnp.asarray(rng.standard_normal((2, 3, 64)), jnp.bfloat16)
        bias = jnp.asarray(rng.standard_normal((3, 16)), jnp.bfloat16)
        w = jnp.asarray(rng.standard_normal((64, 3, 16)), jnp.bfloat16)
        q = jax_splitk.quantize(w, "int4", group_size=32, axis=0)
        packed = jax_splitk.prepack(q, axis=0)
        expected = jnp.einsum("btk,khd->bthd", x, jax_splitk.dequantize(q)) + bias
        matrix, flat = packed.reshape(64, 48), bias.reshape(-1)
        made = {
            "general": flax_nnx.LinearGeneral(packed, bias),
            "einsum": flax_nnx.Einsum("btk,khd->bthd", packed, bias),
            "linear": flax_nnx.Linear(matrix, flat),
        }
        for name, layer in made.items():
            y = run(layer, x)
            assert y.dtype == jnp.bfloat16
            assert relative(y.reshape(expected.shape), expected) < 0.01, name
            assert layer.bias is not None
        assert flax_nnx.Linear(matrix)(x).shape == (2, 3, 48)
        assert flax_nnx.Einsum(None, packed)(x, "btk,khd->bthd").shape == (2, 3, 3, 16)
        assert flax_nnx.Linear(matrix, dtype=jnp.float32)(x).dtype == jnp.float32


def test_a_param_that_holds_a_packed_weight_multiplies() -> None:
    w = jax_splitk.prepack(jax_splitk.quantize(jnp.ones((64, 32)), "int4", group_size=32))
    x = jnp.ones((2, 64), jnp.bfloat16)
    for held in (nnx.Param(w), flax_nnx.PackedKernel(w), nnx.Param(jax_splitk.unpack(w))):
        np.testing.assert_array_equal(jax_splitk.quantized_matmul(x, held), x @ w)
    np.testing.assert_array_equal(jax_splitk.quantized_einsum("bk,kn->bn", x, nnx.Param(w)), x @ w)
    layer = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
    flax_nnx.set_kernel(layer, nnx.Param(w))
    np.testing.assert_array_equal(layer(x), x.astype(jnp.float32) @ w)
    assert type(layer.kernel) is nnx.Param


def test_weights_of_checkpoints_multiply_in_layers() -> None:
    """Those that are not packed, and those whose rows are in another order."""
    with seeded(4) as rng:
        x = jnp.asarray(rng.standard_normal((2, 64)), jnp.float32)
        q = jax_splitk.quantize(jnp.asarray(rng.standard_normal((64, 32)), jnp.float32), "int4", group_size=32)
        order = jnp.asarray(rng.permutation(64))
        for weight in (q, jax_splitk.prepack(q)):
            for kernel in (weight, jax_splitk.PermutedWeight(weight, order)):
                layer = nnx.Linear(64, 32, dtype=jnp.float32, rngs=nnx.Rngs(0))
                flax_nnx.set_kernel(layer, kernel)
                assert relative(run(layer, x), x @ kernel) < 1e-6
        general = nnx.LinearGeneral(64, 32, axis=0, rngs=nnx.Rngs(0))
        flax_nnx.set_kernel(general, jax_splitk.PermutedWeight(q, order))
        with pytest.raises(ValueError, match=r"with a PermutedWeight; accepted: \(\(\(1,\), \(0,\)\)"):
            general(x.T)


class Own(nnx.Module):
    """A layer of a user: Gemma's einsum."""

    def __init__(self, subscripts: str, *shape: int) -> None:
        self.subscripts, self.w = subscripts, nnx.Param(jnp.ones(shape))

    def __call__(self, x: Any) -> Any:
        return jnp.einsum(self.subscripts, x, self.w) + jnp.einsum(self.subscripts, x, self.w[...].astype(x.dtype))


def test_layers_of_users_multiply_by_packed_weights() -> None:
    with seeded(5) as rng:
        x = jnp.asarray(rng.standard_normal((2, 3, 64)), jnp.bfloat16)
        net = nnx.List([Own("btd,ndh->btnh", 4, 64, 32), nnx.Linear(64, 32, rngs=nnx.Rngs(0))])
        net[0].w.set_value(jnp.asarray(rng.standard_normal((4, 64, 32)), jnp.bfloat16))
        rules = [jax_splitk.QuantizationRule(r"0/w", "int4", group_size=32, axis=1), INT4]
        flax_nnx.quantize(net, rules)
        assert type(net[0].w) is flax_nnx.PackedKernel and type(net[1].kernel) is flax_nnx.PackedKernel
        weight = net[0].w.get_raw_value()
        with jax_splitk.intercept():
            y = run(net[0], x)
            check_products(net[0], x, products=2)
        assert y.dtype == jnp.bfloat16
        assert (
            relative(y, 2 * jnp.einsum("btd,ndh->btnh", x.astype(jnp.float32), dequantized(weight, jnp.float32))) < 0.01
        )
        with pytest.raises(ValueError, match="pattern='w' of rule 0 applies to no kernel of a layer"):
            flax_nnx.quantize(nnx.List([Own("ab,bc->ac", 64, 64)]), jax_splitk.QuantizationRule("w", "int4"))


def test_weights_are_data_of_modules() -> None:
    class Net(nnx.Module):
        def __init__(self, w: Any) -> None:
            self.w = w

    w = jax_splitk.prepack(jax_splitk.quantize(jnp.ones((64, 32)), "int4", group_size=32))
    for each in (w, jax_splitk.unpack(w), jax_splitk.PermutedWeight(w, jnp.arange(64))):
        x = jnp.ones((2, 64))
        y = nnx.jit(lambda net, x: x @ net.w)(Net(each), x)
        np.testing.assert_allclose(y, x @ w, rtol=1e-6)


def test_a_packed_kernel_that_is_set_by_hand_is_refused() -> None:
    """`set_kernel` is needed, since the layer converts its kernel to an array."""
    layer = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
    layer.kernel = nnx.Param(jax_splitk.prepack(jax_splitk.quantize(jnp.ones((64, 32)), "int4", group_size=32)))
    with pytest.raises(
        TypeError, match=r"PackedWeight used as an array; accepted: x @ w, jax_splitk\.quantized_matmul"
    ):
        layer(jnp.ones((2, 64)))


def test_gradients_and_optimizers_of_params_leave_packed_kernels_alone() -> None:
    with seeded(3) as rng:
        model = made(rng, models.QwenLayer, False, TWO_LAYERS)
        x = tokens(rng)
        flax_nnx.quantize(model, INT4)
        kernels = nnx.state(model, flax_nnx.PackedKernel)
        optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

        @nnx.jit
        def step(model: Any, optimizer: Any, x: Any) -> Any:
            def loss(model: Any) -> Any:
                logits = jax.nn.log_softmax(model(x).astype(jnp.float32))
                return -jnp.mean(jnp.take_along_axis(logits, x[..., None], -1))

            value, grads = nnx.value_and_grad(loss)(model)
            optimizer.update(model, grads)
            return value

        losses = [float(step(model, optimizer, x)) for _ in range(4)]
        assert losses[-1] < losses[0]
        after = nnx.state(model, flax_nnx.PackedKernel)
        jax.tree.map(np.testing.assert_array_equal, kernels, after)


def test_abstract_models_stay_abstract() -> None:
    model = nnx.eval_shape(lambda: models.ScannedModel(models.QwenLayer, models.SMALL, nnx.Rngs(0)))
    flax_nnx.quantize(model, INT4)
    o = model.layers.o.kernel.get_raw_value()
    assert isinstance(o.words, jax.ShapeDtypeStruct)
    assert (o.shape, o.stack, o.contracted) == ((4, 4, 32, 64), (4,), (0, 1))


def test_rules_choose_layers() -> None:
    model = nnx.eval_shape(lambda: models.Model(models.LlamaLayer, False, TWO_LAYERS, nnx.Rngs(0)))
    rules = [
        jax_splitk.QuantizationRule("head", None),
        jax_splitk.QuantizationRule(r"layers/\d/(q|k)/", "nf4", group_size=64),
        jax_splitk.QuantizationRule("layers/0", "int8", group_size=None),
    ]
    flax_nnx.quantize(model, rules)
    assert model.layers[0].q.kernel.qtype == "nf4"
    assert (model.layers[0].up.kernel.qtype, model.layers[0].up.kernel.group_size) == ("int8", 64)
    assert type(model.head.kernel) is nnx.Param
    assert type(model.layers[1].up.kernel) is nnx.Param


def test_shared_kernels_stay_shared() -> None:
    one, two = (nnx.Linear(64, 64, rngs=nnx.Rngs(0)) for _ in range(2))
    two.kernel = one.kernel
    flax_nnx.quantize(nnx.List([one, two]), INT4)
    assert isinstance(one.kernel, flax_nnx.PackedKernel)
    assert one.kernel is two.kernel


def test_what_cannot_be_quantized_is_refused_and_changes_nothing() -> None:
    linear = functools.partial(nnx.Linear, rngs=nnx.Rngs(0))
    model = nnx.List([linear(64, 64), linear(48, 64)])
    with pytest.raises(ValueError, match=r"1/kernel of shape \(48, 64\): group_size=32 of 48 elements"):
        flax_nnx.quantize(model, INT4)
    assert not any(isinstance(layer.kernel, flax_nnx.PackedKernel) for layer in model)
    with pytest.raises(
        ValueError, match=r"pattern='bias' of rule 0 applies to no kernel of a layer; .*'0/kernel', '1/kernel'"
    ):
        flax_nnx.quantize(model, jax_splitk.QuantizationRule("bias", "int4"))
    einsum = nnx.Einsum("a...,...ab->b...", (64, 64), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"kernel; accepted: 'x,kernel->result', no ellipsis in the kernel"):
        flax_nnx.quantize(nnx.List([einsum]), INT4)
    with pytest.raises(ValueError, match=r"axes that both operands and the result have first in the kernel"):
        flax_nnx.quantize(nnx.Einsum("etd,def->etf", (64, 2, 8), rngs=nnx.Rngs(0)), INT4)
    einsum.einsum_str = None  # calls name it
    with pytest.raises(ValueError, match=r"an nnx.Einsum without einsum_str"):
        flax_nnx.quantize(einsum, INT4)
    with pytest.raises(TypeError, match=r"layer of type Embed; accepted: nnx.Linear, nnx.LinearGeneral, nnx.Einsum"):
        flax_nnx.set_kernel(nnx.Embed(8, 8, rngs=nnx.Rngs(0)), None)  # pyright: ignore
    with pytest.raises(TypeError, match=r"kernel of type ArrayImpl; accepted: PackedWeight"):
        flax_nnx.set_kernel(linear(64, 64), jnp.ones((64, 64)))
    w = jax_splitk.prepack(jax_splitk.quantize(jnp.ones((64, 32)), "int4", group_size=32))
    with pytest.raises(ValueError, match=r"kernel of shape \(64, 32\); accepted: \(64, 64\)"):
        flax_nnx.set_kernel(linear(64, 64), w)
    with pytest.raises(ValueError, match=r"that contracts \(1,\); accepted: axis 0 of 2, then features"):
        flax_nnx.Linear(w.T)
