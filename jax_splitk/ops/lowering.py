"""What the primitives share: from an equation at lowering to the choice, and to the code of the choice.

A primitive rather than an `ffi_call` at trace time, so that the decision is taken at lowering, where the platform and
the final (batched, per-shard) shapes are known.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import mlir

from jax_splitk import kernels
from jax_splitk.ops import partitioning
from jax_splitk.ops.partitioning import Rule
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime import _compat, execute
from jax_splitk.runtime.plan import CustomCall
from jax_splitk.runtime.target import Target, target_for
from jax_splitk.tuning.choice import XLA, Choice
from jax_splitk.tuning.options import Options
from jax_splitk.tuning.select import announce, code_of, select, would_serve

_PLATFORMS = ("cpu", "cuda")


# An equation's problem in canonical form, from the types of its operands and its parameters.
_ProblemOf = Callable[[Sequence[Any], dict[str, Any]], Any]

# How an operation is divided among devices, likewise; or why it is not.
_RuleOf = Callable[[Sequence[Any], dict[str, Any]], Rule | str]

# Our primitives.
PROBLEMS: dict[core.Primitive, _ProblemOf] = {}
RULES: dict[core.Primitive, _RuleOf] = {}


def define(
    primitive: core.Primitive,
    problem_of: _ProblemOf,
    with_xla: Callable[[Any, dict[str, Any], Any], Callable[..., jax.Array]],
    with_kernel: Callable[[Any, dict[str, Any], Any, CustomCall], Callable[..., jax.Array] | None],
    rule_of: _RuleOf,
) -> None:
    """Gives a primitive its implementation outside jit and its lowering, on every platform.

    Args:
      primitive: its parameters include `options`, the caller's.
      problem_of: see `_ProblemOf`.
      with_xla: of (problem, parameters, the result's type), the function of the operands in plain lax.
      with_kernel: of (problem, parameters, the result's type, custom call), the function of the operands around the
        custom call; None where its operands and result are the primitive's as they are.
      rule_of: see `_RuleOf`.
    """
    PROBLEMS[primitive], RULES[primitive] = problem_of, rule_of
    run_outside_jit(primitive)
    for platform in (*_PLATFORMS, None):

        def rule(ctx: Any, *operands: Any, platform: str = platform or "other", **params: Any) -> Any:
            problem = problem_of(ctx.avals_in, params)
            undivided = None
            if _compat.is_automatically_partitioned(ctx):
                division = division_rule(ctx, primitive, params, platform)
                if isinstance(division, Rule):
                    return partitioning.lower(ctx, primitive, division, params, problem, operands)
                undivided = division
            custom_call = _chosen(ctx, problem, platform, params["options"], undivided)
            (out,) = ctx.avals_out
            if custom_call is None:
                function = _compat.over_auto_axes(with_xla(problem, params, out), _compat.explicit_sharding(out))
            elif (function := with_kernel(problem, params, out, custom_call)) is None:
                return execute.lower(ctx, custom_call, problem, operands)
            return mlir.lower_fun(function, False)(ctx, *operands)

        mlir.register_lowering(primitive, rule, platform=platform)


def run_outside_jit(primitive: core.Primitive) -> None:
    """Gives a primitive its implementation outside jit: its lowering."""

    @primitive.def_impl
    def outside_jit(*operands: jax.Array, **params: Any) -> jax.Array:
        with jax.disable_jit(False):  # else jit would call this again, for ever
            return jitted(primitive, **params)(*operands)


@functools.lru_cache(maxsize=1024)
def jitted(primitive: core.Primitive, **params: Any) -> Callable[..., jax.Array]:
    return jax.jit(functools.partial(primitive.bind, **params))


def _is_static(problem: Problem) -> bool:
    """Whether all of a problem's sizes are known: none is a symbolic dimension of jax.export."""
    values = [getattr(problem, field.name) for field in dataclasses.fields(problem)]
    return all(isinstance(leaf, int | str) for leaf in jax.tree.leaves(values))


def only_xla(problem: Problem) -> str | None:
    """Why no kernel on any platform takes the problem; None where one may."""
    return problem.refusal or (None if _is_static(problem) else "symbolic shapes")


def choose(
    problem: Problem,
    target: Target,
    options: Options,
    *,
    undivided: str | None = None,
    measure: bool = False,
    final: bool = False,
) -> Choice:
    """`select`, except that code which XLA partitions by itself is left to XLA: a custom call is opaque to its
    partitioner. `undivided`: why it does, None where it does not.
    """
    reason = only_xla(problem)
    if reason is not None:
        return Choice(problem, XLA, reason, costs=problem.refusal is None and target.is_hopper)
    if undivided is not None and options.implementation != "xla":
        if options.explicit:
            raise NotImplementedError(
                f"{problem}: implementation={options.implementation!r} under automatic partitioning over several "
                f"devices: {undivided}. Use jax.shard_map over all axes, or implementation=None (falls back to XLA)."
            )
        reason = f"automatic partitioning over several devices: {undivided}"
        return Choice(problem, XLA, reason, costs=would_serve(problem, target))
    return select(problem, target, options, measure=measure, final=final)


def division_rule(ctx: Any, primitive: core.Primitive, params: dict[str, Any], platform: str) -> Rule | str:
    """How an equation under automatic partitioning is divided among devices, or why XLA is left to do it."""
    problem, implementation = PROBLEMS[primitive](ctx.avals_in, params), params["options"].implementation
    if implementation == "xla":
        return "implementation='xla' was asked for"
    if not kernels.families(problem.op, platform):
        return f"no kernel for platform {platform}"
    return only_xla(problem) or partitioning.refusal(ctx) or RULES[primitive](ctx.avals_in, params)


def _chosen(
    ctx: mlir.LoweringRuleContext, problem: Problem, platform: str, options: Options, undivided: str | None
) -> CustomCall | None:
    """The custom call that is lowered, None for XLA's operation, with a line in the log."""
    target = target_for(platform)
    # Only what will run here can be measured here.
    measure = undivided is None and not _compat.is_export(ctx) and target.is_local
    choice = choose(problem, target, options, undivided=undivided, measure=measure, final=True)
    choice, custom_call = code_of(choice, target, options, agreed=measure)
    announce(choice, options)
    return custom_call
