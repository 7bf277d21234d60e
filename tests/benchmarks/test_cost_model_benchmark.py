"""benchmarks/cost_model: problems, a sweep on the CPU, fits to synthetic times, and the evaluation's figures."""

import collections
import dataclasses
import itertools
import json
import pathlib
import xml.etree.ElementTree
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks import ceilings
from benchmarks.cost_model import against, evaluate, fit, learn, problems, records, regret, renew, sweep, tuned
from benchmarks.cost_model.evaluate import Outcome
from benchmarks.cost_model.records import Record, Timed
from benchmarks.pages import RESULTS
from jax_splitk import kernels
from jax_splitk.kernels.base import cost_model, xla
from jax_splitk.kernels.base.adapted import Adapted
from jax_splitk.kernels.base.family import ModelledFamily
from jax_splitk.kernels.contraction import wgrad as im2col
from jax_splitk.runtime.target import DEFAULT_CUDA, Target
from jax_splitk.tuning.choice import XLA, Candidate
from jax_splitk.tuning.key import key_for
from jax_splitk.tuning.search import ranked
from tests.problems import conv

pytestmark = pytest.mark.exhaustive

CPU = Target("cpu", "cpu", "", 4)
NOISE = 0.02


def drawn(count: int, seed: int = 3, ops: tuple[str, ...] = problems.OPERATIONS) -> list[problems.Drawn]:
    return [d for _, d in itertools.islice(problems.stream(seed, DEFAULT_CUDA, ops, problems.MAX_FLOPS), count)]


def test_problems_are_valid_and_of_every_kind() -> None:
    kinds, serving = collections.Counter[str](), collections.Counter[str]()
    for d in drawn(600):
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


def test_times_of_padded_channels_are_those_of_the_kernels() -> None:
    """The fit sees the padded problem, and the time without XLA's copies, unless it is mostly copies."""
    p = conv((19, 21), (3, 3), (61, 53))
    padded = next(f for f in kernels.families(p.op, "cuda") if f.name == "wgrad_im2col_padded")
    assert isinstance(padded, Adapted)
    config = im2col.Config(64, 64, 8, True, 2)
    copies = 1e6 * padded.copy_seconds(p, DEFAULT_CUDA)
    assert copies > 1
    for us, kept in ((5 * copies, True), (1.5 * copies, False)):
        rows = fit.fitted([Record(p, DEFAULT_CUDA, (Timed(XLA, 99.0), Timed(Candidate(padded, config), us)))])
        found = [(row.problem, row.candidate.name, row.candidate.config, row.us) for row in rows]
        assert found == [(padded.translated(p), "wgrad_im2col", config, us - copies)] * kept


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


def test_exploration_draws_what_the_model_does_not_propose() -> None:
    new = 0
    for d in drawn(12):
        proposed = set(ranked(key_for(d.problem, DEFAULT_CUDA)))
        found = sweep.explored(d.problem, DEFAULT_CUDA, np.random.default_rng(0))
        assert len(found) == len(set(found)) <= sweep.EXPLORED_BEST + sweep.EXPLORED
        assert all(c.refusal(d.problem, DEFAULT_CUDA) is None for c in found)
        assert found == sweep.explored(d.problem, DEFAULT_CUDA, np.random.default_rng(0))
        new += sum(c not in proposed for c in found)
    assert new >= 36


def learnable(rng: np.random.Generator, groups: int) -> learn.Data:
    """Choices among 8 candidates. Their times depend on two features; the error that they share is noise."""
    rows = rng.uniform(0, 1, (8 * groups, 3)).astype(np.float32)
    of, common = np.repeat(np.arange(groups), 8), rng.normal(0, 0.5, groups)
    logs = 0.6 * (rows[:, 0] > 0.5) * rows[:, 1] + common[of] + rng.normal(0, NOISE, len(of))
    return learn.Data(rows, logs, np.ones(len(of)), of, of % learn.FOLDS)


