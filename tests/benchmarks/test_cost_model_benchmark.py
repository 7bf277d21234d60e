"""benchmarks/cost_model: problems, a sweep on the CPU, fits to synthetic times, and the evaluation's figures."""

import collections
import dataclasses
import itertools
import json
import math
import pathlib
import xml.etree.ElementTree

import jax
import numpy as np
import pytest

from benchmarks.cost_model import constants, evaluate, fit, problems, records, sweep, xla_fit
from benchmarks.cost_model.evaluate import Outcome
from benchmarks.cost_model.records import Record, Timed
from jax_splitk import kernels
from jax_splitk.kernels import Family, cost_model, xla
from jax_splitk.kernels.wgrad import im2col
from jax_splitk.runtime.target import DEFAULT_CUDA, Target
from jax_splitk.tuning.choice import XLA, Candidate

CPU = Target("cpu", "cpu", "", 4)
NOISE = 0.02


def drawn(count: int, seed: int = 3, ops: tuple[str, ...] = problems.OPERATIONS) -> list[problems.Drawn]:
    return [d for _, d in itertools.islice(problems.stream(seed, DEFAULT_CUDA, ops, problems.MAX_FLOPS), count)]


def test_problems_are_valid_and_of_every_kind() -> None:
    kinds, serving = collections.Counter[str](), collections.Counter[str]()
    for d in drawn(300):
        d.problem.validate()
        assert d.problem.flops <= problems.MAX_FLOPS
        assert d.problem.bytes_moved <= problems.MAX_BYTES
        kinds[d.kind] += 1
        of_problem = kernels.families(d.problem.op, "cuda")
        serving.update(f.name for f in of_problem if f.refusal(d.problem, None, DEFAULT_CUDA) is None)
    assert min(kinds.values()) >= 5, kinds
    fitted = [f for op in problems.OPERATIONS for f in kernels.families(op, "cuda")]
    assert min(serving[f.name] for f in fitted) >= 1, serving


def test_a_number_and_a_seed_are_always_the_same_problem() -> None:
    assert drawn(9) == drawn(9)
    assert {d.problem for d in drawn(40)}.isdisjoint(d.problem for d in drawn(40, seed=4))
    assert problems.draw(3, 7, DEFAULT_CUDA) == drawn(9)[7]
    small = problems.draw(3, 7, CPU, max_flops=1e6)
    assert small.problem.flops <= 1e6


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the sizes are for the CPU")
def test_a_sweep_is_kept_and_goes_on(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "BEST", 1)
    monkeypatch.setattr(sweep, "RANDOM", 1)
    monkeypatch.setattr(sweep, "AHEAD", 2)
    out = tmp_path / "new" / "sweep.jsonl"
    given = [str(out), "--ops", "dot_general", "--max-flops", "2e5", "--seconds", "60"]
    assert sweep.main([*given, "--problems", "1"]) == 0
    out.write_text(out.read_text() + '{"seed": 1, "index": 1}\n{"seed": 1, "ind')  # it was cut off in number 1
    assert sweep.main([*given, "--problems", "1"]) == 0
    found = records.read([out])
    assert [record.index for record in found] == [0, 2]
    for record in found:
        assert record.target.platform == "cpu"
        assert record.xla_us is not None and record.xla_us > 0
        assert 1 <= len(record.times()) <= 2
        assert all(t.spread >= 0 and t.error is None for t in record.timed)
        assert records.loads(record.dumps()) == record
    # No deadline is left for another one.
    assert sweep.main([*given[:-1], "0"]) == 1


def synthetic(true: dict[str, Family], count: int, rng: np.random.Generator) -> list[Record]:
    """Problems that wgrad_im2col computes, with times that these families' estimates would have."""
    found = []
    for number, d in enumerate(drawn(10 * count, ops=("conv_wgrad",))):
        if len(found) == count or im2col.FAMILY.refusal(d.problem, None, DEFAULT_CUDA) is not None:
            continue
        configs = im2col.FAMILY.candidates(d.problem, DEFAULT_CUDA)
        some = [Candidate(im2col.FAMILY, configs[i]) for i in rng.permutation(len(configs))[:8]]
        exact = {c: true[c.name].estimate(d.problem, c.config, DEFAULT_CUDA) * 1e6 for c in some}
        timed = tuple(Timed(c, us * math.exp(rng.normal(0, NOISE))) for c, us in exact.items())
        found.append(Record(d.problem, DEFAULT_CUDA, timed, number, d.kind))
    return found


