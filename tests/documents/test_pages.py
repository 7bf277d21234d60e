"""Links lead somewhere, the README is short, and its figures and the results' page are the reports'."""

import pathlib

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
