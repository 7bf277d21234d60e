"""benchmarks/plot.py: the figures that it shows, and the same file for the same report."""

import json
import pathlib
import statistics
import xml.etree.ElementTree

import pytest

pytest.importorskip("matplotlib")

from matplotlib.axes import Axes

from benchmarks import plot
from benchmarks.conv_cases import GROUPS
from benchmarks.headline import GROUP_TITLES

pytestmark = pytest.mark.exhaustive

REPORT = pathlib.Path(__file__).parents[2] / "benchmarks" / "results" / "wgrad_h200.json"


def test_shares() -> None:
    report = json.loads(REPORT.read_text())
    found = plot.shares(report)
    assert set(found) == {plot.label(result["case"]) for result in report["results"]}
    assert len(found) == len(report["results"])
    ratios = [ours / xla for ours, xla in found.values()]
    assert ratios == sorted(ratios, reverse=True)
    assert all(0 < share < 1.1 for pair in found.values() for share in pair)
    first = report["results"][0]
    assert found[plot.label(first["case"])] == (first["share_of_floor"], first["floor_us"] / first["xla"]["us"])


def test_labels_are_the_tables_notation() -> None:
    labels = {
        result["case"]["name"]: plot.label(result["case"]) for result in json.loads(REPORT.read_text())["results"]
    }
    assert labels["c3k64_r7s2_224x224_b256"] == "256, 224, 3 -> 64, 7x7 stride 2"
    assert labels["c96k96g96_r7_56x56_b64"] == "64, 56, 96 depthwise, 7x7"
    assert labels["c128k128g32_r3_56x56_b64"] == "64, 56, 128 -> 128, 3x3, 32 groups"
    assert labels["c64k64_r3_56x56_b256_float32"] == "256, 56, 64 -> 64, 3x3, float32"


def test_a_table_has_every_case(tmp_path: pathlib.Path) -> None:
    assert plot.main([str(REPORT), str(tmp_path / "table.md")]) == 0
    rows, report = (tmp_path / "table.md").read_text().splitlines()[2:], json.loads(REPORT.read_text())
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == list(plot.shares(report))
    (one,) = [result for result in report["results"] if result["case"]["name"] == "c64k64_r3_56x56_b256"]
    xla, ours = one["xla"]["us"], one["ours"]["us"]
    assert f"| 256, 56, 64 -> 64, 3x3 | {xla:.1f} | {ours:.1f} | {xla / ours:.2f} |" in rows


def names(axes: Axes) -> list[str]:
    """The rows' names, from the top."""
    return [text.get_text() for text in axes.texts if text.get_horizontalalignment() == "left"]


def test_chart_has_every_case() -> None:
    report = json.loads(REPORT.read_text())
    figure = plot.chart(report)
    (axes,) = figure.axes
    assert names(axes) == list(plot.shares(report))
    widths = [bar.get_width() for bar in axes.patches]
    assert widths == [pair[i] for i in range(2) for pair in plot.shares(report).values()]
    ratios = [result["xla"]["us"] / result["ours"]["us"] for result in report["results"]]
    means = f"median {statistics.median(ratios):.2f}, geometric mean {statistics.geometric_mean(ratios):.2f}"
    title = figure.get_suptitle()
    assert title.startswith(f"Weight gradients on one NVIDIA H200, XLA's time over ours:\n{means}")
    assert "share of the highest rates reached: bfloat16 products\n790 TFLOP/s, copies 4.3 TB/s" in axes.get_xlabel()
    assert "N, H=W, C -> K, filter" in axes.get_xlabel()


