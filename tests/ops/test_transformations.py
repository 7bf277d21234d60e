"""Every operation equals lax's under every transformation of `tests.transformations`."""

import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jax.experimental import jet

import jax_splitk
from jax_splitk.ops.equations import walk
from tests.exhaustive import drawn, thinned
from tests.problems import generator, seeded
from tests.transformations import Operation, Step, assert_alike, operations, steps

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="these are the CPU's paths")

OPERATIONS = operations()


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_transformation(name: str) -> None:
    operation = OPERATIONS[name]
    assert_alike(operation, [(step,) for step in steps(len(operation.shapes))])


@pytest.mark.parametrize("name", thinned(OPERATIONS, 3))
def test_some_transformations_of_transformations(name: str) -> None:
    operation = OPERATIONS[name]
    every = steps(len(operation.shapes))
    with seeded(61) as rng:
        assert_alike(operation, [[every[i] for i in rng.integers(len(every), size=2)] for _ in range(6)])


# Operations whose rules another operation has, too: they differ in operands that the other one has, in the order of
# axes, or in the activation.
_LIKE_OTHERS = (
    *("ragged_dot", "ragged_dot_general-batch", "ragged_dot_general-transposed"),
    *("matmul-bias-silu", "conv_general_dilated-silu"),
)


def _nested() -> list[tuple[Operation, Step, list[Step]]]:
    """Operations, an inner step, and outer ones: each pair that meets the operation's rules in another way than one of
    its two steps alone.

    Left out: operations that differ in the implementation or the way of the call alone, since the rules do not
    depend on it; those of `_LIKE_OTHERS`; epilogues of experts, which are lax's around the rules of the product;
    steps without operands, in which the operation is a constant, but for derivatives of a loop over it; jit, which
    is around each pair; an outer checkpoint, and checkpoint under what does not differentiate, where it has no
    effect; an outer scan, whose body is what the inner step makes, and vmap and scan of a scan, whose body meets
    the rules as it would alone.
    """
    found = []
    for name, operation in OPERATIONS.items():
        left_out = name in ("intercept", *_LIKE_OTHERS) or name.startswith("ragged_dot-packed-bias")
        if left_out or name.endswith("-xla"):
            continue
        acting = [step for step in steps(len(operation.shapes), every=False) if step.those]
        differentiating = [step for step in acting if step.name in ("jvp", "vjp")]
        transforming = [step for step in acting if step.name != "scan"]
        for inner in (*acting, Step("scan"), Step("checkpoint")):
            outer = differentiating if inner.name in ("scan", "checkpoint") else transforming
            found.append(pytest.param(operation, inner, outer, id=f"{name}-{inner}"))
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize(("operation", "inner", "outer"), drawn(_nested(), 4, 64))
def test_transformations_of_each_transformation(operation: Operation, inner: Step, outer: list[Step]) -> None:
    assert_alike(operation, [(inner, step) for step in outer])


# ---- Taylor coefficients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", thinned(OPERATIONS, 2))
def test_taylor_coefficients(name: str) -> None:
    operation, rng = OPERATIONS[name], generator(62)
    draw = lambda shape: jnp.asarray(rng.integers(-2, 3, shape), jnp.float32)  # noqa: E731
    primals = tuple(draw(shape) for shape in operation.shapes)
    series = tuple([draw(shape) for _ in range(3)] for shape in operation.shapes)
    ours, theirs = (jax.jit(lambda f=f: jet.jet(f, primals, series))() for f in (operation.ours, operation.theirs))
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-3)


# ---- what jax.checkpoint saves ---------------------------------------------------------------------------------------

_POLICIES = {
    **{
        name: getattr(jax.checkpoint_policies, name)
        for name in (
            "everything_saveable",
            "nothing_saveable",
            "dots_saveable",
            "checkpoint_dots",
            "dots_with_no_batch_dims_saveable",
            "checkpoint_dots_with_no_batch_dims",
        )
    },
    "offload_dot_with_no_batch_dims": jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
    # A user's policy, which uses the names of lax's primitives and of their parameters.
    "by_name": lambda primitive, *_, **params: (
        primitive.name in ("dot_general", "conv_general_dilated") and "preferred_element_type" in params
    ),
}
# The width of a chain's rows stays the same, so that three operations can follow each other.
_CHAINED = {
    "conv_general_dilated": ((2, 5, 4, 4), (2, 2, 4, 4)),
    "matmul": ((8, 64), (64, 64)),
    "matmul-batch": ((2, 8, 64), (2, 64, 64)),
    "matmul-bias": ((8, 64), (64, 64)),
    "matmul-silu": ((8, 64), (64, 64)),
    "quantized_matmul": ((8, 64), (64, 64)),
}


def _link(name: str, weight: jax.Array) -> tuple[Callable[..., jax.Array], Callable[..., jax.Array]]:
    """One operation of a chain, as a function of x and a trained array: ours and lax's."""
    if name == "conv_general_dilated":
        geometry: dict[str, Any] = {
            "window_strides": (1, 1), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC"),
        }  # fmt: skip
        ours = lambda x, w: jax_splitk.conv_general_dilated(x, w, **geometry)  # noqa: E731
        return ours, lambda x, w: jax.lax.conv_general_dilated(x, w, **geometry)
    if name == "matmul-bias":
        return lambda x, w: jax_splitk.matmul(x, w, bias=w[0]), lambda x, w: x @ w + w[0]
    if name == "matmul-silu":
        return lambda x, w: jax_splitk.matmul(x, w, activation="silu"), lambda x, w: jax.nn.silu(x @ w)
    if name.startswith("matmul"):
        return jax_splitk.matmul, jnp.matmul
    packed = jax_splitk.prepack(jax_splitk.quantize(weight, "int8", group_size=64))
    dense = jax_splitk.dequantize(jax_splitk.unpack(packed))
    return lambda x, w: jax_splitk.quantized_matmul(x + w[0], packed), lambda x, w: (x + w[0]) @ dense


@pytest.mark.parametrize(("name", "policy"), thinned(itertools.product(_CHAINED, _POLICIES), 3))
def test_checkpoint_policies_save_what_they_save_of_laxs(name: str, policy: str) -> None:
    """Counts saved and offloaded values in the gradient's trace of three operations in a row."""
    rng = generator(63)
    x, w = (jnp.asarray(rng.normal(size=shape) / 8, jnp.float32) for shape in _CHAINED[name])
    gradients, counts = [], []
    for link in _link(name, w):

        def chain(x: jax.Array, w: jax.Array, link: Any = link) -> jax.Array:
            for _ in range(3):
                x = jnp.sin(link(x, w))
            return x

        block = jax.checkpoint(chain, policy=_POLICIES[policy])
        gradient = jax.grad(lambda x, w, f=block: f(x, w).sum(), (0, 1))
        named = [eqn.primitive.name for eqn in walk(jax.make_jaxpr(gradient)(x, w).jaxpr)]
        product = re.compile(r"conv_(?!ert)|.*dot_general|quantized_matmul")
        counts.append((sum(bool(product.match(each)) for each in named), named.count("device_put")))
        gradients.append(jax.jit(gradient)(x, w))
    assert counts[0] == counts[1]
    for ours, theirs in zip(*gradients, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)
