"""What `explain` returns: a decision for each operation, and their table."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax_splitk.problems.conv_wgrad import ConvProblem
from jax_splitk.problems.problem import Problem
from jax_splitk.tuning.choice import Choice, gain


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
      us: microseconds of one operation: as measured, else as our cost model predicts them; None where neither is known,
        as of most operations that are left to XLA.
      xla_us: XLA's microseconds, where they were measured: in the tables that ship with the package, or by tuning.
    """

    problem: Problem
    implementation: str
    family: str | None
    config: Any
    splits: int | None
    workspace_bytes: int
    why: str
    count: int = 1
    us: float | None = None
    xla_us: float | None = None


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The decisions for a function, in the order of its trace; `str()` of it is a table and their sum.

    Attributes:
      decisions: of the function's jax_splitk operations.
      unrouted: of what it leaves to lax and jax_splitk would compute: weight gradients of lax's convolutions, those of
        their forward passes and input gradients that a kernel would compute, and products with arguments of a quantized
        dtype that are dequantized before. The decision is the one that routing the operation to jax_splitk would lead
        to, if no partitioner of XLA's is in the way.
      gains: for each of `unrouted`, what routing would save, in words.
      notes: what else there is to say, a sentence each.
    """

    platform: str
    decisions: tuple[Decision, ...]
    unrouted: tuple[Decision, ...] = ()
    gains: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"no jax_splitk operations (platform {self.platform})"]
        if self.decisions:
            lines = [f"platform {self.platform}", *_table(self.decisions), _sum(self.decisions)]
        if self.unrouted:
            lines += ["", "left to lax; routed to jax_splitk they would be:", *_table(self.unrouted, self.gains)]
            lines += dict.fromkeys(_HOW[_routed_with(d.problem)] for d in self.unrouted)
        return "\n".join([*lines, *self.notes])


_HOW = {
    "convolution": "To route convolutions: jax_splitk.conv_general_dilated in place of lax.conv_general_dilated, or "
    "the function traced inside `with jax_splitk.intercept():`.",
    "quantized_matmul": "To route products: jax_splitk.quantized_matmul(x, w) for w = jax_splitk.prepack("
    "jax_splitk.quantize(...)), which is made once. For x @ w.T in a gradient: its argument transposed=.",
}


def _routed_with(problem: Problem) -> str:
    return "convolution" if isinstance(problem, ConvProblem) else problem.op


def _table(decisions: Sequence[Decision], gains: Sequence[str] | None = None) -> list[str]:
    header = ("operation", "x", "implementation", "family", "config", "splits", "workspace", "why")
    rows: list[tuple[str, ...]] = [header if gains is None else (*header[:-1], "gain", "why")]
    for i, d in enumerate(decisions):
        config = "" if d.config is None else str(d.config)
        splits = "" if d.splits is None else str(d.splits)
        row = (str(d.problem), str(d.count), d.implementation, d.family or "", config, splits)
        gain = () if gains is None else (gains[i],)
        rows.append((*row, f"{d.workspace_bytes / 2**20:.2f} MiB", *gain, d.why))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _sum(decisions: Sequence[Decision]) -> str:
    """One line for the whole function."""
    timed = [d for d in decisions if d.us is not None]
    compared = [d for d in timed if d.xla_us is not None]
    count, timed_count, compared_count = (sum(d.count for d in some) for some in (decisions, timed, compared))
    total = lambda some, name: sum(d.count * getattr(d, name) for d in some)  # noqa: E731
    ours, xla = (total(compared, name) for name in ("us", "xla_us"))
    against = f"{ours:.1f} us measured{{}}, XLA {xla:.1f} us, {gain(ours, xla)}" if compared else ""
    said = [f"sum: {count} operation{'s' * (count > 1)}"]
    known = "" if timed_count == count else f" for {timed_count} of them"
    if compared and compared_count == timed_count:
        said.append(against.format(known))
    elif timed:
        said.append(f"{total(timed, 'us'):.1f} us {'measured or ' if compared else ''}predicted{known}")
    if compared_count < timed_count and compared:
        said.append(against.format(f" for {compared_count} of them"))
    return "; ".join([*said, f"workspace of at most {max(d.workspace_bytes for d in decisions) / 2**20:.2f} MiB"])


def decision(choice: Choice, count: int = 1) -> Decision:
    """What is shown of a choice."""
    family = None if choice.family is None else choice.family.name
    splits = getattr(choice.config, "splits", None)
    shown = (choice.problem, choice.implementation, family, choice.config, splits, choice.workspace_bytes, choice.why)
    us = choice.times.xla_us if choice.family is None else choice.times.us
    return Decision(*shown, count, us, choice.times.xla_us)
