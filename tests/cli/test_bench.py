"""`bench matmul`: a sweep on the CPU, its files, and what it refuses. `bench conv`: the three passes."""

import importlib.util
import json
import pathlib
from typing import Any

import jax
import pytest

from jax_splitk.__main__ import main
from jax_splitk.cli import bench, sweep_chart
from jax_splitk.kernels import catalogue
from jax_splitk.kernels.contraction.products import Config
from jax_splitk.problems.dot_general import DotProblem
from jax_splitk.runtime.target import DEFAULT_CUDA
from jax_splitk.tuning import measure, sweep
from jax_splitk.tuning.choice import XLA
from jax_splitk.tuning.key import problem_as_dict
from tests.command_line import refused, run, text

pytestmark = pytest.mark.usefixtures("cache")
on_the_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="sweeps the host family")

SIZES = ("--m", 16, "--n", 24, "--k", 640)
LONG = DotProblem(1, 128, 256, 65536, "bkm", "bkn", "bfloat16", "float32")


@on_the_cpu
def test_a_sweep_and_its_files(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    files = ("--out", tmp_path / "sweep.json", "--plot", tmp_path / "sweep.svg")
    words = ("bench", "matmul", *SIZES, "--sweep-splits", "1:3,640,5", "--configs", 1, *files)
    found = run(capsys, *words)
    assert found == json.loads((tmp_path / "sweep.json").read_text())
    problem = DotProblem(1, 16, 24, 640, "bkm", "bkn", "bfloat16", "float32")
    assert found["problem"] == problem_as_dict(problem)
    assert [point["splits"] for point in found["points"]] == [1, 2, 3, 5]  # 640 is more than the kernel has
    assert {point["family"] for point in found["points"]} == {"dot_host"}
    assert len({point["config"]["block"] for point in found["points"]}) == 1
    assert all(point["us"] > 0 and point["predicted_us"] > 0 for point in found["points"])
    assert (found["source"], found["xla_us"] > 0, found["model"]["us"] > 0) == ("wall", True, True)
    svg = (tmp_path / "sweep.svg").read_text()
    assert svg.startswith("<?xml") and "<dc:date>" not in svg


@on_the_cpu
def test_a_table_of_the_fastest(capsys: pytest.CaptureFixture[str]) -> None:
    found = text(
        capsys, "bench", "matmul", *SIZES, "--sweep-splits", "2,4", "--only", "block=128", "--dtype", "float32"
    )
    rows = [line.split() for line in found.splitlines() if line[:1].isdigit()]
    assert [(row[0], row[5:7]) for row in rows] == [(splits, ["dot_host", "block=128"]) for splits in "24"]
    assert "rhs bkn: n contiguous, rows aligned to 32 bytes" in found
    assert [line.split(":")[0] for line in found.splitlines()[-3:]] == [
        "XLA",
        "the cost model's first choice",
        "fastest",
    ]


@on_the_cpu
def test_a_config_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    check = measure.Bench._try

    def fails(self: Any, contestant: measure.Contestant) -> str | None:
        return "no luck" if contestant.candidate not in (XLA, first) else check(self, contestant)

    first = sweep.ranked(
        sweep.key_for(DotProblem(1, 16, 24, 640, "bkm", "bkn", "bfloat16", "float32"), sweep.target_for("cpu"))
    )[0]
    monkeypatch.setattr(measure.Bench, "_try", fails)
    splits = next(s for s in (3, 6) if s != first.config.splits)
    found = run(capsys, "bench", "matmul", *SIZES, "--sweep-splits", splits, code=1)
    assert {(point["us"], point["error"]) for point in found["points"]} == {(None, "no luck")}
    monkeypatch.setattr(measure.Bench, "_try", lambda self, contestant: "no luck at all")
    assert main(["bench", "matmul", *map(str, SIZES), "--sweep-splits", "2"]) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err.split("16x24x640 bkm,bkn: ")[1]) == ("", "xla failed: no luck at all\n")


CONV = ("bench", "conv", "--batch", 2, "--in-channels", 4, "--out-channels", 8, "--kernel-spatial", 3, 3)


@on_the_cpu
def test_the_three_passes_of_a_convolution(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (*CONV, "--input-spatial", 9, 8, "--window-strides", 2, 1, "--dtype", "float32", "--configs", 2)
    found = run(capsys, *words, "--out", tmp_path / "conv.json")
    assert found == json.loads((tmp_path / "conv.json").read_text())
    assert [each["problem"]["op"] for each in found["passes"]] == list(bench.PASSES)
    for each, family in zip(found["passes"], ("fprop_host", "dgrad_host", "wgrad_host"), strict=True):
        assert (each["problem"]["input_spatial"], each["problem"]["window_strides"]) == ([9, 8], [2, 1])
        assert [point["family"] for point in each["points"]] == [family] * 2
        assert all(point["us"] > 0 for point in each["points"])
        assert each["xla_us"] > 0
    lines = text(capsys, *words).splitlines()
    assert lines[0].startswith("convolution float32->float32 lhs 2x9x8x4 ")
    rows = {line.split()[0]: line.split() for line in lines if line.startswith("conv_")}
    assert list(rows) == list(bench.PASSES)
    for row in rows.values():
        # Each time is rounded to 0.1 us.
        xla, ours = float(row[1]), float(row[2])
        assert (xla - 0.05) / (ours + 0.05) - 0.01 <= float(row[3]) <= (xla + 0.05) / (ours - 0.05) + 0.01
    least = sum(min(float(row[1]), float(row[2])) for row in rows.values())
    assert float(lines[-1].split(" by XLA, ")[1].split()[0]) == pytest.approx(least, abs=0.2)


@on_the_cpu
def test_a_pass_without_a_kernel_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(word) for word in (*CONV, "--input-spatial", 9, 8, "--dtype", "float32")]
    families = {**catalogue.FAMILIES, "conv_fprop": ()}
    monkeypatch.setattr(catalogue, "FAMILIES", families)
    assert main(words) == 0
    captured = capsys.readouterr()
    assert "conv_dgrad" in captured.out and "conv_fprop" not in captured.out
    assert captured.err.startswith("XLA's alone: conv_fprop ")
    assert captured.err.endswith("there is no kernel for cpu\n")


