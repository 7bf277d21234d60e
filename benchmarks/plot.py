"""Charts of the benchmarks' reports.

A report of `benchmarks.wgrad`, `conv` or `dot` gives each case's share of the highest rates that the hardware reached,
ours and XLA's; one of `benchmarks.quantized` time against the number of rows, for each weight; one of
`benchmarks.models` how many times as fast a step is; one of `benchmarks.profile_step` when each kernel of a step ran;
one of `benchmarks.ragged` the TFLOP/s of each layer, ours, PyTorch's and lax's. A file whose name ends in .md gets the
same figures as a Markdown table; a .txt file gets the sentences that pages quote.

python -m benchmarks.plot RESULTS.json [MORE.json ...] OUT.svg [--rows 8]
"""

import argparse
import json
import math
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import grouped_chart, timeline
from benchmarks.headline import crossing, curves, groups_table, headline, quantized_headline, ratio
from benchmarks.quantized_cases import FASTEST
from benchmarks.report import PRODUCT_FLOPS, copy_rate
from benchmarks.timeline import TEXT_POINTS, WIDTH_INCHES

_T = TypeVar("_T")

OURS, XLA = "#1f5fa8", "#b9bec6"
# The color of each line of FASTEST.
COLORS = {"jax_splitk": OURS, "fp8 x fp8": "#c2571a", "bf16": "#4d8f57", "XLA, quantized": XLA}

LARGE = TEXT_POINTS + 1  # of titles

# For each benchmark, the names of its cases in titles and on the axis.
NAMES = {
    "wgrad": ("Weight gradients", "N, H=W, C -> K, filter", " (bfloat16 where not said)"),
    "conv": ("Passes of convolutions", "pass N, size, C -> K, filter", " (bfloat16 where not said)"),
    "dot": ("Products with a long reduction", "m x n x k", ""),
}


def benchmark(report: dict[str, Any]) -> str:
    """The name of the benchmark that wrote the report."""
    return report.get("benchmark") or ("quantized" if "crossovers" in report else "wgrad")


