"""Environment variables: what they may be. They are read when they are needed, and checked as arguments are."""

import math
import os
import pathlib

_DEFAULTS = {
    "JAX_SPLITK_CACHE_DIR": "",
    "JAX_SPLITK_CACHE_PATH": "",
    "JAX_SPLITK_CACHE_MODE": "update",
    "JAX_SPLITK_AUTOTUNE": "",  # the platform's
    "JAX_SPLITK_COMPILE_AHEAD": "on",
    "JAX_SPLITK_TUNE_BUDGET_S": "10",
    "JAX_SPLITK_AGREEMENT_TIMEOUT_S": "60",
    "JAX_SPLITK_PROGRESS": "auto",
}
WORDS = {
    "JAX_SPLITK_CACHE_MODE": ("off", "read", "update", "frozen"),
    "JAX_SPLITK_AUTOTUNE": ("off", "on_miss"),
    "JAX_SPLITK_COMPILE_AHEAD": ("off", "on"),
    "JAX_SPLITK_PROGRESS": ("auto", "off"),
}


def in_force() -> dict[str, str]:
    """Every variable's value, which may be wrong; its default where it is unset or empty."""
    return {name: os.environ.get(name) or default for name, default in _DEFAULTS.items()}


def word(name: str, default: str = "") -> str:
    """The variable's value; ValueError for a word that is not accepted. `default`: where it is the platform's."""
    chosen, accepted = os.environ.get(name) or _DEFAULTS[name] or default, WORDS[name]
    if chosen not in accepted:
        raise ValueError(f"{name}={chosen!r}; accepted: {', '.join(map(repr, accepted))}")
    return chosen


def seconds(name: str) -> float:
    """The variable's value as a number of seconds; ValueError unless it is above 0."""
    return positive(name, os.environ.get(name) or _DEFAULTS[name], "seconds")


def positive(name: str, text: str, unit: str) -> float:
    """The number that `text` is; ValueError unless it is above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise ValueError(f"{name}={text!r}; accepted: a number of {unit} above 0")
    return value


def expanded(path: str) -> pathlib.Path | None:
    """The path with a leading `~` replaced; None where there is no such home."""
    found = os.path.expanduser(path)
    return None if found.startswith("~") else pathlib.Path(found)


def read_only_caches() -> list[str]:
    """`JAX_SPLITK_CACHE_PATH`: folders to read, separated by colons."""
    return [path for path in os.environ.get("JAX_SPLITK_CACHE_PATH", "").split(os.pathsep) if path]


def mistakes() -> list[str]:
    """What is wrong with this process's variables; JAX_SPLITK_TEST_... are not looked at."""
    ours = [name for name in sorted(os.environ) if name.startswith("JAX_SPLITK_")]
    unknown = [name for name in ours if name not in _DEFAULTS and not name.startswith("JAX_SPLITK_TEST_")]
    found = [f"{name} is not a variable of jax_splitk; accepted: {', '.join(_DEFAULTS)}" for name in unknown]
    for name in _DEFAULTS:
        try:
            if name in WORDS:
                word(name, WORDS[name][0])
            elif name.endswith("_S"):
                seconds(name)
        except ValueError as error:
            found.append(str(error))
    own = os.environ.get("JAX_SPLITK_CACHE_DIR") or "."
    if (folder := expanded(own)) is None or (os.path.lexists(folder) and not os.path.isdir(folder)):
        found.append(f"JAX_SPLITK_CACHE_DIR={own!r}; accepted: a folder, which is made if need be")
    for path in dict.fromkeys(read_only_caches()):
        if (folder := expanded(path)) is None or not os.path.isdir(folder):
            found.append(f"JAX_SPLITK_CACHE_PATH: {path} is not a folder; nothing is read from it")
    return found
