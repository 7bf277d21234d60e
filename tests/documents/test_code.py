"""Every code block of the documentation runs, and every public function's example."""

import contextlib
import doctest
import importlib.util
import inspect
import itertools
import logging
import os
import pathlib
import re
import shlex
import subprocess
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import pytest

import jax_splitk
from jax_splitk.__main__ import main
from jax_splitk.kernels import catalogue
from tests.documents import markdown
from tests.tuning_cache import isolate, new_session

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="what the pages print is the CPU's")

# The code of a page here needs that page's package: .ci/package installs it, and runs the code.
OWN_PACKAGE = markdown.ROOT / "examples" / "custom_kernel" / "README.md"
PAGES = [path for path in markdown.files() if markdown.blocks(path) and path != OWN_PACKAGE]
_ASSIGNMENTS = re.compile(r"^(\w+=\S* )+")
_OURS = re.compile(r"(\w+=\S* )*jax-splitk ")
# Commands that this test does not run, by their beginnings after variables: where they run instead, or why they cannot
# run here.
ELSEWHERE = {
    "make ": ".ci/run",
    "pip install": ".ci/package; the extra cuda13 is two gigabytes",
    "python -m build": ".ci/package",
    "python examples/compile_without_gpu.py": "needs the extra cuda13; tests/test_examples.py on a GPU's machine",
    "python -m benchmarks": "minutes, and a GPU; tests/benchmarks",
    "python -m jax_splitk tune --again benchmarks": "the same",
    ".ci/": "the scripts themselves",
    "python3 -m venv .venv/asan": "minutes; by hand",
    ".venv/asan": "the same",
    "LD_PRELOAD": "the same",
}
LANGUAGES = {"python", "bash", "json", "text", "cpp"}
FRAMEWORKS = ("flax", "equinox", "haiku", "optax", "qwix")


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """An empty working folder, with a cache of its own."""
    isolate(monkeypatch, tmp_path / "cache")
    for op, families in catalogue.FAMILIES.items():
        monkeypatch.setitem(catalogue.FAMILIES, op, families)  # what a page registers is gone after it
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    yield tmp_path / "work"
    logging.getLogger("jax_splitk").setLevel(logging.NOTSET)  # which a page sets


def test_languages_are_known() -> None:
    found = {block.language for path in PAGES for block in markdown.blocks(path)}
    assert found <= LANGUAGES


def page(path: pathlib.Path) -> Any:
    """A parameter for a page. Guides take long, so only `make test-all` runs them."""
    marks = [pytest.mark.exhaustive] if path.parent.name == "guides" else []
    marks.append(pytest.mark.filterwarnings("ignore::DeprecationWarning:qwix.*"))  # it uses names that flax deprecates
    return pytest.param(path, id=markdown.name(path), marks=marks)


@pytest.mark.parametrize("path", [page(path) for path in PAGES])
def test_code_runs(path: pathlib.Path, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page's Python blocks, in their order, share one namespace; what they print is not compared."""
    names: dict[str, Any] = {"__name__": "page"}
    missing = {name for name in FRAMEWORKS if importlib.util.find_spec(name) is None}
    for block in markdown.blocks(path):
        if block.language == "python":
            if missing and any(f"import {name}" in block.text or f"from {name}" in block.text for name in missing):
                pytest.skip(f"not installed: {', '.join(sorted(missing))}")
            # As many empty lines as make a traceback's line numbers the page's.
            exec(compile("\n" * (block.line - 1) + block.text, markdown.name(path), "exec"), names)
        elif block.language == "json":
            assert main(["explain", "--platform", "cuda", block.text]) == 0
        elif block.language == "bash":
            run(script(block.text), folder, monkeypatch)


def script(text: str) -> str:
    """A shell block without the commands that do not run here."""
    lines = text.replace("\\\n", " ").splitlines()
    runs = (
        not any(command.startswith(tuple(ELSEWHERE)) for command in (line, _ASSIGNMENTS.sub("", line)))
        for line in lines
    )
    return "\n".join(itertools.compress(lines, runs))


def run(text: str, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a shell block: lines of `jax-splitk` in this process, since another would import jax for each, and the lines
    between them in a shell."""
    for is_ours, lines in itertools.groupby(text.splitlines(), lambda line: _OURS.match(line) is not None):
        if not is_ours:
            command = "\n".join(lines)
            done = subprocess.run(["bash", "-ec", command], cwd=folder, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
            continue
        for line in lines:
            words = shlex.split(line, comments=True)
            command = words.index("jax-splitk")
            new_session(monkeypatch)  # a command reads what the one before it has stored on disk
            with mock.patch.dict(os.environ, [word.split("=", 1) for word in words[:command]]):
                assert main(words[command + 1 :]) == 0, line


FUNCTIONS = [name for name in jax_splitk.__all__ if callable(getattr(jax_splitk, name))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_examples_of_docstrings(name: str, folder: pathlib.Path) -> None:
    public = getattr(jax_splitk, name)
    if inspect.isclass(public) and issubclass(public, Exception):
        pytest.skip("an exception")
    finder = doctest.DocTestFinder(recurse=False)
    (example,) = finder.find(public, name, module=False, globs={"jax_splitk": jax_splitk, "jax": jax, "jnp": jax.numpy})
    assert example.examples, f"{name} has no example"
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    lines: list[str] = []
    with contextlib.suppress(SystemExit):
        runner.run(example, out=lines.append)
    assert not runner.failures, "".join(lines)
