"""The custom call on arrays: what lowering emits and what the tuner times."""

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax import numpy as jnp
from jax.interpreters import mlir

from jax_splitk.runtime import _compat
from jax_splitk.runtime.plan import CustomCall


class Result(Protocol):
    """A problem, as far as its result's type goes."""

    @property
    def out_shape(self) -> tuple[int, ...]: ...

    @property
    def out_dtype(self) -> str: ...


def call(custom_call: CustomCall, problem: Result, *operands: jax.Array) -> jax.Array:
    """The result of `custom_call` on operands in the problem's canonical layouts.

    Its workspace is a second result: XLA allocates it, shares it between calls, and reports it.
    """
    given = [_as_taken(custom_call, operand) for operand in operands]
    run = jax.ffi.ffi_call(custom_call.target, _results(custom_call, problem, jax.typeof(operands[0])))
    return run(*given, **custom_call.attributes)[0].astype(problem.out_dtype)


def lower(ctx: Any, custom_call: CustomCall, problem: Result, operands: Sequence[Any]) -> list[Any]:
    """What `call` lowers to, without tracing it first, which would take as long as the rest of the lowering."""
    if custom_call.in_float32:
        return list(mlir.lower_fun(functools.partial(call, custom_call, problem), False)(ctx, *operands))
    rule = jax.ffi.ffi_lowering(custom_call.target)
    with_workspace = ctx.replace(avals_out=_results(custom_call, problem, ctx.avals_in[0]))
    return list(rule(with_workspace, *operands, **custom_call.attributes))[:1]


def _as_taken(custom_call: CustomCall, operand: jax.Array) -> jax.Array:
    floating = jnp.issubdtype(operand.dtype, jnp.floating)
    return operand.astype(np.float32) if custom_call.in_float32 and floating else operand


def _results(custom_call: CustomCall, problem: Result, like: Any) -> list[Any]:
    out = _compat.like(like, problem.out_shape, np.float32 if custom_call.in_float32 else problem.out_dtype)
    return [out, _compat.like(out, (custom_call.workspace_bytes,), np.uint8)]