def test_trees_learn_what_tells_candidates_apart() -> None:
    pytest.importorskip("lightgbm")
    data = learnable(np.random.default_rng(0), 300)
    shape = learn.Shape(rounds=60, leaves=8)
    found = learn.held_out(data, shape)

    def apart(logs: np.ndarray) -> np.ndarray:
        return logs - (np.bincount(data.groups, logs) / 8)[data.groups]

    assert apart(data.logs - found).std() < 0.5 * apart(data.logs).std()
    # The arrays as they are written and read again: the same every time.
    again = learn.fit(data, shape)
    for name, values in learn.fit(data, shape).arrays().items():
        assert (values == again.arrays()[name]).all(), name


def test_rates_are_found_that_times_were_made_with() -> None:
    """Measured rates are not fitted, and stay."""
    shipped = cost_model.rates("cuda", "NVIDIA H200")
    changes = {"row_seconds": 3.0, "wave_seconds": 2.0, "partial_bytes": 0.3, "reduce_seconds": 2.5}
    true = dataclasses.replace(shipped, **{name: getattr(shipped, name) * by for name, by in changes.items()})
    rng, rows = np.random.default_rng(0), list[regret.Row]()
    family: ModelledFamily[Any, Any] = im2col.FAMILY
    for group, d in enumerate(drawn(120, ops=("conv_wgrad",))):
        if family.refusal(d.problem, None, DEFAULT_CUDA) is None:
            configs = family.candidates(d.problem, DEFAULT_CUDA)
            works = [family.work(d.problem, c, DEFAULT_CUDA) for c in configs]
            us = cost_model.spent(works, true).seconds * 1e6
            for i in rng.permutation(len(configs))[:8]:
                given = (group, d.problem, DEFAULT_CUDA, Candidate(family, configs[i]))
                rows.append(regret.Row(*given, float(us[i]), 0.0, float(us.min())))
    found = fit.fit_rates(rows, [fit.work_of(row) for row in rows], {"NVIDIA H200": shipped})["NVIDIA H200"]
    for name in changes:
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=0.15), name
    assert all(getattr(found, name) == getattr(shipped, name) for name in fit.MEASURED)


def test_ceilings_are_rates_of_the_cost_model(capsys: pytest.CaptureFixture[str]) -> None:
    rates = ceilings.Ceilings(flops=132 * 4096 * 1.5e9, bytes=4e12).rates(132)
    assert rates == {"tensor_clock": 1.5e9, "memory_bytes": 4e12}
    assert set(rates) < set(fit.MEASURED) < {f.name for f in dataclasses.fields(cost_model.Rates)}
    if jax.default_backend() != "gpu":
        assert ceilings.main() == 1 and "no GPU" in capsys.readouterr().err


def test_regret_is_what_first_choices_lose() -> None:
    """Records of a problem on a device become one, with the lower time of a candidate that is in both."""
    d = drawn(1, ops=("quantized_matmul",))[0]
    a, b, c = [Candidate(f, x) for f in kernels.families("quantized_matmul", "cuda") if f.refusal(d.problem) is None
               for x in f.candidates(d.problem, DEFAULT_CUDA)][:3]  # fmt: skip
    first = Record(d.problem, DEFAULT_CUDA, (Timed(a, 12.0), Timed(b, 11.0), Timed(XLA, 5.0)))
    second = Record(d.problem, DEFAULT_CUDA, (Timed(a, 10.0), Timed(c, 20.0), Timed(b, None, error="lost")))
    rows = regret.merged([first, second])
    assert {row.candidate: row.us for row in rows} == {a: 10.0, b: 11.0, c: 20.0}
    assert {row.best_us for row in rows} == {10.0}
    of = {a: 3.0, b: 2.0, c: 2.0}
    assert regret.regret(rows, np.array([of[row.candidate] for row in rows])).mean == pytest.approx(0.1)
    assert a.family is not None
    assert regret.estimated(rows)[0] == a.family.estimate(d.problem, a.config, DEFAULT_CUDA)


@pytest.mark.parametrize("name", ["kinds_h100_groups.json", "kinds_h100_depthwise.json"])
def test_xlas_times_in_a_report_are_records(name: str, tmp_path: pathlib.Path) -> None:
    out = tmp_path / "found.jsonl"
    assert tuned.main([str(RESULTS / name), str(out)]) == 0
    found, kept = records.read([out]), records.read([records.DATA / "kinds_h100.jsonl"])
    assert len(found) >= 20 and all(record in kept for record in found)
    assert {record.target.device_kind for record in found} == {"NVIDIA H100 80GB HBM3"}


