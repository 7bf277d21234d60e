"""Summaries of reports: the sentences and the table of groups that README and docs quote.

python -m benchmarks.plot REPORT.json [MORE.json ...] OUT.txt
"""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.quantized_cases import FASTEST, crossover

# The names of benchmarks.conv's groups in tables.
GROUP_TITLES = {
    "depthwise": "depthwise in 2D and 16 bits",
    "depthwise-any": "depthwise in 1D, 3D or float32",
    "grouped": "grouped",
    "stem-fprop": "stems, forward pass",
    "stem-wgrad": "stems, weight gradient",
    "conv3d": "3D",
    "strided": "strided and transposed",
    "batch8": "batch 8",
    "dense": "large dense 3x3",
}
# "Few rows" are at most this many.
FEW_ROWS = 16


def ratio(result: dict[str, Any]) -> float:
    """XLA's time, or stock JAX's, over ours."""
    return result["ratio"] if "ratio" in result else result["xla"]["us"] / result["ours"]["us"]


def headline(results: Sequence[dict[str, Any]]) -> str:
    """Median and geometric mean of the ratios, and the mean without the largest ratio, which may dominate a mean."""
    ratios = sorted(map(ratio, results))
    text = f"median {statistics.median(ratios):.2f}, geometric mean {statistics.geometric_mean(ratios):.2f}"
    if len(ratios) == 1:
        return text
    return f"{text} ({statistics.geometric_mean(ratios[:-1]):.2f} without the largest, {ratios[-1]:.2f})"


def groups_table(results: Sequence[dict[str, Any]]) -> str:
    """Geometric mean, least and largest ratio of each group of convolutions, in Markdown."""
    lines = ["| group | passes | ratio | least | largest |", "|---|---|---|---|---|"]
    for group, title in GROUP_TITLES.items():
        ratios = [ratio(result) for result in results if result["case"]["group"] == group]
        if ratios:
            mean = statistics.geometric_mean(ratios)
            lines.append(f"| {title} | {len(ratios)} | {mean:.2f} | {min(ratios):.2f} | {max(ratios):.2f} |")
    return "\n".join(lines) + "\n"


# ---- products with quantized weights ---------------------------------------------------------------------------------


def curves(report: dict[str, Any]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """For each weight and line the points (rows, microseconds), rows ascending."""
    found: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for result in sorted(report["results"], key=lambda r: r["case"]["rows"]):
        of_weight = found.setdefault(result["weight"], {label: [] for label in FASTEST})
        for label, names in FASTEST.items():
            times = [result["times"][name]["us"] for name in names if name in result["times"]]
            if times:
                of_weight[label].append((result["case"]["rows"], min(times)))
    return found


def crossing(lines: dict[str, list[tuple[int, float]]], other: str) -> float | None:
    """The number of rows from which on we are slower than the line `other`; None for never."""
    theirs = dict(lines[other])
    return crossover((rows, us, theirs[rows]) for rows, us in lines["jax_splitk"] if rows in theirs)


def quantized_headline(report: dict[str, Any]) -> str:
    """How products with quantized weights compare with products with fp8 weights: a line for few rows, one for many."""
    found = curves(report)
    qtype = report["results"][0]["case"]["qtype"]
    ratios = [
        theirs / us
        for lines in found.values()
        for (rows, us), (_, theirs) in zip(lines["jax_splitk"], lines["fp8 x fp8"], strict=False)
        if rows <= FEW_ROWS
    ]
    turns = sorted(n for lines in found.values() if (n := crossing(lines, "fp8 x fp8")) is not None)
    said = []
    if ratios:
        said = [
            f"Up to {FEW_ROWS} rows a product with {qtype} weights is {min(ratios):.2f} to {max(ratios):.2f} times as "
            "fast as one with fp8 weights."
        ]
    if turns:
        *others, last = [f"{n:.0f}" for n in turns]
        rows = f"{', '.join(others)} or {last}" if others else last
        said.append(f"fp8 weights are faster from {rows} rows on")
    return "\n".join(said)
