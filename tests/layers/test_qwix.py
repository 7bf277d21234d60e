"""qwix's post-training quantization and adapters with packed weights."""

import dataclasses
import logging
import re
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax import numpy as jnp

import jax_splitk
from benchmarks import language_models as models
from tests.layers.compared import check_products, filled, relative, tokens
from tests.problems import seeded

qwix = pytest.importorskip("qwix")
from jax_splitk.layers import qwix as packed  # noqa: E402 - needs qwix

# qwix 0.1.8 uses names that flax 0.12 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

TWO_LAYERS = dataclasses.replace(models.SMALL, layers=2)
RULE = {"module_path": "layers.*|head", "weight_qtype": "int4", "tile_size": 32}


def test_models_of_nnx() -> None:
    """Kernels of two and three dimensions; against qwix's own products of the same rules."""
    with seeded(0) as rng:
        x = tokens(rng)
        plain = nnx.eval_shape(lambda: models.Model(models.QwenLayer, False, TWO_LAYERS, nnx.Rngs(0)))
        graph, shapes = nnx.split(plain)
        plain = nnx.merge(graph, filled(shapes, rng))

        def quantized(provider: Any) -> Any:
            return nnx.jit(lambda model, x: qwix.quantize_model(model, provider, x))(plain, x)

        rules = [qwix.QuantizationRule(**RULE)]
        ours, theirs = quantized(packed.PtqProvider(rules)), quantized(qwix.PtqProvider(rules))
        graph, state = nnx.split(ours)
        check_products(lambda state, x: nnx.merge(graph, state)(x), state, x, products=2 * 7 + 1)
        assert isinstance(ours.layers[0].o.kernel.array, packed.PackedQArray)
        assert ours.layers[0].o.kernel.array.contracted == (0, 1)
        run = nnx.jit(lambda model, x: model(x))
        y, expected = run(ours, x), run(theirs, x)
        assert y.dtype == expected.dtype
        assert relative(y, expected) < 0.03


def test_scanned_models_of_linen() -> None:
    """Einsums. qwix's own `quantize_params` refuses a scan."""
    with seeded(1) as rng:
        x, model = tokens(rng), models.LinenModel(models.LinenGemmaLayer, True, models.SMALL)
        params = filled(jax.eval_shape(model.init, jax.random.key(0), x), rng)["params"]
        ours = qwix.quantize_model(model, packed.PtqProvider([qwix.QuantizationRule(**RULE)]))
        abstract = jax.eval_shape(ours.init, jax.random.key(0), x)["params"]
        quantized = jax.jit(lambda params: packed.quantize_params(params, abstract))(params)
        assert jax.tree.structure(quantized) == jax.tree.structure(abstract)
        check_products(ours.apply, {"params": quantized}, x, products=5)
        kernel = quantized["layers"]["o"]["kernel"].array
        assert (kernel.stack, kernel.dims, kernel.contracted) == ((4,), (4, 32, 64), (0, 1))
        # Each layer has the values that qwix gives to its kernel alone.
        for i in range(4):
            alone = qwix.quantize(params["layers"]["o"]["kernel"][i], "int4", channelwise_axes=[2], tiled_axes={1: 32})
            for part in ("qvalue", "scale"):
                one = getattr(jax_splitk.unpack(kernel[i]), part)
                np.testing.assert_array_equal(one, np.broadcast_to(getattr(alone, part), one.shape))
        y = jax.jit(ours.apply)({"params": quantized}, x)
        assert relative(y, jax.jit(model.apply)({"params": params}, x)) < 0.5


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.LinearGeneral(64, (2, 32), rngs=rngs)
        self.mix = nnx.Einsum("bhd,hdk->bk", (2, 32, 64), rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.mix(jax.nn.relu(self.up(x)))


def test_adapters_are_trained_over_packed_weights() -> None:
    with seeded(2) as rng:
        x, target = (jnp.asarray(rng.standard_normal((16, 64)), jnp.float32) for _ in range(2))
        rule = {"rank": 8, "alpha": 8.0, "weight_qtype": "nf4", "tile_size": 32}
        model = qwix.apply_lora_to_model(Block(nnx.Rngs(0)), packed.LoraProvider(**rule), x, rngs=nnx.Rngs(1))
        assert isinstance(model.mix.kernel.array, packed.PackedQArray)
        frozen = jax.tree.map(jnp.copy, nnx.state(model, nnx.Not(nnx.LoRAParam)))
        optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.LoRAParam)

        @nnx.jit
        def step(model: Any, optimizer: Any) -> Any:
            loss, grads = nnx.value_and_grad(
                lambda model: jnp.mean(jnp.square(model(x) - target)), argnums=nnx.DiffState(0, nnx.LoRAParam)
            )(model)
            optimizer.update(model, grads)
            return loss

        losses = [float(step(model, optimizer)) for _ in range(5)]
        assert losses[-1] < losses[0]
        jax.tree.map(np.testing.assert_array_equal, frozen, nnx.state(model, nnx.Not(nnx.LoRAParam)))
        assert len(jax.tree.leaves(nnx.state(model, nnx.LoRAParam))) == 4


