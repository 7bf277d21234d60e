"""Standard streams that are closed, or None as in a daemon: writing to them is dropped and does not fail."""

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
    """Lets a handler write to a closed `sys.stderr`: `logging` would fail again when it reports the error there, and
    end a lowering."""
    call = logger.callHandlers

    def guarded(record: logging.LogRecord) -> None:
        try:
            call(record)
        except ValueError:
            if not is_closed(sys.stderr):
                raise

    logger.callHandlers = guarded


def replace_closed() -> None:
    """Opens closed standard streams of a command (`>&-`) as the null device. Otherwise a file that is opened later
    would get their number, and with it the printed text."""
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