def test_fewer_rows_are_spread_from_the_largest_gain_to_the_least(tmp_path: pathlib.Path) -> None:
    report = json.loads(REPORT.read_text())
    every = list(plot.shares(report))
    figure = plot.chart(report, 8)
    (axes,) = figure.axes
    assert names(axes) == [every[i] for i in (0, 4, 8, 12, 15, 19, 23, 27)]
    assert "8 of 28 rows" in axes.get_xlabel()
    assert figure.get_suptitle() == plot.chart(report).get_suptitle(), "the means are those of all"
    assert plot.main(["--rows", "8", str(REPORT), str(tmp_path / "table.md")]) == 0
    rows = (tmp_path / "table.md").read_text().splitlines()[2:]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == names(axes)
    assert plot.spread([1, 2, 3], 5) == [1, 2, 3]


def test_rows_are_a_number(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ("1", "-3", "all"):
        with pytest.raises(SystemExit):
            plot.main([f"--rows={wrong}", str(REPORT), str(tmp_path / "table.md")])
        assert f"{wrong!r}; accepted: a number of rows, 2 or more" in capsys.readouterr().err


def test_rows_and_headlines_are_of_reports_that_compare(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantized = REPORT.with_name("quantized_h200_8192x8192.json")
    assert plot.main(["--rows", "4", str(quantized), str(tmp_path / "plot.svg")]) == 2
    assert "--rows 4 with a report of benchmarks.quantized, which has no rows by gain" in capsys.readouterr().err
    profile = {"benchmark": "profile_step", "environment": {"device_kind": "H200"}, "results": [{"name": "step"}]}
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    assert plot.main([str(tmp_path / "profile.json"), str(tmp_path / "text.txt")]) == 2
    assert "text.txt: a report of benchmarks.profile_step has no medians" in capsys.readouterr().err


def test_headlines_tell_what_a_mean_rests_on(tmp_path: pathlib.Path) -> None:
    results = [{"ratio": ratio} for ratio in (8.0, 1.0, 2.0)]
    assert plot.headline(results) == "median 2.00, geometric mean 2.52 (1.41 without the largest, 8.00)"
    assert plot.headline(results[:1]) == "median 8.00, geometric mean 8.00"
    assert plot.main([str(REPORT), str(tmp_path / "text.txt")]) == 0
    assert (tmp_path / "text.txt").read_text() == f"{plot.headline(json.loads(REPORT.read_text())['results'])}\n"


def test_groups_of_convolutions_are_summed_up(tmp_path: pathlib.Path) -> None:
    passes = REPORT.with_name("conv_h200_suite.json")
    assert plot.main([str(passes), str(tmp_path / "text.txt")]) == 0
    rows = (tmp_path / "text.txt").read_text().splitlines()[4:]
    results = json.loads(passes.read_text())["results"]
    groups = {result["case"]["group"] for result in results}
    assert len(rows) == len(groups) == len(GROUP_TITLES)
    assert set(GROUP_TITLES) == set(GROUPS)
    dense = sorted(r["xla"]["us"] / r["ours"]["us"] for r in results if r["case"]["group"] == "dense")
    figures = statistics.geometric_mean(dense), dense[0], dense[-1]
    assert f"| large dense 3x3 | {len(dense)} | {' | '.join(f'{x:.2f}' for x in figures)} |" in rows


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_files_are_the_same_each_time(tmp_path: pathlib.Path, suffix: str) -> None:
    files = [tmp_path / f"{name}.{suffix}" for name in ("first", "second")]
    for file in files:
        assert plot.main([str(REPORT), str(file)]) == 0
    assert files[0].read_bytes() == files[1].read_bytes()
    if suffix == "svg":
        assert xml.etree.ElementTree.parse(files[0]).getroot().tag.endswith("svg")
        assert b"<dc:date>" not in files[0].read_bytes()


def test_a_report_without_floors_is_refused(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    report = json.loads(REPORT.read_text())
    file.write_text(json.dumps(report | {"results": [r | {"floor_us": None} for r in report["results"]]}))
    assert plot.main([str(file), str(tmp_path / "out.svg")]) == 2
    assert "no result has floor_us; accepted: reports of an H200 or H100" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_a_missing_report_is_refused(name: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / name
    with pytest.raises(SystemExit) as exit_:
        plot.main([str(REPORT), str(file), str(tmp_path / "out.svg")])
    assert exit_.value.code == 2
    said = f"argument report: {str(file)!r} is no file; accepted: what a benchmark wrote with --json"
    assert said in capsys.readouterr().err


def test_later_reports_replace_cases_and_add_others() -> None:
    report = json.loads(REPORT.read_text())
    newer = json.loads(json.dumps(report["results"][1]))
    newer["ours"]["us"] *= 2
    other = json.loads(json.dumps(report["results"][2]))
    other["case"] |= {"name": "another", "batch": 3}
    changed, added = plot.label(newer["case"]), plot.label(other["case"])
    before, after = plot.shares(report), plot.shares(plot.combined([report, report | {"results": [newer, other]}]))
    assert set(after) == {*before, added}
    assert after[changed][0] == before[changed][0] / 2
    assert all(after[name] == before[name] for name in before if name != changed)


def test_reports_that_do_not_belong_together_are_refused(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = json.loads(REPORT.read_text())
    file = tmp_path / "other.json"
    file.write_text(json.dumps(report | {"environment": report["environment"] | {"device_kind": "another"}}))
    assert plot.main([str(REPORT), str(file), str(tmp_path / "out.svg")]) == 2
    assert "reports of different device_kind: NVIDIA H200, another; accepted: one" in capsys.readouterr().err


def test_a_report_without_results_is_refused(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    for kind in plot.CHARTS:
        file.write_text(json.dumps({"benchmark": kind, "environment": {"device_kind": "H200"}, "results": []}))
        assert plot.main([str(file), str(tmp_path / "out.svg")]) == 2
        assert "no results; accepted: reports with some" in capsys.readouterr().err


def test_products_and_steps(tmp_path: pathlib.Path) -> None:
    case = {"name": "64x256x1024", "m": 64, "n": 256, "k": 1024}
    product = {"case": case, "floor_us": 5.0, "ours": {"us": 6.0}, "xla": {"us": 9.0}}
    environment = {"device_kind": "H200"}
    dot = {"benchmark": "dot", "environment": environment, "results": [product]}
    figure = plot.chart(dot)
    assert figure.get_suptitle() == (
        "Products with a long reduction on one H200, XLA's time over ours:\nmedian 1.50, geometric mean 1.50"
    )
    assert names(figure.axes[0]) == ["64 x 256 x 1024"]
    step = {"name": "net", "title": "a net", "ratio": 1.25, "peak_ratio": 1.03}
    steps = {"benchmark": "models", "environment": environment}
    steps["results"] = [step | {"stock": {"ms": 10.0}, "ours": {"ms": 8.0}}, {**step, "name": "other"} | {
        "title": "another", "ratio": 0.8, "stock": {"ms": 8.0}, "ours": {"ms": 10.0}, "peak_ratio": 0.9
    }]  # fmt: skip
    figure = plot.models_chart(steps | {"results": steps["results"][::-1]})
    (axes,) = figure.axes
    assert names(axes) == ["a net", "another"], "sorted by gain"
    assert [bar.get_x() + bar.get_width() for bar in axes.patches] == pytest.approx([1.25, 0.8])
    assert "10.00 -> 8.00 ms   1.25" in [text.get_text() for text in axes.texts]
    assert figure.get_suptitle().startswith("Training steps on one H200, stock JAX's time over ours:\nmedian 1.02")
    for report, row in (
        (dot, "| 64 x 256 x 1024 | 9.0 | 6.0 | 1.50 |"),
        (steps, "| a net | 10.00 | 8.00 | 1.25 | +3% |"),
    ):
        (tmp_path / "report.json").write_text(json.dumps(report))
        assert plot.main([str(tmp_path / "report.json"), str(tmp_path / "table.md")]) == 0
        assert row in (tmp_path / "table.md").read_text().splitlines()
