"""Files that outlive the process: where they are, and reads and writes that cannot hang, corrupt or crash."""

import contextlib
import contextvars
import functools
import itertools
import logging
import os
import pathlib
import pwd
import stat
import time
import uuid
from collections.abc import Iterator
from typing import BinaryIO

from jax_splitk.runtime import settings

logger = logging.getLogger("jax_splitk")

# Largest file that is read: an entry has some kilobytes, a kernel at most a megabyte.
MAX_BYTES = 64 * 2**20
# A write takes milliseconds: a temporary file this old was left by a process that died.
_ABANDONED_SECONDS = 3600


def mode() -> str:
    """`JAX_SPLITK_CACHE_MODE`, for decisions and machine code alike: "update" (the default) reads and writes, "read"
    never writes, "off" does neither, "frozen" reads, and a problem without a decision is an error. Raises ValueError
    for any other word."""
    return settings.word("JAX_SPLITK_CACHE_MODE")


# Collects warnings while `defer_warnings` runs; None: they go to the log.
_deferred: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("deferred", default=None)


@functools.lru_cache(maxsize=4096)
def _warn(text: str) -> None:
    logger.warning("%s", text)


def warn_once(text: str) -> None:
    """Logs a warning that this process has not given yet."""
    if (deferred := _deferred.get()) is None:
        _warn(text)
    else:
        deferred.append(text)


@contextlib.contextmanager
def defer_warnings(to: list[str]) -> Iterator[None]:
    """Collects the messages that `warn_once` gets while the block runs, and logs none of them."""
    token = _deferred.set(to)
    try:
        yield
    finally:
        _deferred.reset(token)


# ---- where -----------------------------------------------------------------------------------------------------------


def cache_dir() -> pathlib.Path | None:
    """The writable cache: `JAX_SPLITK_CACHE_DIR`, else `jax_splitk` in the user's cache folder; None if there is no
    place for it, for example for a user without a home. Raises ValueError for what is no local path."""
    return _cache_dir(*map(os.environ.get, ("JAX_SPLITK_CACHE_DIR", "XDG_CACHE_HOME", "HOME")))


@functools.lru_cache(maxsize=8)  # each lowering asks twice
def _cache_dir(chosen: str | None, base: str | None, home: str | None) -> pathlib.Path | None:
    if chosen:
        return settings.local_path("JAX_SPLITK_CACHE_DIR", chosen)
    if base and os.path.isabs(base):  # the specification says to ignore relative paths
        return pathlib.Path(base, "jax_splitk")
    if not home:
        with contextlib.suppress(KeyError):
            home = pwd.getpwuid(os.getuid()).pw_dir
    return pathlib.Path(home, ".cache", "jax_splitk") if home and os.path.isabs(home) else None


def no_place() -> str:
    """Why there is no cache, where `cache_dir` is None."""
    return "there is no home folder for a cache: set JAX_SPLITK_CACHE_DIR; nothing that is decided or compiled is kept"


def folders() -> list[pathlib.Path]:
    """The caches in the order of their precedence: the writable one, then those of `JAX_SPLITK_CACHE_PATH`.
    Raises ValueError for what is no local path."""
    found = (cache_dir(), *settings.read_only_caches().values())
    return [folder for folder in found if folder is not None]


def files(folder: pathlib.Path, pattern: str) -> Iterator[pathlib.Path]:
    """The paths in a cache folder that match, without those behind links. Empty if the folder may not be entered."""
    if os.path.isdir(folder):  # pathlib.Path raises where os.path returns False
        # glob of Python 3.12 lists the folder for a single name, too: 13 ms in a cache of 8,000 kernels.
        one = not any(character in pattern for character in "*?[")
        for path in filter(os.path.exists, [folder / pattern]) if one else sorted(folder.glob(pattern)):
            between = itertools.takewhile(lambda parent: parent != folder, path.parents)
            if not any(parent.is_symlink() for parent in between):
                yield path


def abandoned(folder: pathlib.Path, pattern: str = "") -> Iterator[pathlib.Path]:
    """Temporary files below a folder that writers left behind when they died."""
    for path in files(folder, f"{pattern}.tmp-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > _ABANDONED_SECONDS:
                yield path


# ---- reads and writes ------------------------------------------------------------------------------------------------


def read(path: str | pathlib.Path, *, own: bool = False) -> bytes | None:
    """The content of a regular file of at most `MAX_BYTES`; None for any other file and for one that cannot be read,
    with one warning if the file exists.

    Args:
      own: the file holds code, so it must belong to this user or root, and not everybody may write to it.
    """
    try:
        with open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            refusal = _refusal(status) or (_distrust(status) if own else None)
            if refusal is None:
                return file.read(status.st_size)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        refusal = error.strerror or str(error)
    warn_once(f"{path} is not read: {refusal}")
    return None


def _refusal(status: os.stat_result) -> str | None:
    """Why a file is not read; None if it may be."""
    if not stat.S_ISREG(status.st_mode):
        return "it is not a regular file"
    return f"it has {status.st_size} bytes; accepted: at most {MAX_BYTES}" if status.st_size > MAX_BYTES else None


def _distrust(status: os.stat_result) -> str | None:
    """Why code from a file or folder is not used."""
    if status.st_uid not in (0, os.geteuid()):
        return f"it belongs to another user ({status.st_uid})"
    return "anybody may write to it" if status.st_mode & stat.S_IWOTH else None


def code_refusal(cache: pathlib.Path) -> str | None:
    """Why no code of a cache folder is used; None if it is used, or if there is none."""
    for folder in (cache, cache / "cubin"):
        with contextlib.suppress(OSError):
            if (reason := _distrust(os.stat(folder))) is not None:
                return f"the code in {folder} is not used: {reason}"
    return None


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of `path` when the block ends; deleted if the block raises. So readers see
    all of it or nothing. Raises OSError."""
    # Not mkstemp, whose files only their owner may read: the umask decides whether a file is shared.
    temporary = path.parent / f".tmp-{os.getpid()}-{uuid.uuid4().hex}"
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o664)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write(path: pathlib.Path, data: bytes) -> bool:
    """Writes atomically (temporary file, then rename), so that readers see all of it or nothing. Also deletes temporary
    files that dead writers left in the folder.

    A cache that cannot be written is not an error: False, and one line in the log.
    """
    try:
        above = itertools.takewhile(lambda parent: not os.path.exists(parent), path.parents)
        for parent in reversed(list(above)):
            parent.mkdir(mode=0o775, exist_ok=True)  # else its code would not be used
        with replacing(path) as file:
            file.write(data)
        for old in abandoned(path.parent):
            old.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("jax_splitk: cannot write %s: %s", path, error)
        return False
    return True
