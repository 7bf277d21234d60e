"""A chart of a report of `benchmarks.wgrad`: each case's share of what the hardware allows, ours and XLA's.

python -m benchmarks.plot RESULTS.json OUT.svg
"""

import argparse
import json
import pathlib
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

OURS, XLA = "#1f5fa8", "#b9bec6"


def shares(report: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """(ours, XLA's) floor time over measured time by case, in the report's order.

    Raises:
      ValueError: no case has a floor (the report is not of an H200).
    """
    results = [r for r in report["results"] if r["floor_us"] is not None]
    if not results:
        raise ValueError("no result has floor_us; accepted: reports of an H200")
    return {r["case"]["name"]: tuple(r["floor_us"] / r[who]["us"] for who in ("ours", "xla")) for r in results}


def chart(report: dict[str, Any]) -> Figure:
    found = shares(report)
    means = [statistics.geometric_mean(pair[i] for pair in found.values()) for i in range(2)]
    figure = Figure(figsize=(8, 0.9 + 0.3 * len(found)), layout="constrained")
    axes = figure.subplots()
    for offset, index, label, color in ((-0.2, 0, "jax_splitk", OURS), (0.2, 1, "XLA", XLA)):
        places = [row + offset for row in range(len(found))]
        axes.barh(places, [pair[index] for pair in found.values()], height=0.4, color=color, label=label)
    edge = max(1.0, *(max(pair) for pair in found.values()))
    for row, (ours, xla) in enumerate(found.values()):
        axes.text(edge + 0.02, row, f"{ours / xla:.2f}x", va="center", fontsize=7)
    axes.set_yticks(range(len(found)), list(found), fontsize=7, family="monospace")
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.set_xlim(0, edge + 0.1)
    axes.set_xticks([i / 5 for i in range(6)], [f"{20 * i}%" for i in range(6)], fontsize=8)
    axes.axvline(1, color="black", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", bbox_to_anchor=(edge / (edge + 0.1), 0), fontsize=8)
    axes.set_title(
        f"Share of the roofline on {report['environment']['device_kind']}; geometric means: jax_splitk {means[0]:.0%}, "
        f"XLA {means[1]:.0%}\n(at the right: speed relative to XLA, geometric mean {means[0] / means[1]:.2f}x)",
        fontsize=9,
    )
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plot", description="A chart of a report of benchmarks.wgrad."
    )
    parser.add_argument("report", type=pathlib.Path, help="JSON file of benchmarks.wgrad")
    parser.add_argument("out", type=pathlib.Path, help="SVG or PNG file")
    options = parser.parse_args(argv)
    try:
        figure = chart(json.loads(options.report.read_text()))
    except ValueError as error:
        print(f"{options.report}: {error}", file=sys.stderr)
        return 2
    # The same bytes for the same report: no date, no version, no random ids. Text as paths looks alike everywhere.
    metadata = {"Date": None, "Creator": None} if options.out.suffix == ".svg" else {"Software": None}
    with mpl.rc_context({"svg.hashsalt": "jax_splitk", "svg.fonttype": "path"}):
        figure.savefig(options.out, metadata=metadata, dpi=150)
    return 0


if __name__ == "__main__":
    sys.exit(main())
