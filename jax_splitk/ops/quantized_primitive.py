"""The `quantized_matmul` primitive: its type, its transformation rules and its lowering.

Operands are x [n, k] and a packed weight's words, or the elements of one that is not packed, its scale and, if it has
one, its zero point, all with the same leading batch dimensions. What no kernel takes (`problem.refusal`) is lowered to
XLA's product, like any other fallback. A batch of activations alone widens n. A batch of weights stays until lowering,
where the choice is made for the product with one of them: a kernel runs once for each (one after the other, each fills
the device), XLA multiplies them all at once.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching

from jax_splitk.ops import lowering, partitioning
from jax_splitk.ops.partitioning import Rule
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.problems.quantized_reference import Layout, Leaves, problem_product, product, product_transposed
from jax_splitk.quantized.packing import cuts
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


def _rule_of(avals: Sequence[Any], params: dict[str, Any]) -> Rule | str:
    """How a product is divided: over rows of x, and over features and k in what packing lets be cut."""
    x, _, scale, *zero_points = avals
    layout: Layout = params["layout"]
    batch = tuple(f"weight{i}" for i in range(x.ndim - 2))
    units = {**dict(zip(batch, x.shape, strict=False)), "rows": x.shape[-2]}
    if layout.version is None:  # XLA's in any case; explicit axes ask for the result's sharding
        units["features"] = layout.shape[1]
        words = groups = (*batch, "k", "features")
    else:
        units["k"], units["features"] = cuts(layout.shape, layout.group_size)
        words = (*batch, "features", "k", "word")
        groups = (*batch, "features", "k" if scale.shape[-2] > 1 else "channel", "lane")
    per_group = [groups] * (1 + len(zero_points))
    return Rule(((*batch, "rows", "k"), words, *per_group), (*batch, "rows", "features"), units, _divided)


def _divided(params: dict[str, Any], parts: Mapping[str, int]) -> dict[str, Any]:
    """The parameters of one part."""
    layout: Layout = params["layout"]
    (k, features), group = layout.shape, layout.group_size
    part = k // parts.get("k", 1)
    shape = (part, features // parts.get("features", 1))
    return {**params, "layout": dataclasses.replace(layout, shape=shape, group_size=part if group == k else group)}


def _abstract_eval(x: Any, values: Any, *leaves: Any, **params: Any) -> Any:
    out = _compat.like(x, (*x.shape[:-1], params["layout"].shape[1]), params["out_dtype"])
    return partitioning.with_explicit_sharding(out, _rule_of, (x, values, *leaves), params)


quantized_matmul_p.def_abstract_eval(_abstract_eval)


# ---- differentiation: linear in x ------------------------------------------------------------------------------------


def _leaves(operands: Sequence[Any]) -> Leaves:
    return (*operands, None) if len(operands) == 2 else tuple(operands)  # pyright: ignore[reportReturnType]


def _over_batch(function: Callable[..., jax.Array], x: Any) -> Callable[..., jax.Array]:
    """A function of matrices, over the leading dimensions that `x` has beyond two."""
    for _ in range(x.ndim - 2):
        function = jax.vmap(function)
    return function


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[jax.Array, Any]:
    (x, words, *floats), (x_dot, _, *floats_dot) = primals, tangents
    layout, out_dtype = params["layout"], params["out_dtype"]
    out = quantized_matmul_p.bind(*primals, **params)
    terms = [] if isinstance(x_dot, ad.Zero) else [quantized_matmul_p.bind(x_dot, words, *floats, **params)]
    if not all(isinstance(dot, ad.Zero) for dot in floats_dot):

        def of_weight(*floats: jax.Array) -> jax.Array:
            multiply = lambda x, *operands: product(layout, x, _leaves(operands), out_dtype)  # noqa: E731
            return _over_batch(multiply, x)(x, words, *floats)

        dots = [ad.instantiate_zeros(dot) for dot in floats_dot]
        terms.append(jax.jvp(of_weight, tuple(floats), tuple(dots))[1])
    return out, sum(terms[1:], start=terms[0]) if terms else ad.Zero(jax.typeof(out).to_tangent_aval())


def _transpose(ct: Any, x: Any, *leaves: Any, **params: Any) -> list[Any]:
    none = [None] * len(leaves)
    if isinstance(ct, ad.Zero):
        return [None, *none]
    layout, dtype = params["layout"], x.aval.dtype
    back = lambda ct, *operands: product_transposed(layout, ct, _leaves(operands), dtype)  # noqa: E731
    return [_over_batch(back, ct)(ct, *leaves), *none]


ad.primitive_jvps[quantized_matmul_p] = _jvp
ad.primitive_transposes[quantized_matmul_p] = _transpose


# ---- batching --------------------------------------------------------------------------------------------------------


def _batch(operands: Sequence[jax.Array], dims: Sequence[int | None], **params: Any) -> tuple[jax.Array, int]:
    x, *leaves = operands
    x_dim, *leaf_dims = dims
    if x_dim is not None and leaf_dims == [None] * len(leaves):
        if params["options"].config is not None:  # chosen for the rows that the caller sees
            return lax.map(lambda x: quantized_matmul_p.bind(x, *leaves, **params), jnp.moveaxis(x, x_dim, 0)), 0
        x = jnp.moveaxis(x, x_dim, -3)
        *batch, size, rows, k = x.shape
        out = quantized_matmul_p.bind(x.reshape(*batch, size * rows, k), *leaves, **params)
        return out.reshape(*batch, size, rows, out.shape[-1]), len(batch)
    (size,) = {operand.shape[dim] for operand, dim in zip(operands, dims, strict=True) if dim is not None}
    in_front = [batching.bdim_at_front(operand, dim, size) for operand, dim in zip(operands, dims, strict=True)]
    return quantized_matmul_p.bind(*in_front, **params), 0


batching.primitive_batchers[quantized_matmul_p] = _batch


# ---- lowering --------------------------------------------------------------------------------------------------------


def _with_xla(problem: QuantizedMatmulProblem, params: dict[str, Any], out: Any) -> Callable[..., jax.Array]:
    del params
    return _over_batch(lambda *operands: problem_product(problem, *operands), out)


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


lowering.define(quantized_matmul_p, _problem_of, _with_xla, _with_kernel, _rule_of)
