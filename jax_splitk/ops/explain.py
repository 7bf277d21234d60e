"""What would run, and why: reads the operations out of a function's trace and asks the selection code."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jax_splitk.ops import trace
from jax_splitk.ops.lowering import choose
from jax_splitk.ops.propagation import Operation
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime.target import local_platform, target_for
from jax_splitk.tuning.choice import Choice

# As JAX names what it lowers for.
_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


@dataclasses.dataclass(frozen=True)
class Decision:
    """One operation of a traced function.

    Attributes:
      problem: what is computed.
      implementation: "cutlass", "host" or "xla"; "none" where an explicit choice cannot serve.
      family: the kernel family, e.g. "wgrad_im2col"; None for XLA.
      config: the family's config, None for XLA.
      splits: parts into which the reduction is cut, None for XLA.
      workspace_bytes: scratch memory asked of XLA.
      why: one sentence.
      count: how many operations of the function are this one.
    """

    problem: Problem
    implementation: str
    family: str | None
    config: Any
    splits: int | None
    workspace_bytes: int
    why: str
    count: int = 1


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The decisions for a function, in the order of its trace; `str()` of it is a table."""

    platform: str
    decisions: tuple[Decision, ...]

    def __str__(self) -> str:
        if not self.decisions:
            return f"no jax_splitk operations (platform {self.platform})"
        header = ("operation", "x", "implementation", "family", "config", "splits", "workspace", "why")
        rows: list[tuple[str, ...]] = [header]
        for d in self.decisions:
            config = "" if d.config is None else str(d.config)
            splits = "" if d.splits is None else str(d.splits)
            size = f"{d.workspace_bytes / 2**20:.2f} MiB"
            rows.append((str(d.problem), str(d.count), d.implementation, d.family or "", config, splits, size, d.why))
        widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([f"platform {self.platform}", *lines])


def decision(choice: Choice, count: int = 1) -> Decision:
    """What is shown of a choice."""
    family = None if choice.family is None else choice.family.name
    splits = getattr(choice.config, "splits", None)
    why, size = choice.why, choice.workspace_bytes
    return Decision(choice.problem, choice.implementation, family, choice.config, splits, size, why, count)


def explain(fn: Callable[..., Any], *args: Any, platform: str | None = None, **kwargs: Any) -> Explanation:
    """For each jax_splitk operation in a trace of `fn(*args, **kwargs)`: what computes it and why.

    Nothing is run, measured or compiled. Shapes are those of the trace: under vmap the batched ones, inside shard_map
    a device's part. `fn` is taken as one program: where an argument, or a sharding or mesh that `fn` names, lies on
    several devices, XLA will partition it, and shown is a device's part, as Shardy divides it.

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
    for operation in trace.operations(fn, args, kwargs, platform):
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
        why = f"{shown.why}; {operation.part_of}" if operation.part_of else shown.why
        found[operation] = dataclasses.replace(shown, why=why)
    return Explanation(platform, tuple(found.values()))
