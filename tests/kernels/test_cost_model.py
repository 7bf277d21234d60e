"""Constants of the cost models as the package's data, and the estimate of XLA's time."""

import collections
import dataclasses
import json
import math
import pathlib
from typing import Any

import numpy as np
import pytest

from benchmarks import conv_cases
from benchmarks.cases import Case
from benchmarks.cost_model import records
from jax_splitk import kernels
from jax_splitk.kernels import catalogue
from jax_splitk.kernels.base import cost_model, forest, xla
from jax_splitk.kernels.base.work import Work
from jax_splitk.problems.dot_general import DotProblem
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.runtime.target import DEFAULT_CUDA, Target, resident_blocks
from tests.problems import seeded

H100 = dataclasses.replace(DEFAULT_CUDA, device_kind="NVIDIA H100 80GB HBM3")
CPU = Target("cpu", "cpu", "", 4)
EVERY = [(op, family) for op in catalogue.FAMILIES for family in kernels.families(op)]


@pytest.mark.parametrize("file", ["nvidia_h200.json", "nvidia_h100_80gb_hbm3.json", "cpu.json"])
def test_a_devices_rates_are_few_and_whole(file: str) -> None:
    record = cost_model.HostRates if file == "cpu.json" else cost_model.Rates
    values = json.loads((cost_model.FOLDER / file).read_text())
    assert cost_model.rates_from(record, values) == record(**values)
    assert len(values) <= 100


