"""Files that outlive the process: where they are, and reads and writes that cannot corrupt or crash."""

import contextlib
import logging
import os
import pathlib
import tempfile

logger = logging.getLogger("jax_splitk")


def cache_dir() -> pathlib.Path:
    """The writable cache: `JAX_SPLITK_CACHE_DIR`, else `jax_splitk` in the user's cache folder."""
    chosen = os.environ.get("JAX_SPLITK_CACHE_DIR")
    if chosen:
        return pathlib.Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return pathlib.Path(base).expanduser() / "jax_splitk"


def read(path: pathlib.Path) -> bytes | None:
    """The file's content, or None when it cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return None


def write(path: pathlib.Path, data: bytes) -> bool:
    """Writes atomically (temporary file, then rename), so that readers see all of it or nothing.

    A cache that cannot be written is not an error: False, and one line in the log.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
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
