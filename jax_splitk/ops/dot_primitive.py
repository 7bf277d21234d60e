"""The `dot_general` primitive: a product, and of its sums activation(sum + bias) + residual, the epilogue.

Operands are lhs, rhs, the bias and the residual, as far as there are any. A bias has the shape of the free dimensions
of lhs ("m") or rhs ("n"). Where an epilogue cannot go with the product (a bias that is mapped with both operands, an
activation that is differentiated, a platform without a kernel for it), XLA computes it of the sums of the product
alone. That is bilinear, and its transposes are products of the same kind.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.interpreters import ad, batching

from jax_splitk.ops import checkpointing, dot_product, lowering, partitioning, taylor
from jax_splitk.ops.folding import mapped_size, one_by_one
from jax_splitk.ops.partitioning import Rule
from jax_splitk.problems.dot_general import E4M3, DotProblem
from jax_splitk.problems.dot_layout import DimensionNumbers, free_dimensions
from jax_splitk.problems.dot_reference import finished
from jax_splitk.runtime import execute
from jax_splitk.runtime.plan import CustomCall

dot_general_p = lowering.Primitive("jax_splitk_dot_general")


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


NO_EPILOGUE = Epilogue()


def bind(
    operands: Sequence[jax.Array], dimensions: DimensionNumbers, epilogue: Epilogue, out_dtype: Any, **params: Any
) -> jax.Array:
    """The value for operands of which lhs and rhs are rounded to `compute_dtype`."""
    params |= {"dimensions": dimensions, "epilogue": epilogue, "out_dtype": jnp.dtype(out_dtype).name}
    return dot_general_p.bind(*operands, **params)


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


def _of_product(operands: Sequence[Any], params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of the product alone, whose sums are of the epilogue's dtype."""
    out_dtype = _problem_of(operands, params).product.out_dtype
    return {**params, "epilogue": NO_EPILOGUE, "out_dtype": out_dtype}


def _composed(*operands: jax.Array, **params: Any) -> jax.Array:
    """The value by a product of its own."""
    sums = bind(operands[:2], **_of_product(operands, params))
    with jax.named_scope(dot_general_p.scope):
        return _finished(sums, operands, params)


def _rule_of(avals: Sequence[Any], params: dict[str, Any]) -> Rule:
    """That of the product. Where the reduction is divided, the epilogue is of the sum over the devices."""
    product, epilogue = dot_product.rule_of(avals[:2], params), params["epilogue"]
    bias = () if epilogue.bias == "none" else (tuple(x for x in product.result if x[0] == epilogue.bias),)
    residual = (product.result,) if epilogue.residual else ()

    def divided(params: dict[str, Any], parts: Mapping[str, int]) -> dict[str, Any]:
        if not any(name in parts for name in product.reductions):
            return params
        return _of_product(avals, params)

    def finish(sums: jax.Array, *operands: jax.Array) -> jax.Array:
        return _finished(sums, operands, params)

    return Rule((*product.operands, *bias, *residual), product.result, product.units, divided, finish)


def _abstract_eval(*avals: Any, **params: Any) -> Any:
    out = dot_product.type_of(avals[0], avals[1], params)
    return partitioning.with_explicit_sharding(out, _rule_of, avals, params)


