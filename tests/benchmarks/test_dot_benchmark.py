"""benchmarks/dot.py: a run on short products, the table that its report makes, and which launches it accepts."""

import json
import pathlib
import types
from collections.abc import Callable

import jax
import pytest
from jax import numpy as jnp

from benchmarks import cases, dot, dot_cases, profile, tables, timing
from benchmarks.timing import Timing
from jax_splitk.kernels.contraction import products as tma
from jax_splitk.ops.decision import Decision
from jax_splitk.runtime.target import target_for
from jax_splitk.tuning import once, table
from jax_splitk.tuning.choice import XLA
from jax_splitk.tuning.key import key_for

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="the sizes are for the CPU"),
]


def test_cases_are_the_sixteen() -> None:
    assert len(dot_cases.DOT_CASES) == 16
    (case,) = cases.find(["1024x2048x50304"], dot_cases.DOT_CASES, lambda case: ())
    assert str(case.problem()) == "dot_general bfloat16->float32 1024x2048x50304 bkm,bkn"
    for case in dot_cases.DOT_CASES:
        assert case.shrunk(1e7).problem().flops <= 1e7 or case.shrunk(1e7).k == 64
    with pytest.raises(SystemExit, match="2"):
        dot.main(["--cases", "1x2"])


def test_a_tuned_run_and_its_table(
    cache: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", "on_miss")
    monkeypatch.setenv("JAX_SPLITK_TUNE_BUDGET_S", "0.05")
    monkeypatch.setattr(dot, "QUICK_CPU_FLOPS", 2e6)
    path = tmp_path / "report.json"
    assert dot.main(["--cases", "64x64x65536", "--json", str(path)]) == 0
    assert "geometric mean of XLA/ours, all" in capsys.readouterr().out
    report = json.loads(path.read_text())
    (result,) = report["results"]
    assert report["abi"]["dot_tma"] == tma.FAMILY.ABI and "driver" in report["environment"]
    assert (result["name"], report["failures"]) == ("64x64x192", {})
    assert result["speedup"] == result["xla"]["us"] / result["ours"]["us"]
    assert max(result["ours_error"], result["xla_error"]) < 1e-5
    assert result["tuning_seconds"] > 0
    assert tables.main([str(path)]) == 0
    target = target_for("cpu")
    assert [path.name for path in table.FOLDER.rglob("*")][1:] == ["dot_general.json"]
    once.state = once.Once()  # a process reads a table once
    entry = table.lookup(key_for(dot_cases.Case(64, 64, 192).problem(), target))
    assert entry is not None and entry.us(XLA) and entry.us(entry.choice)


def test_launches_that_are_not_the_plans() -> None:
    problem = dot_cases.Case(128, 128, 16384).problem()
    decisions = {
        splits: Decision(problem, "cutlass", "dot_tma", tma.Config(64, 64, 8, splits, reduction), splits, 0, "", "")
        for splits, reduction in ((4, "cluster"), (33, "workspace"))
    }
    planned = {splits: dot.planned_kernels(decision) for splits, decision in decisions.items()}
    assert planned == {4: ["dot_tma"], 33: ["dot_tma", "dot_tma_reduce"]}
    assert dot.planned_kernels(Decision(problem, "xla", None, None, None, 0, "", "")) is None

    def wrong(splits: int, **launches: float) -> str | None:
        return dot.wrong_launches(planned[splits], Timing(1, 1, {}, launches, 1, 1, "device", 1, 1))

    assert wrong(4, dot_tma=1.0) is wrong(33, dot_tma=1.0, dot_tma_reduce=1.0) is None
    assert wrong(4, dot_tma=1.0, Memset=1.0) == "launched a call: dot_tma 1 times, Memset 1 times; planned: dot_tma"
    assert wrong(33, dot_tma=1.0) is not None and wrong(4, dot_tma=2.0) is not None


def test_a_trace_counts_the_launches_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def recorded(work: Callable[[], None]) -> list[types.SimpleNamespace]:
        work()
        kernels = [("dot_tma", 0.0, 3e3), ("dot_tma_reduce", 2e3, 4e3)]
        turns = [(name, start + 1e4 * call, end + 1e4 * call) for call in range(3) for name, start, end in kernels]
        return [types.SimpleNamespace(name=name, start_ns=start, end_ns=end) for name, start, end in turns]

    monkeypatch.setattr(profile, "recorded", recorded)
    monkeypatch.setattr(profile, "stream_events", lambda events: events)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    timed = timing.compare({"": lambda: jnp.ones(())}, [()], rounds=2, calls=3)[""]
    assert (timed.launches, timed.source) == ({"dot_tma": 1.0, "dot_tma_reduce": 1.0}, "device")
    assert (timed.us, timed.summed_us) == (pytest.approx(4.0), pytest.approx(5.0))
