"""The chart and the tables of a report of `benchmarks.ragged`: TFLOP/s of the layers in training, by pass."""

from typing import Any

from matplotlib.figure import Figure

from benchmarks.timeline import TEXT_POINTS, WIDTH_INCHES

COLORS = {"ours": "#1f5fa8", "torch": "#c2571a", "lax": "#b9bec6"}
NAMES = {"ours": "jax_splitk", "torch": "torch", "lax": "lax"}
PASSES = {"forward": "forward", "lhs_gradient": "gradient of lhs", "rhs_gradient": "gradient of rhs"}


def rates(report: dict[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """TFLOP/s by pass, layer and contestant, for the layers in training, 16-bit results and random group sizes.

    Raises:
      ValueError: the report has no such case.
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    for which, name in PASSES.items():
        for result in report["results"]:
            case = result["case"]
            if (case["which"], case["kind"], case["out_dtype"]) == (which, "training", case["dtype"]):
                operations = result["tflops"] * result["ours"]["us"]
                layer = f"{case['m']} x {case['k']} x {case['n']} / {case['experts']}"
                times = result["times"]["random"]
                found.setdefault(name, {})[layer] = {who: operations / times[who]["us"] for who in times}
    if not found:
        raise ValueError("no layer in training with 16-bit results; accepted: reports with some")
    return found


def _figures(of_layer: dict[str, float]) -> list[str]:
    return [f"{of_layer[who]:.0f}" if who in of_layer else "-" for who in NAMES]


def chart(report: dict[str, Any]) -> Figure:
    """A panel for each pass, and in it a bar of each contestant for each layer."""
    found = rates(report)
    counts = [len(layers) for layers in found.values()]
    size = (WIDTH_INCHES, 1.3 + 0.4 * sum(counts) + 0.45 * len(counts))
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    panels = figure.subplots(len(counts), squeeze=False, sharex=True, height_ratios=counts)[:, 0]
    for axes, (name, layers) in zip(panels, found.items(), strict=True):
        across = axes.get_yaxis_transform()
        for row, (layer, of_layer) in enumerate(layers.items()):
            axes.text(0, row - 0.27, layer, va="center", fontsize=TEXT_POINTS, transform=across)
            figures = " | ".join(_figures(of_layer))
            axes.text(1, row - 0.27, figures, va="center", ha="right", fontsize=TEXT_POINTS, transform=across)
        for place, (who, contestant) in enumerate(NAMES.items()):
            found_here = {row + 0.17 * place: of[who] for row, of in enumerate(layers.values()) if who in of}
            bars = list(found_here), list(found_here.values())
            axes.barh(*bars, height=0.15, color=COLORS[who], label=contestant)
        axes.set_ylim(len(layers) - 0.4, -0.55)
        axes.set_yticks([])
        axes.set_title(name, fontsize=TEXT_POINTS, loc="left")
        axes.tick_params(axis="x", labelsize=TEXT_POINTS)
        axes.grid(axis="x", linewidth=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
    panels[-1].set_xlabel("TFLOP/s, bfloat16; rows: tokens x k x n / experts", fontsize=TEXT_POINTS)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=TEXT_POINTS, frameon=False)
    kind = report["environment"]["device_kind"]
    title = f"Grouped products on one {kind}, TFLOP/s:\n{' | '.join(NAMES.values())}"
    figure.suptitle(title, fontsize=TEXT_POINTS + 1, x=0.02, ha="left")
    return figure


def table(report: dict[str, Any]) -> str:
    """The same figures in Markdown."""
    lines = [f"| pass | tokens x k x n / experts | {' | '.join(NAMES.values())} |", "|---|---" + "|---" * 3 + "|"]
    for name, layers in rates(report).items():
        lines += [f"| {name} | {layer} | {' | '.join(_figures(of))} |" for layer, of in layers.items()]
    return "\n".join(lines) + "\n"


def means(report: dict[str, Any]) -> str:
    """The geometric means of each pass in Markdown."""
    lines = ["| pass | TFLOP/s | torch takes | lax takes |", "|---|---|---|---|"]
    for key, of in report["geometric_means"].items():
        which, out = key.split()
        name = PASSES[which] + (" in float32" if out == "float32" else "")
        ratios = [of.get(f"{who}/ours") for who in ("torch", "lax")]
        others = ["-" if r is None else f"{r:.{2 if r < 10 else 0}f} times as long" for r in ratios]
        lines.append(f"| {name} | {of['TFLOP/s']:.0f} | {' | '.join(others)} |")
    return "\n".join(lines) + "\n"
