"""The chart and the table of a report of `benchmarks.profile_step`: when each kernel of a training step ran."""

from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

# The parts of `benchmarks.profile_step`.
COLORS = {
    "forward": "#1f5fa8",
    "input gradient": "#4d8f57",
    "weight gradient": "#c2571a",
    "int4 product": "#7b4fa3",
    "XLA": "#b9bec6",
}
# A width at which the text is legible: 9 pixels high if the chart is 400 pixels wide.
WIDTH_INCHES, TEXT_POINTS = 6.0, 10


def rows(report: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The kernels of the step by the row that shows them: one for each of our kernels' names, one for each part of the
    step that XLA computes."""
    (result,) = report["results"]
    found: dict[str, list[dict[str, Any]]] = {}
    for kernel in result["launches"]:
        found.setdefault(row_of(kernel), []).append(kernel)
    return found


def row_of(kernel: dict[str, Any]) -> str:
    ours = kernel["kernel"].startswith(("fprop_", "dgrad_", "wgrad_", "dot_", "quantized_"))
    return kernel["kernel"] if ours else "XLA" if kernel["part"] == "XLA" else f"XLA: {kernel['part']}"


def timeline(report: dict[str, Any]) -> Figure:
    found = rows(report)
    end = max(kernel["start_us"] + kernel["us"] for kernels in found.values() for kernel in kernels)
    figure = Figure(figsize=(WIDTH_INCHES, 1.7 + 0.27 * len(found)), layout="constrained")
    axes = figure.subplots()
    for row, (name, kernels) in enumerate(found.items()):
        spans = [(kernel["start_us"], kernel["us"]) for kernel in kernels]
        axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=[COLORS[kernel["part"]] for kernel in kernels])
        total = sum(kernel["us"] for kernel in kernels)
        axes.text(1.02 * end, row, f"{total:.1f}", va="center", fontsize=TEXT_POINTS, gid=name)
    axes.text(1.02 * end, -1, "us", va="center", fontsize=TEXT_POINTS)
    axes.set_yticks(range(len(found)), list(found), fontsize=TEXT_POINTS)
    axes.set_ylim(len(found) - 0.4, -1.5)
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= end])
    axes.set_xlim(0, 1.18 * end)
    axes.tick_params(axis="x", labelsize=TEXT_POINTS)
    axes.set_xlabel("us from the step's first kernel", fontsize=TEXT_POINTS)
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"A training step on one {report['environment']['device_kind']}", fontsize=TEXT_POINTS)
    present = {kernel["part"] for kernels in found.values() for kernel in kernels}
    handles = [Patch(color=color, label=part) for part, color in COLORS.items() if part in present]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=TEXT_POINTS, frameon=False)
    return figure


def table(report: dict[str, Any]) -> str:
    """The same kernels in Markdown, with the operation's name in HLO."""
    lines = ["| kernel | part | start us | us | op_name |", "|---|---|---|---|---|"]
    for kernel in report["results"][0]["launches"]:
        times = f"{kernel['start_us']:.1f} | {kernel['us']:.1f}"
        lines.append(f"| {kernel['kernel']} | {kernel['part']} | {times} | {kernel['op_name']} |")
    return "\n".join(lines) + "\n"
