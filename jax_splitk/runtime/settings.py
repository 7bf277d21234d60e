"""Environment variables and their accepted values. A variable is read and checked when it is needed."""

import math
import os
import pathlib
import re
from collections.abc import Callable, Iterator

_DEFAULTS = {
    "JAX_SPLITK_CACHE_DIR": "",
    "JAX_SPLITK_CACHE_PATH": "",
    "JAX_SPLITK_CACHE_MODE": "update",
    "JAX_SPLITK_AUTOTUNE": "",  # the platform's
    "JAX_SPLITK_COMPILE_AHEAD": "on",
    "JAX_SPLITK_TUNE_BUDGET_S": "10",
    "JAX_SPLITK_TUNE_LOSS": "0.015",
    "JAX_SPLITK_AGREEMENT_TIMEOUT_S": "60",
    "JAX_SPLITK_PROGRESS": "auto",
}
WORDS = {
    "JAX_SPLITK_CACHE_MODE": ("off", "read", "update", "frozen"),
    "JAX_SPLITK_AUTOTUNE": ("off", "on_miss"),
    "JAX_SPLITK_COMPILE_AHEAD": ("off", "on"),
    "JAX_SPLITK_PROGRESS": ("auto", "off"),
}
# The beginning of a URL, also inside a list of paths that colons separate.
_URL = re.compile(r"(^|:)([A-Za-z][\w+.-]*://|file:)")
_VARIABLE = re.compile(r"\$[A-Za-z_{]")


class SettingError(ValueError):
    """A value of a variable or of a command line's argument is not accepted."""


def in_force() -> dict[str, str]:
    """Every variable's value, which may be wrong; its default where it is unset or empty."""
    return {name: os.environ.get(name) or default for name, default in _DEFAULTS.items()}


def word(name: str, default: str = "") -> str:
    """The variable's value, one of its `WORDS`. Raises SettingError for a word that is not accepted. `default`: used
    if the variable is unset."""
    chosen, accepted = os.environ.get(name) or _DEFAULTS[name] or default, WORDS[name]
    if chosen not in accepted:
        raise SettingError(f"{name}={chosen!r}; accepted: {', '.join(map(repr, accepted))}")
    return chosen


def seconds(name: str) -> float:
    """The variable's value as a number of seconds; SettingError unless it is above 0."""
    return positive(name, os.environ.get(name) or _DEFAULTS[name], "seconds")


def share(name: str) -> float:
    """The variable's value as a share of a whole; SettingError unless it is at least 0 and below 1."""
    text = os.environ.get(name) or _DEFAULTS[name]
    return _number(name, text, "a number of at least 0 and below 1", lambda value: 0 <= value < 1)


def positive(name: str, text: str, unit: str) -> float:
    """`text` as a number; SettingError unless it is above 0."""
    return _number(name, text, f"a number of {unit} above 0", lambda value: 0 < value < math.inf)


def _number(name: str, text: str, accepted: str, accepts: Callable[[float], bool]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not accepts(value):
        raise SettingError(f"{name}={text!r}; accepted: {accepted}")
    return value


def local_path(name: str, text: str) -> pathlib.Path | None:
    """The path of a folder or file with a leading `~` expanded; None if the process's user has no home.

    `name` is the variable or argument. Raises SettingError for a URL, a `$VARIABLE` that no shell has expanded, and an
    unknown user: as a path, each would be a wrong folder.
    """
    found = os.path.expanduser(text)
    unknown = re.match(r"~[^/]", found)
    if _URL.search(text) or _VARIABLE.search(text) or unknown:
        accepted = "a local path, with a leading ~ at most for a home; $VARIABLES are the shell's to replace"
        raise SettingError(f"{name}={text!r}; accepted: {accepted}")
    return None if found.startswith("~") else pathlib.Path(found)


def read_only_caches() -> dict[str, pathlib.Path | None]:
    """`JAX_SPLITK_CACHE_PATH`: folders to read, separated by colons, as they are written and as `local_path`s."""
    name = "JAX_SPLITK_CACHE_PATH"
    given = os.environ.get(name, "")
    if _URL.search(given):
        local_path(name, given)  # before colons separate the paths
    return {path: local_path(name, path) for path in given.split(os.pathsep) if path}


def mistakes() -> list[str]:
    """The mistakes in this process's variables, except JAX_SPLITK_TEST_... ."""
    ours = [name for name in sorted(os.environ) if name.startswith("JAX_SPLITK_")]
    unknown = [name for name in ours if name not in _DEFAULTS and not name.startswith("JAX_SPLITK_TEST_")]
    found = [f"{name} is not a variable of jax_splitk; accepted: {', '.join(_DEFAULTS)}" for name in unknown]
    for name in _DEFAULTS:
        try:
            if name in WORDS:
                word(name, WORDS[name][0])
            elif name.endswith("_S"):
                seconds(name)
            elif name.endswith("_LOSS"):
                share(name)
        except ValueError as error:
            found.append(str(error))
    return [*found, *_wrong_folders()]


def _wrong_folders() -> Iterator[str]:
    """The mistakes in the caches' folders."""
    own = os.environ.get("JAX_SPLITK_CACHE_DIR") or "."
    try:
        folder = local_path("JAX_SPLITK_CACHE_DIR", own)
        if folder is None or (os.path.lexists(folder) and not os.path.isdir(folder)):
            yield f"JAX_SPLITK_CACHE_DIR={own!r}; accepted: a folder, which is made if need be"
    except SettingError as error:
        yield str(error)
    try:
        for path, folder in read_only_caches().items():
            if folder is None or not os.path.isdir(folder):
                yield f"JAX_SPLITK_CACHE_PATH: {path} is not a folder; nothing is read from it"
    except SettingError as error:
        yield str(error)
