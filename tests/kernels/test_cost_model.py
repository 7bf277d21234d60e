"""Constants of the cost models as the package's data, and the estimate of XLA's time."""

import copy
import dataclasses
import json
import math
import pathlib
import re
from typing import Any

import pytest

from benchmarks.cases import Case
from benchmarks.cost_model import constants, records
from jax_splitk import kernels
from jax_splitk.kernels import catalogue, cost_model, xla
from jax_splitk.kernels.dot import tma as dot
from jax_splitk.kernels.family import Translated
from jax_splitk.kernels.wgrad import gather, im2col
from jax_splitk.problems.dot_general import DotProblem
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.runtime.target import DEFAULT_CUDA, Target, resident_blocks

H100 = dataclasses.replace(DEFAULT_CUDA, device_kind="NVIDIA H100 80GB HBM3")
EVERY = [(op, family) for op in catalogue.FAMILIES for family in kernels.families(op)]


@pytest.mark.parametrize("file", ["nvidia_h200.json", "cpu.json"])
def test_shipped_constants_are_whole_and_as_the_fit_writes_them(file: str) -> None:
    path = cost_model.FOLDER / file
    data = json.loads(path.read_text())
    assert constants.text_of(data) == path.read_text()
    platform = "cpu" if file == "cpu.json" else "cuda"
    with_data = {f.name: f for _, f in EVERY if f.platform == platform and f.Costs is not None}
    assert set(with_data) <= set(data["families"])
    for name, family in with_data.items():
        costs = family.costs(Target(platform, "another", "9.0", 100))  # which has no file of its own
        least = {"times"} if isinstance(family, Translated) else {"launch_seconds"}
        assert constants.fitted(costs).keys() >= least or platform == "cpu"
        assert cost_model.record_of(family.Costs, json.loads(json.dumps(dataclasses.asdict(costs)))) == costs, name


