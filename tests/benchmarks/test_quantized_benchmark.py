"""benchmarks/quantized.py: its cases, a run on small shapes, its report and the chart of that."""

import dataclasses
import functools
import json
import math
import pathlib
import xml.etree.ElementTree
from typing import Any

import jax
import numpy as np
import pytest

import jax_splitk
from benchmarks import quantized, quantized_products
from benchmarks.quantized_cases import ROWS, WEIGHTS, Case, crossover, select
from jax_splitk.kernels.cpu import quantized as host

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="the sizes are for the CPU"),
]


def test_cases() -> None:
    found = select([], [])
    assert len(found) == len(WEIGHTS) * len(ROWS) == 27
    assert found[0].name == "28672x8192_n1"
    assert str(found[0].problem()) == (
        "quantized_matmul bfloat16->bfloat16 x 1x8192 w 8192x28672 int4 group 64 scale bfloat16"
    )
    (other,) = select(["192x384"], [5], x_dtype="float8_e4m3fn", qtype="nf4", group_size=None)
    assert (other.group, other.out_dtype) == (384, "bfloat16")
    (bytes_,) = select(["192x384"], [5], qtype="float4_e2m1fn", group_size=32, scale_dtype="float8_e8m0fnu")
    assert bytes_.problem().scale_dtype == "float8_e8m0fnu"
    (awq,) = select(["192x384"], [5], qtype="uint4", group_size=128, scale_dtype="float16", zero_points=True)
    assert (awq.problem().scale_dtype, awq.problem().zero_dtype) == ("float16", "float16")
    for case in found:
        case.shrunk().problem().validate()


