"""benchmarks.qlora on a CPU."""

import json
import pathlib
from typing import Any

import pytest

from benchmarks import qlora

pytestmark = pytest.mark.exhaustive


def test_a_report(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(qlora, "WIDTH", 128)
    monkeypatch.setattr(qlora, "HIDDEN", 192)
    path = tmp_path / "qlora.json"
    assert qlora.main(["--quick", "--layers", "1", "--rows", "8", "--json", str(path)]) == 0
    said = capsys.readouterr().out
    assert "8 rows: ours " in said
    (case,) = json.loads(path.read_text())["cases"]
    assert case["ratios"]["bf16"] == case["times"]["bf16"]["us"] / case["times"]["ours"]["us"]
    assert case["bytes"]["bf16"] == 2 * 128 * 192 * 2
    assert case["bytes"]["ours"] < case["bytes"]["bf16"] / 3
    assert 0 < case["error_of_dx"] < 0.01
    assert any("quantized_matmul_transposed 8, 192 -> 128" in line for line in case["explained"])
