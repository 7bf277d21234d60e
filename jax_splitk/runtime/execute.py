"""The custom call on arrays: what lowering emits and what the tuner times."""

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np

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
    run = jax.ffi.ffi_call(custom_call.target, _results(custom_call, problem, jax.typeof(operands[0])))
    return run(*operands, **custom_call.attributes)[0]


def lower(ctx: Any, custom_call: CustomCall, problem: Result, operands: Sequence[Any]) -> list[Any]:
    """What `call` lowers to, without tracing it first, which would take as long as the rest of the lowering."""
    rule = jax.ffi.ffi_lowering(custom_call.target)
    with_workspace = ctx.replace(avals_out=_results(custom_call, problem, ctx.avals_in[0]))
    return list(rule(with_workspace, *operands, **custom_call.attributes))[:1]


def _results(custom_call: CustomCall, problem: Result, like: Any) -> list[Any]:
    out = _compat.like(like, problem.out_shape, problem.out_dtype)
    return [out, _compat.like(out, (custom_call.workspace_bytes,), np.uint8)]
