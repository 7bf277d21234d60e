"""The plot of a sweep. matplotlib is imported late, since no other command needs it."""

import importlib.util
import pathlib
from typing import Any

from jax_splitk.tuning.sweep import Point, Sweep

SUFFIXES = (".svg", ".png", ".pdf")
_XLA = "#6b7280"


def refusal(path: pathlib.Path) -> str | None:
    """Why no plot can be written to this path; None if it can."""
    if path.suffix not in SUFFIXES:
        return f"accepted: a name that ends in {', '.join(SUFFIXES)}"
    if importlib.util.find_spec("matplotlib") is None:
        return "a plot needs matplotlib, which is not installed: pip install matplotlib"
    return None


def lines_of(found: Sweep) -> dict[str, list[tuple[int, float]]]:
    """(splits, microseconds) of each variant; variants with the fastest points come first."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for point in found.points:
        if point.us is not None:
            lines.setdefault(point.variant, []).append((point.splits, point.us))
    return dict(sorted(lines.items(), key=lambda item: min(us for _, us in item[1])))


def figure(found: Sweep) -> Any:
    """A `matplotlib.figure.Figure` with a line for each variant, XLA's time, and the cost model's first choice."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    drawn = Figure(figsize=(8, 4.8), layout="constrained")
    axes: Any = drawn.subplots()
    for name, points in lines_of(found).items():
        axes.plot(*zip(*points, strict=True), ".-", label=name, linewidth=1.2, markersize=4)
    axes.axhline(found.xla_us, color=_XLA, linestyle="--", linewidth=1.2, label=f"XLA, {found.xla_us:.1f} us")
    for name, marker, size, point in (("model's choice", "*", 15, found.model), ("fastest", "o", 11, found.fastest)):
        if isinstance(point, Point) and point.us is not None:
            label = f"{name}, {point.us:.1f} us"
            style = {"markerfacecolor": "none", "color": "black", "linestyle": "none"}
            axes.plot([point.splits], [point.us], marker, markersize=size, label=label, **style)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda splits, _: f"{splits:g}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("splits")
    axes.set_ylabel("device time, us" if found.source == "device" else "wall time, us")
    axes.grid(True, linewidth=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{found.problem}, {found.target.device_kind}", fontsize=10)
    axes.legend(fontsize=7)
    return drawn


def write(found: Sweep, path: pathlib.Path) -> None:
    """Writes the plot. The same sweep gives the same bytes: no date, no version, no random ids."""
    import matplotlib as mpl  # noqa: PLC0415

    metadata = {".png": {"Software": None}, ".svg": {"Date": None, "Creator": None}}
    with mpl.rc_context({"svg.hashsalt": "jax_splitk", "svg.fonttype": "path"}):
        figure(found).savefig(path, metadata=metadata.get(path.suffix, {"CreationDate": None}), dpi=150)
