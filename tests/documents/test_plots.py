"""The documentation's plots are legible at a width of 400 pixels, and show the reports' figures."""

import pathlib
import re
import xml.etree.ElementTree

import pytest

from tests.documents import markdown

SVG = "{http://www.w3.org/2000/svg}"
PLOTS = sorted((markdown.ROOT / "docs").rglob("*.svg"))
RESULTS = markdown.ROOT / "benchmarks" / "results"
# The reports and the rows of each plot that benchmarks.plot makes.
MADE = {
    "models_h200.svg": (["models_h200*.json"], []),
    "wgrad_h200.svg": (["wgrad_h200.json"], []),
    "readme_wgrad_h200.svg": (["wgrad_h200.json"], ["--rows", "8"]),
    "dot_h200.svg": (["dot_h200.json"], []),
    "ragged_h200.svg": (["ragged_h200.json"], []),
    "quantized_h200.svg": ([f"quantized_h200_{n}x8192.json" for n in (28672, 8192, 3584)], []),
    "readme_quantized_h200.svg": (["quantized_h200_8192x8192.json"], []),
}
# Pixels of a plot's width, and of the least text in it.
SHOWN, LEAST = 400, 9


def sizes(path: pathlib.Path) -> list[float]:
    """The font sizes of an SVG's texts, in the units of its viewBox: of texts that matplotlib drew as outlines of
    glyphs (a font of 100 units, scaled), and of real texts."""
    root = xml.etree.ElementTree.parse(path).getroot()
    found = []
    for element in root.iter():
        if element.tag == f"{SVG}g" and any(child.tag == f"{SVG}use" for child in element):
            scale = re.search(r"scale\(([\d.]+) -\1\)", element.get("transform", ""))
            if scale is not None:
                found.append(100 * float(scale[1]))
        elif element.tag in (f"{SVG}text", f"{SVG}tspan"):
            text = f"{element.get('style', '')}; font-size: {element.get('font-size', '')}"
            found += [float(size) for size in re.findall(r"font(?:-size)?:\s*(?:[a-z]+ )*([\d.]+)", text)]
    return found


def texts(path: pathlib.Path) -> list[str]:
    """The texts that matplotlib wrote as comments beside its outlines."""
    return re.findall(r'<g id="text_\d+">\s*<!-- (.*?) -->', path.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("path", PLOTS, ids=lambda path: path.name)
def test_text_is_legible_at_400_pixels(path: pathlib.Path) -> None:
    _, _, width, _ = map(float, xml.etree.ElementTree.parse(path).getroot().attrib["viewBox"].split())
    found = sizes(path)
    assert len(found) >= max(1, len(texts(path))), "a size of every text"
    assert min(found) * SHOWN / width >= LEAST


def test_small_text_would_be_seen(tmp_path: pathlib.Path) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    figure = figures.Figure(figsize=(9, 3))
    figure.subplots().set_xlabel("share", fontsize=8)
    figure.savefig(tmp_path / "plot.svg")
    assert min(sizes(tmp_path / "plot.svg")) == pytest.approx(8)
    with pytest.raises(AssertionError):
        test_text_is_legible_at_400_pixels(tmp_path / "plot.svg")


@pytest.mark.parametrize("name", MADE)
def test_plots_are_of_the_present_reports(name: str, tmp_path: pathlib.Path) -> None:
    plot = pytest.importorskip("benchmarks.plot", exc_type=ImportError)
    patterns, options = MADE[name]
    reports = [str(path) for pattern in patterns for path in sorted(RESULTS.glob(pattern))]
    assert plot.main([*options, *reports, str(tmp_path / name)]) == 0
    assert texts(tmp_path / name) == texts(markdown.ROOT / "docs" / "plots" / name)