def _problem_of(avals: Sequence[Any], params: dict[str, Any]) -> DotProblem:
    epilogue = params["epilogue"]
    bias, residual = (None if x is None else jnp.dtype(x.dtype).name for x in epilogue.named(avals[2:]))
    return dataclasses.replace(
        dot_product.problem_of(avals[:2], params),
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
    out = dot_general_p.bind(*primals, **params)
    terms: list[jax.Array] = []
    for i in moving:
        if i < 2:
            lhs, rhs = (tangents[0], primals[1]) if i == 0 else (primals[0], tangents[1])
            terms.append(dot_general_p.bind(lhs, rhs, **{**params, "epilogue": NO_EPILOGUE}))
        elif i == 2 and params["epilogue"].bias != "none":
            alone = {**params, "epilogue": Epilogue(params["epilogue"].bias)}
            zeros = jnp.zeros_like(out, dtype=_problem_of(primals, params).epilogue_dtype)
            terms.append(_finished(zeros, (*primals[:2], tangents[i]), alone))
        else:
            terms.append(tangents[i].astype(out.dtype))
    return out, sum(terms[1:], start=terms[0])


# The operand being solved for arrives as a placeholder that has only a type, `.aval`.


def _transpose(ct: Any, lhs: Any, rhs: Any, *rest: Any, **params: Any) -> tuple[Any, ...]:
    """Of a product alone, which is what `_jvp` leaves to be transposed."""
    if rest or params["epilogue"] != NO_EPILOGUE:
        raise NotImplementedError("the transpose of a product with an epilogue, which is not linear")
    if isinstance(ct, ad.Zero):
        return None, None
    if ad.is_undefined_primal(lhs):
        with jax.named_scope("lhs_gradient"):
            return _cotangent(ct, lhs.aval, rhs, params["dimensions"], params), None
    (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = params["dimensions"]
    free = free_dimensions(lhs.ndim, lhs_contracting, lhs_batch)
    # As the result of rhs's product with lhs.
    batch, last = len(lhs_batch), ct.ndim
    order = (*range(batch), *range(batch + len(free), last), *range(batch, batch + len(free)))
    swapped = ((rhs_contracting, lhs_contracting), (rhs_batch, lhs_batch))
    with jax.named_scope("rhs_gradient"):
        return None, _cotangent(ct, rhs.aval, lhs, swapped, params, order)


def _cotangent(
    ct: jax.Array,
    x: Any,
    y: jax.Array,
    dimensions: DimensionNumbers,
    params: dict[str, Any],
    order: tuple[int, ...] | None = None,
) -> jax.Array:
    """The cotangent of x in the product of x and y, whose result has x's free dimensions first. `order` is where the
    dimensions of that result are in ct."""
    (x_contracting, y_contracting), (x_batch, y_batch) = dimensions
    x_free = free_dimensions(x.ndim, x_contracting, x_batch)
    y_free = free_dimensions(y.ndim, y_contracting, y_batch)
    places = tuple(range(ct.ndim)) if order is None else order
    batch = len(x_batch)
    ct_batch, ct_y = places[:batch], places[batch + len(x_free) :]
    in_y_order = tuple(x_contracting[i] for i in np.argsort(y_contracting))
    params = {name: value for name, value in params.items() if name not in ("dimensions", "out_dtype")}
    params["options"] = params["options"].without_config()
    out_dtype = x.dtype
    if params["compute_dtype"] == E4M3:  # which bfloat16 holds, and a cotangent is not rounded to it before the product
        params["compute_dtype"], out_dtype = "bfloat16", "float32"
    # The result is written in x's order where one of the two orders of the operands gives it.
    if in_y_order and x_free and in_y_order[0] < x_free[0]:
        out = bind((y, ct), ((y_free, ct_y), (y_batch, ct_batch)), out_dtype=out_dtype, **params)
        axes = (*x_batch, *in_y_order, *x_free)
    else:
        out = bind((ct, y), ((ct_y, y_free), (ct_batch, y_batch)), out_dtype=out_dtype, **params)
        axes = (*x_batch, *x_free, *in_y_order)
    return out.transpose(tuple(int(i) for i in np.argsort(axes))).astype(x.dtype)


ad.primitive_jvps[dot_general_p] = _jvp
ad.primitive_transposes[dot_general_p] = _transpose


def _taylor(primals: Sequence[jax.Array], series: Sequence[Any], **params: Any) -> Any:
    alone = params["epilogue"] == NO_EPILOGUE
    rule = taylor.bilinear(dot_general_p) if alone else taylor.composed(_composed)
    return rule(primals, series, **params)


taylor.define(dot_general_p, _taylor)


# ---- batching ------------------------------------------------------------------------------------------------------


def _batch(args: Sequence[jax.Array], dims: Sequence[int | None], **params: Any) -> tuple[jax.Array, int]:
    """Two mapped operands have one more batch dimension, a single one has one more free dimension, and what is mapped
    with a bias is its dimension."""
    lhs_dim, rhs_dim, epilogue = dims[0], dims[1], params["epilogue"]
    if params["options"].config is not None:
        return one_by_one(dot_general_p, args, dims, params), 0
    size = mapped_size(args, dims)
    bias, residual = epilogue.named(tuple(zip(args[2:], dims[2:], strict=True)))
    of_bias = (epilogue.bias == "m" and rhs_dim is None) or (epilogue.bias == "n" and lhs_dim is None)
    if (lhs_dim is None and rhs_dim is None) or (bias is not None and bias[1] is not None and not of_bias):
        return jax.vmap(lambda *each: _composed(*each, **params), tuple(dims))(*args), 0
    ranks = (jnp.ndim(args[0]), jnp.ndim(args[1]))  # an unmapped one may be a number of Python
    params["dimensions"], place = dot_product.with_mapped(params["dimensions"], ranks, (lhs_dim, rhs_dim))
    rest = []
    if bias is not None:
        free = _free(args, params)[0 if epilogue.bias == "m" else 1]
        at = free.index(lhs_dim if epilogue.bias == "m" else rhs_dim) if of_bias else None
        rest.append(bias[0] if at is None else _with_dimension(bias, at, size))
    if residual is not None:
        rest.append(_with_dimension(residual, place, size))
    return dot_general_p.bind(*args[:2], *rest, **params), place


def _with_dimension(operand: tuple[jax.Array, int | None], place: int, size: int) -> jax.Array:
    """An operand with its mapped dimension at `place`, or repeated along one there."""
    x, dim = operand
    if dim is not None:
        return jnp.moveaxis(x, dim, place)
    shape = (*x.shape[:place], size, *x.shape[place:])
    return jnp.broadcast_to(jnp.expand_dims(x, place), shape)


batching.primitive_batchers[dot_general_p] = _batch


# ---- checkpoint ----------------------------------------------------------------------------------------------------


def _as_lax(avals: Sequence[Any], params: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """The operand types and the parameters of the product, as a policy of `jax.checkpoint` sees them."""
    of_lax = {"dimension_numbers": params["dimensions"], "precision": params["precision"], "out_sharding": None}
    return avals[:2], of_lax | {"preferred_element_type": jnp.dtype(params["out_dtype"])}


checkpointing.saved_as(dot_general_p, lax.dot_general_p, _as_lax)


# ---- lowering ------------------------------------------------------------------------------------------------------


def _with_xla(problem: DotProblem, params: dict[str, Any], out: Any) -> Callable[..., jax.Array]:
    del out

    def product_and_epilogue(*operands: jax.Array) -> jax.Array:
        dtype = _problem_of(operands, params).product.out_dtype
        return _finished(dot_product.with_lax(operands[0], operands[1], dtype, params), operands, params)

    return product_and_epilogue


def _with_kernel(
    problem: DotProblem, params: dict[str, Any], out: Any, custom_call: CustomCall
) -> Callable[..., jax.Array]:
    def between_reshapes(*operands: jax.Array) -> jax.Array:
        given = dot_product.as_of_problem(problem, operands[0], operands[1], params["dimensions"])
        # Of a product alone there are none.
        rest = [x.reshape(shape) for x, (shape, _) in zip(operands[2:], problem.epilogue_operands, strict=False)]
        result = execute.call(custom_call, problem, *given, *rest).reshape(out.shape)
        return result if problem.epilogue else _finished(result, operands, params)

    return between_reshapes


lowering.define(dot_general_p, _abstract_eval, _problem_of, _with_xla, _with_kernel, _rule_of)
