"""What the primitives share: from an equation at lowering to the choice, and to the code of the choice.

A primitive rather than an `ffi_call` at trace time, so that the decision is taken at lowering, where the platform and
the final (batched, per-shard) shapes are known.
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
from jax_splitk.ops import partitioning
from jax_splitk.ops.partitioning import Rule
from jax_splitk.problems.conv_wgrad import ConvProblem
from jax_splitk.problems.dot_general import DotProblem
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime import _compat, execute
from jax_splitk.runtime.plan import CustomCall
from jax_splitk.runtime.target import Target, target_for
from jax_splitk.tuning import agreement, ahead, watch
from jax_splitk.tuning.choice import XLA, Choice
from jax_splitk.tuning.options import Options
from jax_splitk.tuning.select import announce, code_of, select, without_code
from jax_splitk.tuning.serving import serving, would_serve

_PLATFORMS = ("cpu", "cuda")


# An equation's problem in canonical form, from the types of its operands and its parameters.
_ProblemOf = Callable[[Sequence[Any], dict[str, Any]], Any]

# How an operation is divided among devices, likewise; or why it is not.
_RuleOf = Callable[[Sequence[Any], dict[str, Any]], Rule | str]

# Of (problem, parameters, the result's type), the function of an equation's operands in plain lax; without a problem of
# one that is lax's, as lax would trace it.
_InLax = Callable[[Any, dict[str, Any], Any], Callable[..., jax.Array]]


class Primitive(core.Primitive):
    """A primitive of ours, which `define` completes. Its name is that of the operation.

    Attributes:
      scope: the name, in HLO and in profiles, that those of all its operations have in them.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.scope = f"jax_splitk.{name.removeprefix('jax_splitk_')}"

    problem_of: _ProblemOf
    rule_of: _RuleOf
    in_lax: _InLax


def define(
    primitive: Primitive,
    abstract_eval: Callable[..., Any],
    problem_of: _ProblemOf,
    with_xla: _InLax,
    with_kernel: Callable[[Any, dict[str, Any], Any, CustomCall], Callable[..., jax.Array] | None],
    rule_of: _RuleOf,
) -> None:
    """Gives a primitive its type, its implementation outside jit and its lowering, on every platform.

    Args:
      primitive: its parameters include `options`, the caller's.
      abstract_eval: of the types of its operands and its parameters, the result's type.
      problem_of: see `_ProblemOf`.
      with_xla: see `_InLax`.
      with_kernel: of (problem, parameters, the result's type, custom call), the function of the operands around the
        custom call; None where its operands and result are the primitive's as they are.
      rule_of: see `_RuleOf`.
    """
    primitive.problem_of, primitive.rule_of, primitive.in_lax = problem_of, rule_of, with_xla
    run_outside_jit(primitive)

    def traced(*avals: Any, **params: Any) -> Any:
        out = abstract_eval(*avals, **params)
        with contextlib.suppress(Exception):  # it comes again at lowering
            problem = routed(primitive, avals, params, "cuda")
            if problem is not None and only_xla(problem) is None:
                ahead.traced(served(problem, "cuda"), params["options"])
        return out

    primitive.def_abstract_eval(traced)
    for platform in (*_PLATFORMS, None):

        def rule(ctx: Any, *operands: Any, platform: str = platform or "other", **params: Any) -> Any:
            ctx = _compat.named(ctx, primitive.scope)
            problem = routed(primitive, ctx.avals_in, params, platform)
            if problem is None:
                _left_to_lax(primitive, ctx.avals_in, params)
                return in_lax(primitive, ctx, operands, params)
            problem = served(problem, platform)
            undivided = None
            if _compat.is_automatically_partitioned(ctx):
                laxs = stays_laxs(ctx, problem, params["options"], platform)
                division = laxs or division_rule(ctx, primitive, params, platform)
                if isinstance(division, Rule):
                    return partitioning.lower(ctx, primitive, division, params, problem, operands)
                undivided = division
            custom_call = _chosen(ctx, problem, platform, params["options"], undivided)
            (out,) = ctx.avals_out
            if custom_call is None and params["options"].quiet:
                return in_lax(primitive, ctx, operands, params)  # to the letter, so that XLA fuses it as it does lax's
            if custom_call is None:
                function = _compat.over_auto_axes(with_xla(problem, params, out), _compat.explicit_sharding(out))
            elif (function := with_kernel(problem, params, out, custom_call)) is None:
                return execute.lower(ctx, custom_call, problem, operands)
            return mlir.lower_fun(function, False)(ctx, *operands)

        mlir.register_lowering(primitive, rule, platform=platform)


