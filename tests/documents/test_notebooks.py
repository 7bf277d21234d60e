"""The notebooks run from their first to their last cell, in a kernel of their own."""

import os
import pathlib
import sys

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
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute(cwd=str(tmp_path))
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code" and cell.source)
