"""Charts of the benchmarks' reports. Of `benchmarks.wgrad` and `benchmarks.dot`: each case's share of what the hardware
allows, ours and XLA's. Of `benchmarks.quantized`: time against the number of rows, for each weight. Of
`benchmarks.models`: how many times as fast a step is. Of `benchmarks.profile_step`: when each kernel of a step ran. In
a file whose name ends in .md, the same figures as a Markdown table.

python -m benchmarks.plot RESULTS.json [MORE.json ...] OUT.svg
"""

import argparse
import json
import pathlib
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import timeline
from benchmarks.quantized_cases import FASTEST, crossover

OURS, XLA = "#1f5fa8", "#b9bec6"
# Of a quantized report: the color of each line of FASTEST.
COLORS = {"jax_splitk": OURS, "fp8 x fp8": "#c2571a", "bf16": "#4d8f57", "XLA, quantized": XLA}


# By benchmark: what its cases are, and how a title and the axis name them.
NAMES = {
    "wgrad": ("Weight gradients", "N, H=W, C -> K, filter", " (bfloat16 where not said)"),
    "conv": ("Passes of convolutions", "pass N, size, C -> K, filter", " (bfloat16 where not said)"),
    "dot": ("Products with a long reduction", "m x n x k", ""),
}


def benchmark(report: dict[str, Any]) -> str:
    """Which one wrote the report."""
    return report.get("benchmark") or ("quantized" if "crossovers" in report else "wgrad")


