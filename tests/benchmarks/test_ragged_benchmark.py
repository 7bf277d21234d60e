"""benchmarks/ragged.py: its cases, a run on small layers, and its message about contestants that are left out."""

import dataclasses
import json
import pathlib
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks import grouped_chart, plot, ragged, ragged_cases
from benchmarks.ragged_cases import CASES, SIZES, Case
from jax_splitk.kernels.cpu import ragged as host

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="the sizes are for the CPU"),
]

LAYER = "16384x2048x1408x64"


def test_cases_are_nine_layers_in_four_passes() -> None:
    assert len(CASES) == len({case.name for case in CASES}) == 36
    for case in CASES:
        problem = case.problem()
        assert problem.flops == 2 * case.m * case.k * case.n
        assert problem.operand_types[0][0] == case.shapes[0]
        assert problem.operand_types[1][0] == case.shapes[1]
        assert case.shrunk().problem().flops < 2e8


@pytest.mark.parametrize("kind", SIZES)
def test_sizes(kind: str) -> None:
    case = Case(10_000, 8, 8, 40, "forward")
    sizes = ragged_cases.sizes_of(case, kind, 3)
    assert sizes.sum() == case.m and sizes.dtype == np.int32 and sizes.shape == (40,)
    share = {"random": (0.02, 0.08), "zipf": (0.2, 0.27), "one_hot": (1, 1)}[kind]
    assert share[0] <= sizes.max() / case.m <= share[1]


def test_a_run_and_its_report(cache: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    assert ragged.main(["--cases", LAYER, "--json", str(path)]) == 0
    said = capsys.readouterr().out
    assert "torch left out: no PyTorch with a GPU" in said
    report = json.loads(path.read_text())
    assert report["abi"]["ragged_host"] == host.FAMILY.ABI and report["failures"] == {}
    assert [r["case"]["which"] for r in report["results"]] == [*ragged_cases.PASSES, "rhs_gradient"]
    for result in report["results"]:
        assert list(result["times"]) == list(SIZES)
        assert result["ratios"]["lax"] == result["times"]["random"]["lax"]["us"] / result["ours"]["us"]
        assert result["slowdowns"].keys() == {"zipf", "one_hot"}
        assert result["error"] < (1e-5 if result["case"]["out_dtype"] == "float32" else 5e-3)
    forward = report["results"][0]
    assert report["geometric_means"]["forward bfloat16"]["lax/ours"] == pytest.approx(forward["ratios"]["lax"])
    assert "geometric means, training, rhs_gradient float32: TFLOP/s " in said
    assert f"| {forward['name'].replace('-', ' ')} " in said


def test_the_fastest_of_some_configs(
    cache: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    arguments = ["--cases", f"{LAYER}-forward", "--configs", "2", "--against", "--json", str(path)]
    assert ragged.main(arguments) == 0
    (result,) = json.loads(path.read_text())["results"]
    assert result["config"].startswith("Config(splits=") and result["implementation"] == "host"
    assert result["ratios"] == {}
    assert capsys.readouterr().out.count(" us: Config(") == 2


def test_lax_is_left_out_where_it_needs_too_much_memory(
    cache: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--cases", f"{LAYER}-rhs_gradient", "--against", "lax", "--lax-limit-gib", "0"]
    assert ragged.main(arguments) == 0
    said = capsys.readouterr().out
    assert "lax left out: 0.0 GiB of temporary memory" in said and "too large" in said


def test_other_cases_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert ragged.main(["--cases", "forwards"]) == 2
    assert "cases=forwards; accepted: " in capsys.readouterr().err
    assert ragged.main(["--cases", "decoding", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 8


def test_float32_operands(cache: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The layers in training have float32 operands and results. Their error is that of float32."""
    path = tmp_path / "report.json"
    assert ragged.main(["--cases", LAYER, "--float32", "highest", "--against", "lax", "--json", str(path)]) == 0
    results = json.loads(path.read_text())["results"]
    assert [r["case"]["which"] for r in results] == [*ragged_cases.PASSES]
    assert all(r["name"].endswith("-float32-operands-highest") for r in results)
    assert all(r["error"] < 1e-5 and "lax" in r["ratios"] for r in results)


def test_the_chart_has_the_rates_of_training_layers(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """TFLOP/s are the operations over each contestant's time; lax has no bar where it was left out."""
    times = {"ours": {"us": 2.0}, "torch": {"us": 4.0}}
    layer = dataclasses.asdict(Case(64, 8, 16, 4, "forward"))
    results = [
        {"name": str(number), "case": layer | changes, "tflops": 600.0, "ours": times["ours"], "times": {"random": of}}
        for number, (changes, of) in enumerate((
            ({}, times), ({"which": "lhs_gradient"}, times | {"lax": {"us": 40.0}}), ({"out_dtype": "float32"}, times),
            ({"kind": "decoding"}, times),
        ))
    ]  # fmt: skip
    means = {
        "forward bfloat16": {"TFLOP/s": 600.0, "torch/ours": 2.0},
        "rhs_gradient float32": {"TFLOP/s": 300.4, "lax/ours": 20.04},
    }
    named = {"benchmark": "ragged", "environment": {"device_kind": "H200"}}
    report: dict[str, Any] = {**named, "geometric_means": means, "results": results}
    assert grouped_chart.table(report).splitlines()[2:] == [
        "| forward | 64 x 8 x 16 / 4 | 600 | 300 | - |",
        "| gradient of lhs | 64 x 8 x 16 / 4 | 600 | 300 | 30 |",
    ]
    forward, back = grouped_chart.chart(report).axes
    assert [len(bars) for bars in forward.containers] == [1, 1, 0]
    assert [bars[0].get_width() for bars in back.containers] == [600, 300, 30]  # pyright: ignore[reportIndexIssue]
    with pytest.raises(ValueError, match="no layer in training"):
        grouped_chart.chart(report | {"results": results[2:]})
    (tmp_path / "report.json").write_text(json.dumps(report))
    assert plot.main([str(tmp_path / "report.json"), str(tmp_path / "text.txt")]) == 0
    assert (tmp_path / "text.txt").read_text().splitlines()[2:] == [
        "| forward | 600 | 2.00 times as long | - |",
        "| gradient of rhs in float32 | 300 | - | 20 times as long |",
    ]
    assert plot.main([str(tmp_path / "report.json"), "--rows", "4", str(tmp_path / "plot.svg")]) == 2