@pytest.mark.parametrize(("words", "message"), [
    ((), "the following arguments are required: --input-spatial"),
    (("--input-spatial", 9, 8, "--configs", 0), "--configs=0; accepted: an integer of at least 1"),
    (("--input-spatial", 9, 8, "--padding", "SOME"), "padding='SOME'; accepted: 'SAME', 'SAME_LOWER', 'VALID'"),
    (("--input-spatial", 9, 8, 7), "kernel_spatial"),
    (("--input-spatial", 9, 8, "--dtype", "int8"), "dtype='int8'; accepted"),
])  # fmt: skip
def test_what_is_no_convolution_is_refused(
    words: tuple[Any, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, *CONV, *words)


@pytest.mark.parametrize(("words", "message"), [
    (("--sweep-splits", "0:4"), "--sweep-splits='0:4'; accepted: FIRST:LAST or numbers, with commas, from 1 to 4096"),
    (("--sweep-splits", "4:"), "--sweep-splits='4:'; accepted"),
    (("--configs", 0), "--configs=0; accepted: an integer of at least 1"),
    (("--dtype", "int8"), "dtype='int8'; accepted"),
    (("--lhs-order", "kmb"), "lhs_order='kmb'; accepted"),
    (("--only", "block"), "--only block; accepted: FIELD=VALUE, e.g. tile_m=128"),
    (("--plot", "sweep.txt"), "--plot='sweep.txt': accepted: a name that ends in .svg, .png, .pdf"),
    (("--out", "no/where.json"), "no/where.json; accepted: a file in a folder that exists"),
    pytest.param(("--rhs-order", "bnk"), "dot_host: batch 1, lhs bkm and rhs bnk; accepted: ", marks=on_the_cpu),
    pytest.param(("--only", "block=65"), "no config with block=65 is legal for splits 1 to 128", marks=on_the_cpu),
])  # fmt: skip
def test_what_is_refused(words: tuple[Any, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(capsys, "bench", "matmul", *SIZES, *words)


def test_a_plot_without_matplotlib_is_refused_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = refused(capsys, "bench", "matmul", *SIZES, "--plot", "sweep.svg")
    assert "--plot='sweep.svg': a plot needs matplotlib, which is not installed: pip install matplotlib" in said


def test_numbers_of_splits() -> None:
    assert bench.splits_of("1:3,8,2") == [1, 2, 3, 8]


def test_candidates_for_hopper_are_few_tiles_in_every_mode() -> None:
    splits = range(1, 129)
    found = sweep.candidates(LONG, DEFAULT_CUDA, splits, variants=2)
    assert sorted({c.config.splits for c in found}) == list(splits)
    assert len({(c.config.tile_m, c.config.tile_n, c.config.stages) for c in found}) == 2
    modes = {s: {c.config.reduction for c in found if c.config.splits == s} for s in (1, 8, 9)}
    assert modes == {1: {"none"}, 8: {"workspace", "cluster"}, 9: {"workspace"}}
    only = sweep.candidates(
        LONG, DEFAULT_CUDA, [4], 2, {"tile_m": "64", "tile_n": "64", "reduction": "cluster", "stages": "8"}
    )
    assert [c.config for c in only] == [Config(64, 64, 8, 4, "cluster")]


def test_a_chart_has_a_line_for_each_variant_and_the_marks() -> None:
    pytest.importorskip("matplotlib")
    candidates = sweep.candidates(LONG, DEFAULT_CUDA, [1, 2, 4], 1)
    points = tuple(sweep.Point(c, 9.0 - i, 0.0, 5.0, 0) for i, c in enumerate(candidates))
    (axes,) = sweep_chart.figure(sweep.Sweep(LONG, DEFAULT_CUDA, points, points[0], 8.5, "device")).axes
    labels = [line.get_label() for line in axes.get_lines()]
    fastest = points[-1]
    assert labels[:3] == list(sweep_chart.lines_of(sweep.Sweep(LONG, DEFAULT_CUDA, points, points[0], 8.5, "device")))
    assert labels[3:] == ["XLA, 8.5 us", "model's choice, 9.0 us", f"fastest, {fastest.us:.1f} us"]
    assert axes.get_ylabel() == "device time, us"