@pytest.mark.parametrize(
    "source", [["--kinds", "2", "--seed", "5"], ["--again", str(records.DATA / "evaluated_h200_seed9.jsonl")], []]
)
def test_parts_of_an_evaluation_have_all_problems_once(source: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(evaluate, "run", lambda options: given.append(options) or 1)
    for part in ([], ["--part", "0/2"], ["--part", "1/2"]):
        assert evaluate.main(["out.jsonl", *source, *part, "--max-flops", "1e12"]) == 0
    whole, even, odd = (list(itertools.islice(evaluate.numbered(o, DEFAULT_CUDA), 40)) for o in given)
    assert [index for index, _ in whole[:12]] == [*range(12)]
    assert len({drawn.problem for _, drawn in whole}) == len(whole) > 20
    assert even[:8] == whole[:16:2] and odd[:8] == whole[1:16:2]


@pytest.mark.parametrize("text", ["2/2", "-1/2", "1", "a/b"])
def test_a_part_that_there_is_not(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        evaluate.main(["out.jsonl", f"--part={text}"])
    assert "--part" in capsys.readouterr().err


def times(problem: Any, us: float, xla_us: float, target: Target = DEFAULT_CUDA, kind: str = "a") -> Record:
    family = next(f for f in kernels.families("quantized_matmul", "cuda") if f.refusal(problem) is None)
    config = family.candidates(problem, DEFAULT_CUDA)[0]
    return Record(problem, target, (Timed(Candidate(family, config), us), Timed(XLA, xla_us)), kind=kind)


def written(path: pathlib.Path, found: list[Record], *more: str) -> pathlib.Path:
    path.write_text("".join(f"{line}\n" for line in (*more, *(r.dumps() for r in found))))
    return path


def test_new_times_beside_the_old_and_in_their_place(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, three = (d.problem for d in drawn(3, ops=("quantized_matmul",)))
    other = dataclasses.replace(DEFAULT_CUDA, device_kind="NVIDIA H100 80GB HBM3")
    old = [times(one, 10, 20), times(two, 10, 20), times(two, 15, 20, other)]
    new = [times(one, 5, 20), times(two, 20, 10, kind="b"), times(three, 1, 1)]
    data = tmp_path / "data"
    data.mkdir()
    first = written(data / "first.jsonl", old, '{"environment": {}}')
    fresh = written(tmp_path / "new.jsonl", new)

    assert against.main([str(first), str(fresh)]) == 0
    found = against.pairs(records.read([first]), records.read([fresh]))
    assert [(p.ratio, p.over_xla) for p in found] == [(0.5, 4.0), (2.0, 0.5)]
    assert against.table(found)[1] == ["all", "2", "1.00", "0.50", "2.00", "1.41", "0.50"]
    assert [row[:3] for row in against.table(found)[2:]] == [["a", "1", "0.50"], ["b", "1", "2.00"]]
    assert "0.500 (10.0 -> 5.0 us, XLA 20.0)" in capsys.readouterr().out
    assert against.main([str(written(tmp_path / "none.jsonl", [])), str(fresh)]) == 1

    into = data / "second.jsonl"
    assert renew.renew([fresh], into) == (3, 2)
    assert records.read([first]) == [times(two, 15, 20, other)]
    assert first.read_text().startswith('{"environment": {}}')
    assert records.read([into]) == new
    assert renew.renew([fresh], into) == (3, 3)
    assert records.read([into]) == new


def test_what_ships_is_what_the_fit_writes() -> None:
    """The files of rates; and the trees have seen every family that was timed, and XLA for every operation."""
    for kind in ("NVIDIA H200", "NVIDIA H100 80GB HBM3"):
        assert fit.text_of(cost_model.rates("cuda", kind)) == cost_model.path_for(kind).read_text()
    found = records.read(sorted(records.DATA.glob("*.jsonl")))
    timed = {row.candidate.name for row in fit.fitted(found)}
    assert timed == set(cost_model.residual(cost_model.FOLDER).families)
    classes = xla.learned(cost_model.FOLDER).classes
    assert {r.problem.op for r in found if r.xla_us} == {name.partition(":")[0] for name in classes}


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
