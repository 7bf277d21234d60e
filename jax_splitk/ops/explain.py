"""What would run, and why: reads the operations out of a function's trace and asks the selection code."""

import collections
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from jax_splitk.kernels import xla
from jax_splitk.ops import trace
from jax_splitk.ops.explanation import Decision, Explanation, decision
from jax_splitk.ops.lax_convolutions import passes
from jax_splitk.ops.lax_products import dequantized_products
from jax_splitk.ops.lowering import choose, competes, only_xla
from jax_splitk.ops.propagation import Operation
from jax_splitk.problems.conv_passes import PASSES
from jax_splitk.problems.conv_wgrad import ConvProblem
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime.target import Target, local_platform, target_for
from jax_splitk.tuning.choice import XLA, Choice
from jax_splitk.tuning.options import Options, current
from jax_splitk.tuning.select import is_silent, select

# As JAX names what it lowers for.
_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")

_NO_GRADIENT = (
    "This function has {} that no kernel of jax_splitk would compute faster, and no gradient of a weight, where "
    "kernels gain most. Explain jax.grad of a loss, or the train step."
)


def explain(fn: Callable[..., Any], *args: Any, platform: str | None = None, **kwargs: Any) -> Explanation:
    """Says what computes each operation of `fn(*args, **kwargs)`, and why.

    For each pass of a convolution and each product with a quantized weight that is plain lax, it says what jax_splitk
    would do, and the gain.

    Forward passes and input gradients that are lax's are left out, unless they were asked for by name: those for which
    no kernel competes, and those that are counted in `notes`, because XLA is faster.

    Nothing is run, measured or compiled. Shapes are those of the trace: under vmap the batched ones, inside shard_map
    a device's part. `fn` is taken as one program: where an argument, or a sharding or mesh that `fn` names, lies on
    several devices, XLA will partition it, and shown is a device's part, as Shardy divides it.

    A laptop can explain what a GPU would do: `explain(step, params, batch, platform="cuda")` needs no GPU and no CUDA
    driver, and takes `jax.ShapeDtypeStruct`s in place of arrays. It says what an H200 would run, by the tables that
    ship with the package and the cost model; on the GPU itself caches and tuning come in.

    Args:
      fn: a function that `jax.make_jaxpr` accepts, e.g. a train step or `jax.grad` of a loss.
      *args: its arguments; arrays or `jax.ShapeDtypeStruct`s, whose shardings count.
      **kwargs: its arguments by name.
      platform: "cpu", "cuda" (also without a GPU: then for an H200), "rocm" or "tpu"; None for the default backend's.

    Returns:
      The decisions, in the order of the trace; `str()` of it is a table.

    Raises:
      ValueError: another platform.

    Examples:
      >>> x = jax.ShapeDtypeStruct((8, 56, 56, 64), jnp.bfloat16)
      >>> def wgrad(x, g):
      ...     numbers = ("NHWC", "HWIO", "NHWC")
      ...     return jax_splitk.conv_wgrad(x, g, (3, 3, 64, 64), (1, 1), "SAME", dimension_numbers=numbers)
      >>> (decision,) = jax_splitk.explain(wgrad, x, x, platform="tpu").decisions
      >>> decision.implementation, decision.why
      ('xla', 'no kernel for platform tpu')
    """
    if platform is not None and platform not in _PLATFORMS:
        raise ValueError(f"platform={platform!r}; accepted: None, {', '.join(map(repr, _PLATFORMS))}")
    if platform is None:
        platform = local_platform()
    target = target_for(platform)
    jaxpr = trace.traced(fn, args, kwargs)
    operations = collections.Counter(trace.operations(jaxpr, fn, args, kwargs, platform))
    found = {operation: _decision(operation, target, count) for operation, count in operations.items()}
    decisions, equations = tuple(d for d in found.values() if d is not None), list(trace.equations(jaxpr))
    unrouted = _unrouted([*passes(equations), *dequantized_products(jaxpr)], target)
    silent = sum(count for operation, count in operations.items() if found[operation] is None)
    notes = about_silent(silent)
    names = ("conv_general_dilated", "conv_fprop")
    convolutions = sum(eqn.primitive.name in names for eqn in equations)
    if convolutions and not any(isinstance(d.problem, ConvProblem) for d in (*decisions, *unrouted)):
        notes = (*notes, _NO_GRADIENT.format(f"{convolutions} convolution{'s' * (convolutions > 1)}"))
    return Explanation(platform, decisions, unrouted, tuple(_gain(d, target) for d in unrouted), notes)


def _decision(operation: Operation, target: Target, count: int) -> Decision | None:
    """What computes an operation; None for a silent one."""
    problem, options = operation.problem, operation.options
    try:
        choice = choose(problem, target, options, undivided=operation.undivided)
    except (NotImplementedError, ValueError) as error:
        return Decision(problem, "none", None, options.config, None, 0, str(error), count)
    if is_silent(choice, options):
        return None
    shown = decision(choice, count)
    return dataclasses.replace(shown, why=f"{shown.why}; {operation.note}") if operation.note else shown


def about_silent(count: int) -> tuple[str, ...]:
    """A note on so many silent passes, if there are any."""
    passes = "passes" if count > 1 else "pass"
    said = (
        f"{count} more {passes} of convolutions (forward or input gradient): lax's, as XLA is faster than our kernels."
    )
    return (said,) * (count > 0)


def _unrouted(problems: Iterable[Problem], target: Target) -> tuple[Decision, ...]:
    """What routing would lead to, each problem once; of quiet passes those that would be ours."""
    found: list[Decision | None] = []
    for problem, count in collections.Counter(problems).items():
        quiet = isinstance(problem, PASSES)
        try:
            problem.validate()
        except ValueError as error:
            found.append(None if quiet else Decision(problem, "none", None, None, None, 0, str(error), count))
        else:
            options = current().of_another_pass() if quiet else current()
            found.append(expected(problem, options, target, count))
    return tuple(d for d in found if d is not None and (d.family is not None or not isinstance(d.problem, PASSES)))


def expected(problem: Problem, options: Options, target: Target, count: int = 1) -> Decision | None:
    """What a problem would lead to on another machine, on one device; None for a quiet pass that would be lax's."""
    reason = only_xla(problem)
    if options.quiet and (reason is not None or not competes(problem, target)):
        return None
    try:
        choice = select(problem, target, options) if reason is None else Choice(problem, XLA, reason)
    except (NotImplementedError, ValueError) as error:
        return Decision(problem, "none", None, options.config, None, 0, str(error), count)
    return None if is_silent(choice, options) else decision(choice, count)


def _gain(d: Decision, target: Target) -> str:
    """What routing the operation would save."""
    if d.family is None or d.us is None:
        return "none"
    if d.xla_us is not None:
        return f"{d.count * (d.xla_us - d.us):.1f} of {d.count * d.xla_us:.1f} us"
    if (of_xla := xla.estimate(d.problem, target)) is not None:
        xla_us = of_xla.seconds * 1e6
        return f"about {d.count * (xla_us - d.us):.1f} of {d.count * xla_us:.1f} us, both predicted"
    return "not known: XLA was not measured"
