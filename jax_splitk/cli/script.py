"""Running a user's script as `python SCRIPT` would, and watching what is decided meanwhile."""

import contextlib
import dataclasses
import logging
import os
import pathlib
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence

from jax_splitk import primitive
from jax_splitk.target import Target
from jax_splitk.tuning import agreement, store, tuner
from jax_splitk.tuning.entry import Entry
from jax_splitk.tuning.key import Key
from jax_splitk.tuning.select import Choice

logger = logging.getLogger("jax_splitk")


@dataclasses.dataclass
class Watched:
    """What happened inside `watching`.

    Attributes:
      choices: of every operation that was lowered, with how often.
      entries: by key, where a cache or a measurement was asked; None where neither had an answer.
      measured: the keys that were measured now.
    """

    choices: dict[Choice, int] = dataclasses.field(default_factory=dict)
    entries: dict[Key, Entry | None] = dataclasses.field(default_factory=dict)
    measured: set[Key] = dataclasses.field(default_factory=set)


@contextlib.contextmanager
def watching(*, again: bool = False) -> Iterator[Watched]:
    """Records decisions while the block runs. Takes the place of the two functions that every decision passes.

    Args:
      again: also measure what a cache already has, each key once.
    """
    watched = Watched()
    announce, agree, tune = primitive.announce, agreement.agree, tuner.tune

    def watched_announce(choice: Choice) -> None:
        watched.choices[choice] = watched.choices.get(choice, 0) + 1
        announce(choice)

    def watched_tune(key: Key, target: Target, old: Entry | None = None, seconds: float | None = None) -> Entry:
        entry = tune(key, target, old, seconds)
        watched.measured.add(key)
        return entry

    def watched_agree(key: Key, target: Target, decide: Callable[[], Entry | None]) -> tuple[bool, Entry | None]:
        renew = again and key not in watched.entries
        agreed, entry = agree(key, target, (lambda: _renewed(key, target, decide)) if renew else decide)
        watched.entries[key] = entry
        return agreed, entry

    primitive.announce, agreement.agree, tuner.tune = watched_announce, watched_agree, watched_tune
    try:
        yield watched
    finally:
        primitive.announce, agreement.agree, tuner.tune = announce, agree, tune


def _renewed(key: Key, target: Target, decide: Callable[[], Entry | None]) -> Entry | None:
    """Measures although a cache has the key; falls back to what it has."""
    found = store.lookup(key, target)
    try:
        entry = tuner.tune(key, target, None if found is None else found[0])
    except Exception as error:
        logger.warning("%s: tuning failed (%s: %s)", key.problem, type(error).__name__, error)
        return decide()
    store.save(key, entry)
    return entry


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Environment variables for the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def run(path: pathlib.Path, arguments: Sequence[str]) -> str | None:
    """Runs the script as `__main__`; None, or how it failed, its traceback being on stderr then.

    jax is imported already: a script that sets `JAX_...` variables before it imports jax must get them from outside.
    """
    argv, folders = sys.argv, list(sys.path)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as exit_:
        return None if exit_.code in (None, 0) else f"{path} exited with {exit_.code}"
    except Exception as error:
        traceback.print_exc()
        return f"{path} failed: {type(error).__name__}: {error}"
    finally:
        sys.argv = argv
        sys.path[:] = folders
    return None
