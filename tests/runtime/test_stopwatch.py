"""The stopwatch's order of calls, with custom calls that the tests play."""

import contextlib
import pathlib
import subprocess
from collections.abc import Callable
from typing import Any

import jaxlib
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


@pytest.mark.parametrize(("held", "attempts"), [
    ([True, True], [1, 1]),
    ([False, True, False, True], [2, 2]),
    ([False] * 5 + [True, False, True], [3, 1, 1, 1, 2]),  # work that is never held is not tried again for long
])  # fmt: skip
def test_work_that_was_not_held_is_timed_again(
    held: list[bool],
    attempts: list[int],
    done: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    laps = iter([(float(number), was_held) for number, was_held in enumerate(held, 1)])
    monkeypatch.setattr(_ffi, "stopwatch_lap", lambda: next(laps))
    monkeypatch.setattr(stopwatch, "_state", stopwatch._State())
    for number, expected in enumerate(attempts, 1):
        assert stopwatch.microseconds(lambda: done.append("work")) == sum(attempts[:number])
        assert done == ["start", "work", "stop"] * expected
        done.clear()
    assert len(caplog.records) == (1 in attempts[1:] and not held[0])


def test_without_a_gpu_there_is_no_time() -> None:
    if not _ffi.driver_error():
        pytest.skip("there is a GPU")
    with pytest.raises(RuntimeError, match="the stopwatch has no time: "):
        _ffi.stopwatch_lap()


def test_an_error_of_the_work_is_raised(done: list[str]) -> None:
    with contextlib.suppress(ZeroDivisionError):
        stopwatch.microseconds(lambda: 1 / 0)
    assert done == ["start"]


HERE = pathlib.Path(__file__).parent


def test_the_stream_is_held_until_all_is_enqueued_but_not_for_ever(tmp_path: pathlib.Path) -> None:
    """With a driver that plays a GPU (`played_gpu.cc`). Its checks are of milliseconds, which a busy machine spoils at
    times."""
    program = tmp_path / "played_gpu"
    includes = [f"-I{HERE.parents[1] / 'ffi'}", f"-isystem{pathlib.Path(jaxlib.__file__).parent / 'include'}"]
    command = ["g++", "-std=c++17", "-pthread", *includes, str(HERE / "played_gpu.cc"), "-o", str(program)]
    subprocess.run(command, check=True)
    ended = []
    while 0 not in ended and len(ended) < 5:
        ended.append(subprocess.run([program], check=False).returncode)
    assert ended[-1] == 0, f"lines of the checks that failed: {ended}"
