"""Background work: order, number of threads, waiting, dropping and refusing."""

import concurrent.futures
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jax_splitk.runtime import pool
from jax_splitk.runtime.outcome import Outcome
from jax_splitk.runtime.pool import Pool


class Work:
    """Pieces of work that record when they begin, and end when `let` allows it; their results are their names."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.may_end = threading.Event()
        self._changed = threading.Condition()

    def __call__(self, name: str) -> Callable[[], str]:
        def work() -> str:
            with self._changed:
                self.begun.append(name)
                self._changed.notify_all()
            assert self.may_end.wait(60)
            if name == "fails":
                raise RuntimeError(name)
            return name

        return work

    def wait_for(self, count: int) -> None:
        """Waits until `count` have begun."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.begun) >= count, 60)


def result(outcome: Outcome[str]) -> str:
    assert outcome.wait(60)
    return outcome.result()


def was_dropped(outcome: Outcome[str]) -> bool:
    return outcome.done() and isinstance(outcome.exception(), concurrent.futures.CancelledError)


def submit_three(one: Pool, work: Work) -> None:
    """Submits three pieces of work, at least one of which begins."""
    for name in ("a", "b", "c"):
        one.submit(name, work(name))
    work.wait_for(1)


@pytest.fixture
def work() -> Iterator[Work]:
    one = Work()
    yield one
    one.may_end.set()


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda count: monkeypatch.setattr(pool, "cores", lambda: count)


def test_what_somebody_waits_for_comes_first(work: Work, cores: Any) -> None:
    cores(1)
    one = Pool()
    one.submit("first", work("first"))
    work.wait_for(1)
    for name in ("a", "b", "c"):
        one.submit(name, work(name))
    outcomes = [one.submit("urgent", work("urgent"), urgent=True), one.submit("b", work("never"), urgent=True)]
    work.may_end.set()
    assert [result(outcome) for outcome in outcomes] == ["urgent", "b"]
    assert [result(one.submit(name, work("never"))) for name in ("a", "c")] == ["a", "c"]
    assert work.begun == ["first", "urgent", "b", "a", "c"]


def test_there_are_as_many_at_a_time_as_cores_that_are_not_spared(work: Work, cores: Any) -> None:
    cores(4)
    one = Pool()
    with one.sparing(3):
        submit_three(one, work)
        for name in ("x", "y", "z"):  # somebody waits: on all cores
            one.submit(name, work(name), urgent=True)
        work.wait_for(4)
        assert work.begun[0] == "a"
        assert set(work.begun) == {"a", "x", "y", "z"}
        assert one.queued == 2
    work.may_end.set()
    assert [result(one.submit(name, work("never"), urgent=True)) for name in ("b", "c")] == ["b", "c"]


def test_cores_that_are_free_again_are_used(work: Work, cores: Any) -> None:
    cores(3)
    one = Pool()
    with one.sparing(2):
        submit_three(one, work)
        assert one.queued == 2
    work.wait_for(3)


def test_results_are_taken_once_and_what_has_not_begun_is_dropped(work: Work, cores: Any) -> None:
    cores(1)
    one = Pool()
    one.submit("a", work("a"))
    work.wait_for(1)
    for name in ("fails", "late"):
        one.submit(name, work(name))
    late = one.submit("late", work("never"))
    assert one.take("late") is None
    assert was_dropped(late), "who waits for it goes on"
    threading.Timer(0.05, work.may_end.set).start()
    assert one.take("a") == "a"  # it has waited
    failed = one.submit("fails", work("never"))
    assert failed.wait(60) and failed.exception() is not None
    assert one.take("fails") is None
    assert one.take("a") is one.take("unknown") is None
    assert work.begun == ["a", "fails"]


def test_what_is_ahead_of_what_anybody_asks_for_is_bounded(
    work: Work, cores: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores(1)
    monkeypatch.setattr(pool, "MAX_AHEAD", 2)
    one = Pool()
    first = one.submit("a", work("a"))
    work.wait_for(1)
    one.submit("b", work("b"))
    assert one.submit("c", work("c")) is None
    assert one.submit("urgent", work("urgent"), urgent=True) is not None
    one.drop_ahead()
    assert one.queued == 1, "somebody waits for that"
    work.may_end.set()
    assert [result(first), result(one.submit("urgent", work("never")))] == ["a", "urgent"]
    assert result(one.submit("c", work("c"))) == "c"
    assert one.take("a") is None, "the oldest result that nobody took has made room"
    assert one.take("urgent") == "urgent"


def test_nothing_begins_after_the_end(work: Work, cores: Any) -> None:
    cores(1)
    one = Pool()
    one.submit("a", work("a"))
    work.wait_for(1)
    waiting = one.submit("b", work("b"), urgent=True)
    one.close()
    assert was_dropped(waiting)
    assert one.submit("c", work("c"), urgent=True) is None
    work.may_end.set()
    assert one.take("a") == "a"
    assert work.begun == ["a"]


def test_without_threads_nothing_is_waited_for(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    one = Pool()
    assert was_dropped(one.submit("a", work("a"), urgent=True))
    assert one.take("a") is None
