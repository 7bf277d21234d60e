"""Device source to sm_90a machine code by NVRTC, each source once: results are kept in memory and on disk by content.

What identifies a compilation is its text, options and the versions of the compiler and header packages, never a path.
The files are read and written as `disk.mode` says.
"""

import concurrent.futures
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
from jax_splitk.runtime.cores import usable_cores
from jax_splitk.runtime.nvrtc import compile_in_worker
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


def compile_source(source: Source) -> Compiled:
    """Machine code for `source`: from memory, from disk, or compiled now.

    Raises:
      CompilerUnavailable: NVRTC or its headers are missing.
      CompilationError: the source does not compile; the message has the macros and the log.
    """
    return _compile_once(source, in_worker=False)


def compile_sources(sources: Iterable[Source], given_up: threading.Event | None = None) -> list[Compiled]:
    """`compile_source` of many, those that have to be compiled in parallel processes, one for each core.

    Args:
      sources: in any order, repeats allowed.
      given_up: once it is set no other compilation begins, and CancelledError is raised.
    """
    wanted = list(sources)
    in_worker = len(set(wanted)) > 1

    def compiled(source: Source) -> Compiled:
        if given_up is not None and given_up.is_set():
            raise concurrent.futures.CancelledError
        return _compile_once(source, in_worker)

    with concurrent.futures.ThreadPoolExecutor(usable_cores()) as pool:
        return list(pool.map(compiled, wanted))


def _compile_once(source: Source, in_worker: bool) -> Compiled:
    key = content_key(source)
    with _in_flight.setdefault(key, threading.Lock()):  # one thread compiles, the others wait for its result
        if key not in _memory:
            _memory[key] = _load(key) or _compiled_now(source, key, in_worker)
    return _memory[key]


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


def _compiled_now(source: Source, key: str, in_worker: bool) -> Compiled:
    nvrtc = toolchain.find_nvrtc()
    options = [*source.options(), *(f"--include-path={folder}" for folder in toolchain.include_folders())]
    if in_worker:
        image, log = compile_in_worker(nvrtc.library, source.text(), source.file, options)
    else:
        image, log = nvrtc.compile(source.text(), source.file, options)
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
