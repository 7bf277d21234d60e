"""The `dot_epilogue` primitive: a product of `dot_general`, and of its sums activation(sum + bias) + residual.

Operands are lhs, rhs, the bias and the residual, as far as there are any. A bias has the shape of the free dimensions
of lhs ("m") or rhs ("n"). Where the epilogue cannot go with the product (a bias that is mapped with both operands, an
activation that is differentiated, a platform without a kernel for it), the product is `dot_general`'s, and XLA computes
the epilogue of its sums.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.interpreters import ad, batching

from jax_splitk.ops import dot_primitive, lowering, partitioning
from jax_splitk.ops.partitioning import Rule
from jax_splitk.problems.dot_general import DotProblem
from jax_splitk.problems.dot_layout import free_dimensions
from jax_splitk.problems.dot_reference import finished
from jax_splitk.runtime import execute
from jax_splitk.runtime.plan import CustomCall

dot_epilogue_p = lowering.Primitive("jax_splitk_dot_epilogue")


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """As in `DotProblem`."""

    bias: str = "none"
    activation: str = "none"
    residual: bool = False

    def named(self, operands: Sequence[Any]) -> tuple[Any, Any]:
        """(bias, residual) of the operands after lhs and rhs; None for one that is not there."""
        bias = None if self.bias == "none" else operands[0]
        return bias, operands[-1] if self.residual else None


def bind(operands: Sequence[jax.Array], epilogue: Epilogue, out_dtype: Any, **params: Any) -> jax.Array:
    """`params`: those of `dot_primitive.bind`."""
    return dot_epilogue_p.bind(*operands, epilogue=epilogue, out_dtype=jnp.dtype(out_dtype).name, **params)


def _finished(sums: jax.Array, operands: Sequence[jax.Array], params: dict[str, Any]) -> jax.Array:
    """The result, of sums and all operands."""
    bias, residual = params["epilogue"].named(operands[2:])
    if params["epilogue"].bias == "m":
        bias = bias.reshape(*bias.shape, *[1] * len(_free(operands, params)[1]))
    return finished(sums, bias, params["epilogue"].activation, residual).astype(params["out_dtype"])


def _free(operands: Sequence[Any], params: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The free dimensions of lhs and rhs."""
    contracting, batch = params["dimensions"]
    lhs, rhs = (free_dimensions(operands[i].ndim, contracting[i], batch[i]) for i in range(2))
    return lhs, rhs


def _composed(*operands: jax.Array, **params: Any) -> jax.Array:
    """The value by a product of its own."""
    of_product = {name: value for name, value in params.items() if name != "epilogue"}
    of_product["out_dtype"] = _problem_of(operands, params).epilogue_dtype
    return _finished(dot_primitive.bind(operands[0], operands[1], **of_product), operands, params)


def _rule_of(avals: Sequence[Any], params: dict[str, Any]) -> Rule:
    """That of the product. Where the reduction is divided, the epilogue is of the sum over the devices."""
    product, epilogue = dot_primitive.rule_of(avals[:2], params), params["epilogue"]
    bias = () if epilogue.bias == "none" else (tuple(x for x in product.result if x[0] == epilogue.bias),)
    residual = (product.result,) if epilogue.residual else ()

    def divided(params: dict[str, Any], parts: Mapping[str, int]) -> dict[str, Any]:
        if not any(name in parts for name in product.reductions):
            return params
        return {**params, "epilogue": Epilogue(), "out_dtype": _problem_of(avals, params).epilogue_dtype}

    def finish(sums: jax.Array, *operands: jax.Array) -> jax.Array:
        return _finished(sums, operands, params)

    return Rule((*product.operands, *bias, *residual), product.result, product.units, divided, finish)


def _abstract_eval(*avals: Any, **params: Any) -> Any:
    out = dot_primitive.type_of_product(avals[0], avals[1], params)
    return partitioning.with_explicit_sharding(out, _rule_of, avals, params)


def _problem_of(avals: Sequence[Any], params: dict[str, Any]) -> DotProblem:
    epilogue = params["epilogue"]
    bias, residual = (None if x is None else jnp.dtype(x.dtype).name for x in epilogue.named(avals[2:]))
    return dataclasses.replace(
        dot_primitive.problem_of(avals[:2], params),
        bias=epilogue.bias,
        bias_dtype=bias or "none",
        activation=epilogue.activation,
        residual_dtype=residual or "none",
    )


# ---- differentiation -----------------------------------------------------------------------------------------------


