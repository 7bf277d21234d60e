"""How jax_splitk computes one operation of a function, and the time that several operations save."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax_splitk import kernels
from jax_splitk.kernels.base import xla
from jax_splitk.ops.routing import only_xla
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime.target import Target
from jax_splitk.tuning.choice import Choice


@dataclasses.dataclass(frozen=True)
class Decision:
    """One operation of a traced function, and how jax_splitk computes it.

    Attributes:
      problem: what is computed.
      implementation: "cutlass", "host" or "xla"; "none" where an explicit choice cannot serve.
      family: the kernel family, e.g. "wgrad_im2col"; None for XLA.
      config: the family's config, None for XLA.
      splits: parts into which the reduction is cut, None for XLA.
      workspace_bytes: scratch memory asked of XLA.
      because: what decided: a table, a cache, the cost model, a limit.
      why: one sentence: the same, with the times that were compared.
      count: how many operations of the function are this one.
      ours_us: microseconds of one operation as jax_splitk computes it, which may be by XLA; None if not known.
      xla_us: microseconds of one operation by XLA; None if not known.
      measured: whether both times were measured, in a table that ships with the package or by tuning. Else at least one
        of them is an estimate.
    """

    problem: Problem
    implementation: str
    family: str | None
    config: Any
    splits: int | None
    workspace_bytes: int
    because: str
    why: str
    count: int = 1
    ours_us: float | None = None
    xla_us: float | None = None
    measured: bool = False

    @property
    def saved_us(self) -> float | None:
        """Microseconds by which one operation is faster than XLA's: 0 if XLA computes it; None if not known."""
        if self.implementation == "xla":
            return 0.0
        return None if self.ours_us is None or self.xla_us is None else self.xla_us - self.ours_us


@dataclasses.dataclass(frozen=True)
class Gain:
    """The time that several operations save, each as often as it is computed.

    Attributes:
      saved_us: microseconds saved by the operations whose times by jax_splitk and by XLA are both known.
      xla_us: microseconds that XLA takes for the same operations.
      measured: whether all these times were measured.
      known: how many operations these are.
      unknown: how many other operations a kernel computes; the time that they save is not known.
    """

    saved_us: float
    xla_us: float
    measured: bool
    known: int
    unknown: int

    def __str__(self) -> str:
        operations = f"{self.unknown} operation{'s' * (self.unknown != 1)} not known"
        if not self.known:
            return operations
        about = "" if self.measured else "about "
        saved = f"{about}{_us(self.saved_us)} of {_us(self.xla_us)} us saved"
        return f"{saved}; {operations}" if self.unknown else saved


def _us(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}"


def total_gain(decisions: Sequence[Decision]) -> Gain:
    """The sum of the times that operations save."""
    known = [(d, d.saved_us, d.xla_us) for d in decisions if d.saved_us is not None and d.xla_us is not None]
    return Gain(
        saved_us=sum(d.count * saved for d, saved, _ in known),
        xla_us=sum(d.count * xla_us for d, _, xla_us in known),
        measured=all(d.measured for d, _, _ in known),
        known=sum(d.count for d, _, _ in known),
        unknown=sum(d.count for d in decisions if d.family is not None and d.saved_us is None),
    )


def decision(choice: Choice, target: Target, count: int = 1) -> Decision:
    """The decision that a choice for a target stands for. XLA's time is estimated where it was not measured."""
    times = choice.times
    xla_us = _estimated_xla_us(choice.problem, target) if times.xla_us is None else times.xla_us
    ours_us = xla_us if choice.family is None else times.us
    measured = times.xla_us is not None and ours_us is not None and not (times.predicted and choice.family is not None)
    return Decision(
        problem=choice.problem,
        implementation=choice.implementation,
        family=None if choice.family is None else choice.family.name,
        config=choice.config,
        splits=getattr(choice.config, "splits", None),
        workspace_bytes=choice.workspace_bytes,
        because=choice.because,
        why=choice.why,
        count=count,
        ours_us=ours_us,
        xla_us=xla_us,
        measured=measured,
    )


def _estimated_xla_us(problem: Problem, target: Target) -> float | None:
    """XLA's time by the cost model; None if no kernel runs on the target, whose speed is not known then."""
    families = kernels.families(problem.op, target.platform)
    if only_xla(problem) is not None or all(family.target_refusal(target) is not None for family in families):
        return None
    estimate = xla.estimate(problem, target)
    return None if estimate is None else estimate.seconds * 1e6


def impossible(problem: Problem, config: Any, error: Exception, count: int = 1) -> Decision:
    """The decision for an operation that an explicit choice cannot serve, or that is no valid problem."""
    return Decision(problem, "none", None, config, None, 0, str(error), str(error), count)
