"""benchmarks.transposed on a CPU, without PyTorch, and with a stand-in for it."""

import json
import pathlib
from typing import Any

import pytest

from benchmarks import transposed

pytestmark = pytest.mark.exhaustive

US = {"contiguous_format": 4.0, "channels_last_3d": 2.0}


class Torch:
    class cuda:
        @staticmethod
        def is_available() -> bool:
            return True


def test_a_report(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for name, value in {"IMAGES": 1, "SIZE": 3, "CHANNELS": 4}.items():
        monkeypatch.setattr(transposed, name, value)
    monkeypatch.setattr(transposed, "installed_torch", lambda: Torch)
    theirs = {layout: dict.fromkeys(transposed.PASSES, us) for layout, us in US.items()}
    monkeypatch.setattr(transposed, "pytorch", lambda torch, shapes: theirs)
    path = tmp_path / "transposed.json"
    assert transposed.main(["--quick", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    for name in transposed.PASSES:
        assert found["ratios"][name] == found["ours"][name]["us"] / US["channels_last_3d"]
    assert capsys.readouterr().out.count("PyTorch 2.0 us (channels_last_3d)") == len(transposed.PASSES)


def test_without_pytorch_our_times_are_said(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for name, value in {"IMAGES": 1, "SIZE": 2, "CHANNELS": 4}.items():
        monkeypatch.setattr(transposed, name, value)
    monkeypatch.setattr(transposed, "installed_torch", lambda: None)
    assert transposed.main(["--quick"]) == 0
    said = capsys.readouterr().out
    assert "our times alone" in said
    assert all(f"{name}: " in said for name in transposed.PASSES)
