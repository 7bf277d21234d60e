"""Links lead somewhere, the README is short, and its figures and the results' page are the reports'."""

import json
import pathlib
import re
import statistics

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


# Whose tables the results' page has.
REPORTS = (
    "wgrad_h200.json",
    "conv_h200*.json",
    "models_h200*.json",
    "dot_h200.json",
    "quantized_h200_[0-9]*.json",
    "quantized_h200_e4m3_*.json",
)


def test_the_readme_is_short() -> None:
    assert len((markdown.ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900


@pytest.mark.parametrize("pattern", REPORTS)
def test_the_results_page_has_the_figures_of_the_reports(pattern: str, tmp_path: pathlib.Path) -> None:
    """`python -m benchmarks.plot REPORT.json ... NAME.md` makes its tables."""
    plot = pytest.importorskip("benchmarks.plot", exc_type=ImportError)
    # Of quantized products, the largest weight first.
    found = sorted(map(str, (markdown.ROOT / "benchmarks/results").glob(pattern)))
    reports = sorted(found, key=features, reverse=True)
    assert plot.main([*reports, str(tmp_path / "table.md")]) == 0
    assert (tmp_path / "table.md").read_text() in (markdown.ROOT / "docs/results.md").read_text(encoding="utf-8")


def test_the_readmes_rows_are_of_the_results_page() -> None:
    readme, results = ((markdown.ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/results.md"))
    rows = re.findall(r"^\| \d.*\|$", readme, re.MULTILINE)
    assert len(rows) == 8
    assert set(rows) <= set(results.splitlines())
    (mean,) = re.findall(r"geometric mean of the ratio is ([\d.]+)", results)
    assert f"geometric mean of all is {mean}" in readme
    report = json.loads((markdown.ROOT / "benchmarks/results/wgrad_h200.json").read_text())
    assert f"{statistics.geometric_mean(r['xla']['us'] / r['ours']['us'] for r in report['results']):.2f}" == mean


def features(report: str) -> int:
    """Of a weight, in a report's name."""
    found = re.search(r"(\d+)x\d+\.json$", report)
    return int(found[1]) if found else 0


def test_troubleshooting_quotes_messages_of_the_source() -> None:
    """What stands between the dots of each quoted message, in one of the package's files."""
    package = markdown.ROOT / "jax_splitk"
    # Literals that lines break, f-strings' values and what is escaped in them stand in a message's way.
    source = "\n".join(path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py")))
    source = re.sub(r'"\s*\n\s*f?"', "", source)
    rows = re.findall(r"^\| `([^`]+)` \|", (markdown.ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    assert len(rows) > 20
    parts = {part.strip() for row in rows for part in row.split("...")} - {""}
    assert not {part for part in parts if part not in source}
