"""benchmarks.quantized_models on a CPU."""

import dataclasses
import json
import pathlib

import pytest

from benchmarks import language_models, quantized_models

pytestmark = pytest.mark.exhaustive

pytest.importorskip("qwix")


# qwix 0.1.8 uses names that flax 0.12 deprecates.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_report(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = dataclasses.replace(language_models.SMALL, width=128, hidden=192)
    monkeypatch.setattr(quantized_models, "SIZE", size)
    path = tmp_path / "models.json"
    cases = ["llama-nnx-16x1", "gemma-linen-16x1", "qwen-qwix-16x1"]
    assert (
        quantized_models.main(["--quick", "--layers", "2", "--group", "32", "--cases", *cases, "--json", str(path)])
        == 0
    )
    report = json.loads(path.read_text())
    nnx, qwix, linen = report["results"]
    assert sum(nnx["products"].values()) == 2 * 7 + 1
    assert sum(linen["products"].values()) == 5  # the scanned layers' count once
    assert qwix["products"] == nnx["products"]
    for result in (nnx, linen, qwix):
        assert result["ratio"] == result["times"]["bf16"]["us"] / result["times"]["packed"]["us"]
        assert result["bytes"]["packed"] < result["bytes"]["bf16"] / 2
        assert 0 < result["errors"]["packed"] <= 2 * result["errors"]["bf16"] < 0.1
