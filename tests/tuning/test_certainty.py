"""Effects of the cost model's uncertainty: how many candidates are close, and whether XLA is preferred."""

import dataclasses
import math
import pathlib
from typing import Any

import numpy as np
import pytest

from benchmarks.cost_model import records
from jax_splitk import kernels
from jax_splitk.kernels.base import cost_model, xla
from jax_splitk.problems.operations import OPERATIONS
from jax_splitk.runtime.target import DEFAULT_CUDA
from jax_splitk.tuning import certainty, table
from jax_splitk.tuning.choice import XLA, Candidate
from jax_splitk.tuning.options import Options
from jax_splitk.tuning.select import select
from tests.tuning_cache import CPU, random_key

SUITES = {str(r.problem): r.problem for r in records.shipped(DEFAULT_CUDA)}
LONG = next(p for p in SUITES.values() if "8x56x56x64 g 8x56x56x64 kernel 3x3" in str(p))
XLAS = xla.estimate


@pytest.fixture(autouse=True)
def _without_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("JAX_SPLITK_CACHE_MODE", "off")
    monkeypatch.setattr(table, "FOLDER", tmp_path)


def device(monkeypatch: pytest.MonkeyPatch, slower: float, doubt: float) -> None:
    """Sets how much slower XLA is (a logarithm), and the uncertainty of our estimates."""
    of_xla = XLAS(LONG, DEFAULT_CUDA)
    assert of_xla is not None
    changed = dataclasses.replace(of_xla, seconds=of_xla.seconds * math.exp(slower))
    monkeypatch.setattr(xla, "estimate", lambda problem, target: changed)
    monkeypatch.setattr(cost_model, "uncertainty", lambda family, target: doubt)


def test_xla_is_preferred_where_it_is_faster_beyond_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(slower: float, doubt: float, options: Options = Options()) -> Any:  # noqa: B008 - frozen
        device(monkeypatch, slower, doubt)
        return select(LONG, DEFAULT_CUDA, options)

    ours = chosen(2.0, 0.1)
    assert (ours.implementation, ours.times.xla_us) == ("cutlass", None)
    estimate = XLAS(LONG, DEFAULT_CUDA)
    assert estimate is not None
    equal = math.log(ours.times.us * 1e-6 / estimate.seconds)  # what makes XLA as fast as ours
    doubt = certainty.DOUBT * math.hypot(estimate.uncertainty, 0.1)
    faster = equal - 1.2 * doubt
    choice = chosen(faster, 0.1)
    assert choice.candidate == XLA
    assert choice.why == (
        f"the cost model predicts that XLA is faster (XLA {ours.times.us * math.exp(-1.2 * doubt):.1f} us, "
        f"{ours.candidate.name} {ours.times.us:.1f} us)"
    )
    # Not where it is doubtful, nor where ours were asked for.
    assert chosen(faster, 2 * doubt / certainty.DOUBT).candidate == ours.candidate
    assert chosen(equal - 0.8 * doubt, 0.1).candidate == ours.candidate
    assert chosen(faster, 0.1, Options(implementation="cutlass")).candidate == ours.candidate
    assert chosen(faster, 0.1, Options(config=ours.config)).candidate == ours.candidate


def test_more_candidates_are_close_where_the_model_is_less_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = kernels.families("conv_wgrad", "cuda")[:2]
    ranking = [(1.0, Candidate(first, 0)), (1.06, Candidate(second, 0)), (1.06, Candidate(first, 1))]
    ranking += [(1.3, Candidate(first, 2)), (1.3, Candidate(second, 1)), (3.0, Candidate(second, 2))]

    def close(doubt: float) -> list[Candidate]:
        device(monkeypatch, 0.0, doubt)
        return certainty.close(ranking, LONG, DEFAULT_CUDA)

    assert [len(close(doubt)) for doubt in (0.01, 0.1, 0.3, 2.0)] == [1, 2, 4, 6]
    assert close(0.1) == [ranking[0][1], ranking[1][1]]  # two families err apart
    assert certainty.close([], LONG, DEFAULT_CUDA) == []


@pytest.mark.parametrize("op", OPERATIONS)
def test_every_operations_problems_have_features(op: str) -> None:
    key = random_key(np.random.default_rng(0), DEFAULT_CUDA, op)
    for family in kernels.families(op):
        assert family.uncertainty(key.problem, DEFAULT_CUDA) > 0
    assert xla.features(key.problem, DEFAULT_CUDA).floor > 0


def test_xla_is_far_slower_only_where_the_estimate_is_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    of_xla = xla.Estimate(100e-6, 0.4)
    monkeypatch.setattr(xla, "estimate", lambda problem, target: of_xla)
    monkeypatch.setattr(certainty, "_jaxlib", lambda: certainty._FITTED_JAXLIB)
    bound = 100e-6 / (certainty._FAR * math.exp(certainty._FAR_DEVIATIONS * 0.4))
    assert certainty.far_slower_xla(bound * 0.99, LONG, DEFAULT_CUDA) == of_xla.seconds
    assert certainty.far_slower_xla(bound * 1.01, LONG, DEFAULT_CUDA) is None
    unknown = dataclasses.replace(DEFAULT_CUDA, device_kind="NVIDIA GH200 480GB")
    assert certainty.far_slower_xla(1e-9, LONG, unknown) is None
    assert certainty.far_slower_xla(1e-9, LONG, CPU) is None
    for op in ("ragged_dot", "quantized_ragged_dot", "quantized_matmul_transposed"):  # not always fitted to XLA's times
        problem = random_key(np.random.default_rng(0), DEFAULT_CUDA, op).problem
        assert certainty.far_slower_xla(1e-9, problem, DEFAULT_CUDA) is None
    monkeypatch.setattr(certainty, "_jaxlib", lambda: (99, 0))
    assert certainty.far_slower_xla(1e-9, LONG, DEFAULT_CUDA) is None
    monkeypatch.setattr(xla, "estimate", lambda problem, target: None)
    assert certainty.far_slower_xla(1e-9, LONG, DEFAULT_CUDA) is None
