"""Differentiation of the quantized product, and of the one with the transposed weight. Each is linear in x, and the
other one is its transpose. Their weight is linear in the scales and in the zero points. Cotangents of these are
computed directly, in float32, not derived by JAX from the arithmetic of dequantization."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core
from jax.interpreters import ad, mlir

from jax_splitk import kernels
from jax_splitk.ops import checkpointing, lowering, quantized_primitive, routing, taylor
from jax_splitk.ops.quantized_primitive import (
    QuantizedCall,
    TransposedCall,
    over_batch,
    quantized_matmul_p,
    quantized_transposed_p,
)
from jax_splitk.ops.tangents import by_some, summed
from jax_splitk.problems import quantized_reference as reference
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.problems.quantized_reference import leaves_of
from jax_splitk.runtime import _compat
from jax_splitk.tuning.options import Options

# (x, *leaves, dot) -> x times the tangent of the weight, of which `dot` is that of a leaf.
weight_tangent_p = core.Primitive("quantized_weight_tangent")

_PARTS = ("scale", "zero_point", "channel_scale")  # Leaves[1:]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class WeightTangent(QuantizedCall):
    """x times the tangent of a weight. `wrt`: the leaf that moves, one of `_PARTS`."""

    wrt: str

    primitive = weight_tangent_p


@contextlib.contextmanager
def _traced_as(part: str) -> Iterator[None]:
    """The names, in HLO and in profiles, of operations of lax that are a part of the product's derivative."""
    with jax.named_scope(part), jax.named_scope(quantized_matmul_p.scope):
        yield


# ---- with respect to what the weight is made of ----------------------------------------------------------------------


def _with_tangent(call: WeightTangent) -> Callable[..., jax.Array]:
    """`weight_tangent_p` of matrices in plain lax."""
    layout, out_dtype = call.layout, call.out_dtype

    def multiplied(x: jax.Array, *operands: jax.Array) -> jax.Array:
        *given, dot = operands
        leaves, moved = leaves_of(layout, given), 1 + _PARTS.index(call.wrt)

        def of_part(part: jax.Array) -> jax.Array:
            values, *parts = (part if i == moved else leaf for i, leaf in enumerate(leaves))
            return reference.product(layout, x, (values, *parts), out_dtype)  # pyright: ignore[reportArgumentType]

        # The product is linear in both kinds of scales.
        return jax.jvp(of_part, (leaves[moved],), (dot,))[1] if call.wrt == "zero_point" else of_part(dot)

    return multiplied


def _tangent(x: Any, *operands: Any, call: WeightTangent) -> jax.Array:
    sharding = _compat.explicit_sharding(call.type_of(*map(jax.typeof, (x, *operands))))
    automatic = _compat.over_auto_axes(over_batch(_with_tangent(call), x), sharding)
    with _traced_as(f"{call.wrt}_tangent"):
        return automatic(x, *operands)


def _tangent_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: WeightTangent) -> tuple[jax.Array, Any]:
    (*given, dot), (*given_dots, dot_dot) = primals, tangents
    out = call.bind(*primals)
    terms = [] if isinstance(dot_dot, ad.Zero) else [call.bind(*given, dot_dot)]
    terms += by_some(lambda *operands: _tangent(*operands, dot, call=call), given, given_dots)
    return out, summed(terms, out)


def _tangent_transpose(ct: Any, x: Any, *operands: Any, call: WeightTangent) -> list[Any]:
    *leaves, dot = operands
    if isinstance(ct, ad.Zero):
        return [None] * (len(operands) + 1)
    if ad.is_undefined_primal(x):
        of_x = lambda x: _tangent(x, *operands, call=call)  # noqa: E731
        with _traced_as("x_gradient"):
            return [*jax.linear_transpose(of_x, x.aval)(ct), *[None] * len(operands)]
    layout = call.layout

    def back(x: jax.Array, ct: jax.Array, *leaves: jax.Array) -> jax.Array:
        return reference.cotangent(call.wrt, layout, x, ct, leaves_of(layout, leaves), dot.aval)

    automatic = _compat.over_auto_axes(over_batch(back, x), _compat.explicit_sharding(dot.aval))
    with _traced_as(f"{call.wrt}_gradient"):
        return [None, *[None] * len(leaves), automatic(x, ct, *leaves)]


weight_tangent_p.def_abstract_eval(lambda *avals, call: call.type_of(*avals))
lowering.run_outside_jit(weight_tangent_p)
mlir.register_lowering(weight_tangent_p, mlir.lower_fun(_tangent, False))
ad.primitive_jvps[weight_tangent_p] = _tangent_jvp
ad.primitive_transposes[weight_tangent_p] = _tangent_transpose
quantized_primitive.define_batching(weight_tangent_p)
checkpointing.define(weight_tangent_p, lax.dot_general_p)
taylor.define(weight_tangent_p, taylor.composed(_tangent))


