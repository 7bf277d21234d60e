"""Compiles device source to sm_90a machine code with NVRTC. Results are kept in memory and on disk by content.

The source text, the options and the versions of the compiler and header packages identify a compilation, never a path.
Files are read and written as `disk.mode` says, when a caller asks for the machine code. So kernels that are compiled
ahead are not stored until then. A file's name hashes text and options separately from the versions, so that a machine
without a compiler finds kernels from other machines.
"""

import atexit
import concurrent.futures
import dataclasses
import functools
import hashlib
import json
import logging
import os
import pathlib
import re
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from jax_splitk.runtime import disk, toolchain, wgmma_header, worker
from jax_splitk.runtime.outcome import Outcome
from jax_splitk.runtime.pool import Pool
from jax_splitk.runtime.source import Source
from jax_splitk.runtime.worker import compile_in_worker

logger = logging.getLogger("jax_splitk")

_FILE_MAGIC = b"jax_splitk cubin 5\n"
# File names of earlier versions.
_OLD_FILES = f"cubin/{'[0-9a-f]' * 64}.cubin"


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Machine code (an ELF cubin) and the compiler's log, with ptxas's report of registers and spills."""

    image: bytes
    log: str


class CompilationError(RuntimeError):
    """NVRTC refused a kernel; the message holds the configuration and the compiler's log."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The content of a kernel's file.

    Attributes:
      key: the source's `content_key` on the machine that compiled it.
      origin: the source file's `origin` on that machine.
      compiler: `toolchain.identity` on that machine.
      source: the compiled source, with its macros' values as texts.
    """

    key: str
    origin: str
    compiler: str
    source: Source
    compiled: Compiled

    @property
    def source_key(self) -> str:
        return self.key.partition("-")[0]


# One pool for the whole process, with a worker for each core: machine code depends on nothing but its source.
_memory: dict[str, Compiled] = {}
_in_flight: dict[str, threading.Lock] = {}
pool = Pool()  # compilations

_WATCH_SECONDS = 0.2


def compile_source(source: Source) -> Compiled:
    """Machine code for `source`: from memory, from disk, from a worker that is compiling it, or compiled now.

    Raises:
      CompilerUnavailable: NVRTC or its headers are missing.
      CompilationError: the source does not compile; the message has the macros and the log.
    """
    key = source_key(source)
    with _in_flight.setdefault(key, threading.Lock()):  # one thread compiles, the others wait for its result
        if key not in _memory:
            _memory[key] = _from_caches(source) or _stored(
                source, pool.take(key) or _machine_code(source, in_worker=False)
            )
    return _memory[key]


def compile_sources(sources: Iterable[Source], given_up: threading.Event | None = None) -> list[Compiled]:
    """`compile_source` for many sources. Parallel processes, one for each core, compile those that no cache has. A
    program that cannot start processes (`worker.available`) compiles the sources itself, one after the other.

    Args:
      sources: in any order, repeats allowed.
      given_up: once it is set no other compilation begins, and CancelledError is raised.
    """
    sources = list(sources)
    wanted = {source_key(source): source for source in sources}
    missing = {key: source for key, source in wanted.items() if key not in _memory and not _is_stored(source)}
    # Compiling a single source here is as fast, unless a worker has already started it.
    begun = [_submit(key, source, urgent=True) for key, source in missing.items()] if len(missing) > 1 else []
    running = [outcome for outcome in begun if outcome is not None]
    try:
        while running:
            if given_up is not None and given_up.is_set():
                raise concurrent.futures.CancelledError
            running[0].wait(_WATCH_SECONDS)
            running = [outcome for outcome in running if not outcome.done()]
    finally:
        pool.drop(missing)
    for source in () if worker.available() else missing.values():
        if given_up is not None and given_up.is_set():
            raise concurrent.futures.CancelledError
        compile_source(source)
    return [compile_source(source) for source in sources]


def compile_ahead(sources: Iterable[Source]) -> None:
    """Begins to compile sources in the background, and returns at once. A later `compile_source` waits for the worker,
    or compiles the source itself if no worker has started it. It also raises the errors."""
    for key, source in {source_key(source): source for source in sources}.items():
        if key not in _memory and not _in_flight.setdefault(key, threading.Lock()).locked() and not _is_stored(source):
            _submit(key, source, urgent=False)


def _submit(key: str, source: Source, *, urgent: bool) -> Outcome[Any] | None:
    if not worker.available():
        return None  # threads would compile one after the other, too, and would not end with the interpreter
    return pool.submit(key, functools.partial(_machine_code, source, in_worker=True), urgent=urgent)


def _reset_after_fork() -> None:
    """Replaces the pool in a forked process, which has none of its threads."""
    pool.__init__()
    _in_flight.clear()


os.register_at_fork(after_in_child=_reset_after_fork)
atexit.register(pool.close)


def held(source: Source) -> Compiled | None:
    """Machine code for `source` if this process or a cache has it; nothing is compiled.

    A cached kernel must come from this machine's compiler version. If there is no compiler, or nothing may be written
    (`disk.mode`), the newest version's kernel serves.
    """
    key = source_key(source)
    with _in_flight.setdefault(key, threading.Lock()):
        if key not in _memory and (found := _from_caches(source)) is not None:
            _memory[key] = found
    return _memory.get(key)


def _from_caches(source: Source) -> Compiled | None:
    """`held`, from a cache."""
    has_compiler = toolchain.unavailable() is None
    found = _load(content_key(source)) if has_compiler else None
    if found is None and (not has_compiler or disk.mode() != "update"):
        found = _load_any(source_key(source))
    return found


def content_key(source: Source) -> str:
    """Identity of a compilation by this machine's compiler: text, options and versions."""
    return f"{source_key(source)}-{_digest((toolchain.identity(),))[:16]}"


