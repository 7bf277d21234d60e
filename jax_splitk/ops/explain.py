"""`explain`: finds the operations in a function's trace, and asks the selection what would compute them."""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.extend import core

from jax_splitk.kernels.base import cost_model
from jax_splitk.ops import trace
from jax_splitk.ops.chained import chain_p
from jax_splitk.ops.chains import PRODUCTS
from jax_splitk.ops.decision import Decision, decision, impossible
from jax_splitk.ops.equations import inner, walk
from jax_splitk.ops.explanation import Explanation
from jax_splitk.ops.few_rows import copied_products, copy_bytes, options_of_copied
from jax_splitk.ops.lax_convolutions import passes
from jax_splitk.ops.lax_grouped import grouped_products
from jax_splitk.ops.lax_products import dequantized_products
from jax_splitk.ops.lowering import choose
from jax_splitk.ops.propagation import Operation
from jax_splitk.ops.routing import competes, only_xla, served
from jax_splitk.problems.conv_passes import PASSES
from jax_splitk.problems.conv_wgrad import ConvProblem
from jax_splitk.problems.dot_general import DotProblem
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime import toolchain
from jax_splitk.runtime.target import Target, local_platform, target_for
from jax_splitk.tuning.choice import XLA, Choice
from jax_splitk.tuning.options import Options, current
from jax_splitk.tuning.select import is_silent, select

# As JAX names what it lowers for.
_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")

# The problems of operations that a caller does not name.
_IMPLIED = (*PASSES, DotProblem)

_NO_GRADIENT = (
    "This function has {} that no kernel of jax_splitk would compute faster, and no gradient of a weight, where "
    "kernels gain most. Explain jax.grad of a loss, or the train step."
)
_NO_COMPILER = (
    "Nothing is installed here that compiles these kernels, and what is lowered for CUDA here is XLA's. The extra "
    "`compiler` has what is missing, and `cuda13` on a machine with a GPU: pip install '.[compiler]' in the checkout."
)


