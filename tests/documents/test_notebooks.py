"""The notebooks run from their first to their last cell, in a kernel of their own, and print what they store."""

import os
import pathlib
import re
import sys
from typing import Any

import pytest

from tests.documents import markdown

NOTEBOOKS = sorted((markdown.ROOT / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(markdown.ROOT), *filter(None, sys.path)]))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_SPLITK_CACHE_DIR", str(tmp_path / "cache"))
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    stored = outputs(notebook)
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute(cwd=str(tmp_path))
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code" and cell.source)
    assert outputs(notebook) == stored, "`make notebooks` stores what the documentation shows"


def outputs(notebook: Any) -> list[list[str]]:
    """The words that each cell prints, sorted, without what differs from machine to machine: the processor's name,
    times and other numbers, and where a table breaks its lines, which depends on the widths of the numbers."""
    texts = ("".join(output.get("text", "") for output in cell.get("outputs", [])) for cell in notebook.cells)
    unnamed = (re.sub(r"(?m)^platform cpu: .*", "platform cpu", text) for text in texts)
    return [sorted(re.sub(r"[-+]?\d[\d.,]*(e[-+]?\d+)?", "#", text).split()) for text in unnamed]