def routed(primitive: Primitive, avals: Sequence[Any], params: dict[str, Any], platform: str) -> Problem | None:
    """The problem of an equation; None where it is lax's: a quiet one for which no family of `platform` competes."""
    options: Options = params["options"]
    if not options.quiet:
        return primitive.problem_of(avals, params)
    if options.implementation == "xla" or not _has_elements(avals):
        return None
    problem = primitive.problem_of(avals, params)
    return problem if competes(problem, target_for(platform)) else None


def competes(problem: Problem, target: Target) -> bool:
    """Whether a pass that the caller did not name may be a kernel's."""
    return any(family.competes for family in serving(problem, target))


def _has_elements(avals: Sequence[Any]) -> bool:
    """Whether the sizes are known, and none is 0."""
    sizes = [size for aval in avals for size in aval.shape]
    return _compat.is_known(*sizes) and 0 not in sizes


def _left_to_lax(primitive: Primitive, avals: Sequence[Any], params: dict[str, Any]) -> None:
    """Tells those who watch of a pass for which no kernel of this platform competes: one of another may."""
    if watch.state.watchers and _has_elements(avals):
        watch.state.asked(primitive.problem_of(avals, params), params["options"])


def in_lax(primitive: Primitive, ctx: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """Lowers an equation that is lax's as lax does."""
    (out,) = ctx.avals_out
    return mlir.lower_fun(primitive.in_lax(None, params, out), False)(ctx, *operands)


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


def served(problem: Problem, platform: str) -> Problem:
    """What kernels of the platform compute of a problem: all of it, or the product alone where none of them takes the
    epilogue with it, which is XLA's then."""
    if not isinstance(problem, DotProblem) or not problem.epilogue or only_xla(problem) is not None:
        return problem
    families = kernels.families(problem.op, platform)
    takes = lambda problem: any(family.problem_refusal(problem) is None for family in families)  # noqa: E731
    return problem.product if takes(problem.product) and not takes(problem) else problem


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
        return Choice(problem, XLA, reason, kernel_blocked=problem.refusal is None and target.is_hopper)
    if undivided is not None and options.implementation != "xla":
        if options.quiet and (whole := select(problem, target, options)).candidate == XLA:
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
    """Why a quiet pass under automatic partitioning is lax's, divided or not: no kernel is chosen for the whole, nor
    for a device's part if all devices divide its batch, which is measured as far as it may be. None where one is.
    `final`: it will be lowered."""
    if not options.quiet or only_xla(problem) is not None or not isinstance(problem, ConvProblem):
        return None
    target, unmeasured = target_for(platform), dataclasses.replace(options, alone=True)
    here = final and target.is_local and not _compat.is_export(ctx)
    # In a job all processes must find the same; nothing is measured for it.
    agreed, devices = here and agreement.needed(), _compat.device_count(ctx)

    def is_kernels(problem: Problem, options: Options, measure: bool) -> bool:
        choice = select(problem, target, options, measure=measure)
        # In a job the process that lacks the compiler says so where the others compile (`code_of`).
        return choice.candidate != XLA and (not final or agreed or without_code(choice, target) is None)

    if is_kernels(problem, unmeasured, agreed):
        return None
    if problem.batch % devices == 0:
        part = dataclasses.replace(problem, batch=problem.batch // devices)
        if is_kernels(part, unmeasured if agreed else options, here):
            return None
    return "no kernel is chosen for it"


def division_rule(ctx: Any, primitive: Primitive, params: dict[str, Any], platform: str) -> Rule | str:
    """How an equation under automatic partitioning is divided among devices, or why XLA is left to do it."""
    problem, options = primitive.problem_of(ctx.avals_in, params), params["options"]
    if options.implementation == "xla":
        return "implementation='xla' was asked for"
    if not kernels.families(problem.op, platform):
        return f"no kernel for platform {platform}"
    return only_xla(problem) or partitioning.refusal(ctx) or primitive.rule_of(ctx.avals_in, params)


def _chosen(
    ctx: mlir.LoweringRuleContext, problem: Problem, platform: str, options: Options, undivided: str | None
) -> CustomCall | None:
    """The custom call that is lowered, None for XLA's operation, with a line in the log."""
    target = target_for(platform)
    # Only what will run here can be measured here.
    measure = undivided is None and not _compat.is_export(ctx) and target.is_local
    if not _compat.is_automatically_partitioned(ctx):
        ahead.lowered(problem, options, target, measure)
    choice = choose(problem, target, options, undivided=undivided, measure=measure, final=True)
    choice, custom_call = code_of(choice, target, options, agreed=measure)
    announce(choice, options)
    return custom_call
