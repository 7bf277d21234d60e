"""What commands print: tables for people or JSON on stdout, everything else on stderr."""

import contextlib
import json
import pathlib
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import tabulate

from jax_splitk.runtime import disk, streams
from jax_splitk.runtime.settings import SettingError

# No column of a table is narrowed to less than this.
_LEAST_WIDTH = 16


class UsageError(SettingError):
    """A wrong argument. `main` prints the message of a SettingError, such as this, with the command's usage, and exits
    with 2."""


@contextlib.contextmanager
def usage() -> Iterator[None]:
    """In the block arguments or settings are checked: a ValueError becomes a `UsageError`."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from None


def users_cache(*, writable: bool = False) -> pathlib.Path:
    """The user's cache folder; `writable` for commands that change it."""
    folder = disk.cache_dir()
    if folder is None:
        raise UsageError(disk.no_place())
    with usage():
        mode = disk.mode()
    if writable and mode != "update":
        raise UsageError(f"JAX_SPLITK_CACHE_MODE={mode!r}; accepted by this command, which writes: 'update'")
    return folder


def emit(value: Any, text: str, as_json: bool) -> None:
    """Prints `value` as JSON, or `text`."""
    print(json.dumps(value, indent=2, default=str) if as_json else _printable(text))


def note(text: str) -> None:
    """Prints a line on stderr."""
    print(_printable(text), file=sys.stderr)


def _printable(text: str) -> str:
    """The text with control characters and lone surrogates escaped, which damaged files may hold."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], narrow: Sequence[str] = ()) -> str:
    """Aligned columns. On a terminal the columns named by `narrow` are shortened, in this order, until a line fits."""
    lines = [[_printable(cell) for cell in line] for line in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if streams.is_terminal(sys.stdout):
        excess = sum(widths) + 2 * (len(widths) - 1) - shutil.get_terminal_size().columns
        for i in map(list(header).index, narrow):
            cut = max(0, min(excess, widths[i] - _LEAST_WIDTH))
            widths[i], excess = widths[i] - cut, excess - cut
    cut = [[_cut(cell, width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    shown = tabulate.tabulate(cut, tablefmt="plain", disable_numparse=True)  # it would widen columns of a header
    return "\n".join(line.rstrip() for line in shown.splitlines())


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 2]}.."


def number(value: float | None, form: str = ".1f") -> str:
    """The number as text, or a dash for None."""
    return "-" if value is None else format(value, form)
