"""Lowering of all primitives: from an equation to its problem, to the choice, and to the code of the choice.

Operations are primitives, and not an `ffi_call` at trace time, so that the choice is made at lowering, where the
platform and the final (batched, per-shard) shapes are known.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import mlir

from jax_splitk import kernels
from jax_splitk.ops import partitioning, program
from jax_splitk.ops.call import Call, Primitive
from jax_splitk.ops.partitioning import Rule
from jax_splitk.ops.routing import has_elements, only_xla, routed, served
from jax_splitk.problems.conv_wgrad import ConvProblem
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime import _compat, execute
from jax_splitk.runtime.plan import CustomCall
from jax_splitk.runtime.target import Target, target_for
from jax_splitk.tuning import agreement, ahead, watch
from jax_splitk.tuning.choice import XLA, Choice
from jax_splitk.tuning.options import Options
from jax_splitk.tuning.select import announce, code_of, select, without_code
from jax_splitk.tuning.serving import would_serve

_PLATFORMS = ("cpu", "cuda")


def define(primitive: Primitive) -> None:
    """Gives a primitive its type, its implementation outside jit and its lowering, on every platform."""
    run_outside_jit(primitive)

    def traced(*avals: Any, call: Call) -> Any:
        out = call.type_of(*avals)
        with contextlib.suppress(Exception):  # it comes again at lowering
            problem = routed(call, avals, "cuda")
            if problem is not None and only_xla(problem) is None:
                ahead.traced(served(problem, "cuda")[0], call.options)
        return out

    primitive.def_abstract_eval(traced)
    for platform in (*_PLATFORMS, None):

        def rule(ctx: Any, *operands: Any, call: Call, platform: str = platform or "other") -> Any:
            ctx = _compat.named(ctx, primitive.scope)
            problem = routed(call, ctx.avals_in, platform)
            if problem is None:
                _left_to_lax(call, ctx.avals_in)
                return as_lax_does(ctx, operands, call)
            problem, _ = served(problem, platform)
            undivided = None
            if _compat.is_automatically_partitioned(ctx):
                target, devices = target_for(platform), _compat.device_count(ctx)
                program.lowered(problem, call.options, target, measure=_may_measure(ctx, target), devices=devices)
                laxs = stays_laxs(ctx, problem, call.options, platform)
                division = laxs or division_rule(ctx, call, platform)
                if isinstance(division, Rule):
                    return partitioning.lower(ctx, division, call, problem, operands)
                undivided = division
            choice, custom_call = chosen(ctx, problem, platform, call.options, undivided)
            announce(choice, call.options)
            problem = choice.problem
            (out,) = ctx.avals_out
            if custom_call is None and call.options.implied:
                return as_lax_does(ctx, operands, call)  # to the letter, so that XLA fuses it as it does lax's
            if custom_call is None:
                function = _compat.over_auto_axes(call.in_lax(problem, out), _compat.explicit_sharding(out))
            elif (function := call.with_kernel(problem, out, custom_call)) is None:
                return execute.lower(ctx, custom_call, problem, operands)
            return mlir.lower_fun(function, False)(ctx, *operands)

        mlir.register_lowering(primitive, rule, platform=platform)


def _left_to_lax(call: Call, avals: Sequence[Any]) -> None:
    """Tells watchers about a pass for which no kernel of this platform competes: one of another platform may."""
    if watch.state.watchers and has_elements(avals):
        watch.state.asked(call.problem(avals), call.options)


def as_lax_does(ctx: Any, operands: Sequence[Any], call: Call) -> Any:
    """Lowers an equation that is lax's as lax does."""
    (out,) = ctx.avals_out
    return mlir.lower_fun(call.in_lax(None, out), False)(ctx, *operands)


def run_outside_jit(primitive: core.Primitive) -> None:
    """Gives a primitive its implementation outside jit: its lowering."""

    @primitive.def_impl
    def outside_jit(*operands: jax.Array, call: Any) -> jax.Array:
        with jax.disable_jit(False):  # else jit would call this again, for ever
            return jitted(call)(*operands)