def _weight_terms(x: Any, leaves: Sequence[Any], tangents: Sequence[Any], call: QuantizedCall) -> list[jax.Array]:
    """The result's tangents by those of the weight's leaves."""
    static = {"layout": call.layout, "out_dtype": call.out_dtype, "options": call.options.without_config()}
    parts = zip(_PARTS, leaves_of(call.layout, tangents)[1:], strict=True)
    asked = [(wrt, dot) for wrt, dot in parts if dot is not None and not isinstance(dot, ad.Zero)]
    return [WeightTangent(wrt=wrt, **static).bind(x, *leaves, dot) for wrt, dot in asked]


# ---- the product -----------------------------------------------------------------------------------------------------


def tangent_terms(primals: Sequence[Any], tangents: Sequence[Any], call: QuantizedCall) -> list[jax.Array]:
    """The terms of the tangent of a product: by the tangent of x, which is not rounded, and by those of the weight's
    leaves."""
    call = dataclasses.replace(call, options=call.options.without_rounding())
    (x, *leaves), (x_dot, *dots) = primals, tangents
    terms = [] if isinstance(x_dot, ad.Zero) else [call.bind(x_dot, *leaves)]
    return [*terms, *_weight_terms(x, leaves, dots, call)]


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: QuantizedCall) -> tuple[jax.Array, Any]:
    out = call.bind(*primals)
    return out, summed(tangent_terms(primals, tangents, call), out)


def _cotangent(ct: Any, x: Any, leaves: Sequence[Any], call: QuantizedCall, transposed: type[QuantizedCall]) -> Any:
    """The cotangent of x, by the product with the other one of w and w.T."""
    dtype = reference.widened(x.aval.dtype)
    back = transposed(layout=call.layout, out_dtype=dtype.name, options=call.options.without_rounding())
    back = dataclasses.replace(back, options=_options_of(back.options, back.problem([ct, *leaves])))
    with jax.named_scope("x_gradient"):
        dx = back.bind(ct, *leaves)
        return _compat.placed_like(reference.to_cotangent(dx, x.aval.dtype), x.aval)


def _options_of(options: Options, problem: QuantizedMatmulProblem) -> Options:
    """The options for the product that is the transpose of the one the caller asked for. An implementation that cannot
    serve it was not asked for."""
    options = options.without_config()
    if options.implementation in (None, "xla"):
        return options
    families = [f for f in kernels.families(problem.op) if f.implementation == options.implementation]
    serves = routing.only_xla(problem) is None and any(f.problem_refusal(problem) is None for f in families)
    return options if serves else dataclasses.replace(options, implementation=None)


def _transpose(ct: Any, x: Any, *leaves: Any, call: QuantizedCall) -> list[Any]:
    dx = None if isinstance(ct, ad.Zero) else _cotangent(ct, x, leaves, call, TransposedCall)
    return [dx, *[None] * len(leaves)]


ad.primitive_jvps[quantized_matmul_p] = _jvp
ad.primitive_transposes[quantized_matmul_p] = _transpose


def _in_lax(x: jax.Array, *leaves: jax.Array, call: QuantizedCall) -> jax.Array:
    """The product in plain lax, for Taylor coefficients: it is linear in x, and not in the weight's leaves."""
    layout = call.layout
    product = lambda x, *of: reference.product(layout, x, leaves_of(layout, of), call.out_dtype)  # noqa: E731
    return over_batch(product, x)(x, *leaves)


taylor.define(quantized_matmul_p, taylor.composed(_in_lax))


# ---- the product with the transposed weight --------------------------------------------------------------------------


def _transposed_in_lax(x: jax.Array, *leaves: jax.Array, call: QuantizedCall) -> jax.Array:
    """The product with w.T in plain lax, for derivatives by the weight's leaves."""
    out = call.type_of(*map(jax.typeof, (x, *leaves)))

    def product(x: jax.Array, *leaves: jax.Array) -> jax.Array:
        return reference.product_transposed(call.layout, x, leaves_of(call.layout, leaves), call.out_dtype)

    return _compat.over_auto_axes(over_batch(product, x), _compat.explicit_sharding(out))(x, *leaves)


def _transposed_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: QuantizedCall) -> tuple[jax.Array, Any]:
    (x, values, *parts), (x_dot, _, *dots) = primals, tangents
    out = call.bind(*primals)
    terms = [] if isinstance(x_dot, ad.Zero) else [call.bind(x_dot, values, *parts)]
    terms += by_some(lambda *parts: _transposed_in_lax(x, values, *parts, call=call), parts, dots)
    return out, summed(terms, out)


def _transposed_transpose(ct: Any, x: Any, *leaves: Any, call: QuantizedCall) -> list[Any]:
    dx = None if isinstance(ct, ad.Zero) else _cotangent(ct, x, leaves, call, QuantizedCall)
    return [dx, *[None] * len(leaves)]


ad.primitive_jvps[quantized_transposed_p] = _transposed_jvp
ad.primitive_transposes[quantized_transposed_p] = _transposed_transpose
taylor.define(quantized_transposed_p, taylor.composed(_transposed_in_lax))