def explain(
    fn: Callable[..., Any], *args: Any, platform: str | None = None, verbose: bool = False, **kwargs: Any
) -> Explanation:
    """Says what computes each operation of `fn(*args, **kwargs)`, and why.

    For each pass of a convolution, each grouped product and each product with a quantized weight that is plain lax, it
    says what jax_splitk would do, and the gain. The same holds for each product of at most 64 rows in a loop whose
    weight is a slice of a stack: XLA copies the slice first.

    Forward passes and input gradients that are lax's are left out, unless they were asked for by name: those for which
    no kernel competes, and those that are counted in `notes`, because XLA is faster.

    Nothing is run, measured or compiled. Shapes are those of the trace: under vmap the batched ones, inside shard_map a
    device's part. `fn` is taken as one program: where an argument, or a sharding or mesh that `fn` names, lies on
    several devices, XLA will partition it, and the result shows a device's part, as Shardy divides it.

    A laptop can explain what a GPU would do: `explain(step, params, batch, platform="cuda")` needs no GPU, no CUDA
    driver and no compiler of kernels, and takes `jax.ShapeDtypeStruct`s in place of arrays. It says what an H200 would
    run, by the tables that ship with the package and the cost model; on the GPU itself, caches and tuning count as
    well.

    Args:
      fn: a function that `jax.make_jaxpr` accepts, e.g. a train step or `jax.grad` of a loss.
      *args: its arguments; arrays or `jax.ShapeDtypeStruct`s, whose shardings count.
      **kwargs: its arguments by name. Those called platform or verbose have to be bound before (`functools.partial`).
      platform: "cpu", "cuda" (also without a GPU: then for an H200), "rocm" or "tpu"; None for the default backend's.
      verbose: whether `str()` of the result also has each operation's config, workspace and whole reason.

    Returns:
      The decisions, in the order of the trace; `str()` of it is a table of at most 100 columns, and what the kernels
      gain.

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
    decisions, equations = [d for d in found.values() if d is not None], list(walk(jaxpr))
    unrouted = routed(collections.Counter(left_to_lax(jaxpr)), target)
    silent = (op for op in operations if found[op] is None and isinstance(op.problem, ConvProblem))
    notes = about_silent(sum(operations[op] for op in silent)) + _about_chains(equations)
    names = ("conv_general_dilated", "conv_fprop", "conv_fprop_epilogue")
    convolutions = sum(eqn.primitive.name in names for eqn in equations)
    if convolutions and not any(isinstance(d.problem, ConvProblem) for d in (*decisions, *unrouted)):
        notes = (*notes, _NO_GRADIENT.format(f"{convolutions} convolution{'s' * (convolutions > 1)}"))
    return explanation(target, decisions, unrouted, notes, verbose)


def explanation(
    target: Target,
    decisions: Sequence[Decision],
    unrouted: Sequence[Decision] = (),
    notes: Iterable[str] = (),
    verbose: bool = False,
) -> Explanation:
    """The decisions for a target, with a note where this machine has no such device or no compiler for it."""
    needs_compiler = any(d.implementation == "cutlass" for d in (*decisions, *unrouted))
    lacks = needs_compiler and toolchain.unavailable() is not None
    assumed = target.platform == "cuda" and not target.is_local
    notes = (*notes, *[_NO_COMPILER] * lacks)
    return Explanation(target.platform, target.device_kind, assumed, tuple(decisions), tuple(unrouted), notes, verbose)


def _decision(operation: Operation, target: Target, count: int) -> Decision | None:
    """The decision for an operation; None for a silent one (`is_silent`)."""
    problem, options = operation.problem, operation.options
    try:
        choice = choose(problem, target, options, undivided=operation.undivided)
    except (NotImplementedError, ValueError) as error:
        return impossible(problem, options.config, error, count)
    if is_silent(choice, options):
        return None
    return _noted(decision(choice, target, count), operation.note)


def _noted(shown: Decision, note: str) -> Decision:
    """The decision with a note for the reader."""
    if not note:
        return shown
    return dataclasses.replace(shown, because=f"{shown.because}; {note}", why=f"{shown.why}; {note}")


def about_silent(count: int) -> tuple[str, ...]:
    """A note that counts silent passes; empty for none."""
    passes = "passes" if count > 1 else "pass"
    said = (
        f"{count} more {passes} of convolutions (forward or input gradient): lax's, as XLA is faster than our kernels."
    )
    return (said,) * (count > 0)


def _about_chains(equations: Iterable[core.JaxprEqn]) -> tuple[str, ...]:
    """A note that counts the products in chains; empty for none."""
    sizes = [sum(each.primitive in PRODUCTS for each in walk(jaxpr))
             for eqn in equations if eqn.primitive is chain_p for jaxpr in inner(eqn)]  # fmt: skip
    chains = f"{len(sizes)} chain{'s' * (len(sizes) > 1)}"
    said = f"{sum(sizes)} products are in {chains}: neighbours whose kernel is quantized_stream's are one custom call."
    return (said,) * bool(sizes)


def left_to_lax(jaxpr: core.Jaxpr) -> Iterator[Problem]:
    """The problems that a program leaves to lax and jax_splitk may compute, each as often as the program has it."""
    equations = list(walk(jaxpr))
    yield from passes(equations)
    yield from grouped_products(equations)
    yield from dequantized_products(jaxpr)
    yield from copied_products(jaxpr)


def routed(problems: Mapping[Problem, int], target: Target) -> list[Decision]:
    """The decisions if these problems were routed to jax_splitk. Implied passes, and products of a stack's slices, are
    left out unless a kernel would compute them."""
    found: list[Decision | None] = []
    for problem, count in problems.items():
        implied = isinstance(problem, _IMPLIED)
        try:
            problem.validate()
        except ValueError as error:
            found.append(None if implied else impossible(problem, None, error, count))
        else:
            options = current().of_another_pass() if implied else current()
            if isinstance(problem, DotProblem):
                options = options_of_copied()
            found.append(_with_copy(expected(problem, options, target, count), target))
    return [d for d in found if d is not None and (d.family is not None or not isinstance(d.problem, _IMPLIED))]


def _with_copy(shown: Decision | None, target: Target) -> Decision | None:
    """Adds the time to copy a slice out of its stack to XLA's time, in the decision for a product with the slice.
    Leaves decisions for other operations as they are."""
    if shown is None or shown.family is None or not isinstance(shown.problem, DotProblem):
        return shown
    rates = cost_model.rates(target.platform, target.device_kind)
    copy_us = 1e6 * (rates.launch_seconds + copy_bytes(shown.problem) / rates.memory_bytes)
    xla_us = None if shown.xla_us is None else shown.xla_us + copy_us
    said = dataclasses.replace(shown, xla_us=xla_us, measured=False)
    return _noted(said, f"XLA copies the weight out of its stack first, in about {copy_us:.0f} us")


def expected(problem: Problem, options: Options, target: Target, count: int = 1) -> Decision | None:
    """The decision for a problem on one device of a target; None for an implied pass that would be lax's."""
    reason = only_xla(problem)
    if options.implied and (reason is not None or not competes(problem, target)):
        return None
    problem, note = served(problem, target.platform)
    try:
        choice = select(problem, target, options) if reason is None else Choice(problem, XLA, reason)
    except (NotImplementedError, ValueError) as error:
        return impossible(problem, options.config, error, count)
    return None if is_silent(choice, options) else _noted(decision(choice, target, count), note)
