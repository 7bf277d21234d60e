"""What commands print: tables for people or JSON on stdout, and everything else on stderr."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any


def emit(value: Any, text: str, *, as_json: bool) -> None:
    """Prints `value` as JSON, or `text`."""
    print(json.dumps(value, indent=2) if as_json else text)


def note(text: str) -> None:
    """A line on stderr."""
    print(printable(text), file=sys.stderr)


def printable(text: str) -> str:
    """The text with control characters and lone surrogates, which damaged files may hold, escaped."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        printable("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        for line in lines
    )


def number(value: float | None, form: str = ".1f") -> str:
    """The number, or a dash."""
    return "-" if value is None else format(value, form)


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """What the block prints goes to stderr, also what its subprocesses and native code print."""
    sys.stdout.flush()
    saved = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