@functools.lru_cache(maxsize=1024)
def jitted(call: Call) -> Callable[..., jax.Array]:
    return jax.jit(functools.partial(call.primitive.bind, call=call))


def choose(
    problem: Problem,
    target: Target,
    options: Options,
    *,
    undivided: str | None = None,
    measure: bool = False,
    final: bool = False,
) -> Choice:
    """`select`, except that XLA computes what its partitioner divides by itself: it cannot look into a custom call.

    `undivided`: why XLA's partitioner divides the operation; None if it does not.
    """
    reason = only_xla(problem)
    if reason is not None:
        return Choice(problem, XLA, reason, kernel_blocked=problem.refusal is None and target.is_hopper)
    if undivided is not None and options.implementation != "xla":
        if options.implied and (whole := select(problem, target, options)).candidate == XLA:
            return whole  # divided or not
        if options.explicit:
            raise NotImplementedError(
                f"{problem}: implementation={options.implementation!r} under automatic partitioning over several "
                f"devices: {undivided}. Use jax.shard_map over all axes, or implementation=None (falls back to XLA)."
            )
        reason = f"automatic partitioning over several devices: {undivided}"
        return Choice(problem, XLA, reason, kernel_blocked=would_serve(problem, target))
    return select(problem, target, options, measure=measure, final=final)


def stays_laxs(ctx: Any, problem: Problem, options: Options, platform: str, *, final: bool = True) -> str | None:
    """Why an implied pass under automatic partitioning stays lax's; None if it does not.

    It stays lax's if no kernel is chosen for the whole pass, nor for a device's part where the devices can divide the
    batch. The choice for the part may be measured. `final`: whether the pass will be lowered, and not only looked at.
    """
    if options.copied_operand:
        return "products that intercept(few_rows=True) routes are lax's in a program for several devices"
    if not options.implied or only_xla(problem) is not None or not isinstance(problem, ConvProblem):
        return None
    target, unmeasured = target_for(platform), dataclasses.replace(options, forward_only=True)
    here = final and _may_measure(ctx, target)
    # In a job all processes must find the same; nothing is measured for it.
    agreed, devices = here and agreement.needed(), _compat.device_count(ctx)

    def is_kernels(problem: Problem, options: Options, measure: bool) -> bool:
        choice = select(problem, target, options, measure=measure)
        # In a job of several processes one that lacks the compiler says so when the others compile (`code_of`).
        return choice.candidate != XLA and (not final or agreed or without_code(choice, target) is None)

    if is_kernels(problem, unmeasured, agreed):
        return None
    part = program.part_of(problem, devices)
    if part is not None and is_kernels(part, unmeasured if agreed else options, here):
        return None
    return "no kernel is chosen for it"


def division_rule(ctx: Any, call: Call, platform: str) -> Rule | str:
    """How an equation under automatic partitioning is divided among devices, or why XLA is left to do it."""
    problem, _ = served(call.problem(ctx.avals_in), platform)
    if call.options.implementation == "xla":
        return "implementation='xla' was asked for"
    if not kernels.families(problem.op, platform):
        return f"no kernel for platform {platform}"
    return only_xla(problem) or partitioning.refusal(ctx) or call.rule(ctx.avals_in)


def _may_measure(ctx: Any, target: Target) -> bool:
    """Whether the code that is lowered will run here: only such can be measured here."""
    return target.is_local and not _compat.is_export(ctx)


def chosen(
    ctx: mlir.LoweringRuleContext, problem: Problem, platform: str, options: Options, undivided: str | None = None
) -> tuple[Choice, CustomCall | None]:
    """The choice, and the custom call that is lowered for it, None for XLA's operation."""
    target = target_for(platform)
    measure = undivided is None and _may_measure(ctx, target)
    if not _compat.is_automatically_partitioned(ctx):
        program.lowered(problem, options, target, measure=measure)
    choice = choose(problem, target, options, undivided=undivided, measure=measure, final=True)
    return code_of(choice, target, options, agreed=measure)
