"""The stopwatch's order of calls, with custom calls that the tests play."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from jax_splitk import _ffi
from jax_splitk.runtime import stopwatch


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happened, in order."""
    found: list[str] = []

    def program(target: str) -> Callable[[], Any]:
        return lambda: found.append("start" if target == stopwatch.START_TARGET else "stop")

    monkeypatch.setattr(stopwatch, "_program", program)
    return found


@pytest.mark.parametrize(("held", "attempts"), [([True], 1), ([False, True], 2), ([False] * 9, 3)])
def test_work_that_was_not_held_is_timed_again(
    held: list[bool], attempts: int, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    laps = iter([(float(number), was_held) for number, was_held in enumerate(held, 1)])
    monkeypatch.setattr(_ffi, "stopwatch_lap", lambda: next(laps))
    assert stopwatch.microseconds(lambda: done.append("work")) == attempts
    assert done == ["start", "work", "stop"] * attempts


def test_without_a_gpu_there_is_no_time() -> None:
    if not _ffi.driver_error():
        pytest.skip("there is a GPU")
    with pytest.raises(RuntimeError, match="the stopwatch has no time: "):
        _ffi.stopwatch_lap()


def test_an_error_of_the_work_is_raised(done: list[str]) -> None:
    with contextlib.suppress(ZeroDivisionError):
        stopwatch.microseconds(lambda: 1 / 0)
    assert done == ["start"]
