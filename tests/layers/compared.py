"""A model of packed weights against the same model with the dequantized ones."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

import jax_splitk
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from tests.problems import on_device


def relative(y: Any, exact: Any) -> float:
    y, exact = (np.asarray(a, np.float64) for a in (y, exact))
    return float(np.linalg.norm(y - exact) / np.linalg.norm(exact))


def check_products(fn: Callable[..., Any], *args: Any, products: int) -> None:
    """All products with a packed weight are jax_splitk's, of kernels on Hopper, and there are so many of them."""
    explanation = jax_splitk.explain(fn, *args, platform="cuda")
    assert not explanation.unrouted, str(explanation)
    assert {type(d.problem) for d in explanation.decisions} == {QuantizedMatmulProblem}
    assert sum(d.count for d in explanation.decisions) == products, str(explanation)
    assert {d.implementation for d in explanation.decisions} == {"cutlass"}, str(explanation)


def check_close(packed: Any, plain: Any, plain32: Any) -> None:
    """The packed model's result is as near to that of float32 arithmetic as the dequantized model's, within twice."""
    assert packed.dtype == plain.dtype and packed.shape == plain.shape
    assert np.isfinite(np.asarray(packed, np.float32)).all()
    assert relative(packed, plain32) <= 2 * relative(plain, plain32) < 0.1


def tokens(rng: Any) -> jax.Array:
    return jnp.asarray(rng.integers(0, 80, (2, 6)))


def filled(shapes: Any, rng: Any) -> Any:
    """Random parameters for an abstract tree: faster than a model's own initialisation."""

    def one(path: Any, leaf: Any) -> jax.Array:
        center = float("scale" in jax.tree_util.keystr(path))
        return on_device(center + rng.standard_normal(leaf.shape) / 8, leaf.dtype)

    return jax.tree_util.tree_map_with_path(one, shapes)