def _jvp(primals: Sequence[jax.Array], tangents: Sequence[Any], **params: Any) -> tuple[jax.Array, Any]:
    """An activation is differentiated at the sums, which are kept; all else is linear, and stays in the kernel."""
    moving = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]
    if params["epilogue"].activation != "none":

        def of_moving(*given: jax.Array) -> jax.Array:
            changed = dict(zip(moving, given, strict=True))
            return _composed(*(changed.get(i, x) for i, x in enumerate(primals)), **params)

        return jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])
    out = dot_epilogue_p.bind(*primals, **params)
    of_product = {name: value for name, value in params.items() if name != "epilogue"}
    terms: list[jax.Array] = []
    for i in moving:
        if i < 2:
            lhs, rhs = (tangents[0], primals[1]) if i == 0 else (primals[0], tangents[1])
            terms.append(dot_primitive.bind(lhs, rhs, **of_product))
        elif i == 2 and params["epilogue"].bias != "none":
            alone = {**params, "epilogue": Epilogue(params["epilogue"].bias)}
            zeros = jnp.zeros_like(out, dtype=_problem_of(primals, params).epilogue_dtype)
            terms.append(_finished(zeros, (*primals[:2], tangents[i]), alone))
        else:
            terms.append(tangents[i].astype(out.dtype))
    return out, sum(terms[1:], start=terms[0])


ad.primitive_jvps[dot_epilogue_p] = _jvp


# ---- batching ------------------------------------------------------------------------------------------------------


def _batch(args: Sequence[jax.Array], dims: Sequence[int | None], **params: Any) -> tuple[jax.Array, int]:
    """As the product's, where what is mapped with a bias is its dimension."""
    lhs_dim, rhs_dim, epilogue = dims[0], dims[1], params["epilogue"]
    (size,) = {x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None}
    if params["options"].config is not None:  # chosen for the product that the caller sees
        in_front = tuple(batching.bdim_at_front(x, dim, size) for x, dim in zip(args, dims, strict=True))
        return lax.map(lambda each: dot_epilogue_p.bind(*each, **params), in_front), 0
    bias, residual = epilogue.named(tuple(zip(args[2:], dims[2:], strict=True)))
    of_bias = (epilogue.bias == "m" and rhs_dim is None) or (epilogue.bias == "n" and lhs_dim is None)
    if (lhs_dim is None and rhs_dim is None) or (bias is not None and bias[1] is not None and not of_bias):
        return jax.vmap(lambda *each: _composed(*each, **params), tuple(dims))(*args), 0
    ranks = (args[0].ndim, args[1].ndim)
    dimensions, place = dot_primitive.with_mapped(params["dimensions"], ranks, (lhs_dim, rhs_dim))
    params["dimensions"] = dimensions
    rest = []
    if bias is not None:
        free = _free(args, params)[0 if epilogue.bias == "m" else 1]
        at = free.index(lhs_dim if epilogue.bias == "m" else rhs_dim) if of_bias else None
        rest.append(bias[0] if at is None else _with_dimension(bias, at, size))
    if residual is not None:
        rest.append(_with_dimension(residual, place, size))
    return dot_epilogue_p.bind(*args[:2], *rest, **params), place


def _with_dimension(operand: tuple[jax.Array, int | None], place: int, size: int) -> jax.Array:
    """An operand with its mapped dimension at `place`, or repeated along one there."""
    x, dim = operand
    if dim is not None:
        return jnp.moveaxis(x, dim, place)
    shape = (*x.shape[:place], size, *x.shape[place:])
    return jnp.broadcast_to(jnp.expand_dims(x, place), shape)


batching.primitive_batchers[dot_epilogue_p] = _batch


# ---- lowering ------------------------------------------------------------------------------------------------------


def _with_xla(problem: DotProblem, params: dict[str, Any], out: Any) -> Callable[..., jax.Array]:
    del out

    def product_and_epilogue(*operands: jax.Array) -> jax.Array:
        dtype = _problem_of(operands, params).epilogue_dtype
        return _finished(dot_primitive.with_lax(operands[0], operands[1], dtype, params), operands, params)

    return product_and_epilogue


def _with_kernel(
    problem: DotProblem, params: dict[str, Any], out: Any, custom_call: CustomCall
) -> Callable[..., jax.Array]:
    def between_reshapes(*operands: jax.Array) -> jax.Array:
        given = dot_primitive.as_of_problem(problem, operands[0], operands[1], params["dimensions"])
        # Of a product alone there are none.
        rest = [x.reshape(shape) for x, (shape, _) in zip(operands[2:], problem.epilogue_operands, strict=False)]
        result = execute.call(custom_call, problem, *given, *rest).reshape(out.shape)
        return result if problem.epilogue else _finished(result, operands, params)

    return between_reshapes


lowering.define(dot_epilogue_p, _abstract_eval, _problem_of, _with_xla, _with_kernel, _rule_of)