def source_key(source: Source) -> str:
    """Identity of a source: text and options."""
    return _digest((origin(source.file), source.structs, source.options()))


def origin(file: str) -> str:
    """Identity that all compilations of a source file share: its text without the structs."""
    return _digest((Source(file, ()).text(),))


@functools.lru_cache(maxsize=4096)
def _digest(identity: tuple[Any, ...]) -> str:
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def compile_anew(source: Source) -> Compiled:
    """`compile_source` without any cache."""
    try:
        found = _machine_code(source, in_worker=True)
    except worker.NoWorker:
        found = _machine_code(source, in_worker=False)
    return _compiled(source, found)


def store(folder: pathlib.Path, source: Source, compiled: Compiled) -> bool:
    """Writes this machine's compilation of a source into a cache folder. Returns False, with a warning, if it
    cannot."""
    key = content_key(source)
    return disk.write(folder / _file(key), _pack(key, toolchain.identity(), source, compiled))


def program(source: Source) -> tuple[str, str, list[str], dict[str, str]]:
    """The arguments of `Nvrtc.compile` for a source: its text, its name, options, and headers in place of files."""
    options = [*source.options(), *(f"--include-path={folder}" for folder in toolchain.include_folders())]
    text = source.text(with_lines=True)
    return text, source.file, options, wgmma_header.needed(text)


def _machine_code(source: Source, *, in_worker: bool) -> tuple[bytes | None, str]:
    """(machine code, or None if the source does not compile; log)."""
    nvrtc = toolchain.find_nvrtc()
    if in_worker:
        return compile_in_worker(nvrtc.library, *program(source))
    return nvrtc.compile(*program(source))


def _stored(source: Source, found: tuple[bytes | None, str]) -> Compiled:
    """Keeps a compilation's result in memory and on disk. Raises CompilationError if it has no machine code."""
    compiled = _compiled(source, found)
    folder = disk.cache_dir()
    if folder is not None and disk.mode() == "update":
        store(folder, source, compiled)
    return compiled


def _compiled(source: Source, found: tuple[bytes | None, str]) -> Compiled:
    image, log = found
    if image is None:
        macros = " ".join(f"{name}={value}" for name, value in source.defines)
        raise CompilationError(f"{source.file} does not compile with {macros}:\n{log}")
    return Compiled(image, log)


# ---- the files -------------------------------------------------------------------------------------------------------


def _file(key: str) -> str:
    """A kernel file's path relative to a cache folder."""
    return f"cubin/{key}.cubin"


def _folders() -> list[pathlib.Path]:
    return [] if disk.mode() == "off" else disk.folders()


