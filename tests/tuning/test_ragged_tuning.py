"""Tuning of grouped products: their sizes are data, and times are means over several kinds of them."""

import functools
import threading
from typing import Any

import jax
import numpy as np
import pytest

import jax_splitk
from jax_splitk.kernels.cpu import ragged as host
from jax_splitk.problems.ragged_dot import RaggedDotProblem
from jax_splitk.problems.ragged_reference import by_blocks
from jax_splitk.runtime.target import target_for
from jax_splitk.tuning import measure, search
from jax_splitk.tuning.choice import XLA, Candidate
from jax_splitk.tuning.key import key_for
from jax_splitk.tuning.measure import Bench, Contestant
from tests.problems import seeded
from tests.ragged_dots import exactly, integers

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the CPU's kernel is tuned")

PROBLEM = RaggedDotProblem("forward", 4, 96, 16, 32, "float32", "float32")


def test_the_check_of_results_is_exact() -> None:
    """The check goes block by block: it needs only the operands' memory, and multiplies every row once."""
    with seeded(470) as rng:
        cases: list[tuple[Any, str, int, int]] = [
            ("forward", "gkn", 0, 1100), ("forward", "gnk", 6, 40), ("rhs_gradient", "gkn", 0, 1100),
            ("rhs_gradient", "gkn", 6, 7),
        ]  # fmt: skip
        for mode, order, total, m in cases:
            p = RaggedDotProblem(mode, 4, m, 5, 3, "float32", "float32", "highest", order, total)
            for sizes in (None, rng.integers(-3, 400, p.size_count)):
                operands = integers(p, rng, sizes)
                out = jax.jit(functools.partial(by_blocks, p))(*operands)
                np.testing.assert_array_equal(out, exactly(p, *operands), err_msg=str(p))


@pytest.mark.parametrize(("wanted", "sets"), [(1, 3), (3, 3), (4, 12), (13, 24)])
def test_every_kind_of_sizes_is_measured_as_often(wanted: int, sets: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(measure.ROTATED_BYTES, "cpu", wanted * PROBLEM.bytes_moved)
    bench = Bench(PROBLEM, "cpu", threading.Event())
    largest = [int(operands[2].max()) for operands in bench._inputs]
    assert len(largest) == bench.sets == sets
    assert all(size == PROBLEM.m for size in largest[2::3])
    assert all(size < PROBLEM.m for size in [*largest[::3], *largest[1::3]])
    (ours,), failures = bench.prepare([Candidate(host.FAMILY, host.Config(1, 24))])
    assert not failures
    assert len(bench.times_of_kinds(ours)) == 3


def test_a_wrong_result_for_one_kind_of_sizes_is_found() -> None:
    bench = Bench(PROBLEM, "cpu", threading.Event())
    (xla,), _ = bench.prepare([XLA])
    right = [xla.of_kind(kind)[0] for kind in range(3)]
    for i, error in ((0, 1.0), (2, 1.0), (2, 0.0)):
        results = [x * (1 + error * (kind == i)) for kind, x in enumerate(right)]
        of_kind = lambda kind, r=results: [r[kind]]  # noqa: E731
        wrong = bench._try(Contestant(Candidate(host.FAMILY, host.Config(1, 24)), lambda: None, of_kind=of_kind))
        assert (wrong is None) == (error == 0.0)


def test_what_loses_badly_on_one_kind_is_not_chosen() -> None:
    key = key_for(PROBLEM, target_for("cpu"))
    times = {24: [1.0, 1.0, 4.0], 96: [3.0, 1.2, 1.9], 384: [1.3, 1.3, 1.3]}

    class Scripted:
        def times_of_kinds(self, contestant: Contestant) -> list[float]:
            return times[contestant.candidate.config.row_block]

    finalists = [Contestant(Candidate(host.FAMILY, host.Config(1, block)), lambda: None) for block in times]
    bench: Any = Scripted()
    found = search.Search(key, 2**28, None, 1.0)._steady(bench, finalists)
    assert [c.candidate.config.row_block for c in found] == [384]
    assert search.Search(key, 2**28, None, 1.0)._steady(bench, finalists[:2]) == finalists[:2]  # each loses on some


@pytest.mark.parametrize("error", ["RESOURCE_EXHAUSTED: Out of memory", "NOT_FOUND: Failed to get configs for: 2 of 5"])
def test_a_problem_that_xla_has_no_memory_for_is_tuned(
    error: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """lax needs the operands' memory once for each group. XLA fails to allocate it, or finds no kernel."""
    monkeypatch.setenv("JAX_SPLITK_CACHE_DIR", str(tmp_path))
    prepare = Bench.prepare

    def without_xla(self: Bench, candidates: Any) -> Any:
        if XLA in candidates:
            return [], [search.Measurement(XLA, None, f"XlaRuntimeError: {error}")]
        return prepare(self, candidates)

    monkeypatch.setattr(Bench, "prepare", without_xla)
    (entry,) = (entry for _, entry in jax_splitk.tune_problems([PROBLEM], seconds=0.2, again=True))
    assert entry.choice.family is host.FAMILY
    assert entry.us(entry.choice) is not None
    assert entry.us(XLA) is None
