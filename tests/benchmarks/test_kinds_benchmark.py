"""benchmarks/kinds.py: a seed gives the same cases, kernels serve them, and a run on small ones."""

import json
import pathlib

import jax
import pytest

from benchmarks import conv, kinds, report
from jax_splitk import kernels
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests.problems import conv as conv_problem

pytestmark = pytest.mark.exhaustive

# Passes of which XLA computes some.
UNSERVED = {("narrow-groups", "wgrad")}


def test_a_seed_gives_the_same_cases_of_every_kind() -> None:
    cases = list(kinds.drawn())
    assert cases == list(kinds.drawn()) != list(kinds.drawn(seed=1))
    assert len({case.name for case in cases}) == len(cases) == len(kinds.KINDS) * kinds.DRAWS * 3
    for case in cases:
        case.as_given().validate()
        assert 1e5 < case.problem().flops < 2e12, case.name


def test_kernels_serve_the_cases_on_hopper() -> None:
    for case in kinds.drawn():
        problem = case.problem()
        served = [f for f in kernels.families(problem.op, "cuda") if f.refusal(problem, None, DEFAULT_CUDA) is None]
        assert served or (case.group, case.which) in UNSERVED, case.name
        assert all(family.candidates(problem, DEFAULT_CUDA) for family in served), case.name


@pytest.mark.parametrize(("dtype", "groups", "flops_a_second"), [
    ("bfloat16", 1, 790e12), ("float32", 1, 395e12), ("bfloat16", 64, 790e12), ("float32", 64, 59.3e12),
])  # fmt: skip
def test_the_floor_has_the_rate_of_the_cores_that_can_compute_it(
    dtype: str, groups: int, flops_a_second: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = conv_problem((56, 56), (15, 15), (64, 64), padding=7, groups=groups, dtype=dtype)
    monkeypatch.setattr(report, "copy_rate", lambda _: 1e30)
    assert report.floor_us(p) == pytest.approx(1e6 * p.flops / flops_a_second)
    monkeypatch.setattr(report, "copy_rate", lambda _: 4.3e9)
    assert report.floor_us(p) == pytest.approx(1e6 * p.bytes_moved / 4.3e9)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the sizes are for the CPU")
def test_a_run(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(conv, "QUICK_CPU_FLOPS", 1e6)
    path = tmp_path / "report.json"
    drawn = list(kinds.drawn(seed=7, draws=1))
    chosen = [next(c.name for c in drawn if c.group == group) for group in ("depthwise-dilated", "groups")]
    assert kinds.main(["--seed", "7", "--draws", "1", "--cases", *chosen, "--quick", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert {result["case"]["group"] for result in report["results"]} == {"depthwise-dilated", "groups"}
    assert all(result["ours_error"] < 1e-2 for result in report["results"])
    assert report["seed"] == 7 and set(report["summary"]) == {"depthwise-dilated", "groups"}
    assert "groups: XLA/ours" in capsys.readouterr().out
