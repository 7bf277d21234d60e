"""benchmarks/models: the networks are those that their names say, and compute the same with lax and with jax_splitk."""

import dataclasses

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from benchmarks import models
from benchmarks.models import convnext, efficientnet, resnet3d
from benchmarks.models.layers import OURS, STOCK, Layers, Model, Params

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the sizes are for the CPU")

QUICK = ("audio_encoder", "mlp_256")


def disturbed(model: Model, rng: np.random.Generator) -> Params:
    """Weights none of which is without effect, as those behind a scale of 0 are."""
    return jax.tree.map(lambda w: jnp.asarray(w + 0.1 * rng.standard_normal(w.shape, np.float32)), model.initial())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.exhaustive) for name in models.MODELS]
)
def test_stock_and_ours_agree(name: str) -> None:
    (model,) = models.find([name], tiny=True)
    rng = np.random.default_rng(0)
    params, data = disturbed(model, rng), model.data(rng)

    def both(layers: Layers) -> tuple[jax.Array, Params]:
        exact = dataclasses.replace(layers, dtype=jnp.float32)
        return jax.jit(jax.value_and_grad(lambda params: model.loss(exact, params, *data)))(params)

    (stock, stock_gradients), (ours, our_gradients) = both(STOCK), both(OURS)
    assert float(ours) == pytest.approx(float(stock), rel=1e-4)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(stock_gradients), jax.tree.leaves(our_gradients), strict=True
    ):
        assert float(jnp.linalg.norm(a)) > 0, path
        assert float(jnp.linalg.norm(a - b)) <= 1e-3 * float(jnp.linalg.norm(a)), path


def test_sizes_are_those_of_the_papers() -> None:
    def size(params: Params) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(params))

    assert size(convnext.initial((3, 3, 9, 3), (96, 192, 384, 768), 1000)) == 28_589_128
    assert size(resnet3d.initial((64, 128, 256, 512), 400)) == 33_371_472
    # The published 5,288,548, without the weights of its squeeze and excitation.
    assert size(efficientnet.initial(efficientnet.B0, 32, 1280, 1000)) == 0