@pytest.mark.parametrize(("weights", "changes", "message"), [
    (["192"], {}, "case '192'; accepted: FEATURESxK, for instance 28672x8192"),
    (["192x100"], {}, "group_size=64; accepted: a divisor of k=100"),
    (["192x128"], {"qtype": "int5"}, "qtype='int5'; accepted: int4"),
    (["192x128"], {"qtype": "nf4", "zero_points": True}, "zero_points with qtype='nf4'; accepted: int4, uint4, int8"),
    (["192x128"], {"scale_dtype": "float8_e5m2"}, "scale_dtype='float8_e5m2'; accepted: 'bfloat16'"),
])  # fmt: skip
def test_cases_that_are_refused(weights: list[str], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select(weights, [1], **changes)


@pytest.mark.parametrize(("points", "expected"), [
    ([(1, 5, 10), (16, 5, 10)], None),
    ([(1, 11, 10), (16, 12, 10)], 1.0),
    ([(1, 5, 10), (4, 5, 10), (16, 20, 10)], 8.0),  # half-way between the ratios 1/2 and 2
    ([(1, 11, 10), (4, 5, 10), (16, 20, 10)], 8.0),  # what is slower at first does not count
    ([(1, 11, 10), (4, 5, 10)], None),
    ([(16, 20, 10), (4, 5, 10)], 8.0),
])  # fmt: skip
def test_crossover(points: list[tuple[int, float, float]], expected: float | None) -> None:
    found = crossover(points)
    assert found == expected or math.isclose(found or 0, expected or 0)


@pytest.fixture(scope="module")
def report_file(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    file = tmp_path_factory.mktemp("report") / "report.json"
    command = ["--cases", "3584x8192", "--n", "1", "9", "4096", "--rounds", "1"]
    command += ["--against", "xla_quantized", "xla_fp8", "--configs", "quantized_host", "--most", "2"]
    assert quantized.main([*command, "--json", str(file)]) == 0
    return file


def test_report(report_file: pathlib.Path) -> None:
    report = json.loads(report_file.read_text())
    assert report["environment"]["platform"] == "cpu"
    assert report["environment"]["jax_splitk"] == jax_splitk.__version__
    assert report["abi"]["quantized_host"] == host.FAMILY.ABI
    assert report["failures"] == {}
    assert [result["name"] for result in report["results"]] == ["192x512_n1", "192x512_n9"]  # 4096 rows are not quick
    assert set(report["crossovers"]) == {"192x512"}
    for result in report["results"]:
        assert set(result["times"]) == {"ours", "xla_quantized", "xla_fp8"}
        assert result["ratios"]["xla_fp8"] == result["times"]["xla_fp8"]["us"] / result["times"]["ours"]["us"]
        assert result["error"] < 5e-3
        assert result["fp8_product"] is False
        assert [found["family"] for found in result["configs"]] == ["quantized_host"] * 2
        assert all(found["error"] < 5e-3 and found["us"] > 0 for found in result["configs"])


@pytest.mark.parametrize("qtype", ["int4", "uint4", "int8", "float8_e4m3fn", "nf4"])
def test_shapes_of_products(qtype: str) -> None:
    case = Case(70, 128, 3, "float8_e4m3fn", qtype, 32)
    for product in quantized_products.products(case).values():
        out = jax.eval_shape(functools.partial(product.multiply, case), *product.arguments(case))
        assert out.shape == (16 if product.name == "xla_fp8" else 3, 70)
        assert out.dtype == "bfloat16"


def test_a_contestant_that_fails_does_not_cost_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    products = quantized_products.products

    def fail(*_: Any) -> jax.Array:
        raise RuntimeError("no such product")

    def one_fails(case: Case) -> dict[str, quantized_products.Product]:
        found = products(case)
        return found | {"xla_fp8": dataclasses.replace(found["xla_fp8"], multiply=fail)}

    monkeypatch.setattr(quantized_products, "products", one_fails)
    command = ["--cases", "1024x2048", "--n", "2", "--against", "xla_16bit", "xla_fp8", "--rounds", "1"]
    assert quantized.main(command) == 1
    said = capsys.readouterr().out
    assert "64x128_n2 (host)" in said or "64x128_n2 (xla)" in said
    assert "XLA bf16/ours" in said
    assert "failed: 64x128_n2 xla_fp8" in said


@pytest.mark.parametrize(("words", "message"), [
    ("--n 0", "argument --n: '0'; accepted: an integer of at least 1"),
    ("--n 8 -1", "argument --n: '-1'; accepted: an integer of at least 1"),
    ("--n 1.5", "argument --n: '1.5'; accepted: an integer of at least 1"),
    ("--most -1", "argument --most: '-1'; accepted: an integer of at least 1"),
    ("--rounds 0", "argument --rounds: '0'; accepted: an integer of at least 1"),
    ("--configs quantized_host quantized_stream", "--configs quantized_stream; accepted on cpu: quantized_host"),
])  # fmt: skip
def test_arguments_that_are_refused(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        quantized.arguments(words.split())
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_a_case_that_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert quantized.main(["--cases", "wide"]) == 2
    assert "case 'wide'; accepted" in capsys.readouterr().err


@dataclasses.dataclass
class FakeTensor:
    values: np.ndarray

    def to(self, dtype: str) -> "FakeTensor":
        assert dtype == "e4m3"
        return self

    def t(self) -> "FakeTensor":
        return FakeTensor(self.values.T)


class FakeTorch:
    """A stand-in for the parts of PyTorch that the benchmark uses. It records the products' shapes."""

    bfloat16, float32, float8_e4m3fn = "bf16", "f32", "e4m3"

    def __init__(self) -> None:
        self.made: list[tuple[int, ...]] = []

    def randn(self, *shape: int, device: str, dtype: str) -> FakeTensor:
        assert (device, dtype) == ("cuda", "bf16")
        return FakeTensor(np.ones(shape))

    def ones(self, shape: tuple[int, ...], device: str, dtype: str) -> FakeTensor:
        assert (shape, device, dtype) == ((), "cuda", "f32")
        return FakeTensor(np.ones(shape))

    def mm(self, a: FakeTensor, b: FakeTensor) -> None:
        self.made.append((a.values @ b.values).shape)

    def _scaled_mm(self, a: FakeTensor, b: FakeTensor, **options: Any) -> None:
        assert set(options) == {"scale_a", "scale_b", "out_dtype", "use_fast_accum"}
        self.mm(a, b)


def test_products_of_pytorch() -> None:
    case, torch = Case(70, 128, 3), FakeTorch()
    weights = quantized_products.torch_weights(torch, case, {"xla_16bit": 2, "xla_fp8": 3})
    assert {name: len(found) for name, found in weights.items()} == {"torch_bf16": 2, "torch_fp8": 3}
    found = quantized_products.torch_products(torch, case, weights)
    for i in range(5):
        found["torch_bf16"](i)
        found["torch_fp8"](i)
    assert torch.made == [(3, 70), (16, 70)] * 5


# ---- the chart -------------------------------------------------------------------------------------------------------


def test_chart(report_file: pathlib.Path, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks import plot  # noqa: PLC0415

    report = json.loads(report_file.read_text())
    lines = plot.curves(report)["192x512"]
    assert [n for n, _ in lines["jax_splitk"]] == [1, 9]
    assert lines["fp8 x fp8"][0] == (1, report["results"][0]["times"]["xla_fp8"]["us"])
    (axes,) = plot.quantized_chart(report).axes
    shown = [line.get_label() for line in axes.get_lines() if line.get_label() in plot.FASTEST]
    assert shown == [label for label in plot.FASTEST if label != "bf16"]
    files = [tmp_path / f"{name}.svg" for name in ("first", "second")]
    for file in files:
        assert plot.main([str(report_file), str(file)]) == 0
    assert files[0].read_bytes() == files[1].read_bytes()
    assert xml.etree.ElementTree.parse(files[0]).getroot().tag.endswith("svg")


def test_table_and_chart_show_the_faster_of_two(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks import plot  # noqa: PLC0415

    def report(kernels: str, times: dict[int, dict[str, float]]) -> dict[str, Any]:
        results = [
            {
                "name": f"64x64_n{rows}",
                "weight": "64x64",
                "case": {"rows": rows, "x_dtype": "bfloat16", "qtype": "int4", "group_size": 64},
                "times": {name: {"us": us} for name, us in of_rows.items()},
            }
            for rows, of_rows in times.items()
        ]
        environment = {"device_kind": "H200", "kernel_sources": {"products.cu": kernels}}
        return {"environment": environment, "crossovers": {}, "results": results}

    both = {"xla_fp8": 11.4, "torch_fp8": 11.94, "xla_16bit": 21.0, "torch_bf16": 20.0}
    reports = [
        report("a", {8: {"ours": 7.6, **both}, 1: {"ours": 7.5, "torch_fp8": 12.0}}),
        report("b", {64: {"ours": 1002.5, "xla_quantized": 38.8}}),
        report("a", {16: {"ours": 8.0}}),
    ]
    files = [tmp_path / f"{i}.json" for i in range(3)]
    for file, found in zip(files, reports, strict=True):
        file.write_text(json.dumps(found))
    out = tmp_path / "table.md"
    assert plot.main([*map(str, files), str(out)]) == 0
    assert out.read_text().splitlines() == [
        "| weight | n | jax_splitk | fp8 x fp8 | bf16 | XLA, quantized |",
        "|---|---|---|---|---|---|",
        "| 64x64 | 1 | 7.5 | 12.0 |  |  |",
        "| 64x64 | 8 | 7.6 | 11.4 | 20.0 |  |",
        "| 64x64 | 16 | 8.0 |  |  |  |",
        "| 64x64 | 64* | 1002 |  |  | 38.8 |",
    ]
    assert plot.curves(plot.combined(reports))["64x64"]["fp8 x fp8"] == [(1, 12.0), (8, 11.4)]
    results = pathlib.Path(plot.__file__).parent / "results"
    assert plot.main([str(results / "wgrad_h200.json"), str(out)]) == 0
    assert out.read_text().startswith("| N, ")
    assert plot.main([str(results / "partitioned_h200x2.json"), str(out)]) == 2
    assert "accepted: of benchmarks.wgrad, conv, dot, quantized, models" in capsys.readouterr().err


def test_chart_marks_where_others_become_faster() -> None:
    pytest.importorskip("matplotlib")
    from benchmarks import plot  # noqa: PLC0415

    def result(rows: int, ours: float, xla: float, torch: float) -> dict[str, Any]:
        times = {"ours": {"us": ours}, "xla_fp8": {"us": xla}, "torch_fp8": {"us": torch}}
        case = {"rows": rows, "x_dtype": "bfloat16", "qtype": "int4", "group_size": 64}
        return {"weight": "64x64", "case": case, "times": times}

    report = {"environment": {"device_kind": "H200"}, "results": [result(1, 5, 11, 10), result(4, 20, 10, 12)]}
    (axes,) = plot.quantized_chart(report).axes
    assert "fp8 x fp8 from n = 2" in axes.get_title("left")
    assert "bf16" not in axes.get_title()
