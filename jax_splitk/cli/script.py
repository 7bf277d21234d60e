"""Running a user's script as `python SCRIPT` would."""

import contextlib
import os
import pathlib
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence


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
