"""Writes what README and docs show of the reports in `benchmarks/results`: plots, and marked blocks of the pages.

    python -m benchmarks.pages           # after a report was added
    python -m benchmarks.pages --check   # only says what differs, with exit code 1

A block is what stands between two comments of a page. The first comment has the arguments of `benchmarks.plot`: the
reports, as patterns in `benchmarks/results`, and "table.md" or "text.txt". The figures of the newest report count.

    <!-- benchmarks.plot models_*.json table.md -->
    <!-- end -->
"""

import argparse
import json
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence

from benchmarks import plot

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# The reports and the rows of each plot that benchmarks.plot makes, in docs/plots.
PLOTS: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "models.svg": (["models_*.json"], []),
    "wgrad_h200.svg": (["wgrad_h200.json"], []),
    "readme_wgrad_h200.svg": (["wgrad_h200.json"], ["--rows", "8"]),
    "dot_h200.svg": (["dot_h200.json"], []),
    "profile_step_h200.svg": (["profile_step_h200.json"], []),
    "ragged_h200.svg": (["ragged_h200.json"], []),
    "quantized_h200.svg": ([f"quantized_h200_{n}x8192.json" for n in (28672, 8192, 3584)], []),
    "readme_quantized_h200.svg": (["quantized_h200_8192x8192.json"], []),
}
_BLOCK = re.compile(r"(<!-- benchmarks\.plot ([^\n]+) (\w+\.\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def reports(patterns: Iterable[str]) -> list[str]:
    """The reports that match the patterns; those of one pattern from the oldest to the newest."""
    found: dict[str, None] = {}
    for pattern in patterns:
        dated = [(json.loads(path.read_text())["environment"]["date"], str(path)) for path in RESULTS.glob(pattern)]
        found |= dict.fromkeys(path for _, path in sorted(dated))
    return list(found)


def made(patterns: Iterable[str], options: Iterable[str], path: pathlib.Path) -> None:
    """Writes what benchmarks.plot makes of the reports. Raises ValueError if it refuses them."""
    found = reports(patterns)
    if not found or plot.main([*options, *found, str(path)]) != 0:
        raise ValueError(f"reports {' '.join(patterns)}: benchmarks.plot makes no {path.name} of {len(found)} files")


def updated(page: str) -> str:
    """A page's text with its blocks written anew."""

    def block(match: re.Match[str]) -> str:
        begin, patterns, name, _, end = match.groups()
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, name)
            made(patterns.split(), [], path)
            return f"{begin}\n{path.read_text()}\n{end}"

    return _BLOCK.sub(block, page)


def pages() -> list[pathlib.Path]:
    """The pages that may have blocks."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(argv)
    new: dict[pathlib.Path, bytes] = {page: updated(page.read_text("utf-8")).encode() for page in pages()}
    with tempfile.TemporaryDirectory() as folder:
        for name, (patterns, rows) in PLOTS.items():
            path = pathlib.Path(folder, name)
            made(patterns, rows, path)
            new[ROOT / "docs" / "plots" / name] = path.read_bytes()
    differing = [path for path, data in new.items() if not path.exists() or path.read_bytes() != data]
    for path in differing:
        print(path.relative_to(ROOT))
        if not options.check:
            path.write_bytes(new[path])
    return 1 if options.check and differing else 0


if __name__ == "__main__":
    sys.exit(main())
