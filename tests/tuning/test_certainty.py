"""What follows from how sure the cost models are: how many candidates are close, and whether XLA is preferred."""

import copy
import dataclasses
import json
import math
import pathlib

import numpy as np
import pytest

from benchmarks.cost_model import records
from jax_splitk import kernels
from jax_splitk.kernels import cost_model, xla
from jax_splitk.problems.operations import OPERATIONS
from jax_splitk.runtime.target import DEFAULT_CUDA, Target
from jax_splitk.tuning import certainty, table
from jax_splitk.tuning.choice import XLA, Candidate
from jax_splitk.tuning.options import Options
from jax_splitk.tuning.select import select
from tests.tuning_cache import random_key

SUITES = {str(r.problem): r.problem for r in records.shipped(DEFAULT_CUDA)}
LONG = next(p for p in SUITES.values() if "8x56x56x64 g 8x56x56x64 kernel 3x3" in str(p))
MODEL = json.loads(cost_model.path_for("NVIDIA H200").read_text())


@pytest.fixture(autouse=True)
def _without_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("JAX_SPLITK_CACHE_MODE", "off")
    monkeypatch.setattr(table, "FOLDER", tmp_path)


def device(monkeypatch: pytest.MonkeyPatch, folder: pathlib.Path, one: float, doubt: float) -> Target:
    """A GPU on which XLA is so much slower, by its logarithm, and our estimates are of that uncertainty."""
    monkeypatch.setattr(cost_model, "FOLDER", folder)
    model = copy.deepcopy(MODEL)
    model["xla"]["conv_wgrad"]["weights"]["one"] += one
    for family in model["families"].values():
        family["uncertainty"] = {xla.class_of(LONG): doubt}
    kind = f"NVIDIA {folder} {one} {doubt}"
    cost_model.path_for(kind).write_text(json.dumps(model))
    return dataclasses.replace(DEFAULT_CUDA, device_kind=kind)


def test_xla_is_preferred_where_it_is_faster_beyond_doubt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    ours = select(LONG, device(monkeypatch, tmp_path, 0.0, 0.1), Options())
    assert (ours.implementation, ours.times.xla_us) == ("cutlass", None)
    estimate = xla.estimate(LONG, DEFAULT_CUDA)
    assert estimate is not None
    equal = math.log(ours.times.us * 1e-6 / estimate.seconds)  # what makes XLA as fast as ours
    doubt = certainty.DOUBT * math.hypot(estimate.uncertainty, 0.1)
    faster = device(monkeypatch, tmp_path, equal - 1.2 * doubt, 0.1)
    choice = select(LONG, faster, Options())
    assert choice.candidate == XLA
    assert choice.why == (
        f"the cost model predicts that XLA is faster (XLA {ours.times.us * math.exp(-1.2 * doubt):.1f} us, "
        f"{ours.candidate.name} {ours.times.us:.1f} us)"
    )
    # Not where it is doubtful, nor where ours were asked for.
    doubtful = device(monkeypatch, tmp_path, equal - 1.2 * doubt, 2 * doubt / certainty.DOUBT)
    assert select(LONG, doubtful, Options()).candidate == ours.candidate
    nearly = device(monkeypatch, tmp_path, equal - 0.8 * doubt, 0.1)
    assert select(LONG, nearly, Options()).candidate == ours.candidate
    assert select(LONG, faster, Options(implementation="cutlass")).candidate == ours.candidate
    assert select(LONG, faster, Options(config=ours.config)).candidate == ours.candidate


def test_more_candidates_are_close_where_the_model_is_less_sure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    first, second = kernels.families("conv_wgrad", "cuda")[:2]
    ranking = [(1.0, Candidate(first, 0)), (1.06, Candidate(second, 0)), (1.06, Candidate(first, 1))]
    ranking += [(1.3, Candidate(first, 2)), (1.3, Candidate(second, 1)), (3.0, Candidate(second, 2))]
    counts = [
        len(certainty.close(ranking, LONG, device(monkeypatch, tmp_path, 0.0, doubt)))
        for doubt in (0.01, 0.1, 0.3, 2.0)
    ]
    assert counts == [1, 2, 4, 6]
    sure = certainty.close(ranking, LONG, device(monkeypatch, tmp_path, 0.0, 0.1))
    assert sure == [ranking[0][1], ranking[1][1]]  # two families err apart
    assert certainty.close([], LONG, DEFAULT_CUDA) == []


@pytest.mark.parametrize("op", OPERATIONS)
def test_every_operations_problems_have_a_class(op: str) -> None:
    """Each search asks for it."""
    key = random_key(np.random.default_rng(0), DEFAULT_CUDA, op)
    for family in kernels.families(op):
        assert family.uncertainty(key.problem, DEFAULT_CUDA) > 0
    assert xla.class_of(key.problem) != "empty"
