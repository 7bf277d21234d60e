"""Differentiation of the quantized product: it is linear in x, and its weight is linear in the scales and in the zero
points. Each has a cotangent of its own making, in float32, rather than one that JAX derives from the arithmetic."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax import numpy as jnp
from jax.extend import core
from jax.interpreters import ad, mlir

from jax_splitk.ops import lowering, quantized_primitive, taylor
from jax_splitk.ops.quantized_primitive import leaves_of, over_batch, quantized_matmul_p
from jax_splitk.problems import quantized_reference as reference
from jax_splitk.problems.quantized_matmul import X_DTYPES
from jax_splitk.problems.quantized_reference import Layout, Leaves
from jax_splitk.runtime import _compat
from jax_splitk.tuning.options import Options

# (x, *leaves, dot) -> x times the tangent of the weight, of which `dot` is that of the leaf `wrt`.
weight_tangent_p = core.Primitive("quantized_weight_tangent")
# (x, *leaves, *leaves of the second weight) -> the product; the second weight computes the cotangent of x.
paired_p = lowering.Primitive("quantized_matmul_paired")

_PARTS = ("scale", "zero_point")


@dataclasses.dataclass(frozen=True)
class Back:
    """Everything static about the product with the second weight."""

    layout: Layout
    options: Options


def bind_paired(
    x: jax.Array, leaves: Leaves, layout: Layout, out_dtype: Any, options: Options, back_leaves: Leaves, back: Back
) -> jax.Array:
    """`quantized_primitive.bind` whose cotangent of x is computed with a second weight."""
    own, others = ([leaf for leaf in given if leaf is not None] for given in (leaves, back_leaves))
    static = {"layout": layout, "out_dtype": jnp.dtype(out_dtype).name, "options": options}
    return paired_p.bind(x, *own, *others, own=len(own), back=back, **static)


@contextlib.contextmanager
def _traced_as(part: str) -> Iterator[None]:
    """The names, in HLO and in profiles, of operations of lax that are a part of the product's derivative."""
    with jax.named_scope(part), jax.named_scope(quantized_matmul_p.scope):
        yield


def _sum(terms: Sequence[jax.Array], out: jax.Array) -> Any:
    return sum(terms[1:], start=terms[0]) if terms else ad.Zero(jax.typeof(out).to_tangent_aval())


# ---- with respect to what the weight is made of ----------------------------------------------------------------------


def _with_tangent(layout: Layout, out_dtype: str, wrt: str) -> Callable[..., jax.Array]:
    """`weight_tangent_p` of matrices in plain lax."""

    def multiplied(x: jax.Array, *operands: jax.Array) -> jax.Array:
        *leaves, dot = operands
        values, scale, zero_point = leaves_of(leaves)
        if wrt == "scale":
            return reference.product(layout, x, (values, dot, zero_point), out_dtype)
        of_zeros = lambda zeros: reference.product(layout, x, (values, scale, zeros), out_dtype)  # noqa: E731
        return jax.jvp(of_zeros, (zero_point,), (dot,))[1]

    return multiplied


def _tangent(x: Any, *operands: Any, **params: Any) -> jax.Array:
    types = map(jax.typeof, (x, *operands))
    sharding = _compat.explicit_sharding(quantized_primitive.type_of_product(*types, **params))
    automatic = _compat.over_auto_axes(over_batch(_with_tangent(**params), x), sharding)
    with _traced_as(f"{params['wrt']}_tangent"):
        return automatic(x, *operands)


def _tangent_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[jax.Array, Any]:
    (*given, dot), (*given_dots, dot_dot) = primals, tangents
    out = weight_tangent_p.bind(*primals, **params)
    terms = [] if isinstance(dot_dot, ad.Zero) else [weight_tangent_p.bind(*given, dot_dot, **params)]
    asked = [i for i, tangent in enumerate(given_dots) if not isinstance(tangent, ad.Zero)]
    if asked:

        def of(*some: jax.Array) -> jax.Array:
            changed = dict(zip(asked, some, strict=True))
            return _tangent(*[changed.get(i, operand) for i, operand in enumerate(given)], dot, **params)

        terms.append(jax.jvp(of, tuple(given[i] for i in asked), tuple(given_dots[i] for i in asked))[1])
    return out, _sum(terms, out)


