"""What would run, and why: reads the operations out of a function's trace and asks the selection code."""

import collections
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from jax_splitk.kernels import xla
from jax_splitk.ops import trace
from jax_splitk.ops.explanation import Decision, Explanation, decision
from jax_splitk.ops.lax_convolutions import weight_gradients
from jax_splitk.ops.lax_products import dequantized_products
from jax_splitk.ops.lowering import choose, only_xla
from jax_splitk.ops.propagation import Operation
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime.target import Target, local_platform, target_for
from jax_splitk.tuning.choice import XLA, Choice
from jax_splitk.tuning.options import Options, current
from jax_splitk.tuning.select import select

# As JAX names what it lowers for.
_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")

_NO_GRADIENT = (
    "This function has {} and no gradient of a weight: gradients are where jax_splitk acts. Explain jax.grad of a "
    "loss, or the train step."
)


def explain(fn: Callable[..., Any], *args: Any, platform: str | None = None, **kwargs: Any) -> Explanation:
    """For each jax_splitk operation in a trace of `fn(*args, **kwargs)`: what computes it and why. For each weight
    gradient and each product with a quantized weight that is plain lax: what jax_splitk would do, and the gain.

    Nothing is run, measured or compiled. Shapes are those of the trace: under vmap the batched ones, inside shard_map
    a device's part. `fn` is taken as one program: where an argument, or a sharding or mesh that `fn` names, lies on
    several devices, XLA will partition it, and shown is a device's part, as Shardy divides it.

    A laptop can explain what a GPU would do: `explain(step, params, batch, platform="cuda")` needs no GPU and no CUDA
    driver, and takes `jax.ShapeDtypeStruct`s in place of arrays. It says what an H200 would run, by the tables that
    ship with the package and the cost model; on the GPU itself caches and tuning come in.

    Args:
      fn: a function that `jax.make_jaxpr` accepts, e.g. a train step or `jax.grad` of a loss.
      *args, **kwargs: its arguments; arrays or `jax.ShapeDtypeStruct`s, whose shardings count.
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
    found: dict[Operation, Decision] = {}
    jaxpr = trace.traced(fn, args, kwargs)
    for operation in trace.operations(jaxpr, fn, args, kwargs, platform):
        if operation in found:
            found[operation] = dataclasses.replace(found[operation], count=found[operation].count + 1)
            continue
        problem, options = operation.problem, operation.options
        try:
            choice = choose(problem, target, options, undivided=operation.undivided)
        except (NotImplementedError, ValueError) as error:
            found[operation] = Decision(problem, "none", None, options.config, None, 0, str(error))
            continue
        shown = decision(choice)
        why = f"{shown.why}; {operation.note}" if operation.note else shown.why
        found[operation] = dataclasses.replace(shown, why=why)
    decisions, equations = tuple(found.values()), list(trace.equations(jaxpr))
    unrouted = _unrouted([*weight_gradients(equations), *dequantized_products(jaxpr)], target)
    notes = ()
    names = ("conv_general_dilated", "conv_fprop")
    convolutions = sum(eqn.primitive.name in names for eqn in equations)
    if convolutions and not any(d.problem.op == "conv_wgrad" for d in (*decisions, *unrouted)):
        notes = (_NO_GRADIENT.format(f"{convolutions} convolution{'s' * (convolutions > 1)}"),)
    return Explanation(platform, decisions, unrouted, tuple(_gain(d, target) for d in unrouted), notes)


def _unrouted(problems: Iterable[Problem], target: Target) -> tuple[Decision, ...]:
    """What routing would lead to, each problem once."""
    found = []
    for problem, count in collections.Counter(problems).items():
        try:
            problem.validate()
        except ValueError as error:
            found.append(Decision(problem, "none", None, None, None, 0, str(error), count))
        else:
            found.append(expected(problem, current(), target, count))
    return tuple(found)


def expected(problem: Problem, options: Options, target: Target, count: int = 1) -> Decision:
    """What a problem would lead to on another machine, on one device."""
    reason = only_xla(problem)
    try:
        choice = select(problem, target, options) if reason is None else Choice(problem, XLA, reason)
    except (NotImplementedError, ValueError) as error:
        return Decision(problem, "none", None, options.config, None, 0, str(error), count)
    return decision(choice, count)


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
