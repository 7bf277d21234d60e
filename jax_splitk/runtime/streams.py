"""Standard streams that are closed, or None as in a daemon: what would be written there is lost, and nothing fails."""

import contextlib
import logging
import os
import sys
from typing import Any


def is_terminal(stream: Any) -> bool:
    """Whether a stream is there, open, and a terminal."""
    with contextlib.suppress(AttributeError, ValueError, OSError):
        return bool(stream.isatty())
    return False


def is_closed(stream: Any) -> bool:
    """Whether nothing can be written to a stream."""
    return stream is None or getattr(stream, "closed", False)


def guard_log(logger: logging.Logger) -> None:
    """A line of the log must not end a lowering: where a handler writes to a closed `sys.stderr`, `logging` fails once
    more when it says so there."""
    call = logger.callHandlers

    def guarded(record: logging.LogRecord) -> None:
        try:
            call(record)
        except ValueError:
            if not is_closed(sys.stderr):
                raise

    logger.callHandlers = guarded


def replace_closed() -> None:
    """Of a command (`>&-`): standard streams that are closed lead nowhere, so that no file that is opened later gets
    their number and what is printed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            try:
                os.fstat(number)
            except OSError:
                nowhere = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
                if nowhere != number:
                    os.dup2(nowhere, number)
                    os.close(nowhere)
            setattr(sys, name, open(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))  # noqa: SIM115
