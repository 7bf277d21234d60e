"""benchmarks/conv.py: every case is some kernel's, and a run on small ones."""

import json
import pathlib

import jax
import pytest

import jax_splitk
from benchmarks import against_xla, conv, conv_cases, conv_epilogues
from jax_splitk import kernels
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime.target import DEFAULT_CUDA

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="the sizes are for the CPU"),
]


def test_every_case_is_served_on_hopper() -> None:
    names = [case.name for case in conv_cases.CONV_CASES]
    assert len(set(names)) == len(names)
    assert {case.group for case in conv_cases.CONV_CASES} == set(conv_cases.GROUPS)
    for case in conv_cases.CONV_CASES:
        case.as_given().validate()
        problem = case.problem()
        families = kernels.families(problem.op, "cuda")
        assert any(family.refusal(problem, None, DEFAULT_CUDA) is None for family in families), case.name
    with pytest.raises(SystemExit, match="2"):
        conv.main(["--cases", "depthwise", "none"])


def test_a_run(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A run over every pass, and a transposed convolution."""
    monkeypatch.setattr(conv, "QUICK_CPU_FLOPS", 1e6)
    path = tmp_path / "report.json"
    chosen = ["wgrad_c64k64_3x3x3_16x56x56_b8", "fprop_c256k128_4x4t2_16x16_b64", "dgrad_c96k192_2x2s2_57x57_b64"]
    assert conv.main(["--cases", *chosen, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert {result["case"]["which"] for result in report["results"]} == {"fprop", "dgrad", "wgrad"}
    assert any(result["case"]["transposed"] for result in report["results"])
    assert all(result["ours_error"] < 1e-2 for result in report["results"])
    assert report["abi"]["fprop_im2col"] >= 1
    assert "strided: XLA/ours" in capsys.readouterr().out
    figures = report["summary"]["strided"]
    assert figures["least"] <= figures["mean"] and figures["goal"] == 1.4


@pytest.mark.parametrize(
    ("mode", "arguments", "tuned"), [("on_miss", (), 2), ("off", (), 0), ("on_miss", ("cutlass",), 0)]
)
def test_problems_are_tuned_together_first(
    mode: str,
    arguments: tuple[str, ...],
    tuned: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A failure there does not end the run."""
    asked: list[Problem] = []

    def tune(problems: list[Problem]) -> None:
        asked.extend(problems)
        raise RuntimeError("XLA cannot compute it")

    monkeypatch.setattr(jax_splitk, "tune_problems", tune)
    monkeypatch.setattr(against_xla.Benchmark, "_run_all", lambda *_: ([], {}))
    monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", mode)
    cases = conv_cases.CONV_CASES[:2]
    more = [word for name in arguments for word in ("--implementation", name)]
    assert conv.main(["--cases", *(case.name for case in cases), "--no-quick", *more]) == 0
    assert asked == [case.problem() for case in cases[:tuned]]
    assert ("tuning: XLA cannot compute it" in capsys.readouterr().out) == bool(tuned)


def test_a_run_with_epilogues(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides compute the same: kernels of the CPU have no epilogue, and XLA computes it."""
    monkeypatch.setattr(conv, "QUICK_CPU_FLOPS", 1e6)
    path = tmp_path / "report.json"
    chosen = [f"fprop_c256k256g32_3x3_28x28_b64_{epilogue}" for epilogue in ("relu", "residual")]
    assert conv_epilogues.main(["--cases", *chosen, "--quick", "--json", str(path), "--implementation", "host"]) == 0
    report = json.loads(path.read_text())
    assert [result["case"]["epilogue"] for result in report["results"]] == ["relu", "residual"]
    assert all(result["ours_error"] < 1e-2 and result["family"] == "fprop_host" for result in report["results"])
    assert set(report["summary"]) == {"relu", "residual"}
