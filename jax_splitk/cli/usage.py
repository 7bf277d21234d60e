"""Arguments that cannot be accepted: the argument, its value and what is."""

import argparse
import math
import os
import pathlib

from jax_splitk.runtime import disk


class UsageError(ValueError):
    """A wrong argument or setting; `main` prints the message with the command's usage and exits with 2."""


def positive(text: str) -> float:
    """The argparse type of a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}; accepted: a number above 0")
    return value


def not_negative(text: str) -> float:
    """The argparse type of a number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}; accepted: a number of at least 0")
    return value


def cache_folder(argument: str, text: str) -> pathlib.Path:
    """An existing cache folder."""
    if not os.path.isdir(os.path.join(text, "tuning")):
        raise UsageError(f"{argument}={text!r}; accepted: a cache folder, that is one which contains tuning/")
    return pathlib.Path(text)


def require_writable() -> None:
    """For commands that change the writable layer."""
    try:
        mode = disk.mode()
    except ValueError as error:
        raise UsageError(str(error)) from None
    if mode != "update":
        raise UsageError(f"JAX_SPLITK_CACHE_MODE={mode!r}; accepted by this command, which writes: 'update'")
