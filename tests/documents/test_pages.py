"""Links lead somewhere, the README is short, and the figures in README and results come from the reports."""

import json
import pathlib
import re

import pytest

from tests.documents import markdown


@pytest.mark.parametrize("path", markdown.files(), ids=markdown.name)
def test_links(path: pathlib.Path) -> None:
    for link in markdown.links(path):
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), f"{link}: no such file"
        if anchor and target.suffix == ".md":
            assert anchor in markdown.anchors(target), f"{link}: no such heading"


def test_the_readme_is_short() -> None:
    assert len((markdown.ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900


REPORTS = (
    "conv_h200*",
    "wgrad_h200",
    "dot_h200",
    "ragged_h200",
    "quantized_h200_8192x8192",
    "quantized_h200_e4m3_8192x8192",
)


@pytest.mark.parametrize("report", REPORTS)
def test_the_results_page_has_a_table_of_each_report(report: str) -> None:
    """tests/documents/test_plots.py compares what stands in the tables."""
    page = (markdown.ROOT / "docs/results.md").read_text(encoding="utf-8")
    assert re.search(rf"<!-- benchmarks\.plot [^>]*\b{re.escape(report)}\.json[^>]* table\.md -->", page)


# The pages that quote summaries of reports.
QUOTES = (
    ("README.md", "wgrad_h200.json"),
    ("README.md", "quantized_h200_[0-9]*.json"),
    ("docs/results.md", "wgrad_h200.json"),
    ("docs/results.md", "conv_h200*.json"),
    ("docs/results.md", "dot_h200.json"),
    ("docs/results.md", "quantized_h200_[0-9]*.json"),
    ("docs/limits.md", "quantized_h200_[0-9]*.json"),
)


def said(pattern: str, tmp_path: pathlib.Path) -> list[str]:
    """The lines that benchmarks.plot writes about reports: sentences for pages, and rows of a table."""
    plot = pytest.importorskip("benchmarks.plot", exc_type=ImportError)
    reports = sorted(map(str, (markdown.ROOT / "benchmarks/results").glob(pattern)))
    assert plot.main([*reports, str(tmp_path / "text.txt")]) == 0
    return (tmp_path / "text.txt").read_text().splitlines()


def words(page: str) -> str:
    """A page's text on one line."""
    return " ".join((markdown.ROOT / page).read_text(encoding="utf-8").split())


@pytest.mark.parametrize(("page", "pattern"), QUOTES)
def test_pages_quote_what_reports_come_to(page: str, pattern: str, tmp_path: pathlib.Path) -> None:
    lines = said(pattern, tmp_path)
    if page == "docs/limits.md":  # only where int4 weights do not help
        lines = lines[1:]
    assert not [line for line in lines if line not in words(page)]


def test_one_figure_for_dense_filters(tmp_path: pathlib.Path) -> None:
    """README and limits quote the results' row of large dense 3x3 convolutions, and of 1x1 weight gradients."""
    (row,) = [line for line in said("conv_h200*.json", tmp_path) if line.startswith("| large dense 3x3 |")]
    mean, least, largest = row.strip("| ").split(" | ")[2:]
    assert f"({mean} times in geometric mean)" in words("README.md")
    assert f"{least} to {largest} times XLA's speed, {mean} in geometric mean" in words("docs/limits.md")
    report = json.loads((markdown.ROOT / "benchmarks/results/wgrad_h200.json").read_text())
    pointwise = [
        r["xla"]["us"] / r["ours"]["us"]
        for r in report["results"]
        if r["case"]["kernel"] == [1, 1] and r["case"]["batch"] == 256
    ]
    assert f"{min(pointwise):.2f} to {max(pointwise):.2f} times" in words("docs/limits.md")
    assert f"{min(pointwise) - 1:.0%} to {max(pointwise) - 1:.0%}" in words("README.md")


def test_troubleshooting_quotes_messages_of_the_source() -> None:
    """Each part between the dots of a quoted message must stand in one of the package's files."""
    package = markdown.ROOT / "jax_splitk"
    # Line breaks in literals, values in f-strings and escapes interrupt a message's text.
    source = "\n".join(path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py")))
    source = re.sub(r'"\s*\n\s*f?"', "", source)
    rows = re.findall(r"^\| `([^`]+)` \|", (markdown.ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    assert len(rows) > 20
    parts = {part.strip() for row in rows for part in row.split("...")} - {""}
    assert not {part for part in parts if part not in source}
