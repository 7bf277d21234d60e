"""benchmarks/quantized_experts.py: its cases, and a run on small layers."""

import dataclasses
import json
import pathlib

import jax
import pytest

from benchmarks import quantized_experts
from benchmarks.quantized_experts import CASES
from jax_splitk.kernels.quantized import experts
from jax_splitk.runtime.target import DEFAULT_CUDA

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="the sizes are for the CPU"),
]


def test_cases_have_a_kernel() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        assert experts.FAMILY.refusal(case.problem()) is None
        assert experts.FAMILY.candidates(case.problem(), DEFAULT_CUDA)
        for seed in range(3):
            sizes = case.sizes(seed)
            assert sizes.sum() == case.m and sizes.shape == (case.experts,)
            assert sizes.max() <= case.tokens


def test_a_run_and_its_report(
    cache: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With int4 weights: under the flags of the tests XLA:CPU of jaxlib 0.10 cannot compile a function that quantizes
    to float4_e2m1fn and packs."""
    some = tuple(dataclasses.replace(case, qtype="int4", scale_dtype="bfloat16") for case in CASES)
    monkeypatch.setattr(quantized_experts, "CASES", some)
    path = tmp_path / "report.json"
    assert quantized_experts.main(["--cases", "128,1", "--quick", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["failures"] == {}
    assert [r["name"] for r in report["results"]] == [case.shrunk().name for case in CASES[:3]]
    for result in report["results"]:
        assert result["error"] < 5e-3
        assert result["epilogue_error"] < 1e-2
        assert result["ratios"].keys() == {"bfloat16", "dequantized"}
        assert result["epilogue"].keys() == {"fused", "separate"}
        assert result["active"] in (4, 8, 2)
    assert "| active experts |" in capsys.readouterr().out
    assert quantized_experts.main(["--cases", "nothing"]) == 2
