"""benchmarks/profile_step.py and its timeline: the parts of a step, and a chart that is legible."""

import json
import os
import pathlib
import re

import jax
import pytest

pytest.importorskip("matplotlib")

from matplotlib.text import Text

from benchmarks import plot, profile_step, timeline
from benchmarks.models.passes import FORWARD, INPUT, WEIGHT, Launch
from benchmarks.profile_step import INT4, XLA

pytestmark = pytest.mark.exhaustive

PROGRAM = """
  %wgrad_im2col.3 = (f32[3,3,64,64]{3,2,1,0}, u8[64]{0}) custom-call(%a), custom_call_target="jax_splitk_launch_v2", \
metadata={op_name="jit(step)/transpose(jvp(dense))/jax_splitk.conv_wgrad/wgrad_im2col" stack_frame_id=3}
  ROOT %cudnn-conv.4 = bf16[8]{0} custom-call(%a), custom_call_target="__cudnn$convForward", \
metadata={op_name="jit(step)/jvp(dense)/jax_splitk.conv_fprop/conv_general_dilated"}
  %loop_fusion = bf16[8]{0} fusion(%a), kind=kLoop, calls=%c, metadata={op_name="jit(step)/jvp()/max"}
"""
# One step's kernels: name, XLA's instruction, nanoseconds; and what they are.
STEP = [
    (Launch("sm90_xmma_fprop_implicit_gemm", "cudnn-conv.4", 1e6, 1.02e6), FORWARD),
    (Launch("loop_fusion", "loop_fusion", 1.02e6, 1.03e6), XLA),
    (Launch("fprop_toeplitz", "", 1.03e6, 1.05e6), FORWARD),
    (Launch("quantized_stream_int4", "", 1.05e6, 1.06e6), INT4),
    (Launch("dgrad_toeplitz", "", 1.06e6, 1.08e6), INPUT),
    (Launch("wgrad_im2col_partial", "wgrad_im2col.3", 1.08e6, 1.11e6), WEIGHT),
    (Launch("wgrad_im2col_reduce_splits", "wgrad_im2col.3", 1.105e6, 1.12e6), WEIGHT),
]


def launches() -> list[Launch]:
    return [launch for launch, _ in STEP]


def kernels() -> list[dict[str, object]]:
    return profile_step.described(launches(), profile_step.op_names(PROGRAM))


def report(tmp_path: pathlib.Path) -> pathlib.Path:
    file = tmp_path / "report.json"
    results = [{"name": "step", "launches": kernels()}]
    file.write_text(
        json.dumps({"benchmark": "profile_step", "environment": {"device_kind": "H200"}, "results": results})
    )
    return file


def test_parts_of_a_step() -> None:
    assert profile_step.op_names(PROGRAM)["loop_fusion"] == "jit(step)/jvp()/max"
    found = kernels()
    assert [kernel["part"] for kernel in found] == [part for _, part in STEP]
    assert [kernel["start_us"] for kernel in found] == pytest.approx([0, 20, 30, 50, 60, 80, 105])
    assert [kernel["us"] for kernel in found] == pytest.approx([20, 10, 20, 10, 20, 30, 15])
    assert found[0]["op_name"] == "jit(step)/jvp(dense)/jax_splitk.conv_fprop/conv_general_dilated"
    assert profile_step.part_of("gemm", "jit(f)/x_gradient/jax_splitk.quantized_matmul/dot_general") == INT4


def test_the_last_step_is_kept() -> None:
    step = launches()
    later = [Launch(x.kernel, x.instruction, x.start + 1e6, x.end + 1e6) for x in step]
    assert profile_step.last_step([*later, *step], 2) == later
    with pytest.raises(ValueError, match="13 kernels in 2 steps; accepted: the same kernels in each step"):
        profile_step.last_step([*later[1:], *step], 2)
    with pytest.raises(ValueError, match="14 kernels in 2 steps"):
        profile_step.last_step([*later[1:], later[1], *step], 2)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="this is the CPU's path")
def test_without_a_gpu_it_says_what_hlo_says(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    file = tmp_path / "report.json"
    assert profile_step.main(["--tiny", "--json", str(file)]) == 1
    said = capsys.readouterr().out
    assert "no GPU kernels in the profile on cpu: nothing is written" in said
    assert not file.exists()
    for op_name in (
        "jit(step)/jvp(dense)/jax_splitk.conv_fprop/conv_general_dilated",
        "jit(step)/transpose(jvp(depthwise))/jax_splitk.conv_wgrad/wgrad_host",
        r"jit(step)/jvp(head)/jit(_matmul)/jax_splitk.quantized_matmul/quantized_host_int4",
    ):
        assert f"| {op_name} " in said, op_name


def test_timeline_shows_each_part_and_is_legible(tmp_path: pathlib.Path) -> None:
    """If the chart is 400 pixels wide, its text is at least 9 pixels high."""
    figure = timeline.timeline(json.loads(report(tmp_path).read_text()))
    (axes,) = figure.axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["XLA: forward", "XLA", *(launch.kernel for launch in launches()[2:])]
    colors = [tuple(collection.get_facecolor()[0]) for collection in axes.collections]
    assert len(set(colors)) == len(timeline.COLORS)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(timeline.COLORS)
    assert tuple(timeline.COLORS) == profile_step.PARTS
    out = tmp_path / "out.svg"
    assert plot.main([str(report(tmp_path)), str(out)]) == 0
    width = float(re.search(r'<svg [^>]*\bwidth="([\d.]+)pt"', out.read_text())[1])
    sizes = [text.get_fontsize() for text in figure.findobj(Text) if text.get_text()]
    assert min(sizes) * 400 / width >= 9


def test_a_table_has_every_kernel(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "table.md"
    assert plot.main([str(report(tmp_path)), str(out)]) == 0
    rows = out.read_text().splitlines()
    assert len(rows) == 2 + len(STEP)
    assert rows[2].startswith("| sm90_xmma_fprop_implicit_gemm | forward | 0.0 | 20.0 | jit(step)/jvp(dense)/jax_split")
