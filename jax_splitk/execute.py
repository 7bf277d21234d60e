"""The custom call on arrays: what lowering emits and what the tuner times."""

import jax
import numpy as np

from jax_splitk import _compat
from jax_splitk.kernels import Problem
from jax_splitk.plan import CustomCall


def call(custom_call: CustomCall, problem: Problem, *operands: jax.Array) -> jax.Array:
    """The result of `custom_call` on operands in the problem's canonical layouts.

    Its workspace is a second result: XLA allocates it, shares it between calls, and reports it.
    """
    out_type = _compat.like(jax.typeof(operands[0]), problem.out_shape, problem.out_dtype)
    workspace = _compat.like(out_type, (custom_call.workspace_bytes,), np.uint8)
    run = jax.ffi.ffi_call(custom_call.target, (out_type, workspace))
    return run(*operands, **custom_call.attributes)[0]
