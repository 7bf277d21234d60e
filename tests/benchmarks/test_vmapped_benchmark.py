"""benchmarks.vmapped on a CPU."""

import json
import pathlib
from typing import Any

import pytest

from benchmarks import vmapped


def test_a_report(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for name, value in {"IMAGES": 2, "SIZE": 6, "CHANNELS": 4}.items():
        monkeypatch.setattr(vmapped, name, value)
    path = tmp_path / "vmapped.json"
    assert vmapped.main(["--quick", "--json", str(path)]) == 0
    assert "the same problems: True" in capsys.readouterr().out
    found = json.loads(path.read_text())
    assert found["ratio"] == found["vmap"]["us"] / found["batch"]["us"]
    assert found["problems"]["vmap"] == found["problems"]["batch"] != []