def _tangent_transpose(ct: Any, x: Any, *operands: Any, **params: Any) -> list[Any]:
    *leaves, dot = operands
    if isinstance(ct, ad.Zero):
        return [None] * (len(operands) + 1)
    if ad.is_undefined_primal(x):
        of_x = lambda x: _tangent(x, *operands, **params)  # noqa: E731
        with _traced_as("x_gradient"):
            return [*jax.linear_transpose(of_x, x.aval)(ct), *[None] * len(operands)]
    layout = params["layout"]
    cotangent = reference.scale_cotangent if params["wrt"] == "scale" else reference.zero_point_cotangent

    def back(x: jax.Array, ct: jax.Array, *leaves: jax.Array) -> jax.Array:
        return reference.group_order(layout, cotangent(layout, x, ct, leaves_of(leaves)), dot.aval)

    automatic = _compat.over_auto_axes(over_batch(back, x), _compat.explicit_sharding(dot.aval))
    with _traced_as(f"{params['wrt']}_gradient"):
        return [None, *[None] * len(leaves), automatic(x, ct, *leaves)]


weight_tangent_p.def_abstract_eval(quantized_primitive.type_of_product)
lowering.run_outside_jit(weight_tangent_p)
mlir.register_lowering(weight_tangent_p, mlir.lower_fun(_tangent, False))
ad.primitive_jvps[weight_tangent_p] = _tangent_jvp
ad.primitive_transposes[weight_tangent_p] = _tangent_transpose
quantized_primitive.define_batching(weight_tangent_p)
quantized_primitive.define_checkpointing(weight_tangent_p)
taylor.define(weight_tangent_p, taylor.composed(_tangent))


def _weight_terms(x: Any, leaves: Sequence[Any], tangents: Sequence[Any], params: dict[str, Any]) -> list[jax.Array]:
    """The result's tangents by those of the weight's leaves."""
    static = {"layout": params["layout"], "out_dtype": params["out_dtype"]}
    asked = [(wrt, dot) for wrt, dot in zip(_PARTS, tangents[1:], strict=False) if not isinstance(dot, ad.Zero)]
    return [weight_tangent_p.bind(x, *leaves, dot, wrt=wrt, **static) for wrt, dot in asked]


# ---- the product -----------------------------------------------------------------------------------------------------


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[jax.Array, Any]:
    (x, *leaves), (x_dot, *dots) = primals, tangents
    out = quantized_matmul_p.bind(*primals, **params)
    terms = [] if isinstance(x_dot, ad.Zero) else [quantized_matmul_p.bind(x_dot, *leaves, **params)]
    return out, _sum([*terms, *_weight_terms(x, leaves, dots, params)], out)


def _transpose(ct: Any, x: Any, *leaves: Any, **params: Any) -> list[Any]:
    none = [None] * len(leaves)
    if isinstance(ct, ad.Zero):
        return [None, *none]
    layout, dtype = params["layout"], x.aval.dtype
    back = lambda ct, *operands: reference.product_transposed(layout, ct, leaves_of(operands), dtype)  # noqa: E731
    automatic = _compat.over_auto_axes(over_batch(back, ct), _compat.explicit_sharding(x.aval))
    with _traced_as("x_gradient"):
        return [automatic(ct, *leaves), *none]


ad.primitive_jvps[quantized_matmul_p] = _jvp
ad.primitive_transposes[quantized_matmul_p] = _transpose


def _in_lax(x: jax.Array, *leaves: jax.Array, **params: Any) -> jax.Array:
    """The product in plain lax, for Taylor coefficients: it is linear in x, and not in the weight's leaves."""
    layout, out_dtype = params["layout"], params["out_dtype"]
    product = lambda x, *leaves: reference.product(layout, x, leaves_of(leaves), out_dtype)  # noqa: E731
    return over_batch(product, x)(x, *leaves)


