"""One decision serves callers that allow workspaces of different sizes."""

import dataclasses
import logging
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import pytest

import jax_splitk
from benchmarks.cases import Case
from jax_splitk.kernels.cpu import wgrad as wgrad_host
from jax_splitk.tuning import entry, search, select, store, tuner
from jax_splitk.tuning.choice import XLA, Candidate
from jax_splitk.tuning.entry import XLA_ESTIMATE, Entry, Measurement
from jax_splitk.tuning.key import key_for
from jax_splitk.tuning.options import DEFAULT_WORKSPACE_LIMIT, Options
from tests.tuning_cache import CPU, ship

pytestmark = [
    pytest.mark.usefixtures("cache"),
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="tunes the CPU's family"),
]

PROBLEM = Case("tiny", 12, 30, 31, 8, 16, (3, 3), dtype="float32").problem()
KEY = key_for(PROBLEM, CPU)
SMALL, MIDDLE, LARGE = (Candidate(wgrad_host.FAMILY, wgrad_host.Config(splits, 128)) for splits in (1, 8, 32))


def size(candidate: Candidate) -> int:
    return wgrad_host.FAMILY.workspace_bytes(PROBLEM, candidate.config)


def entry_of(
    choice: Candidate,
    times: dict[Candidate, float],
    limit: int = DEFAULT_WORKSPACE_LIMIT,
    metadata: Mapping[str, Any] | None = None,
) -> Entry:
    measurements = tuple(Measurement(candidate, us) for candidate, us in times.items())
    return Entry.of(KEY, choice, measurements, None, metadata, limit)


def chosen(limit: int | None = None, **how: Any) -> Any:
    return select.select(PROBLEM, CPU, Options(workspace_limit_bytes=limit), **how)


def test_the_fastest_that_fits_is_taken() -> None:
    assert size(SMALL) < size(MIDDLE) < size(LARGE)
    times = {LARGE: 5.0, MIDDLE: 6.0, SMALL: 7.0, XLA: 6.5}
    found = entry_of(LARGE, times)
    assert found.best(size(LARGE)) == LARGE
    assert found.best(size(LARGE) - 1) == MIDDLE
    assert found.best(size(MIDDLE) - 1) == XLA
    assert found.best(size(MIDDLE) - 1, "host") == SMALL
    assert found.best(size(SMALL) - 1) is None  # XLA is faster than a kernel that does not fit, which proves nothing
    assert entry_of(XLA, times).best(0) == XLA
    assert entry_of(LARGE, {}).best(size(LARGE) - 1) is None
    for estimate, fits in ((6.5, None), (7.5, SMALL)):  # XLA was not timed
        ours = {candidate: us for candidate, us in times.items() if candidate != XLA}
        untimed = entry_of(LARGE, ours, metadata={XLA_ESTIMATE: estimate})
        assert untimed.best(size(LARGE) - 1) == MIDDLE
        assert untimed.best(size(MIDDLE) - 1) == fits
        assert untimed.best(size(MIDDLE) - 1, "host") == SMALL
    store.save(found)
    assert chosen(size(LARGE) - 1).config == MIDDLE.config
    assert chosen(size(LARGE) - 1).why == "user cache: 6.0 us, XLA 6.5 us"
    assert chosen(size(MIDDLE) - 1).why == "user cache: XLA 6.5 us, ours 5.0 us"


def test_without_evidence_the_cost_model_chooses_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of a shipped table has no evidence but its choice. A later layer that has an answer comes first."""
    ship(KEY, LARGE)
    assert (chosen().config, chosen().why) == (LARGE.config, "shipped table: 5.0 us, XLA 9.0 us")
    choice = chosen(size(LARGE) - 1)
    assert choice.workspace_bytes < size(LARGE)
    assert choice.why.startswith("the cost model's best of ")
    ship(KEY, SMALL)
    result = jax_splitk.TuningResult(((KEY, entry_of(LARGE, {})),))
    assert select.select(PROBLEM, CPU, Options(None, None, size(SMALL), result)).config == SMALL.config
    monkeypatch.setenv("JAX_SPLITK_CACHE_MODE", "frozen")
    assert chosen(size(SMALL), final=True).config == SMALL.config
    limit = size(SMALL) - 1
    with pytest.raises(jax_splitk.FrozenCacheMiss, match=f"--workspace-limit-bytes {limit}$"):
        chosen(limit, final=True)


def test_a_search_under_a_limit_serves_others(cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one entry for all limits. Configs for a larger limit are searched once; a search under the default limit
    serves every caller."""
    monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", "on_miss")
    monkeypatch.setattr(search, "FIRST_ROUND", 6)
    limits, tune = [], tuner.tune

    def counting(key: Any, limit: int, old: Any, seconds: Any) -> Entry:
        limits.append(limit)
        return tune(key, limit, old, 0.05)

    monkeypatch.setattr(tuner, "tune", counting)
    small = sorted(size(c) for c in search.ranked(KEY))[3]
    with jax_splitk.options(workspace_limit_bytes=small):
        ((_, found),) = jax_splitk.tune_problems([PROBLEM])
    ours = [m.candidate for m in found.measurements if m.candidate != XLA]
    assert found.workspace_limit_bytes == small
    assert 0 < max(map(size, ours)) <= small
    for limit in (small, None, 2**40, small, None):
        assert chosen(limit, measure=True).workspace_bytes <= (limit or DEFAULT_WORKSPACE_LIMIT)
        assert chosen(limit, measure=True).why.startswith(("user cache: ", "measured now: "))
    assert limits == [small, DEFAULT_WORKSPACE_LIMIT]
    assert list(store.files(cache)) == [cache / KEY.file]
    both, _ = store.lookup(KEY)
    assert both.workspace_limit_bytes == DEFAULT_WORKSPACE_LIMIT
    assert {m.candidate for m in both.measurements} >= set(ours)
    with jax_splitk.options(workspace_limit_bytes=0):  # nothing fits: there is nothing to decide
        assert len(jax_splitk.tune_problems([PROBLEM])) == 0


def test_a_decision_under_a_smaller_limit_does_not_replace_one_under_a_larger() -> None:
    wide, narrow = entry_of(LARGE, {LARGE: 5.0, SMALL: 9.0}), entry_of(SMALL, {SMALL: 8.0}, limit=size(SMALL))
    for merged in (entry.merge(wide, narrow), entry.merge(narrow, wide)):
        assert (merged.choice, merged.workspace_limit_bytes) == (LARGE, DEFAULT_WORKSPACE_LIMIT)
        assert {m.candidate for m in merged.measurements} == {LARGE, SMALL}
    assert entry.merge(wide, narrow).us(SMALL) == 8.0
    huge = dataclasses.replace(narrow, workspace_limit_bytes=2**40)
    assert entry.merge(huge, wide).choice == LARGE  # both have seen all that the default allows: the newer one


def test_an_earlier_versions_cache_is_a_miss_that_is_told_once(
    cache: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = cache / "tuning" / "0241a7bd34d5e2a8" / "015fddad699d1d03c985924096498358f1665a26.json"
    old.parent.mkdir(parents=True)
    old.write_text('{"schema": 2}')
    with caplog.at_level(logging.WARNING, "jax_splitk"):
        for _ in range(2):
            assert chosen().why.startswith("the cost model's best")
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{cache} has entries of another version of jax_splitk, which are not used")