def _is_stored(source: Source) -> bool:
    """Whether a cache has a file for `_from_caches`. The file may be damaged."""
    names = [_file(content_key(source))] if toolchain.unavailable() is None else []
    if not names or disk.mode() != "update":
        names.append(_file(f"{source_key(source)}-*"))
    return any(next(disk.files(folder, name), None) is not None for folder in _folders() for name in names)


def _load(key: str) -> Compiled | None:
    """The machine code of a `content_key`."""
    for folder in _folders():
        if (kernel := _read(folder, folder / _file(key))) is not None:
            return kernel.compiled
        _say_old(folder)
    return None


def _load_any(key: str) -> Compiled | None:
    """The machine code of a `source_key` from the newest compiler version; among equal versions, from the first
    cache."""
    paths = [(folder, path) for folder in _folders() for path in disk.files(folder, _file(f"{key}-*"))]
    kernels = [kernel for folder, path in paths if (kernel := _read(folder, path)) is not None]
    newest = max(kernels, key=lambda kernel: _version(kernel.compiler), default=None)
    if newest is None:
        return None
    logger.info("%s of a cache is used, which %s compiled", newest.source.file, newest.compiler)
    return newest.compiled


def _version(compiler: str) -> list[int]:
    """The numbers of a version, which can be compared."""
    return [int(number) for number in re.findall(r"\d{1,9}", compiler)]


def _read(folder: pathlib.Path, path: pathlib.Path) -> Kernel | None:
    """The kernel in a file of a cache folder; None if it cannot be used, with one warning if the file exists."""
    if not os.path.lexists(path):
        return None
    if (refusal := disk.code_refusal(folder)) is not None:
        disk.warn_once(refusal)
    elif (data := disk.read(path, own=True)) is not None:
        if (kernel := _of(path, data)) is not None:
            return kernel
        disk.warn_once(f"{path} is damaged or another compilation's, and is not used")
    return None


@functools.lru_cache(maxsize=256)  # a folder has thousands of files
def _say_old(folder: pathlib.Path) -> None:
    if next(disk.files(folder, _OLD_FILES), None) is not None:
        prune = "`python -m jax_splitk cache prune --damaged` deletes a user cache's"
        disk.warn_once(f"{folder} has kernels of another version of jax_splitk, which are not used; {prune}")


def is_old(path: pathlib.Path) -> bool:
    """Whether a kernel's file has a name of an earlier version."""
    return "-" not in path.stem


def cached(folder: pathlib.Path) -> Iterator[tuple[pathlib.Path, Kernel | None]]:
    """The kernels' files of a cache folder; None for a file that cannot be used."""
    for path in disk.files(folder, "cubin/*.cubin"):
        yield path, _of(path, disk.read(path, own=True) or b"")


def _of(path: pathlib.Path, data: bytes) -> Kernel | None:
    """The kernel in the data of a file, if it matches the file's name."""
    kernel = _unpack(data)
    return kernel if kernel is not None and kernel.key == path.stem else None


def _pack(key: str, compiler: str, source: Source, compiled: Compiled) -> bytes:
    header = {"key": key, "origin": origin(source.file), "compiler": compiler, "log": compiled.log}
    defines = [(name, str(value)) for name, value in source.defines]
    header |= {"file": source.file, "defines": defines, "structs": source.structs}
    body = json.dumps(header).encode() + b"\0" + compiled.image
    return _FILE_MAGIC + hashlib.sha256(body).digest() + body


def _unpack(data: bytes) -> Kernel | None:
    """None if the data is not a complete output of `_pack`."""
    magic, rest = data[: len(_FILE_MAGIC)], data[len(_FILE_MAGIC) :]
    if magic != _FILE_MAGIC or hashlib.sha256(rest[32:]).digest() != rest[:32]:
        return None
    text, _, image = rest[32:].partition(b"\0")
    try:
        header = json.loads(text)
        defines = tuple((name, value) for name, value in header.pop("defines"))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None
    texts = [header.get(name) for name in ("key", "origin", "compiler", "file", "structs", "log")]
    if len(header) != len(texts) or not all(isinstance(text, str) for text in (*texts, *sum(defines, ()))):
        return None
    key, origin, compiler, file, structs, log = texts
    return Kernel(key, origin, compiler, Source(file, defines, structs), Compiled(image, log))