taylor.define(quantized_matmul_p, taylor.composed(_in_lax))


# ---- the product with a second weight for the cotangent of x ---------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Pair:
    """Everything static about the cotangent of x."""

    layout: Layout
    x_dtype: Any
    back: Back


def _dx_by_second(pair: _Pair, g: jax.Array, leaves: Leaves, back_leaves: Leaves) -> jax.Array:
    """g [n, features] @ w.T with the weight that stands for w.T; differentiated, it is the product with w itself."""
    del leaves
    layout, options = pair.back.layout, pair.back.options
    dx = quantized_primitive.bind(g, back_leaves, layout, reference.widened(pair.x_dtype), options)
    return reference.to_cotangent(dx, pair.x_dtype)


_by_second: Any = jax.custom_jvp(_dx_by_second, nondiff_argnums=(0,))


def _by_second_jvp(pair: _Pair, primals: Any, tangents: Any) -> tuple[jax.Array, Any]:
    (g, leaves, back_leaves), (g_dot, leaves_dot, _) = primals, tangents
    out = _by_second(pair, g, leaves, back_leaves)
    zero = jax.custom_derivatives.SymbolicZero
    terms = [] if isinstance(g_dot, zero) else [_by_second(pair, g_dot, leaves, back_leaves)]
    asked = [i for i in (1, 2) if not isinstance(leaves_dot[i], zero | None)]
    if asked:

        def of(*given: jax.Array) -> jax.Array:
            mixed = list(leaves)
            for i, leaf in zip(asked, given, strict=True):
                mixed[i] = leaf
            return reference.product_transposed(pair.layout, g, (mixed[0], mixed[1], mixed[2]), pair.x_dtype)

        terms.append(jax.jvp(of, tuple(leaves[i] for i in asked), tuple(leaves_dot[i] for i in asked))[1])
    return out, sum(terms[1:], start=terms[0]) if terms else jnp.zeros_like(out)


_by_second.defjvp(_by_second_jvp, symbolic_zeros=True)


def _alone(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of the product itself."""
    return {name: params[name] for name in ("layout", "out_dtype", "options")}


def _product(*operands: jax.Array, **params: Any) -> jax.Array:
    return quantized_matmul_p.bind(*operands[: params["own"] + 1], **_alone(params))


def _paired_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[jax.Array, Any]:
    (x, *leaves), (x_dot, *dots), own = primals, tangents, params["own"]
    out = paired_p.bind(*primals, **params)
    terms = [] if isinstance(x_dot, ad.Zero) else [paired_p.bind(x_dot, *leaves, **params)]
    return out, _sum([*terms, *_weight_terms(x, leaves[:own], dots[:own], params)], out)


def _paired_transpose(ct: Any, x: Any, *leaves: Any, **params: Any) -> list[Any]:
    own, none = params["own"], [None] * len(leaves)
    if isinstance(ct, ad.Zero) or ct.dtype.name not in X_DTYPES:
        return [*_transpose(ct, x, *leaves[:own], **_alone(params)), *none[own:]]
    pair = _Pair(params["layout"], x.aval.dtype, params["back"])
    back = lambda ct, *all: _by_second(pair, ct, leaves_of(all[:own]), leaves_of(all[own:]))  # noqa: E731
    with jax.named_scope("x_gradient"):
        return [_compat.placed_like(over_batch(back, ct)(ct, *leaves), x.aval), *none]


paired_p.def_abstract_eval(
    lambda *avals, **params: quantized_primitive.type_of_product(*avals[: params["own"] + 1], **_alone(params))
)
lowering.run_outside_jit(paired_p)
paired_p.problem_of = lambda avals, params: quantized_matmul_p.problem_of(avals[: params["own"] + 1], _alone(params))
mlir.register_lowering(paired_p, mlir.lower_fun(_product, False))
ad.primitive_jvps[paired_p] = _paired_jvp
ad.primitive_transposes[paired_p] = _paired_transpose
quantized_primitive.define_batching(paired_p)
quantized_primitive.define_checkpointing(paired_p)
taylor.define(paired_p, taylor.composed(_product))
