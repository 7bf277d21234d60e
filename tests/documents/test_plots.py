"""The documentation's plots are legible at a width of 400 pixels, and show the reports' figures."""

import json
import pathlib
import re
import xml.etree.ElementTree

import pytest

from tests.documents import markdown

SVG = "{http://www.w3.org/2000/svg}"
PLOTS = sorted((markdown.ROOT / "docs").rglob("*.svg"))
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


def test_plots_and_blocks_are_of_the_present_reports(tmp_path: pathlib.Path) -> None:
    """`python -m benchmarks.pages` writes them."""
    pages = pytest.importorskip("benchmarks.pages", exc_type=ImportError)
    for name, (patterns, options) in pages.PLOTS.items():
        pages.made(patterns, options, tmp_path / name)
        assert texts(tmp_path / name) == texts(markdown.ROOT / "docs" / "plots" / name), name
    for page in pages.pages():
        assert pages.updated(page.read_text(encoding="utf-8")) == page.read_text(encoding="utf-8"), page


def test_blocks_are_written_and_other_text_stays(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = pytest.importorskip("benchmarks.pages", exc_type=ImportError)
    result = {"title": "net", "ratio": 2.0, "peak_ratio": 1.0, "stock": {"ms": 4.0}, "ours": {"ms": 2.0}}
    for name, date, kind, ratio, names in (
        ("models_b", "2026-01-01", "NVIDIA H200", 3.0, ["a", "b"]),
        ("models_a", "2026-01-02", "NVIDIA H100 80GB HBM3", 2.0, ["a"]),
    ):
        results = [result | {"name": name, "title": f"net {name}", "ratio": ratio} for name in names]
        report = {"benchmark": "models", "environment": {"date": date, "device_kind": kind}, "results": results}
        (tmp_path / f"{name}.json").write_text(json.dumps(report))
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    page = "# A\n\n<!-- benchmarks.plot models_*.json table.md -->\nold\n<!-- end -->\nB <!-- a comment -->\n"
    new = pages.updated(page)
    assert new.startswith("# A\n\n<!-- benchmarks.plot models_*.json table.md -->\n\n| model |")
    assert new.endswith("\n\n<!-- end -->\nB <!-- a comment -->\n") and "old" not in new
    rows = [
        line for line in new.splitlines() if line.startswith("| net")
    ]  # the newest figures of a, the larger gain first
    assert rows == ["| net b, H200 | 4.00 | 2.00 | 3.00 | +0% |", "| net a, H100 | 4.00 | 2.00 | 2.00 | +0% |"]
    text = pages.updated(page.replace("table.md", "text.txt"))
    assert "2 networks: median 2.50, geometric mean 2.45 (2.00 without the largest, 3.00)" in text
    with pytest.raises(ValueError, match=r"reports none\*: benchmarks.plot makes no table.md of 0 files"):
        pages.updated(page.replace("models_*.json", "none*"))