def test_the_fit_finds_the_constants_that_times_were_made_with(capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    shipped = im2col.FAMILY.costs(DEFAULT_CUDA)
    changes = {"mma_flops_per_sm": 0.7, "wave_seconds": 1.6, "partial_bytes_per_second": 0.3, "reduce_seconds": 4.0}
    changed = {name: constants.fitted(shipped)[name] * by for name, by in changes.items()}
    true = {im2col.FAMILY.name: im2col.FAMILY.with_costs(constants.replaced(shipped, changed))}
    found = synthetic(true, 40, rng)
    held = [r for r in found if records.is_held_out(r.problem, 0.3)]
    seen = [r for r in found if r not in held]
    assert len(held) >= fit.LEAST_RECORDS
    fitted, rows = fit.fit_families(seen, held)
    assert list(fitted) == ["wgrad_im2col"] == [rows[1][0]]
    new = constants.fitted(fitted["wgrad_im2col"].costs(DEFAULT_CUDA))
    for name in changes:
        assert new[name] == pytest.approx(changed[name], rel=0.1), name
    before, after = fit.judged(held, {}), fit.judged(held, fitted)
    assert before is not None and after is not None
    assert after.mean < before.mean / 2
    shipped = cost_model.model_of("cuda", "NVIDIA H200")
    model = fit.model(shipped, seen, held, fitted)
    entry = model["families"]["wgrad_im2col"]
    assert entry["constants"]["wave_seconds"] == new["wave_seconds"]
    assert all(NOISE / 2 < value < 3 * NOISE for value in entry["uncertainty"].values())
    assert model["families"]["wgrad_halo"] == shipped["families"]["wgrad_halo"]


def test_xlas_weights_are_found_and_a_disturbed_time_does_not_matter() -> None:
    rng = np.random.default_rng(1)
    suite = [d.problem for d in drawn(200, ops=("dot_general",))]

    def seconds(problem: object) -> float:
        f = xla.features(problem, DEFAULT_CUDA)
        return f.floor * math.exp(0.5 - 0.2 * (f.sizes["k"] - 9) + 0.4 * ("float32" in f.kinds))

    def timed(problem: object, noise: float) -> Record:
        us = seconds(problem) * 1e6 * math.exp(rng.normal(0, noise))
        return Record(problem, DEFAULT_CUDA, (Timed(XLA, us),))

    found = [timed(problem, NOISE) for problem in suite[:150]]
    of_class = [i for i, record in enumerate(found) if xla.class_of(record.problem) == "mn half"]
    found[of_class[3]] = timed(found[of_class[3]].problem, 10.0)
    model = xla_fit.fit(found)
    estimates = {p: xla.estimate_by(model, p, DEFAULT_CUDA) for p in suite[150:]}
    off = [abs(math.log(e.seconds / seconds(p))) for p, e in estimates.items() if e is not None]
    assert len(off) > 30
    assert np.mean(off) < 0.03
    assert model["classes"]["mn half"]["uncertainty"] > 5 * NOISE  # not that nothing had happened
    rows = fit.xla_rows({}, {"dot_general": model}, [timed(problem, NOISE) for problem in suite[150:]])
    assert rows[1][:3] + rows[1][4:5] == ["dot_general", "50", "0", str(len(off))]


def test_what_data_and_tables_have_is_fitted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors are those of fits to the others: of a problem that is there twice, none."""
    given: list[Record] = []
    monkeypatch.setattr(fit, "fit_xla", lambda seen: given.extend(seen) or {})
    assert fit.main(["--shipped", "--keep", "--held-out", "0"]) == 0
    from_tables = {record.problem for record in records.shipped(DEFAULT_CUDA)}
    from_data = [record.problem for record in records.read(sorted(records.DATA.glob("*.jsonl")))]
    both = from_tables.intersection(from_data)
    assert len(both) > 50 and len(given) == len(from_data) + len(from_tables - both)


def test_a_fit_is_written_as_the_package_reads_it(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What ships has the uncertainties and XLA's weights that this command makes."""
    assert fit.main(["--shipped", "--keep", "--held-out", "0", "--write", str(tmp_path / "model.json")]) == 0
    assert "regret of the first choice" in capsys.readouterr().out
    shipped = json.loads(cost_model.path_for("NVIDIA H200").read_text())
    made = json.loads((tmp_path / "model.json").read_text())
    assert made["families"].keys() == shipped["families"].keys()
    assert made["xla"].keys() == shipped["xla"].keys()
    with pytest.raises(SystemExit):
        fit.main([])  # of no device


def outcome(**us: float) -> Outcome:
    return Outcome("{}", "conv_wgrad", "resnet", us, xla_us=100.0, best_us=50.0, tuning_seconds=5.0)


def test_the_figures_of_an_evaluation(tmp_path: pathlib.Path) -> None:
    found = [outcome(first=50.0, untuned=50.0, tuned=50.0) for _ in range(8)]
    found.append(outcome(first=60.0, untuned=60.0, tuned=50.0, again=50.9))
    found.append(outcome(first=110.0, untuned=100.0, tuned=51.0, again=60.0))
    figures = {row[1]: row[2:] for row in evaluate.table(found)[1:] if row[0].startswith("all") or not row[0]}
    assert figures["regret, mean"] == ["14.0%", "12.0%", "0.2%"]
    assert figures["over 5% slower than XLA"] == ["10.0%", "0.0%", "0.0%"]
    assert figures["winners that flip by over 2%"] == ["", "", "50.0% of 2"]
    path = tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps(dataclasses.asdict(o)) + '\n{"index": 3}\n' for o in found))
    assert evaluate.read([path]) == found
    made = [tmp_path / "table.md", tmp_path / "plot.svg"]
    assert evaluate.main([str(path), "--report", *map(str, made)]) == 0
    assert "| winners that flip by over 2%" in made[0].read_text()
    assert xml.etree.ElementTree.parse(made[1]).getroot().tag.endswith("svg")


def test_an_h100s_times_are_fitted_with_an_h200s_and_another_devices_by_themselves() -> None:
    """The file that is written is that of the device which owns the constants."""
    h100, another = (
        dataclasses.replace(DEFAULT_CUDA, device_kind=f"NVIDIA {kind}") for kind in ("H100 80GB HBM3", "?")
    )
    cpu = Target("cpu", "cpu", "", 4)
    assert fit._owner(h100) == fit._owner(DEFAULT_CUDA) == DEFAULT_CUDA
    assert fit._owner(another) == another
    assert fit._owner(cpu) == cpu
