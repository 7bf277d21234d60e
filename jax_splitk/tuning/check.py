"""Compares a candidate's results with those of XLA's operation. Most results are near XLA's own. The error of others is
compared with XLA's error: XLA's kernels differ among themselves by more than ours do where sums are long."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import numpy as jnp

from jax_splitk.problems.operations import OPERATIONS
from jax_splitk.problems.problem import Problem

# Accepted relative error against XLA's result: rounding to the output's dtype, and float32 accumulation.
TOLERANCE = {"float32": 1e-3, "float16": 2e-3, "bfloat16": 1e-2}
MOST_OF_XLAS = 10  # times the tolerance: a result of XLA's that is further off excuses no candidate

# Runs a function that uses the device and waits for what it computes, and returns its result.
OnDevice = Callable[[Callable[[], Any]], Any]


class Check:
    """What the results of one problem's candidates are compared with.

    Programs are compiled before the device is asked for, since other searches wait for it.

    Attributes:
      xlas: results of XLA's operation for operands of each kind, once that has run.
    """

    xlas: Sequence[jax.Array] = ()

    def __init__(
        self, problem: Problem, inputs: Sequence[Sequence[jax.Array]], compiler_options: Mapping[str, Any]
    ) -> None:
        """`inputs`: operands of each kind."""
        self._problem = problem
        self._inputs = inputs
        self._options = dict(compiler_options)
        self._operation = OPERATIONS[problem.op]
        self._references: dict[int, jax.Array] = {}

    def why_wrong(self, results: Sequence[jax.Array], on_device: OnDevice) -> str | None:
        """Why results for operands of each kind are wrong; None if they are not."""
        wrong = (self._wrong(kind, result, on_device) for kind, result in enumerate(results))
        return next(filter(None, wrong), None)

    def _wrong(self, kind: int, result: jax.Array, on_device: OnDevice) -> str | None:
        accepted = TOLERANCE[self._problem.out_dtype] + self._operation.operand_error(self._problem)
        if self.xlas and self._error(result, self.xlas[kind], on_device) <= accepted:
            return None
        exact = self.reference(kind, on_device)
        error = self._error(result, exact, on_device)
        if error > accepted and self.xlas:
            xlas = self._error(self.xlas[kind], exact, on_device)
            if xlas <= MOST_OF_XLAS * accepted:
                accepted = max(accepted, 2 * xlas)
        if error <= accepted:
            return None
        return f"differs from XLA's: relative error {error:.1e}, accepted: {accepted:.0e}"

    def reference(self, kind: int, on_device: OnDevice) -> jax.Array:
        """XLA's result in float32 for operands of a kind. It takes up to one second to compute, once."""
        if kind not in self._references:
            program, operands = self._reference_program, self._inputs[kind]
            self._references[kind] = on_device(lambda: jax.block_until_ready(program(*operands)))
        return self._references[kind]

    @functools.cached_property
    def _reference_program(self) -> Callable[..., jax.Array]:
        """XLA does not time its own kernels for it, which would disturb measurements."""
        full = dataclasses.replace(self._problem, out_dtype="float32")
        function = self._operation.check or self._operation.reference
        options: dict[str, Any] = {**self._options, "xla_gpu_autotune_level": 0}
        lowered = jax.jit(lambda *operands: function(full, *operands)).lower(*self._inputs[0])
        return lowered.compile(compiler_options=options)

    def _error(self, result: jax.Array, exact: jax.Array, on_device: OnDevice) -> float:
        types = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (result, exact)]
        program = _error_of(*types, options=tuple(self._options.items()))
        return on_device(lambda: float(program(result, exact)))


@functools.lru_cache(maxsize=64)
def _error_of(
    result: jax.ShapeDtypeStruct, exact: jax.ShapeDtypeStruct, options: tuple[tuple[str, Any], ...]
) -> Callable[..., jax.Array]:
    return jax.jit(_relative_error).lower(result, exact).compile(compiler_options=dict(options))


def _relative_error(out: jax.Array, exact: jax.Array) -> jax.Array:
    """The norm of the difference over the norm of `exact`; where that is zero, the greatest number of the output.
    Computed on the device, since an output may have hundreds of megabytes."""
    out, exact = out.astype(jnp.float32), exact.astype(jnp.float32)
    scale = jnp.linalg.norm(exact)
    return jnp.where(scale > 0, jnp.linalg.norm(out - exact) / scale, jnp.max(jnp.abs(out), initial=0))
