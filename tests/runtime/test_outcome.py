"""Outcomes of work in threads: who waits goes on, also where Ctrl-C comes during a wait."""

import concurrent.futures
import os
import signal
import sys
import threading
import time
import types
from typing import Any

import pytest

from jax_splitk.runtime.outcome import Outcome, join


def test_results_and_errors() -> None:
    one: Outcome[int] = Outcome()
    assert not one.done()
    assert not one.wait(0.001)
    threading.Timer(0.05, one.set_result, (3,)).start()
    assert one.wait(60)
    assert (one.result(), one.exception(), one.done(), one.wait(0)) == (3, None, True, True)
    other: Outcome[int] = Outcome()
    other.set_exception(ValueError("no"))
    assert isinstance(other.exception(), ValueError)
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            other.result()


def test_many_wait() -> None:
    one: Outcome[str] = Outcome()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(one.result) for _ in range(8)]
        threading.Timer(0.05, one.set_result, ("done",)).start()
        assert [each.result(60) for each in waiting] == ["done"] * 8


def interrupted_at(moment: int, work: Any, *arguments: Any) -> bool:
    """Raises KeyboardInterrupt at the moment-th line, call or return of `work`. False: it has fewer."""
    left = moment

    def trace(frame: types.FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work(*arguments)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("comes", [False, True])
def test_ctrl_c_in_a_wait_leaves_no_lock_taken(comes: bool) -> None:
    """Neither where the outcome comes during the wait, nor where it comes later: who sets it, and who waits again, go
    on."""
    for moment in range(100):
        one: Outcome[int] = Outcome()
        if comes:
            one.set_result(moment)
            one._done = False  # the wait looks just before
        was_interrupted = interrupted_at(moment, one.wait, 0.001)
        one._done = comes
        if not comes:
            setter = threading.Thread(target=one.set_result, args=(moment,), daemon=True)
            setter.start()
            setter.join(60)
            assert not setter.is_alive()
        assert one.done() and one.result() == moment
        if not was_interrupted:
            return
    raise AssertionError("a wait has fewer moments")


def test_a_thread_is_waited_for() -> None:
    begun, may_end = time.monotonic(), threading.Event()
    thread = threading.Thread(target=may_end.wait, args=(60,), daemon=True)
    thread.start()
    join(thread, 0.05)
    assert thread.is_alive() and time.monotonic() - begun >= 0.05
    threading.Timer(0.05, may_end.set).start()
    join(thread, 60)
    assert not thread.is_alive()


def test_ctrl_c_does_not_make_a_thread_end() -> None:
    """In `Thread.join` it does, for Python."""
    may_end = threading.Event()
    thread = threading.Thread(target=may_end.wait, args=(60,), daemon=True)
    thread.start()
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            join(thread, 30)
    finally:
        signal.signal(signal.SIGINT, before)
    assert thread.is_alive()
    may_end.set()
    join(thread, 60)
    assert not thread.is_alive()
