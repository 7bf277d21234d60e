"""The result of `explain`: tables of at most 100 columns, the gain of the kernels, and how to route other
operations."""

import dataclasses
import re
import textwrap
from collections.abc import Sequence

import tabulate

from jax_splitk.ops.decision import Decision, Gain, total_gain
from jax_splitk.problems.conv_wgrad import ConvProblem
from jax_splitk.problems.problem import Problem

WIDTH = 100
_REASON_WIDTH = 24  # of the last column, where there is no room for more
_HEADER = ("operation", "kernel", "us", "XLA us", "saved us", "because")

_HOW = {
    "convolution": "To route convolutions: jax_splitk.conv_general_dilated in place of lax.conv_general_dilated, or "
    "the function traced inside `with jax_splitk.intercept():`.",
    "dot_general": "To route products of few rows with a slice of a stack: the function traced inside "
    "`with jax_splitk.intercept(few_rows=True):`, or jax_splitk.matmul(x, w, implementation='cutlass'). XLA's own "
    "products read the slices in place under two options of XLA, which docs/limits.md names.",
    "quantized_matmul": "To route products: jax_splitk.quantized_matmul(x, w) for w = jax_splitk.prepack("
    "jax_splitk.quantize(...)), which is made once. Its gradient with respect to x reads the same weight.",
    "ragged_dot": "To route grouped products: jax_splitk.ragged_dot in place of lax.ragged_dot, or the function traced "
    "inside `with jax_splitk.intercept():`.",
}


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The decisions for a function, in the order of its trace. `str()` gives a table and the gain.

    Attributes:
      platform: "cpu", "cuda", "rocm" or "tpu".
      device: the processor that the decisions are for, e.g. "NVIDIA H200".
      assumed: whether the device is assumed, since this machine has none.
      decisions: the function's jax_splitk operations.
      unrouted: lax's operations that jax_splitk could compute: weight gradients of convolutions, forward passes and
        input gradients for which it has a kernel, grouped products, products with a dequantized argument, and products
        of few rows whose weight XLA copies out of a stack, with the copy in XLA's time. The decision is the one after
        routing the operation to jax_splitk, unless XLA's partitioner prevents it.
      notes: further remarks, one sentence each.
      verbose: whether `str()` shows configs, splits, workspaces and full reasons.
    """

    platform: str
    device: str
    assumed: bool
    decisions: tuple[Decision, ...]
    unrouted: tuple[Decision, ...] = ()
    notes: tuple[str, ...] = ()
    verbose: bool = False

    @property
    def gain(self) -> Gain:
        """The gain of the function's jax_splitk operations over XLA."""
        return total_gain(self.decisions)

    @property
    def gain_if_routed(self) -> Gain:
        """The possible gain of operations that are left to lax."""
        return total_gain(self.unrouted)

    def __str__(self) -> str:
        return _text(self)


def _text(explained: Explanation) -> str:
    """The whole text of an explanation."""
    lines = [_title(explained)]
    if explained.decisions:
        lines += _table(explained.decisions, explained.verbose)
    else:
        lines.append("no jax_splitk operations")
    if explained.unrouted:
        lines += ["", "left to lax; routed to jax_splitk it would be:"]
        lines += _table(explained.unrouted, explained.verbose)
        for said in dict.fromkeys(_HOW[_routed_with(d.problem)] for d in explained.unrouted):
            lines += _wrapped(said)
    shown = (*explained.decisions, *explained.unrouted)
    if any(d.ours_us is not None and not d.measured for d in shown):
        lines.append("~: estimated by the cost model, not measured. ?: not known.")
    for note in explained.notes:
        lines += _wrapped(note)
    if explained.decisions:
        lines.append(f"sum of {_counted(explained.decisions)}: {explained.gain}")
    if explained.unrouted:
        lines.append(f"routing {_counted(explained.unrouted)}: {explained.gain_if_routed}")
    return "\n".join(lines)


def _title(explained: Explanation) -> str:
    device = "" if explained.device == explained.platform else f": {explained.device}"
    assumed = ", which is assumed: this machine has no CUDA GPU" if explained.assumed else ""
    return f"platform {explained.platform}{device}{assumed}"


def _counted(decisions: Sequence[Decision]) -> str:
    count = sum(d.count for d in decisions)
    return f"{count} operation{'s' * (count > 1)}"


def _routed_with(problem: Problem) -> str:
    return "convolution" if isinstance(problem, ConvProblem) else problem.op


def _wrapped(said: str) -> list[str]:
    return textwrap.wrap(said, WIDTH, break_long_words=False, break_on_hyphens=False)


def _table(decisions: Sequence[Decision], verbose: bool) -> list[str]:
    rows = [_row(d) for d in decisions]
    operation, *fixed, reason = (max(map(len, column)) for column in zip(_HEADER, *rows, strict=True))
    room = WIDTH - sum(fixed) - 2 * (len(_HEADER) - 1)
    operation = min(operation, room - min(reason, _REASON_WIDTH))
    lines = tabulate.tabulate(
        [_HEADER, *rows],  # a header of tabulate's own would widen columns
        tablefmt="plain",
        disable_numparse=True,
        colalign=("left", "left", "right", "right", "right", "left"),
        maxcolwidths=[operation, *[None] * len(fixed), room - operation],
    ).splitlines()
    if verbose:
        for d in decisions:
            lines += ["", *_details(d)]
    return [line.rstrip() for line in lines]


def _row(d: Decision) -> tuple[str, ...]:
    """The cells of a decision. A time is for one operation, a saving for all of them."""
    times = [_time(us, d) for us in (d.ours_us, d.xla_us)]
    saved = "?" if d.family is not None else ""
    if d.family is not None and d.saved_us is not None:
        saved = f"{'' if d.measured else '~'}{d.count * d.saved_us:.1f}"
    return (d.problem.brief, d.family or d.implementation, *times, saved, _reason(d))


def _reason(d: Decision) -> str:
    """The source of the decision, without the number of configs that the cost model compared."""
    return re.sub(r"'s best of \d+ configs\b", "", d.because)


def _time(us: float | None, d: Decision) -> str:
    if us is None:
        return "?"
    times = f"{d.count} x " if d.count > 1 else ""
    return f"{times}{'' if d.measured else '~'}{us:.1f}"


def _details(d: Decision) -> list[str]:
    """Further lines of a verbose text."""
    config = "" if d.config is None else f"  {d.family} {d.config}"
    splits = "" if d.splits is None else f"splits {d.splits}, "
    workspace = f"  {splits}workspace {d.workspace_bytes / 2**20:.2f} MiB"
    return [f"{d.count} x {d.problem}", *filter(None, (config, workspace)), f"  {d.why}"]