def combined(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first report with the cases of all reports. If several reports have a case, the figures of the last one
    count. A result's `kernels` is the number of other kernel versions in the reports before its own.

    Reports of whole steps may be of several devices, since each ratio is of one run. Then each result has its `device`.

    Raises:
      ValueError: the reports are of different benchmarks or types, or of different devices.
    """
    kinds = list(dict.fromkeys(r["environment"]["device_kind"] for r in reports))
    devices = {kind: kind.removeprefix("NVIDIA ").partition(" ")[0] for kind in kinds}
    mixed = len(kinds) > 1 and all(benchmark(r) == "models" for r in reports)
    for name, values in (
        ("device_kind", set() if mixed else set(kinds)),
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
        more = {"kernels": versions.index(version)}
        if mixed:
            more["device"] = devices[report["environment"]["device_kind"]]
        for result in report["results"]:
            results[result.get("case", {}).get("name") or result["name"]] = result | more
    environment = reports[0]["environment"]
    if mixed:
        environment = environment | {"device_kind": " or ".join(sorted({r["device"] for r in results.values()}))}
    return reports[0] | {"environment": environment, "results": list(results.values())}


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


def by_gain(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The results of a report that compares two times, largest gain first."""
    return sorted(report["results"], key=ratio, reverse=True)


def spread(results: Sequence[_T], most: int | None) -> list[_T]:
    """At most `most` of the sorted results, at even distances, with the first and the last."""
    if most is None or len(results) <= most:
        return list(results)
    return [results[round(i * (len(results) - 1) / (most - 1))] for i in range(most)]


def shares(report: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """(ours, XLA's) floor time over measured time by label, in the order of `by_gain`.

    Raises:
      ValueError: no case has a floor (the report is of another device than an H200 or H100).
    """
    results = [r for r in by_gain(report) if r["floor_us"] is not None]
    if not results:
        raise ValueError("no result has floor_us; accepted: reports of an H200 or H100")
    return {label(r["case"]): tuple(r["floor_us"] / r[who]["us"] for who in ("ours", "xla")) for r in results}


# ---- bars ------------------------------------------------------------------------------------------------------------


def _bars(title: str, rows: Sequence[tuple[str, str]], top: float = 0.75) -> tuple[Figure, Axes]:
    """A figure with a line of text above each row's place for bars: a name on the left, figures on the right.

    `top` is the height of the legend above the rows, in rows.
    """
    # A row, its text included, takes 0.4 inches.
    figure = Figure(figsize=(WIDTH_INCHES, 1.1 + 0.4 * (len(rows) + top)), layout="constrained", facecolor="white")
    axes = figure.subplots()
    across = axes.get_yaxis_transform()
    for row, (name, figures) in enumerate(rows):
        axes.text(0, row - 0.2, name, va="center", fontsize=TEXT_POINTS, transform=across)
        axes.text(1, row - 0.2, figures, va="center", ha="right", fontsize=TEXT_POINTS, transform=across)
    axes.set_ylim(len(rows) - 0.4, -0.5 - top)
    axes.set_yticks([])
    axes.tick_params(axis="x", labelsize=TEXT_POINTS)
    axes.grid(axis="x", linewidth=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.suptitle(title, fontsize=LARGE, x=0.02, ha="left")
    return figure, axes


def chart(report: dict[str, Any], most: int | None = None) -> Figure:
    """Our share of the highest rates that large products and copies reached, and XLA's, for `most` of the cases."""
    what, notation, dtypes = NAMES[benchmark(report)]
    found = shares(report)
    times = {label(r["case"]): (r["xla"]["us"], r["ours"]["us"]) for r in report["results"]}
    shown = spread(list(found), most)
    kind = report["environment"]["device_kind"]
    title = f"{what} on one {kind}, XLA's time over ours:\n{headline(report['results'])}"
    rows = [
        (name, "{:.1f} -> {:.1f} us   {:.2f}".format(*times[name], times[name][0] / times[name][1])) for name in shown
    ]
    figure, axes = _bars(title, rows, top=1.5)
    for offset, index, name, color in ((0.11, 0, "jax_splitk", OURS), (0.31, 1, "XLA", XLA)):
        places = [row + offset for row in range(len(shown))]
        axes.barh(places, [found[name][index] for name in shown], height=0.2, color=color, label=name)
    axes.set_xlim(0, max(1.04, *(max(found[name]) + 0.02 for name in shown)))
    axes.set_xticks([i / 5 for i in range(6)], [f"{20 * i}%" for i in range(6)])
    copied = copy_rate(kind) or math.nan
    rates = f"bfloat16 products\n{PRODUCT_FLOPS / 1e12:.0f} TFLOP/s, copies {copied / 1e12:.1f} TB/s"
    some = "" if len(shown) == len(found) else f"{len(shown)} of {len(found)} "
    axes.set_xlabel(
        f"share of the highest rates reached: {rates}\n{some}rows: {notation}{dtypes}", fontsize=TEXT_POINTS
    )
    axes.legend(loc="upper left", ncols=2, fontsize=TEXT_POINTS, frameon=False, borderaxespad=0)
    return figure


def xla_table(report: dict[str, Any], most: int | None = None) -> str:
    """The figures of `most` of the weight gradients, passes or products in Markdown."""
    lines = [f"| {NAMES[benchmark(report)][1]} | XLA us | jax_splitk us | ratio |", "|---|---|---|---|"]
    for result in spread(by_gain(report), most):
        ours, xla = result["ours"]["us"], result["xla"]["us"]
        lines.append(f"| {label(result['case'])} | {xla:.1f} | {ours:.1f} | {xla / ours:.2f} |")
    return "\n".join(lines) + "\n"


# ---- lines -----------------------------------------------------------------------------------------------------------


def quantized_table(report: dict[str, Any]) -> str:
    """The figures of the chart in Markdown. Stars mark figures with other kernels than those of the first report."""
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


def quantized_chart(report: dict[str, Any]) -> Figure:
    """Time against the number of rows, a panel for each weight."""
    found = curves(report)
    case = report["results"][0]["case"]
    figure = Figure(figsize=(WIDTH_INCHES, 0.6 + 2.9 * len(found)), layout="constrained", facecolor="white")
    panels = figure.subplots(len(found), squeeze=False, sharex=True)[:, 0]
    for axes, (weight, lines) in zip(panels, found.items(), strict=True):
        _draw_curves(axes, weight, lines)
    panels[-1].set_xlabel("n, rows of the activation", fontsize=TEXT_POINTS)
    panels[0].legend(fontsize=TEXT_POINTS, loc="upper left")
    group = f"groups of {case['group_size']}" if case["group_size"] else "per channel"
    kind = report["environment"]["device_kind"]
    title = f"Device time of a product on one {kind}:\n{case['x_dtype']} activations, {case['qtype']} weights ({group})"
    figure.suptitle(title, fontsize=LARGE, x=0.02, ha="left")
    return figure


def _draw_curves(axes: Axes, weight: str, lines: dict[str, list[tuple[int, float]]]) -> None:
    for name, points in lines.items():
        if points:
            axes.loglog(*zip(*points, strict=True), "o-", color=COLORS[name], label=name, markersize=3, linewidth=1.4)
    rows = [n for n, _ in lines["jax_splitk"]]
    axes.set_xticks(rows, [str(n) for n in rows])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda us, _: f"{us:,.0f}")
    axes.tick_params(labelsize=TEXT_POINTS)
    axes.grid(True, linewidth=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylabel("us", fontsize=TEXT_POINTS)
    said = []
    for other in ("fp8 x fp8", "bf16"):
        n = crossing(lines, other)
        if n is not None:
            axes.axvline(n, color=COLORS[other], linewidth=0.8, linestyle="--")
        if lines[other]:
            said.append(f"{other} from n = {n:.0f}" if n else f"{other} never")
    faster = f"\nfaster (interpolated): {', '.join(said)}" if said else ""
    axes.set_title(f"weight {weight} (features x k){faster}", fontsize=TEXT_POINTS, loc="left")


# ---- whole steps -----------------------------------------------------------------------------------------------------


def step_title(result: dict[str, Any]) -> str:
    """The name of a network, with its device if the others have another one."""
    return f"{result['title']}, {result['device']}" if "device" in result else result["title"]


def models_chart(report: dict[str, Any], most: int | None = None) -> Figure:
    """Stock JAX's time of a step over ours, with both times. The axis is logarithmic, with bars from 1 to both
    sides."""
    results = spread(by_gain(report), most)
    kind = report["environment"]["device_kind"]
    title = f"Training steps on one {kind}, stock JAX's time over ours:\n{headline(report['results'])}"
    rows = [(step_title(r), f"{r['stock']['ms']:.2f} -> {r['ours']['ms']:.2f} ms   {r['ratio']:.2f}") for r in results]
    figure, axes = _bars(title, rows, top=0.1)
    ratios = [r["ratio"] for r in results]
    colors = [OURS if ratio >= 1 else XLA for ratio in ratios]
    axes.set_xscale("log")
    places = [row + 0.21 for row in range(len(rows))]
    axes.barh(places, [ratio - 1 for ratio in ratios], left=1, height=0.3, color=colors)
    axes.set_xlim(min(0.95, *ratios), max(1.5, *ratios) * 1.05)
    ticks = [tick for tick in (1, 1.5, 2, 3, 5, 10, 20, 50, 100) if tick <= max(1.5, *ratios)]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("stock JAX's time of a training step over jax_splitk's", fontsize=TEXT_POINTS)
    return figure


def models_table(report: dict[str, Any], most: int | None = None) -> str:
    """The same figures in Markdown, with the peak memory over stock JAX's."""
    lines = ["| model | stock ms | jax_splitk ms | ratio | peak memory |", "|---|---|---|---|---|"]
    for r in spread(by_gain(report), most):
        times = f"{r['stock']['ms']:.2f} | {r['ours']['ms']:.2f} | {r['ratio']:.2f}"
        lines.append(f"| {step_title(r)} | {times} | {round(100 * (r['peak_ratio'] - 1)):+d}% |")
    return "\n".join(lines) + "\n"


# ---- command line ----------------------------------------------------------------------------------------------------

CHARTS = {"wgrad": chart, "conv": chart, "dot": chart, "quantized": quantized_chart, "models": models_chart}
CHARTS |= {"profile_step": timeline.timeline, "ragged": grouped_chart.chart}
TABLES = {"wgrad": xla_table, "conv": xla_table, "dot": xla_table, "quantized": quantized_table, "models": models_table}
TABLES |= {"profile_step": timeline.table, "ragged": grouped_chart.table}
# Benchmarks whose charts have no rows by gain, and whose reports have no sentences for pages.
WITHOUT_ROWS, WITHOUT_TEXT = ("quantized", "profile_step", "ragged"), ("profile_step",)


def text(report: dict[str, Any]) -> str:
    """The sentences, or the short table, of a report that pages quote."""
    kind = benchmark(report)
    if kind == "quantized":
        return quantized_headline(report) + "\n"
    if kind == "ragged":
        return grouped_chart.means(report)
    if kind == "models":
        return f"{len(report['results'])} networks: {headline(report['results'])}\n"
    # Markdown wants an empty line before a table.
    return f"{headline(report['results'])}\n" + ("\n" + groups_table(report["results"]) if kind == "conv" else "")


def existing_file(text: str) -> pathlib.Path:
    """The argparse type of a report."""
    path = pathlib.Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is no file; accepted: what a benchmark wrote with --json")
    return path


def row_count(text: str) -> int:
    """The argparse type of --rows."""
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r}; accepted: a number of rows, 2 or more")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plot", description=f"A chart of reports of benchmarks.{', '.join(CHARTS)}."
    )
    parser.add_argument(
        "reports", type=existing_file, nargs="+", metavar="report", help="JSON files of one of these, later ones count"
    )
    parser.add_argument("out", type=pathlib.Path, help="SVG or PNG file; .md for a table, .txt for what it comes to")
    parser.add_argument(
        "--rows", type=row_count, metavar="N", help="so many rows, from the largest gain to the least; all"
    )
    options = parser.parse_args(argv)
    try:
        reports = [json.loads(path.read_text()) for path in options.reports]
        if not all("results" in report and benchmark(report) in CHARTS for report in reports):
            raise ValueError(f"a report of another kind; accepted: of benchmarks.{', '.join(CHARTS)}")
        if not all(report["results"] for report in reports):
            raise ValueError("no results; accepted: reports with some")
        report = combined(reports)
        kind = benchmark(report)
        if options.rows and kind in WITHOUT_ROWS:
            raise ValueError(f"--rows {options.rows} with a report of benchmarks.{kind}, which has no rows by gain")
        if options.out.suffix == ".txt" and kind in WITHOUT_TEXT:
            raise ValueError(
                f"{options.out.name}: a report of benchmarks.{kind} has no medians; accepted: .svg, .png, .md"
            )
        rows = {} if options.rows is None else {"most": options.rows}
        if options.out.suffix in (".md", ".txt"):
            options.out.write_text(TABLES[kind](report, **rows) if options.out.suffix == ".md" else text(report))
            return 0
        figure = CHARTS[kind](report, **rows)
    except ValueError as error:
        print(f"{', '.join(map(str, options.reports))}: {error}", file=sys.stderr)
        return 2
    save(figure, options.out)
    return 0


def save(figure: Figure, path: pathlib.Path) -> None:
    """Writes a figure so that the same figure gives the same bytes: no date, no version, no random ids. Text becomes
    paths, to look alike everywhere."""
    metadata = {"Date": None, "Creator": None} if path.suffix == ".svg" else {"Software": None}
    with mpl.rc_context({"svg.hashsalt": "jax_splitk", "svg.fonttype": "path"}):
        figure.savefig(path, metadata=metadata, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
