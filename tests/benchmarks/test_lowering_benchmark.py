"""benchmarks/lowering.py: what a lowering for CUDA and a first run report."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import pytest

from benchmarks import first_run, lowering
from jax_splitk.runtime import compiler
from jax_splitk.tuning import device

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="the sizes are for the CPU"),
]


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_SPLITK_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", "on_miss")
    monkeypatch.setenv("JAX_SPLITK_TUNE_BUDGET_S", "0.05")


def test_a_first_run_and_its_parts() -> None:
    before = compiler._machine_code, device.state.lock
    stock, ours = (first_run.measure("nature_dqn", True, ours, 1) for ours in (False, True))
    assert before == (compiler._machine_code, device.state.lock), "nothing stays patched"
    for found in (stock, ours):
        parts = [found[f"{part}_s"] for part in ("trace", "lower", "compile", "run")]
        assert found["first_run_s"] == pytest.approx(sum(parts)) and min(parts) > 0
    assert ours["loss"] == pytest.approx(stock["loss"], rel=1e-3)
    assert ours["measured"] == len(ours["operations"]) == 3  # the weight gradients: a CPU competes for nothing else
    assert ours["parts"]["operands"]["count"] == 3
    assert ours["parts"]["executables"]["count"] == ours["candidates"] + 3  # XLA's
    assert 0 < ours["parts"]["device"]["s"] < ours["lower_s"]
    assert "operations" not in stock
    with pytest.raises(ValueError, match="--devices=99; accepted: 1 to"):
        first_run.measure("nature_dqn", True, False, 99)


def test_kernels_of_a_lowering_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", "off")
    monkeypatch.setenv("JAX_SPLITK_COMPILE_AHEAD", "off")
    monkeypatch.setattr(compiler, "_machine_code", lambda source, *, in_worker: (b"code", ""))
    found = lowering.measure("nature_dqn", True, False)
    assert found["compiled_here"] > 0 == found["compiled_by_workers"]
    assert found["at_once"] == 1 and found["lower_s"] > 0 and found["problems"] >= 8


def test_a_report_of_first_runs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"stock": 10.0, "ours": 20.0}
    asked: list[Sequence[str]] = []

    def run_here(model: str, options: Sequence[str], settings: Any) -> dict[str, Any]:
        asked.append([model, *options])
        found = {"first_run_s": seconds[options[-1]], "step_ms": 3.0 if options[-1] == "stock" else 2.0}
        return {"environment": {"device_kind": "a GPU"}, **found}

    monkeypatch.setattr(lowering, "run_here", run_here)
    path = tmp_path / "first_run.json"
    lowering.main(["hifigan", "resnet50_b32", "--first-run", "--devices", "2", "--json", str(path)])
    report = json.loads(path.read_text())
    assert report["benchmark"] == "first_run" and report["environment"] == {"device_kind": "a GPU"}
    assert [result["name"] for result in report["results"]] == ["hifigan", "resnet50_b32"]
    for result in report["results"]:
        assert (result["goal_s"], result["within_goal"], result["ratio"]) == (21.0, True, 1.5)
        assert "environment" not in result["ours"]
    assert asked[0] == ["hifigan", "--tiny", "--here", "stock"]  # which only warms up
    assert asked[1:3] == [["hifigan", "--devices", "2", "--here", who] for who in ("stock", "ours")]
