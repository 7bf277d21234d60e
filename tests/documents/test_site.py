"""`make docs`: no page has a dead link, also when pages are opened as files, and notebooks show their outputs."""

import html.parser
import json
import os
import pathlib
import re
import subprocess
import sys
import urllib.parse

import pytest

from tests.documents import markdown

pytest.importorskip("mkdocs", reason="`make docs` installs it; .ci/run runs that first")
pytest.importorskip("nbconvert", reason="the same")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The documentation as HTML, built with warnings as errors."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)],
        cwd=markdown.ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Page(html.parser.HTMLParser):
    """The links and loaded files of a page, and its anchors."""

    def __init__(self, path: pathlib.Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value is not None}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if "href" in given:
            (self.links if tag == "a" else self.loaded).append(given["href"])
        if "src" in given:
            self.loaded.append(given["src"])


def dead(page: Page, path: pathlib.Path, pages: dict[pathlib.Path, Page]) -> list[str]:
    """Links to files that are missing, to folders, which a browser does not open as pages, and to missing anchors."""
    found = []
    for link in (*page.links, *page.loaded):
        parts = urllib.parse.urlsplit(link)
        if parts.scheme in ("http", "https", "mailto", "data") or link in ("#", "."):
            continue
        target = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
        anchor = urllib.parse.unquote(parts.fragment)
        if not target.is_file() or (anchor and target in pages and anchor not in pages[target].anchors):
            found.append(link)
    return found


@pytest.mark.exhaustive
def test_no_link_is_dead(site: pathlib.Path) -> None:
    # A server shows 404.html in place of any address, so its links begin at the server's root.
    paths = [path for path in site.rglob("*.html") if path.name != "404.html"]
    pages = {path: Page(path) for path in paths}
    assert len(pages) > 25
    wrong = {path.relative_to(site).as_posix(): dead(page, path, pages) for path, page in pages.items()}
    assert {path: links for path, links in wrong.items() if links} == {}


def test_dead_links_would_be_seen(tmp_path: pathlib.Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.html").write_text('<h1 id="top"></h1><a href="#top"></a><a href="b.html"></a><img src="c.svg">')
    (tmp_path / "b.html").write_text('<a href="a.html#top"></a><a href="a.html#other"></a><a href="folder/"></a>')
    pages = {path: Page(path) for path in tmp_path.glob("*.html")}
    assert dead(pages[tmp_path / "a.html"], tmp_path / "a.html", pages) == ["c.svg"]
    assert dead(pages[tmp_path / "b.html"], tmp_path / "b.html", pages) == ["a.html#other", "folder/"]


def test_pages_load_nothing_from_other_sites(site: pathlib.Path) -> None:
    loaded = {link for path in site.rglob("*.html") for link in Page(path).loaded}
    assert not [link for link in loaded if link.startswith(("http", "//"))]


def test_notebooks_are_shown_with_their_outputs(site: pathlib.Path) -> None:
    for path in sorted((markdown.ROOT / "docs" / "notebooks").glob("*.ipynb")):
        page = (site / "notebooks" / f"{path.stem}.html").read_text(encoding="utf-8")
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        outputs = [output for cell in cells for output in cell.get("outputs", [])]
        assert len(outputs) >= 4, "`make notebooks` stores them"
        assert {output["output_type"] for output in outputs} == {"stream"}
        assert page.count(">Output</span>") == len(outputs)
        # The highlighter may put a text into elements.
        shown = re.sub(r"<[^>]*>", "", page)
        for output in outputs:
            assert html.unescape("".join(output["text"]).strip().splitlines()[-1]) in html.unescape(shown)


def test_home_has_previous_and_next_and_a_switch_to_dark(site: pathlib.Path) -> None:
    home, start = (site / "index.html").read_text(), (site / "quick-start.html").read_text()
    assert 'rel="next"' in home
    assert 'rel="prev"' in start
    assert 'data-md-color-scheme="slate"' in home
    assert "plots/models.svg" in home


def test_the_api_has_a_row_for_each_argument(site: pathlib.Path) -> None:
    """A merged row would have a comma in its name, and a signature that is not wrapped would be one long line."""
    page = (site / "reference" / "api.html").read_text(encoding="utf-8")
    names = re.findall(r'<tr class="doc-section-item">\s*<td>\s*<code>([^<]*)</code>', page)
    assert len(names) > 80
    assert not [name for name in names if "," in name]
    signatures = re.findall(r'<div class="[^"]*doc-signature[^"]*">(.*?)</div>', page, re.DOTALL)
    lines = [line for text in signatures for line in html.unescape(re.sub(r"<[^>]*>", "", text)).splitlines()]
    assert len(lines) > 150
    assert max(map(len, lines)) <= 100
