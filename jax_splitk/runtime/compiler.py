"""Device source to sm_90a machine code by NVRTC, each source once: results are kept in memory and on disk by content.

What identifies a compilation is its text, options and the versions of the compiler and header packages, never a path.
The files are read and written as `disk.mode` says, by whoever asks for the machine code: what is compiled ahead leaves
no trace until then.
"""

import atexit
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import pathlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from jax_splitk.runtime import disk, toolchain
from jax_splitk.runtime.nvrtc import compile_in_worker
from jax_splitk.runtime.pool import Pool
from jax_splitk.runtime.source import Source

logger = logging.getLogger("jax_splitk")

_FILE_MAGIC = b"jax_splitk cubin 4\n"


class CompilationError(RuntimeError):
    """NVRTC refused a kernel; the message holds the configuration and the compiler's log."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Machine code (an ELF cubin) and the compiler's log, with ptxas's report of registers and spills."""

    image: bytes
    log: str


_memory: dict[str, Compiled] = {}
_in_flight: dict[str, threading.Lock] = {}
_pool = Pool()

_WATCH_SECONDS = 0.2


def compile_source(source: Source) -> Compiled:
    """Machine code for `source`: from memory, from disk, from a worker that is at it, or compiled now.

    Raises:
      CompilerUnavailable: NVRTC or its headers are missing.
      CompilationError: the source does not compile; the message has the macros and the log.
    """
    key = content_key(source)
    with _in_flight.setdefault(key, threading.Lock()):  # one thread compiles, the others wait for its result
        if key not in _memory:
            _memory[key] = _load(key) or _kept(source, key, _pool.take(key) or _machine_code(source, in_worker=False))
    return _memory[key]


def compile_sources(sources: Iterable[Source], given_up: threading.Event | None = None) -> list[Compiled]:
    """`compile_source` of many, those that have to be compiled in parallel processes, one for each core.

    Args:
      sources: in any order, repeats allowed.
      given_up: once it is set no other compilation begins, and CancelledError is raised.
    """
    sources = list(sources)
    wanted = {content_key(source): source for source in sources}
    missing = {key: source for key, source in wanted.items() if key not in _memory and not _is_stored(key)}
    # A single one is as soon compiled here, unless a worker is at it.
    futures = {_submit(key, source, urgent=True) for key, source in missing.items()} if len(missing) > 1 else set()
    running = {future for future in futures if future is not None}
    try:
        while running:
            if given_up is not None and given_up.is_set():
                raise concurrent.futures.CancelledError
            running = concurrent.futures.wait(running, _WATCH_SECONDS).not_done
    finally:
        _pool.drop(missing)
    return [compile_source(source) for source in sources]


def compile_ahead(sources: Iterable[Source]) -> None:
    """Begins to compile what will be asked for, in the background, and returns at once. Whoever asks for it waits for
    its worker, or compiles it where none is at it yet, and is told what is wrong with it."""
    for key, source in {content_key(source): source for source in sources}.items():
        if key not in _memory and not _in_flight.setdefault(key, threading.Lock()).locked() and not _is_stored(key):
            _submit(key, source, urgent=False)


def drop_ahead() -> None:
    """Does without what `compile_ahead` was given, as far as that has not begun."""
    _pool.drop_ahead()


def queued() -> int:
    """How many compilations wait for a core."""
    return _pool.queued


def sparing(cores: int) -> contextlib.AbstractContextManager[None]:
    """Leaves so many cores to a measurement, while the block runs; but what somebody waits for is compiled on all."""
    return _pool.sparing(cores)


def _submit(key: str, source: Source, *, urgent: bool) -> Any:
    return _pool.submit(key, functools.partial(_machine_code, source, in_worker=True), urgent=urgent)


def _start_anew() -> None:
    """In a forked process, which has none of the threads."""
    _pool.__init__()
    _in_flight.clear()


os.register_at_fork(after_in_child=_start_anew)
atexit.register(_pool.close)


def content_key(source: Source) -> str:
    """Identity of a compilation: text, options and versions."""
    return _digest((origin(source.file), source.structs, source.options()))


def origin(file: str) -> str:
    """Identity of what a source file's compilations have in common: its text but for the structs, and the versions."""
    versions = sorted(toolchain.header_versions().items())
    return _digest((Source(file, ()).text(), toolchain.find_nvrtc().version, *versions))


@functools.lru_cache(maxsize=4096)
def _digest(identity: tuple[Any, ...]) -> str:
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def _machine_code(source: Source, *, in_worker: bool) -> tuple[bytes | None, str]:
    """(machine code or None where it does not compile, log)."""
    nvrtc = toolchain.find_nvrtc()
    options = [*source.options(), *(f"--include-path={folder}" for folder in toolchain.include_folders())]
    if in_worker:
        return compile_in_worker(nvrtc.library, source.text(), source.file, options)
    return nvrtc.compile(source.text(), source.file, options)


def _kept(source: Source, key: str, found: tuple[bytes | None, str]) -> Compiled:
    """What was found, also on disk; CompilationError where it is no machine code."""
    image, log = found
    if image is None:
        macros = " ".join(f"{name}={value}" for name, value in source.defines)
        raise CompilationError(f"{source.file} does not compile with {macros}:\n{log}")
    compiled = Compiled(image, log)
    folder = disk.cache_dir()
    if folder is not None and disk.mode() == "update":
        disk.write(folder / _file(key), _pack(key, origin(source.file), compiled))
    return compiled


# ---- the files -------------------------------------------------------------------------------------------------------


def _file(key: str) -> str:
    """Relative to a cache folder."""
    return f"cubin/{key}.cubin"


def _is_stored(key: str) -> bool:
    """Whether there is a file, which may be damaged."""
    return disk.mode() != "off" and any(os.path.lexists(folder / _file(key)) for folder in disk.folders())


def _load(key: str) -> Compiled | None:
    for folder in [] if disk.mode() == "off" else disk.folders():
        path = folder / _file(key)
        if not os.path.lexists(path):
            continue
        if (refusal := disk.code_refusal(folder)) is not None:
            disk.warn_once(refusal)
        elif (data := disk.read(path, own=True)) is not None:
            header, image = _unpack(data) or ({}, b"")
            if header.get("key") == key:
                return Compiled(image, header["log"])
            disk.warn_once(f"{path} is damaged or another compilation's, and is not used")
    return None


def cached(folder: pathlib.Path) -> Iterator[tuple[pathlib.Path, str | None]]:
    """(file, origin) of the machine code that a cache folder holds; None for a file that cannot be used."""
    for path in disk.files(folder, "cubin/*.cubin"):
        found = _unpack(disk.read(path, own=True) or b"")
        yield path, found[0]["origin"] if found is not None and found[0]["key"] == path.stem else None


def _pack(key: str, origin: str, compiled: Compiled) -> bytes:
    header = {"key": key, "origin": origin, "log": compiled.log}
    body = json.dumps(header).encode() + b"\0" + compiled.image
    return _FILE_MAGIC + hashlib.sha256(body).digest() + body


def _unpack(data: bytes) -> tuple[dict[str, str], bytes] | None:
    """(header, cubin); None for anything that `_pack` did not write whole."""
    magic, rest = data[: len(_FILE_MAGIC)], data[len(_FILE_MAGIC) :]
    if magic != _FILE_MAGIC or hashlib.sha256(rest[32:]).digest() != rest[:32]:
        return None
    text, _, image = rest[32:].partition(b"\0")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_whole = isinstance(header, dict) and header.keys() == {"key", "origin", "log"}
    return (header, image) if is_whole and all(isinstance(value, str) for value in header.values()) else None