def test_adapters_of_linen() -> None:
    with seeded(3) as rng:
        x = jnp.asarray(rng.standard_normal((4, 64)), jnp.bfloat16)
        rule = {"rank": 4, "alpha": 4.0, "weight_qtype": "int4", "tile_size": 32}
        ours, theirs = (
            qwix.apply_lora_to_model(linen.DenseGeneral((2, 32)), provider(**rule))
            for provider in (packed.LoraProvider, qwix.LoraProvider)
        )
        variables, others = (model.init(jax.random.key(0), x) for model in (ours, theirs))
        assert isinstance(variables["params"]["kernel"].array, packed.PackedQArray)
        b = jnp.asarray(rng.standard_normal(variables["params"]["kernel_lora_b"].shape), jnp.float32)
        for each in (variables, others):
            each["params"]["kernel_lora_b"] = b
        y, expected = ours.apply(variables, x), theirs.apply(others, x)
        assert (y.dtype, y.shape) == (expected.dtype, expected.shape)
        assert relative(y, expected) < 0.01


def test_what_packing_does_not_take_stays_qwixs(caplog: pytest.LogCaptureFixture) -> None:
    x = jnp.ones((2, 48))
    cases: list[tuple[dict[str, Any], Any, str | None]] = [
        ({"weight_qtype": "int4", "tile_size": 24}, nnx.Linear(48, 64, rngs=nnx.Rngs(0)), "groups of 24"),
        ({"weight_qtype": "float8_e5m2"}, nnx.Linear(48, 64, rngs=nnx.Rngs(0)), "float8_e5m2"),
        ({"weight_qtype": "int8", "act_qtype": "int8"}, nnx.Linear(48, 64, rngs=nnx.Rngs(0)), None),
    ]
    for rule, layer, logged in cases:
        caplog.clear()
        with caplog.at_level(logging.INFO, "jax_splitk"):
            model = qwix.quantize_model(layer, packed.PtqProvider([qwix.QuantizationRule(**rule)]), x)
        assert isinstance(model.kernel.array, qwix.QArray)
        assert (logged is None) == (not caplog.messages)
        assert logged is None or re.search(f"weight of shape .48, 64. that is not packed: .*{logged}", caplog.text)
        theirs = qwix.quantize_model(layer, qwix.PtqProvider([qwix.QuantizationRule(**rule)]), x)
        np.testing.assert_array_equal(model(x), theirs(x))
    conv = nnx.Conv(64, 64, (3,), rngs=nnx.Rngs(0))
    rule = qwix.QuantizationRule(weight_qtype="int8", act_qtype="int8")
    model = qwix.quantize_model(conv, packed.PtqProvider([rule]), jnp.ones((1, 8, 64)))
    assert isinstance(model.kernel.array, qwix.QArray)


def test_kernels_with_sharding_names_are_refused() -> None:
    kernel_init = linen.with_partitioning(linen.initializers.ones, (None, "tp"))
    rule = qwix.QuantizationRule(weight_qtype="int4", tile_size=32)
    model = qwix.quantize_model(linen.Dense(96, kernel_init=kernel_init), packed.PtqProvider([rule]))
    with pytest.raises(
        ValueError, match=r"a kernel of shape \(64, 96\) with sharding names; accepted: a kernel without"
    ):
        model.init(jax.random.key(0), jnp.ones((2, 64)))
