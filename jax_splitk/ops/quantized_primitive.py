"""The `quantized_matmul` primitive: its type, batching and lowering (quantized_gradient.py differentiates it).

Operands are x [n, k] and a packed weight's words, or the elements of one that is not packed, its scale and, if it has
one, its zero point, all with the same leading batch dimensions. What no kernel takes (`problem.refusal`) is lowered to
XLA's product, like any other fallback. A batch of activations alone widens n. A batch of weights stays until lowering,
where the choice is made for the product with one of them: a kernel runs once for each (one after the other, each fills
the device), XLA multiplies them all at once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.extend import core
from jax.interpreters import batching

from jax_splitk.ops import lowering
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.problems.quantized_reference import Layout, Leaves, problem_product
from jax_splitk.runtime import _compat, execute
from jax_splitk.runtime.plan import CustomCall

quantized_matmul_p = core.Primitive("quantized_matmul")


def bind(x: jax.Array, leaves: Leaves, layout: Layout, out_dtype: Any, options: Any) -> jax.Array:
    """x [n, k] @ w of the weight that `leaves` and `layout` describe."""
    present = [leaf for leaf in leaves if leaf is not None]
    return quantized_matmul_p.bind(x, *present, layout=layout, out_dtype=jnp.dtype(out_dtype).name, options=options)


def _problem_of(avals: Sequence[Any], params: dict[str, Any]) -> QuantizedMatmulProblem:
    """The problem of an equation, of one of its weights if it has a batch of them."""
    x, _, scale, *zero_point = avals
    layout: Layout = params["layout"]
    return QuantizedMatmulProblem(
        rows=_compat.static_or_symbolic(x.shape[-2]),
        k=layout.shape[0],
        features=layout.shape[1],
        x_dtype=jnp.dtype(x.dtype).name,
        out_dtype=params["out_dtype"],
        qtype=layout.qtype,
        group_size=layout.group_size,
        scale_dtype=jnp.dtype(scale.dtype).name,
        zero_dtype=jnp.dtype(zero_point[0].dtype).name if zero_point else "none",
        layout=int(layout.version or 0),
    )


def type_of_product(x: Any, values: Any, *leaves: Any, layout: Layout, out_dtype: str, **params: Any) -> Any:
    """Of x's leading dimensions and the weight's features."""
    del leaves, params
    out = _compat.like(x, (*x.shape[:-1], layout.shape[1]), out_dtype)
    sharding = _compat.explicit_sharding(x)
    if sharding is None:
        return out
    features = values.sharding.spec[-1] if layout.version is None else None
    return out.update(sharding=out.sharding.update(spec=jax.sharding.PartitionSpec(*sharding.spec[:-1], features)))


quantized_matmul_p.def_abstract_eval(type_of_product)


# ---- batching --------------------------------------------------------------------------------------------------------


def leaves_of(operands: Sequence[Any]) -> Leaves:
    """A weight's leaves from its operands, of which the zero point may be missing."""
    return (*operands, None) if len(operands) == 2 else tuple(operands)  # pyright: ignore[reportReturnType]


def over_batch(function: Callable[..., jax.Array], x: Any) -> Callable[..., jax.Array]:
    """A function of matrices, over the leading dimensions that `x` has beyond two."""
    for _ in range(x.ndim - 2):
        function = jax.vmap(function)
    return function


def define_batching(primitive: core.Primitive) -> None:
    """Gives a primitive of (x, operands that belong to the weight) its rule for vmap."""

    def batch(operands: Sequence[jax.Array], dims: Sequence[int | None], **params: Any) -> tuple[jax.Array, int]:
        x, *leaves = operands
        x_dim, *leaf_dims = dims
        if x_dim is not None and leaf_dims == [None] * len(leaves):
            if "options" in params and params["options"].config is not None:  # chosen for the rows that the caller sees
                return lax.map(lambda x: primitive.bind(x, *leaves, **params), jnp.moveaxis(x, x_dim, 0)), 0
            x = jnp.moveaxis(x, x_dim, -3)
            *batch, size, rows, k = x.shape
            out = primitive.bind(x.reshape(*batch, size * rows, k), *leaves, **params)
            return out.reshape(*batch, size, rows, out.shape[-1]), len(batch)
        (size,) = {operand.shape[dim] for operand, dim in zip(operands, dims, strict=True) if dim is not None}
        in_front = [batching.bdim_at_front(operand, dim, size) for operand, dim in zip(operands, dims, strict=True)]
        return primitive.bind(*in_front, **params), 0

    batching.primitive_batchers[primitive] = batch


define_batching(quantized_matmul_p)


# ---- lowering --------------------------------------------------------------------------------------------------------


def _with_xla(problem: QuantizedMatmulProblem, params: dict[str, Any], out: Any) -> Callable[..., jax.Array]:
    del params
    return over_batch(lambda *operands: problem_product(problem, *operands), out)


def _with_kernel(
    problem: QuantizedMatmulProblem, params: dict[str, Any], out: Any, custom_call: CustomCall
) -> Callable[..., jax.Array] | None:
    del params
    if out.ndim == 2:
        return None

    def one_by_one(*operands: jax.Array) -> jax.Array:
        function: Callable[..., jax.Array] = lambda *one: execute.call(custom_call, problem, *one)  # noqa: E731
        for _ in range(operands[0].ndim - 2):
            function = lambda *many, each=function: lax.map(lambda one: each(*one), many)  # noqa: E731
        return function(*operands)

    return one_by_one


lowering.define(quantized_matmul_p, _problem_of, _with_xla, _with_kernel)