@pytest.mark.parametrize(("damage", "message"), [
    (lambda d: "{", "is damaged"),
    (lambda d: json.dumps([d]), "is damaged"),
    (lambda d: "7", "is damaged"),
    (lambda d: json.dumps(d).replace('"shadow"', '"shade"'), "shade, shadow are missing or unknown"),
    (lambda d: json.dumps({**d, "shadow": "0"}), "shadow='0'; accepted: numbers above 0"),
    (lambda d: json.dumps({**d, "shadow": 0}), "shadow=0; accepted"),
    (lambda d: json.dumps({**d, "shadow": math.nan}), "shadow=nan; accepted"),
])  # fmt: skip
def test_a_damaged_file_of_rates_is_said(
    damage: Any, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    data = json.loads(cost_model.path_for("NVIDIA H200").read_text())
    monkeypatch.setattr(cost_model, "FOLDER", tmp_path)
    kind = f"NVIDIA {tmp_path}"  # a device name that no cache has
    cost_model.path_for(kind).write_text(damage(data))
    with pytest.raises(ValueError, match=message) as error:
        cost_model.rates("cuda", kind)
    assert "install jax_splitk again" in str(error.value)
    assert str(tmp_path) in str(error.value)


def rows_and_trees() -> tuple[np.ndarray, forest.Forest]:
    trees, _ = forest.read(cost_model.FOLDER / cost_model.RESIDUAL)
    rng = np.random.default_rng(0)
    features = cost_model.CONFIG_NUMBERS + cost_model.PROBLEM_NUMBERS + cost_model.ALIGNMENTS + 26
    return rng.uniform(0, 100, (50, features)).astype(np.float32), trees


def test_trees_give_what_a_walk_from_node_to_node_gives() -> None:
    rows, trees = rows_and_trees()
    assert len(trees.leaf) < 70_000
    for row, factor in zip(rows, trees.factors(rows), strict=True):
        total = 0
        for root in trees.roots:
            node = root
            while trees.yes[node] != node:
                node = (trees.yes if row[trees.feature[node]] <= trees.threshold[node] else trees.no)[node]
            total += trees.leaf[node]
        assert factor == pytest.approx(math.exp(total / forest.UNITS), rel=1e-4)
    assert (trees.factors(rows[:1]) == trees.factors(rows)[:1]).all()
    assert trees.factors(rows[:0]).shape == (0,)


@pytest.mark.parametrize("change", [
    {"yes": lambda yes: yes + len(yes)},
    {"roots": lambda roots: roots - 1},
    {"leaf": lambda leaf: leaf[1:]},
    {"leaf": None},
])  # fmt: skip
def test_damaged_trees_are_said(change: dict[str, Any], tmp_path: pathlib.Path) -> None:
    with np.load(cost_model.FOLDER / cost_model.RESIDUAL) as data:
        arrays = dict(data)
    for name, changed in change.items():
        arrays = {**arrays, name: changed(arrays[name])} if changed else {n: a for n, a in arrays.items() if n != name}
    np.savez(tmp_path / "residual.npz", **arrays)
    with pytest.raises(ValueError, match="install jax_splitk again"):
        forest.read(tmp_path / "residual.npz")
    (tmp_path / "residual.npz").write_bytes(b"PK and no more")
    with pytest.raises(ValueError, match="install jax_splitk again"):
        cost_model.residual(tmp_path)


def test_estimates_do_not_depend_on_what_is_estimated_beside() -> None:
    """Some problems of each family, drawn anew in each run."""
    served = collections.defaultdict(list)
    for problem in (r.problem for r in records.shipped(DEFAULT_CUDA)):
        for family in kernels.families(problem.op, "cuda"):
            if family.refusal(problem) is None:
                served[family].append(problem)
    with seeded(55) as rng:
        for family, problems in served.items():
            for problem in rng.permutation(np.array(problems, object))[:8]:
                configs = family.candidates(problem, DEFAULT_CUDA)
                seconds = family.estimates(problem, configs, DEFAULT_CUDA)
                some = range(0, len(configs), 1 + len(configs) // 5)
                assert [family.estimate(problem, configs[i], DEFAULT_CUDA) for i in some] == [seconds[i] for i in some]
                assert family.estimates(problem, [], DEFAULT_CUDA) == []


def test_every_part_of_a_works_time_counts() -> None:
    """More work of any kind takes longer."""
    rates = cost_model.rates("cuda", DEFAULT_CUDA.device_kind)
    one = Work(**{f.name: 1e6 for f in dataclasses.fields(Work) if f.type is float} | {"memory_share": 0.5, "waves": 2})
    (least,) = cost_model.spent([one], rates).seconds
    for name, value in vars(one).items():
        more = dataclasses.replace(one, **{name: value * (0.5 if name == "memory_share" else 8)})
        assert cost_model.spent([more], rates).seconds[0] > least, name


def test_a_family_from_outside_is_estimated_by_the_rates_alone() -> None:
    work = Work(tensor_clocks=1e6)
    problem = next(r.problem for r in records.shipped(DEFAULT_CUDA))
    (seconds,) = cost_model.estimates("outside", problem, [None], [work], DEFAULT_CUDA)
    rates = cost_model.rates("cuda", DEFAULT_CUDA.device_kind)
    assert seconds == cost_model.spent([work], rates).seconds[0] > 1e6 / rates.tensor_clock
    assert cost_model.uncertainty("outside", DEFAULT_CUDA) == math.inf


def test_devices_differ_by_their_rates() -> None:
    """An unknown device has an H200's rates. A known device without recorded times has the memory rate of its data
    sheet."""
    h200, h100 = (cost_model.rates("cuda", target.device_kind) for target in (DEFAULT_CUDA, H100))
    assert cost_model.rates("cuda", "NVIDIA another") == h200
    assert 0.6 < h100.memory_bytes / h200.memory_bytes < 0.8
    nvl = cost_model.rates("cuda", "NVIDIA H100 NVL")
    assert nvl == dataclasses.replace(h200, memory_bytes=nvl.memory_bytes)
    assert nvl.memory_bytes == pytest.approx(h200.memory_bytes * 3.94 / 4.8)
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


def test_every_family_has_an_uncertainty() -> None:
    """The uncertainty follows from held-out times."""
    for _, family in EVERY:
        assert family.uncertainty(None, DEFAULT_CUDA if family.platform == "cuda" else CPU) > 0
    learned = cost_model.residual(cost_model.FOLDER)
    assert 0.03 < min(learned.spreads) < max(learned.spreads) < 0.5


def test_xlas_time_is_known_where_it_was_measured() -> None:
    """Estimates for the suites' problems and for timed products are within the stated uncertainty."""
    timed = records.read([records.DATA / "products_again_h200.jsonl"])
    products = [r for r in timed if r.problem.op == "dot_general"]
    found = [*records.shipped(DEFAULT_CUDA), *products]
    errors = []
    for record in found:
        estimate = xla.estimate(record.problem, DEFAULT_CUDA)
        assert estimate is not None, record.problem
        errors.append(math.log(estimate.seconds * 1e6 / record.xla_us) / estimate.uncertainty)
    assert len(products) == 50 and len(found) >= 28 + 28 + 50
    assert sum(abs(error) < 2 for error in errors) > 0.9 * len(errors)


@pytest.mark.parametrize("changes", [{"rows": 0}, {"rows": 2**20}, {"k": 64}, {"features": 2**20}])
def test_xlas_time_is_not_known_elsewhere(changes: dict[str, Any]) -> None:
    known = QuantizedMatmulProblem(16, 8192, 8192, "bfloat16", "bfloat16", "int4", 64, "bfloat16")
    assert xla.estimate(known, DEFAULT_CUDA) is not None
    assert xla.estimate(dataclasses.replace(known, **changes), DEFAULT_CUDA) is None
    assert xla.estimate(known, Target("cpu", "cpu", "", 4)) is None


@pytest.mark.parametrize("kernel", [(1, 1), (3, 3)])
def test_xla_takes_longer_for_a_wider_result(kernel: tuple[int, int]) -> None:
    """XLA converts a weight gradient's operands to float32 for it."""
    problem = Case("conv", 16, 32, 32, 512, 512, kernel).problem()
    same, wider = (
        xla.estimate(dataclasses.replace(problem, out_dtype=d), DEFAULT_CUDA) for d in ("bfloat16", "float32")
    )
    floor = xla.features(problem, DEFAULT_CUDA).floor
    assert floor < same.seconds < 1.6 * floor
    assert wider.seconds > 2.5 * same.seconds


@pytest.mark.parametrize(("kind", "channels", "groups", "size", "batch", "us"), [
    ("fprop", 384, 8, 28, 55, 228), ("dgrad", 384, 8, 28, 55, 219), ("wgrad", 384, 8, 28, 55, 411),
    ("fprop", 896, 8, 14, 95, 212), ("dgrad", 896, 8, 14, 95, 262), ("wgrad", 896, 8, 14, 95, 394),
])  # fmt: skip
def test_xla_is_slow_with_groups_that_are_no_power_of_two(
    kind: str, channels: int, groups: int, size: int, batch: int, us: float
) -> None:
    """Near its times on an H100 (results/kinds_h100_groups.json)."""
    case = conv_cases.Case("groups", kind, batch, (size, size), (channels, channels), (3, 3), 1, groups=groups)
    estimate = xla.estimate(case.problem(), DEFAULT_CUDA)
    assert estimate is not None and us / 2.5 < estimate.seconds * 1e6 < 3 * us


def test_xlas_time_depends_on_the_number_of_cores() -> None:
    big = max(records.shipped(DEFAULT_CUDA), key=lambda r: r.problem.flops).problem
    whole, half = (xla.estimate(big, dataclasses.replace(DEFAULT_CUDA, cores=cores)) for cores in (132, 110))
    assert whole.seconds < half.seconds < 1.4 * whole.seconds
