"""Measurements on another GPU of the architecture decide if there are none on this one."""

import dataclasses

import pytest

from jax_splitk.kernels.contraction import wgrad as im2col
from jax_splitk.kernels.quantized import stream
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.runtime.target import DEFAULT_CUDA, Target
from jax_splitk.tuning import lookup, model
from jax_splitk.tuning.choice import XLA, Candidate
from jax_splitk.tuning.key import key_for
from jax_splitk.tuning.lookup import Query
from jax_splitk.tuning.options import DEFAULT_WORKSPACE_LIMIT, Options
from jax_splitk.tuning.select import select
from tests.problems import conv
from tests.tuning_cache import ship

pytestmark = pytest.mark.usefixtures("cache")

H100 = dataclasses.replace(DEFAULT_CUDA, device_kind="NVIDIA H100 80GB HBM3")
PROBLEM = conv((14, 14), (3, 3), (64, 64), batch=8, padding=1, dtype="bfloat16", out_dtype="bfloat16")
FAMILY = im2col.FAMILY


def other_config(target: Target = DEFAULT_CUDA) -> Candidate:
    """A candidate that the cost model does not choose."""
    predicted = select(PROBLEM, target, Options())
    candidates = (Candidate(FAMILY, config) for config in FAMILY.candidates(PROBLEM, target))
    return next(c for c in candidates if c != predicted.candidate and c.workspace_bytes(PROBLEM))


def test_a_siblings_table_decides_before_the_cost_model() -> None:
    choice = other_config()
    ship(key_for(PROBLEM, DEFAULT_CUDA), choice, us=7.0)
    found = select(PROBLEM, H100, Options())
    assert found.candidate == choice
    assert found.why == "NVIDIA H200's shipped table (7.0 us predicted)"
    # A row of its own comes first.
    own = next(Candidate(FAMILY, c) for c in FAMILY.candidates(PROBLEM, H100) if Candidate(FAMILY, c) != choice)
    ship(key_for(PROBLEM, H100), own)
    assert select(PROBLEM, H100, Options()).candidate == own
    assert select(PROBLEM, DEFAULT_CUDA, Options()).candidate == choice


def test_where_xla_was_faster_on_a_sibling_it_is_taken() -> None:
    ship(key_for(PROBLEM, DEFAULT_CUDA), XLA)
    found = select(PROBLEM, H100, Options())
    assert (found.candidate, found.why) == (XLA, "NVIDIA H200's shipped table")
    # Not where a kernel was asked for.
    assert select(PROBLEM, H100, Options(implementation="cutlass")).implementation == "cutlass"


def test_a_siblings_choice_that_does_not_fit_is_passed_over() -> None:
    choice = other_config()
    ship(key_for(PROBLEM, DEFAULT_CUDA), choice)
    limit = choice.workspace_bytes(PROBLEM) - 1
    assert lookup.SIBLING_TABLES(Query(key_for(PROBLEM, H100), Options(), limit)) is None
    assert select(PROBLEM, H100, Options(workspace_limit_bytes=limit)).workspace_bytes <= limit


@pytest.mark.parametrize(
    "target",
    [
        dataclasses.replace(DEFAULT_CUDA, device_kind="NVIDIA H100 PCIe", cores=114),
        dataclasses.replace(H100, cores=114),
        dataclasses.replace(DEFAULT_CUDA, device_kind="NVIDIA H800"),
    ],
    ids=lambda target: f"{target.device_kind}, {target.cores}",
)
def test_other_gpus_are_no_siblings(target: Target) -> None:
    ship(key_for(PROBLEM, DEFAULT_CUDA), other_config())
    assert select(PROBLEM, target, Options()).why.startswith("the cost model's best of")


def test_without_caches_no_table_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    ship(key_for(PROBLEM, DEFAULT_CUDA), other_config())
    monkeypatch.setenv("JAX_SPLITK_CACHE_MODE", "off")
    assert select(PROBLEM, H100, Options()).why.startswith("the cost model's best of")


def test_a_siblings_decision_serves_fewer_rows() -> None:
    def of_rows(rows: int) -> QuantizedMatmulProblem:
        return QuantizedMatmulProblem(rows, 4096, 4096, "bfloat16", "bfloat16", "int4", 64, "bfloat16")

    key = key_for(of_rows(16), DEFAULT_CUDA)
    _, best, _ = model.best(key, DEFAULT_WORKSPACE_LIMIT, [stream.FAMILY])
    ship(key, best)
    found = select(of_rows(14), H100, Options())
    assert found.candidate == best
    assert found.because == "NVIDIA H200's shipped table, decision of 16 rows"