def combined(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first report with the cases of all; of a case that several have, the last one's figures.

    A result's `kernels` counts from 0 how many other versions of the kernels the reports before its own are of.

    Raises:
      ValueError: they are of different devices or benchmarks, or of different types.
    """
    for name, values in (
        ("device_kind", {r["environment"]["device_kind"] for r in reports}),
        ("benchmark", {benchmark(r) for r in reports}),
        ("x_dtype", {result.get("case", {}).get("x_dtype") for r in reports for result in r["results"]}),
    ):
        if len(values) > 1:
            raise ValueError(f"reports of different {name}: {', '.join(map(str, sorted(values)))}; accepted: one")
    versions: list[Any] = []
    results = {}
    for report in reports:
        version = report["environment"].get("kernel_sources")
        versions += [] if version in versions else [version]
        for result in report["results"]:
            results[result.get("case", {}).get("name") or result["name"]] = result | {
                "kernels": versions.index(version)
            }
    return reports[0] | {"results": list(results.values())}


def label(case: dict[str, Any]) -> str:
    """A convolution of a report in the tables' notation: pass, if there are several, and N, size, C -> K, filter; a
    product: m x n x k."""
    if "k" in case:
        return f"{case['m']} x {case['n']} x {case['k']}"
    if "which" in case:
        which, (inputs, outputs), size = f"{case['which']} ", case["channels"], case["size"]
        steps, moved = case["steps"], "input dilation" if case["transposed"] else "stride"
    else:
        which, inputs, outputs = "", case["in_channels"], case["out_channels"]
        steps, moved = case["stride"][0], "stride"
        size = list(dict.fromkeys((case["height"], case["width"])))
    groups, dtype = case["groups"], case["dtype"]
    depthwise = groups == inputs == outputs > 1
    size, kernel = ("x".join(map(str, sizes)) for sizes in (size, case["kernel"]))
    parts = [f"{which}{case['batch']}", size, f"{inputs} depthwise" if depthwise else f"{inputs} -> {outputs}"]
    parts += [f"{kernel} {moved} {steps}" if steps > 1 else kernel]
    parts += [f"{groups} groups"] if groups > 1 and not depthwise else []
    return ", ".join(parts if dtype == "bfloat16" else [*parts, dtype])


def by_ratio(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The results of a report of weight gradients or products, those first that gain most over XLA."""
    return sorted(report["results"], key=lambda r: r["ours"]["us"] / r["xla"]["us"])


def shares(report: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """(ours, XLA's) floor time over measured time by label, in the order of `by_ratio`.

    Raises:
      ValueError: no case has a floor (the report is not of an H200).
    """
    results = [r for r in by_ratio(report) if r["floor_us"] is not None]
    if not results:
        raise ValueError("no result has floor_us; accepted: reports of an H200")
    return {label(r["case"]): tuple(r["floor_us"] / r[who]["us"] for who in ("ours", "xla")) for r in results}


def chart(report: dict[str, Any]) -> Figure:
    title, notation, dtypes = NAMES[benchmark(report)]
    found = shares(report)
    times = {label(r["case"]): (r["ours"]["us"], r["xla"]["us"]) for r in report["results"]}
    figure = Figure(figsize=(9, 1.3 + 0.3 * len(found)), layout="constrained")
    axes = figure.subplots()
    for offset, index, name, color in ((-0.2, 0, "jax_splitk", OURS), (0.2, 1, "XLA", XLA)):
        places = [row + offset for row in range(len(found))]
        axes.barh(places, [pair[index] for pair in found.values()], height=0.4, color=color, label=name)
    edge = max(1.0, *(max(pair) for pair in found.values()))
    axes.text(edge + 0.02, -1.1, "jax_splitk, XLA (us): ratio", va="center", fontsize=7)
    for row, name in enumerate(found):
        ours, xla = times[name]
        axes.text(edge + 0.02, row, f"{ours:.1f}, {xla:.1f}: {xla / ours:.2f}", va="center", fontsize=7)
    axes.set_yticks(range(len(found)), list(found), fontsize=8)
    axes.set_ylim(len(found) - 0.4, -1.5)
    axes.set_ylabel(f"{notation}{dtypes}", fontsize=8)
    axes.set_xlim(0, edge + 0.28)
    axes.set_xticks([i / 5 for i in range(6)], [f"{20 * i}%" for i in range(6)], fontsize=8)
    axes.set_xlabel("share of the roofline: max(operations / peak rate, bytes / bandwidth) over the time", fontsize=8)
    axes.axvline(1, color="black", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center right", bbox_to_anchor=(edge / (edge + 0.28), 0.69), fontsize=8)
    mean = statistics.geometric_mean(ours / xla for ours, xla in found.values())
    kind = report["environment"]["device_kind"]
    axes.set_title(f"{title} on one {kind}: {mean:.2f} times as fast as XLA (geometric mean)", fontsize=10)
    return figure


def curves(report: dict[str, Any]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """By weight and line: (rows, microseconds), rows ascending."""
    found: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for result in sorted(report["results"], key=lambda r: r["case"]["rows"]):
        of_weight = found.setdefault(result["weight"], {label: [] for label in FASTEST})
        for label, names in FASTEST.items():
            times = [result["times"][name]["us"] for name in names if name in result["times"]]
            if times:
                of_weight[label].append((result["case"]["rows"], min(times)))
    return found


def xla_table(report: dict[str, Any]) -> str:
    """The figures of weight gradients or products in Markdown."""
    lines = [f"| {NAMES[benchmark(report)][1]} | XLA us | jax_splitk us | ratio |", "|---|---|---|---|"]
    for result in by_ratio(report):
        ours, xla = result["ours"]["us"], result["xla"]["us"]
        lines.append(f"| {label(result['case'])} | {xla:.1f} | {ours:.1f} | {xla / ours:.2f} |")
    return "\n".join(lines) + "\n"


def quantized_table(report: dict[str, Any]) -> str:
    """The figures of the chart in Markdown; stars mark what was measured with other kernels than the first report."""
    versions = {(result["weight"], result["case"]["rows"]): result.get("kernels", 0) for result in report["results"]}
    found = {
        weight: {label: dict(points) for label, points in lines.items()} for weight, lines in curves(report).items()
    }
    lines = [f"| weight | n | {' | '.join(FASTEST)} |", "|---|---" + "|---" * len(FASTEST) + "|"]
    for weight, times in found.items():
        for rows in times["jax_splitk"]:
            cells = [_microseconds(times[label].get(rows)) for label in FASTEST]
            lines.append(f"| {weight} | {rows}{'*' * versions[weight, rows]} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _microseconds(us: float | None) -> str:
    return "" if us is None else f"{us:.0f}" if us >= 1000 else f"{us:.1f}"


def crossing(lines: dict[str, list[tuple[int, float]]], other: str) -> float | None:
    """Rows from which on we are slower than the line `other`; None for never."""
    theirs = dict(lines[other])
    return crossover((rows, us, theirs[rows]) for rows, us in lines["jax_splitk"] if rows in theirs)


def quantized_chart(report: dict[str, Any]) -> Figure:
    found = curves(report)
    case = report["results"][0]["case"]
    figure = Figure(figsize=(4 * max(2, len(found)), 3.8), layout="constrained")
    panels = figure.subplots(1, len(found), squeeze=False, sharey=True)[0]
    for axes, (weight, lines) in zip(panels, found.items(), strict=True):
        _draw_curves(axes, weight, lines)
    panels[0].set_ylabel("device time of a product, us", fontsize=8)
    panels[0].legend(fontsize=8, loc="upper left")
    group = f"groups of {case['group_size']}" if case["group_size"] else "per channel"
    kind = report["environment"]["device_kind"]
    figure.suptitle(f"{case['x_dtype']} activations, {case['qtype']} weights ({group}) on one {kind}", fontsize=10)
    return figure


def _draw_curves(axes: Axes, weight: str, lines: dict[str, list[tuple[int, float]]]) -> None:
    for label, points in lines.items():
        if points:
            axes.loglog(*zip(*points, strict=True), "o-", color=COLORS[label], label=label, markersize=3, linewidth=1.4)
    rows = [n for n, _ in lines["jax_splitk"]]
    axes.set_xticks(rows, [str(n) for n in rows], fontsize=7)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda us, _: f"{us:,.0f}")
    axes.tick_params(axis="y", labelsize=7)
    axes.grid(True, linewidth=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("n, rows of the activation", fontsize=8)
    said = []
    for other in ("fp8 x fp8", "bf16"):
        n = crossing(lines, other)
        if n is not None:
            axes.axvline(n, color=COLORS[other], linewidth=0.8, linestyle="--")
        if lines[other]:
            said.append(f"{other} is faster from n = {n:.0f} (interpolated)" if n else f"{other} is never faster")
    axes.set_title("\n".join([f"weight {weight} (features x k)", *said]), fontsize=8)


# ---- whole steps -----------------------------------------------------------------------------------------------------


def models_chart(report: dict[str, Any]) -> Figure:
    """Stock JAX's time of a step over ours, with both times; an axis of logarithms, from 1 to both sides."""
    results = report["results"]
    figure = Figure(figsize=(8, 1.3 + 0.36 * len(results)), layout="constrained")
    axes = figure.subplots()
    ratios = [r["ratio"] for r in results]
    colors = [OURS if ratio >= 1 else XLA for ratio in ratios]
    axes.set_xscale("log")
    axes.barh(range(len(results)), [ratio - 1 for ratio in ratios], left=1, height=0.6, color=colors)
    for row, r in enumerate(results):
        times = f"{r['stock']['ms']:.2f} -> {r['ours']['ms']:.2f} ms: {r['ratio']:.2f}"
        axes.text(max(r["ratio"], 1.0) * 1.02, row, times, va="center", fontsize=7)
    axes.set_yticks(range(len(results)), [r["title"] for r in results], fontsize=8)
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.6)
    # With room for the last text.
    axes.set_xlim(min(0.95, *ratios), max(1.5, max(ratios) ** 1.4))
    ticks = [tick for tick in (1, 1.5, 2, 3, 5, 10, 20, 50, 100) if tick <= max(1.5, *ratios)]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("stock JAX's time of a training step over jax_splitk's", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    mean, kind = statistics.geometric_mean(ratios), report["environment"]["device_kind"]
    axes.set_title(f"Training steps on one {kind}: {mean:.2f} times as fast (geometric mean)", fontsize=10)
    return figure


def models_table(report: dict[str, Any]) -> str:
    """The same figures in Markdown, with the peak memory over stock JAX's."""
    lines = ["| model | stock ms | jax_splitk ms | ratio | peak memory |", "|---|---|---|---|---|"]
    for r in report["results"]:
        times = f"{r['stock']['ms']:.2f} | {r['ours']['ms']:.2f} | {r['ratio']:.2f}"
        lines.append(f"| {r['title']} | {times} | {r['peak_ratio'] - 1:+.0%} |")
    return "\n".join(lines) + "\n"


# ---- command line ----------------------------------------------------------------------------------------------------

CHARTS = {"wgrad": chart, "conv": chart, "dot": chart, "quantized": quantized_chart, "models": models_chart}
CHARTS |= {"profile_step": timeline.timeline}
TABLES = {"wgrad": xla_table, "conv": xla_table, "dot": xla_table, "quantized": quantized_table, "models": models_table}
TABLES |= {"profile_step": timeline.table}


def existing_file(text: str) -> pathlib.Path:
    """The argparse type of a report."""
    path = pathlib.Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is no file; accepted: what a benchmark wrote with --json")
    return path


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plot", description=f"A chart of reports of benchmarks.{', '.join(CHARTS)}."
    )
    parser.add_argument(
        "reports", type=existing_file, nargs="+", metavar="report", help="JSON files of one of these, later ones count"
    )
    parser.add_argument("out", type=pathlib.Path, help="SVG or PNG file; .md for a table")
    options = parser.parse_args(argv)
    try:
        reports = [json.loads(path.read_text()) for path in options.reports]
        if not all("results" in report and benchmark(report) in CHARTS for report in reports):
            raise ValueError(f"a report of another kind; accepted: of benchmarks.{', '.join(CHARTS)}")
        if not all(report["results"] for report in reports):
            raise ValueError("no results; accepted: reports with some")
        report = combined(reports)
        if options.out.suffix == ".md":
            options.out.write_text(TABLES[benchmark(report)](report))
            return 0
        figure = CHARTS[benchmark(report)](report)
    except ValueError as error:
        print(f"{', '.join(map(str, options.reports))}: {error}", file=sys.stderr)
        return 2
    # The same bytes for the same report: no date, no version, no random ids. Text as paths looks alike everywhere.
    metadata = {"Date": None, "Creator": None} if options.out.suffix == ".svg" else {"Software": None}
    with mpl.rc_context({"svg.hashsalt": "jax_splitk", "svg.fonttype": "path"}):
        figure.savefig(options.out, metadata=metadata, dpi=150)
    return 0


if __name__ == "__main__":
    sys.exit(main())
