"""benchmarks.decode on a CPU."""

import json
import pathlib
from typing import Any

import pytest

from benchmarks import decode

pytestmark = pytest.mark.exhaustive


def test_a_report(tmp_path: pathlib.Path, capsys: Any) -> None:
    path = tmp_path / "decode.json"
    assert decode.main(["--quick", "--layers", "2", "--rows", "3", "--json", str(path)]) == 0
    assert "3 rows, 2 layers" in capsys.readouterr().out
    (found,) = json.loads(path.read_text())["results"]
    cases = found["cases"]
    weights = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 192)
    assert cases["bf16"]["weight_bytes"] == cases["bf16, scan"]["weight_bytes"] == 2 * weights
    assert cases["int4_ours"]["weight_bytes"] < weights
    assert cases["bf16"]["difference"] == 0
    # The formats have the same weights, and unrolled and scanned layers are the same model.
    assert cases["bf16_ours"]["difference"] < 0.02
    most_of = {"bf16": 0.02, "bf16_in_place": 0.02, "fp8": 0.3, "fp8_ours": 0.3, "int4_ours": 0.5, "int4_fused": 0.5}
    for name, most in most_of.items():
        assert cases[f"{name}, scan"]["difference"] < most
    assert 0 < cases["int4_ours"]["difference"] < 0.5
    assert cases["int4_fused"]["weight_bytes"] <= cases["int4_ours"]["weight_bytes"]  # k and v share their last tile
    assert any("64 -> 384" in line for line in cases["int4_fused"]["explained"])
    assert any("dot_general 3 x 192 x 64" in line for line in cases["bf16_ours"]["explained"])
    assert cases["bf16"]["times_floor"] == cases["bf16"]["us"] / cases["bf16"]["floor_us"]


def test_only_one_contestant_and_one_form(capsys: Any) -> None:
    assert decode.main(["--quick", "--layers", "1", "--rows", "1", "--no-scan", "--only", "bf16"]) == 0
    said = capsys.readouterr().out
    assert "| bf16 " in said and "scan" not in said and "int4" not in said
    with pytest.raises(SystemExit):
        decode.main(["--layers", "1", "--rows", "0"])
