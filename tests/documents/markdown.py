"""The Markdown files of the checkout: their code blocks, links and headings."""

import dataclasses
import functools
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[\w-]*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced code block: the file's line that its text begins at, its language, its text without indentation."""

    line: int
    language: str
    text: str


def files() -> list[pathlib.Path]:
    """The Markdown files for readers, without benchmarks/notes."""
    top = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "benchmarks/README.md")
    return [
        *(ROOT / name for name in top),
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "examples").rglob("*.md")),
    ]


def name(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def blocks(path: pathlib.Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    found = []
    for fence in _FENCE.finditer(text):
        code = re.sub(f"^{fence['indent']}", "", fence["text"], flags=re.MULTILINE)
        found.append(Block(text.count("\n", 0, fence.start("text")) + 1, fence["language"], code))
    return found


def prose(path: pathlib.Path) -> str:
    """The text without its code."""
    return re.sub(r"`[^`\n]*`", "", _FENCE.sub("", path.read_text(encoding="utf-8")))


def links(path: pathlib.Path) -> list[str]:
    """Targets of links and images, except those on other sites."""
    found = re.findall(r"\]\(([^)\s]+)\)", prose(path))
    return [target for target in found if not re.match(r"https?://", target)]


def anchors(path: pathlib.Path) -> set[str]:
    """The anchors of a file's headings, as Markdown's toc makes them."""
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    words = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[-\s]+", "-", word) for word in words}
