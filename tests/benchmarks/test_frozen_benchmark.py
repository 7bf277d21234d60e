"""benchmarks.frozen: a process that cannot compile runs a step from another process's decisions and kernels."""

import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks import frozen

pytestmark = pytest.mark.exhaustive


def test_a_step_runs_from_what_was_exported(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert frozen.main(["nature_dqn", "--tiny", "--json", str(tmp_path / "found.json")]) == 0
    (found,) = json.loads((tmp_path / "found.json").read_text())["results"]
    assert json.loads(capsys.readouterr().out) == found
    assert found["operations"] >= found["ours"] > 0
    assert found["loss_difference"] <= frozen.ROUNDING
    missing = "nvidia-cuda-nvrtc 13, nvidia-cuda-cccl, nvidia-cuda-runtime are not installed: pip install "
    assert found["compiler"].startswith(missing)


@pytest.mark.parametrize(("change", "message"), [
    ({}, None),
    ({"choices": {"a": "host", "b": "xla"}}, "choices"),
    ({"losses": [1.0, 0.7]}, "losses"),
    ({"losses": [1.0, float("nan")]}, "losses"),
])  # fmt: skip
def test_another_choice_or_result_is_an_error(
    change: dict[str, Any], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned = {"choices": {"a": "host", "b": "host"}, "losses": [1.0, 0.5], "tuning_seconds": 3.0}
    other = {**tuned, "lowering_seconds": 0.1, "compiler": "none", "environment": {}, **change}

    def run(command: Sequence[str], **settings: str) -> str:
        del settings
        return json.dumps({"tuned": tuned, "frozen": other}.get(command[-1]))

    monkeypatch.setattr(frozen, "_run", run)
    if message is None:
        assert frozen.tune_and_run("mlp_256", tiny=True)[0]["ours"] == 2
    else:
        with pytest.raises(RuntimeError, match=message):
            frozen.tune_and_run("mlp_256", tiny=True)


def test_a_process_that_fails_is_said() -> None:
    with pytest.raises(RuntimeError, match="nowhere"):
        frozen._run([sys.executable, "-c", "raise SystemExit('nowhere')"])
