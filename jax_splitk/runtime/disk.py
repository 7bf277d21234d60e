"""Files that outlive the process: where they are, and reads and writes that cannot corrupt or crash."""

import contextlib
import functools
import logging
import os
import pathlib
import uuid

from jax_splitk.runtime import settings

logger = logging.getLogger("jax_splitk")

MODES = ("off", "read", "update", "frozen")


def mode() -> str:
    """`JAX_SPLITK_CACHE_MODE`, for decisions and machine code alike: "update" (the default) reads and writes, "read"
    never writes, "off" does neither, "frozen" reads, and a problem without a decision is an error. Raises ValueError
    for any other word."""
    return settings.word("JAX_SPLITK_CACHE_MODE", MODES, "update")


def cache_dir() -> pathlib.Path:
    """The writable cache: `JAX_SPLITK_CACHE_DIR`, else `jax_splitk` in the user's cache folder."""
    return _cache_dir(*map(os.environ.get, ("JAX_SPLITK_CACHE_DIR", "XDG_CACHE_HOME", "HOME")))


@functools.lru_cache(maxsize=8)  # each lowering asks twice
def _cache_dir(chosen: str | None, base: str | None, home: str | None) -> pathlib.Path:
    del home  # `expanded` looks it up
    return expanded(chosen) if chosen else expanded(base or "~/.cache") / "jax_splitk"


def expanded(path: str) -> pathlib.Path:
    """The path with `~` replaced where there is a home: pathlib's `expanduser` raises where there is none."""
    return pathlib.Path(os.path.expanduser(path))


def read(path: str | pathlib.Path) -> bytes | None:
    """The file's content, or None when it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return None


def write(path: pathlib.Path, data: bytes) -> bool:
    """Writes atomically (temporary file, then rename), so that readers see all of it or nothing.

    A cache that cannot be written is not an error: False, and one line in the log.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not mkstemp, whose files are for their owner alone: a cache may be shared, as the umask says.
        temporary = path.parent / f".tmp-{os.getpid()}-{uuid.uuid4().hex}"
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        logger.warning("jax_splitk: cannot write %s: %s", path, error)
        return False
    return True