@pytest.mark.parametrize(("damage", "message"), [
    (lambda d: "{", "is damaged"),
    (lambda d: json.dumps([d]), "is damaged"),
    (lambda d: json.dumps({**d, "families": {}}), "NoneType"),
    (lambda d: json.dumps(d).replace("shadow", "shade"), "shade, shadow are missing or unknown"),
    (lambda d: re.sub('"narrow": [0-9.]+', '"narrow": "0"', json.dumps(d)), "narrow='0'; accepted: numbers above 0"),
    (lambda d: re.sub('"narrow": [0-9.]+', '"narrow": 0', json.dumps(d)), "narrow=0; accepted"),
    (lambda d: json.dumps(d).replace('"sharers": 8', '"sharers": 8.5'), "sharers=8.5; accepted"),
])  # fmt: skip
def test_a_damaged_file_is_said(
    damage: Any, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    data = json.loads(cost_model.path_for("NVIDIA H200").read_text())
    monkeypatch.setattr(cost_model, "FOLDER", tmp_path)
    device = Target("cuda", f"NVIDIA {tmp_path}", "9.0", 132)  # a name that nothing remembers
    cost_model.path_for(device.device_kind).write_text(damage(data))
    with pytest.raises(ValueError, match=message) as error:
        im2col.FAMILY.costs(device)
    assert "install jax_splitk again" in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_other_constants_change_estimates_of_that_family_object_alone() -> None:
    problem = next(r.problem for r in records.shipped(DEFAULT_CUDA) if im2col.FAMILY.refusal(r.problem) is None)
    config = im2col.FAMILY.candidates(problem, DEFAULT_CUDA)[0]
    before = im2col.FAMILY.estimate(problem, config, H100)
    costs = im2col.FAMILY.costs(DEFAULT_CUDA)
    slow = im2col.FAMILY.with_costs(dataclasses.replace(costs, launch_seconds=costs.launch_seconds + 1))
    assert slow.estimate(problem, config, H100) == pytest.approx(1 + before)
    assert im2col.FAMILY.estimate(problem, config, H100) == before


def test_an_h100_has_its_share_of_an_h200s_memory() -> None:
    """And an H200's other constants, also those that a fit tries. A device that is not known has all of an H200's."""
    another = dataclasses.replace(DEFAULT_CUDA, device_kind="NVIDIA another")
    for family in (im2col.FAMILY, dot.FAMILY, gather.FAMILY):
        h200 = family.costs(DEFAULT_CUDA)
        assert family.costs(another) == h200
        for own in (family, family.with_costs(h200)):
            h100 = own.costs(H100)
            assert h100.hbm_bytes_per_second == pytest.approx(h200.hbm_bytes_per_second * 3.35 / 4.8)
            assert dataclasses.replace(h100, hbm_bytes_per_second=h200.hbm_bytes_per_second) == h200
    toeplitz = next(family for _, family in EVERY if family.name == "fprop_toeplitz")
    rates, fewer = (toeplitz.costs(target).hbm_bytes_per_second for target in (DEFAULT_CUDA, H100))
    assert fewer == {channels: pytest.approx(rate * 3.35 / 4.8) for channels, rate in rates.items()}
    memory_bound = DotProblem(1, 8, 8, 1 << 20, "bkm", "bkn", "bfloat16", "float32")
    there, here = (xla.features(memory_bound, target).floor for target in (DEFAULT_CUDA, H100))
    assert here > 1.2 * there


def test_clusters_that_run_at_a_time_fit_the_machine() -> None:
    for cluster, clusters in {1: 132, 2: 66, 3: 36, 4: 30, 5: 23, 6: 16, 7: 14, 8: 15}.items():
        assert resident_blocks(DEFAULT_CUDA, cluster) == clusters * cluster
        assert resident_blocks(DEFAULT_CUDA, cluster, 2) == 2 * clusters * cluster
        fewer = resident_blocks(dataclasses.replace(DEFAULT_CUDA, cores=78), cluster)
        assert fewer % cluster == 0
        assert 0 < fewer <= 78


def test_uncertainty_is_that_of_the_class_of_problems() -> None:
    stem, dense, small = (
        next(r.problem for r in records.shipped(DEFAULT_CUDA) if xla.class_of(r.problem) == name)
        for name in ("few channels half 2d", "dense half 2d", "grouped half 2d")
    )
    assert im2col.FAMILY.uncertainty(stem, DEFAULT_CUDA) == cost_model.UNKNOWN  # which it was not measured on
    assert 0 < im2col.FAMILY.uncertainty(dense, DEFAULT_CUDA) < cost_model.UNKNOWN
    assert im2col.FAMILY.uncertainty(small, H100) == im2col.FAMILY.uncertainty(small, DEFAULT_CUDA)
    outside = copy.copy(im2col.FAMILY)
    outside.name = "outside"
    assert outside.uncertainty(dense, DEFAULT_CUDA) == math.inf
    empty = dataclasses.replace(dense, batch=0)
    assert im2col.FAMILY.uncertainty(empty, DEFAULT_CUDA) == cost_model.UNKNOWN


def test_xlas_time_is_known_where_it_was_measured() -> None:
    """Of the problems of the suites, within the uncertainty that is said."""
    products = [r for r in records.read([records.DATA / "dot_h200.jsonl"]) if r.kind == "suite"]
    found = [*records.shipped(DEFAULT_CUDA), *products]
    errors = []
    for record in found:
        estimate = xla.estimate(record.problem, DEFAULT_CUDA)
        assert estimate is not None, record.problem
        errors.append(math.log(estimate.seconds * 1e6 / record.xla_us) / estimate.uncertainty)
    assert len(products) == 16 and len(found) >= 28 + 28 + 16
    assert sum(abs(error) < 2 for error in errors) > 0.9 * len(errors)


@pytest.mark.parametrize("changes", [{"rows": 0}, {"rows": 2**20}, {"k": 64}, {"features": 2**20}])
def test_xlas_time_is_not_known_elsewhere(changes: dict[str, Any]) -> None:
    known = QuantizedMatmulProblem(16, 8192, 8192, "bfloat16", "bfloat16", "int4", 64, "bfloat16")
    assert xla.estimate(known, DEFAULT_CUDA) is not None
    assert xla.estimate(dataclasses.replace(known, **changes), DEFAULT_CUDA) is None
    assert xla.estimate(known, Target("cpu", "cpu", "", 4)) is None


@pytest.mark.parametrize("kernel", [(1, 1), (3, 3)])
def test_xla_takes_longer_for_a_wider_result(kernel: tuple[int, int]) -> None:
    """It converts the operands of a weight gradient to float32. A roofline's time for one that is not wider."""
    problem = Case("conv", 16, 32, 32, 512, 512, kernel).problem()
    same, wider = (
        xla.estimate(dataclasses.replace(problem, out_dtype=d), DEFAULT_CUDA) for d in ("bfloat16", "float32")
    )
    floor = xla.features(problem, DEFAULT_CUDA).floor
    assert floor < same.seconds < 1.6 * floor
    assert wider.seconds > 2.5 * same.seconds


def test_xlas_time_depends_on_the_number_of_cores() -> None:
    big = max(records.shipped(DEFAULT_CUDA), key=lambda r: r.xla_us).problem
    whole, half = (xla.estimate(big, dataclasses.replace(DEFAULT_CUDA, cores=cores)) for cores in (132, 110))
    assert whole.seconds < half.seconds < 1.4 * whole.seconds
