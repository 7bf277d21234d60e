"""Operations and bytes of a function, which XLA cannot count inside of custom calls."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax import numpy as jnp
from jax.interpreters import mlir

from jax_splitk.ops import lowering, routing, trace
from jax_splitk.ops.call import Call
from jax_splitk.ops.primitives import PRIMITIVES
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime.target import local_platform
from jax_splitk.tuning import watch


@dataclasses.dataclass(frozen=True)
class OperationCost:
    """The operations and bytes of one jax_splitk operation; the function has `count` of them."""

    problem: Problem
    count: int
    flops: int
    bytes_accessed: int


@dataclasses.dataclass(frozen=True)
class Cost:
    """The operations and bytes of a function; `str()` of it is a table.

    Attributes:
      operations: jax_splitk's operations, in the order of the trace.
      flops, bytes_accessed: sums over these operations.
      rest_flops, rest_bytes_accessed: those of everything else, as XLA counts them before it fuses anything.
      total_flops, total_bytes_accessed: those of the whole function.
    """

    operations: tuple[OperationCost, ...]
    rest_flops: float
    rest_bytes_accessed: float

    @property
    def flops(self) -> int:
        return sum(each.count * each.flops for each in self.operations)

    @property
    def bytes_accessed(self) -> int:
        return sum(each.count * each.bytes_accessed for each in self.operations)

    @property
    def total_flops(self) -> float:
        return self.flops + self.rest_flops

    @property
    def total_bytes_accessed(self) -> float:
        return self.bytes_accessed + self.rest_bytes_accessed

    def __str__(self) -> str:
        rows = [(str(each.problem), each.count, each.flops, each.bytes_accessed) for each in self.operations]
        rows += [("jax_splitk", sum(each.count for each in self.operations), self.flops, self.bytes_accessed)]
        rows += [("the rest", "", self.rest_flops, self.rest_bytes_accessed)]
        rows += [("total", "", self.total_flops, self.total_bytes_accessed)]
        width = max(len(name) for name, *_ in rows)
        lines = [f"{'operation':{width}}  {'x':>4}  {'GFLOP':>12}  {'MB':>12}"]
        for name, count, flops, moved in rows:
            lines.append(f"{name:{width}}  {count:>4}  {flops / 1e9:>12.4f}  {moved / 1e6:>12.4f}")
        return "\n".join(lines)


def cost(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Cost:
    """Floating-point operations and bytes of `fn(*args, **kwargs)`, with those of our custom calls.

    `jax.stages.Compiled.cost_analysis` and profilers count nothing for a custom call. Here each jax_splitk operation
    counts the same for every implementation: two operations for each multiply-add of its matrix product (also those
    with padding, which XLA leaves out), and the bytes of each operand and of the result once. XLA's `cost_analysis` of
    everything else is added. So the share of a GPU's peak that a step reaches is `cost(step, *args).total_flops /
    seconds / peak`.

    As in XLA's analysis the body of a loop counts once. An operation inside shard_map counts as one device's part, and
    one that XLA will partition counts as a whole.

    Nothing is compiled, run or tuned.

    Args:
      fn: a function that `jax.jit` accepts, e.g. a train step.
      *args: its arguments; arrays or `jax.ShapeDtypeStruct`s.
      **kwargs: its arguments by name.

    Returns:
      A `Cost`: `operations`, each with `problem`, `count`, `flops` and `bytes_accessed`; the sums `flops` and
      `bytes_accessed`; `rest_flops`, `rest_bytes_accessed`, `total_flops` and `total_bytes_accessed`. `print` shows a
      table.

    Examples:
      >>> x = jax.ShapeDtypeStruct((8, 56, 56, 64), jnp.bfloat16)
      >>> def wgrad(x, g):
      ...     numbers = ("NHWC", "HWIO", "NHWC")
      ...     return jax_splitk.conv_wgrad(x, g, (3, 3, 64, 64), (1, 1), "SAME", dimension_numbers=numbers)
      >>> jax_splitk.cost(wgrad, x, x).flops == 2 * (8 * 56 * 56) * (3 * 3 * 64) * 64
      True
    """
    found: dict[Problem, int] = {}
    platform = local_platform()
    for eqn, problem in trace.ours(trace.traced(fn, args, kwargs), platform):
        out: Any = eqn.outvars[0].aval
        # A batch of weights is one equation.
        times = math.prod(out.shape) // max(1, math.prod(problem.out_shape))
        found[problem] = found.get(problem, 0) + times
    operations = (OperationCost(problem, n, problem.flops, problem.bytes_moved) for problem, n in found.items())
    rules: Any = tuple((primitive, _nothing(platform)) for primitive in PRIMITIVES)
    parameters = mlir.LoweringParameters(override_lowering_rules=rules)
    with watch.state.tracing_only():
        rest = jax.jit(fn).trace(*args, **kwargs).lower(_private_parameters=parameters).cost_analysis() or {}
    # What XLA does not know, as other custom calls, counts as -1.
    return Cost(tuple(operations), *(max(0.0, rest.get(name, 0.0)) for name in ("flops", "bytes accessed")))


def _nothing(platform: str) -> Callable[..., Any]:
    """A lowering rule that gives zeros: they take no computing, so XLA counts everything else."""

    def lowered(ctx: Any, *operands: Any, call: Call) -> Any:
        if routing.routed(call, ctx.avals_in, platform) is None:
            return lowering.as_lax_does(ctx, operands, call)
        (out,) = ctx.avals_out
        return mlir.lower_fun(lambda *_: jnp.zeros(out.shape, out.dtype), False)(ctx, *operands)

    return lowered
