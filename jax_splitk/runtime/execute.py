"""Runs a custom call on arrays: lowering emits it, and the tuner times it."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax import numpy as jnp
from jax.extend import core
from jax.interpreters import mlir

from jax_splitk.runtime import _compat
from jax_splitk.runtime.plan import CustomCall


class Result(Protocol):
    """The part of a problem that determines its result's type."""

    @property
    def out_shape(self) -> tuple[int, ...]: ...

    @property
    def out_dtype(self) -> str: ...


# `jax.ffi.ffi_call`, except that HLO calls it by the custom call's name, and that nothing hashes the machine code.
_custom_call_p = core.Primitive("jax_splitk_custom_call")
_custom_call_p.multiple_results = True


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """The parameter of the primitive. It is equal only to itself, so that nothing compares or hashes machine code.

    Attributes:
      results: their types.
      replaced: operands whose memory a result takes, by their numbers. XLA copies an operand that is read later.
    """

    custom_call: CustomCall
    results: Sequence[Any]
    replaced: Mapping[int, int] = dataclasses.field(default_factory=dict)


def call(custom_call: CustomCall, problem: Result, *operands: jax.Array) -> jax.Array:
    """The result of `custom_call` on operands in the problem's canonical layouts.

    Its workspace is a second result: XLA allocates it, shares it between calls, and reports it.
    """
    around, given = custom_call.around, [jnp.asarray(operand) for operand in operands]
    given = given if around is None else around.before(given)
    results = _results(custom_call, problem, jax.typeof(given[0]))
    result = _custom_call_p.bind(*given, call=_Call(custom_call, results))[0]
    return result if around is None else around.after(result)


def call_joined(
    custom_call: CustomCall, results: Sequence[Any], *operands: jax.Array, replaced: Mapping[int, int]
) -> list[jax.Array]:
    """The results, of the given types, of a custom call of several plans (`joined_plan.py`). `replaced`: operands whose
    memory a result takes."""
    types = [*results, _compat.like(results[0], (custom_call.workspace_bytes,), np.uint8)]
    return _custom_call_p.bind(*operands, call=_Call(custom_call, types, replaced))[:-1]


def lower(ctx: Any, custom_call: CustomCall, problem: Result, operands: Sequence[Any]) -> list[Any]:
    """Lowers `call` without tracing it first, which would take as long as the rest of the lowering."""
    if custom_call.around is not None:
        return list(mlir.lower_fun(functools.partial(call, custom_call, problem), False)(ctx, *operands))
    results = _results(custom_call, problem, ctx.avals_in[0])
    return _lowered(ctx.replace(avals_out=results), *operands, call=_Call(custom_call, results))[:1]


def _lowered(ctx: Any, *operands: Any, call: _Call) -> list[Any]:
    custom_call = call.custom_call
    with _compat.location(ctx, custom_call.name):
        lowering = jax.ffi.ffi_lowering(custom_call.target, operand_output_aliases=dict(call.replaced) or None)
        return list(lowering(ctx, *operands, **custom_call.attributes))


_custom_call_p.def_abstract_eval(lambda *avals, call: call.results)
_custom_call_p.def_impl(lambda *operands, call: jax.jit(functools.partial(_custom_call_p.bind, call=call))(*operands))
mlir.register_lowering(_custom_call_p, _lowered)


def _results(custom_call: CustomCall, problem: Result, like: Any) -> list[Any]:
    around = custom_call.around
    shape, dtype = (problem.out_shape, problem.out_dtype) if around is None else around.returned
    out = _compat.like(like, shape, dtype)
    return [out, _compat.like(out, (custom_call.workspace_bytes,), np.uint8)]
