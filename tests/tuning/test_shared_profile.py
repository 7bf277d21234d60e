"""One profile serves all searches that wait: its parts, and searches that fail or give up."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from jax_splitk.tuning import profile
from jax_splitk.tuning.profile import Event
from jax_splitk.tuning.shared_profile import SharedProfile


class Device:
    """A device whose profiles show the work that ran in them; `busy` until it is set free."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.profiles: list[list[Event]] = []
        self.ran: list[Event] = []
        self.lock = threading.Lock()
        self.fails: Callable[[Callable[[], object]], None] | None = None
        monkeypatch.setattr(profile, "recorded", self.recorded)
        monkeypatch.setattr(profile, "module_times", list)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        with self.lock:
            yield

    def recorded(self, work: Callable[[], object]) -> list[Event]:
        assert self.lock.locked()
        if self.fails is not None:
            self.fails(work)
        self.ran = []
        work()
        self.profiles.append(self.ran)
        return self.ran

    def runs(self, name: str) -> Callable[[], None]:
        return lambda: self.ran.append((name, 0.0, 1.0))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def nothing() -> None:
    pass


def waiting(shared: SharedProfile, count: int) -> None:
    """Waits until `count` searches wait for the next profile."""
    deadline = time.monotonic() + 60
    while len(shared._waiting) < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def asked(pool: ThreadPoolExecutor, shared: SharedProfile, *works: tuple[Any, ...]) -> list[Future[list[Event]]]:
    """The futures of profiles of these arguments, requested one after the other."""
    found = []
    for work in works:
        found.append(pool.submit(shared.events, *work))
        waiting(shared, len(found))
    return found


def test_those_that_wait_are_in_one_profile(device: Device, pool: ThreadPoolExecutor) -> None:
    shared = SharedProfile()
    with device.held():
        futures = asked(pool, shared, *((device.runs(name), device.held, nothing) for name in "abc"))
    events = [future.result(60) for future in futures]
    assert [name for name, *_ in device.ran] == ["a", "b", "c"]
    assert events == [device.ran] * 3
    assert len(device.profiles) == 1
    assert shared.events(device.runs("d"), device.held, nothing) == [("d", 0.0, 1.0)]
    assert len(device.profiles) == 1 + 1


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_what_one_raises_is_its_own(failing: int, device: Device, pool: ThreadPoolExecutor) -> None:
    class GivenUp(BaseException):
        pass

    def fails() -> None:
        raise GivenUp

    shared = SharedProfile()
    works = [fails if i == failing else device.runs(str(i)) for i in range(3)]
    with device.held():
        futures = asked(pool, shared, *((work, device.held, nothing) for work in works))
    for i, future in enumerate(futures):
        if i == failing:
            with pytest.raises(GivenUp):
                future.result(60)
        else:
            assert {name for name, *_ in future.result(60)} == {str(i) for i in range(3)} - {str(failing)}


def test_where_no_profile_can_be_taken_all_are_told(device: Device, pool: ThreadPoolExecutor) -> None:
    shared = SharedProfile()

    def taken_already(_: Callable[[], object]) -> None:
        raise RuntimeError("a profile is being taken already")

    device.fails = taken_already
    with device.held():
        futures = asked(pool, shared, *((device.runs(name), device.held, nothing) for name in "abc"))
    for future in futures:
        with pytest.raises(RuntimeError, match="already"):
            future.result(60)


def test_who_asks_while_a_profile_fails_has_the_next(device: Device, pool: ThreadPoolExecutor) -> None:
    shared = SharedProfile()
    others: list[Future[list[Event]]] = []

    def failing(_: Callable[[], object]) -> None:
        device.fails = None
        others.extend(asked(pool, shared, *((device.runs(name), device.held, nothing) for name in "bc")))
        raise RuntimeError("failed")

    device.fails = failing
    with pytest.raises(RuntimeError, match="failed"):
        shared.events(device.runs("a"), device.held, nothing)
    assert [other.result(60) for other in others] == [[("b", 0.0, 1.0), ("c", 0.0, 1.0)]] * 2


def test_another_takes_the_profile_where_the_first_goes_away(device: Device, pool: ThreadPoolExecutor) -> None:
    class GivenUp(BaseException):
        pass

    leave = threading.Event()

    @contextlib.contextmanager
    def left() -> Iterator[None]:
        leave.wait(60)
        raise GivenUp
        yield

    shared = SharedProfile()
    first, *others = asked(
        pool, shared, (device.runs("a"), left, nothing), *((device.runs(n), device.held, nothing) for n in "bc")
    )
    leave.set()
    with pytest.raises(GivenUp):
        first.result(60)
    names = [{name for name, *_ in other.result(60)} for other in others]
    assert all(name in found for name, found in zip("bc", names, strict=True))
    assert not any("a" in found for found in names)


def test_who_is_given_up_does_not_wait(device: Device, pool: ThreadPoolExecutor) -> None:
    class GivenUp(BaseException):
        pass

    def given_up() -> None:
        raise GivenUp

    shared = SharedProfile()
    with device.held():
        first, second = asked(
            pool, shared, (device.runs("a"), device.held, nothing), (device.runs("b"), device.held, given_up)
        )
        with pytest.raises(GivenUp):
            second.result(60)
    assert ("a", 0.0, 1.0) in first.result(60)
