"""CuTe source to sm_90a machine code: NVRTC from its wheel, headers from theirs, results kept on disk by content.

No CUDA toolkit, no nvcc and no GPU are needed. What identifies a compilation is its text, options and the versions of
the compiler and header packages, never a path. The files are read and written as `disk.mode` says.
"""

import concurrent.futures
import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.resources
import importlib.util
import json
import logging
import os
import pathlib
import re
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from jax_splitk.runtime import disk
from jax_splitk.runtime.nvrtc import Nvrtc, NvrtcError, compile_in_worker

logger = logging.getLogger("jax_splitk")

ARCH = "sm_90a"
_FILE_MAGIC = b"jax_splitk cubin 4\n"
_HEADER_PACKAGES = ("nvidia-cutlass", "nvidia-cuda-cccl", "nvidia-cuda-runtime")
_OWN_INCLUDE = re.compile(r'^#include "([\w/]+\.cuh)"$', re.MULTILINE)
_STRUCTS = "structs.cuh"
INSTALL_HINT = "pip install 'jax_splitk[cuda13]'"


class CompilerUnavailable(RuntimeError):
    """NVRTC or the headers it needs are not installed; the message names what is missing."""


class CompilationError(RuntimeError):
    """NVRTC refused a kernel; the message holds the configuration and the compiler's log."""


@functools.cache
def _file_text(file: str) -> str:
    return importlib.resources.files("jax_splitk.kernels").joinpath(file).read_text(encoding="utf-8")


@functools.lru_cache(maxsize=256)
def _source_text(file: str, structs: str) -> str:
    """The file with what it includes in its place, each header once."""
    included = {file}

    def included_text(include: re.Match[str]) -> str:
        if include[1] in included:
            return ""
        included.add(include[1])
        text = structs if include[1] == _STRUCTS else _file_text(include[1])
        return _OWN_INCLUDE.sub(included_text, text)

    return _OWN_INCLUDE.sub(included_text, _file_text(file))


@dataclasses.dataclass(frozen=True)
class Source:
    """A device source file of `jax_splitk/kernels` and what specialises it.

    Attributes:
      file: relative to that folder, as are the headers that it includes.
      defines: macros.
      structs: the text that stands for `#include "structs.cuh"`; see `kernels/device/structs.py`.
    """

    file: str
    defines: tuple[tuple[str, str | int], ...]
    structs: str = ""

    def text(self) -> str:
        """The file, with the headers that it includes in their places."""
        return _source_text(self.file, self.structs)

    def options(self) -> tuple[str, ...]:
        return (
            f"--gpu-architecture={ARCH}",
            "--std=c++17",
            "-default-device",
            "--ptxas-options=-v",
            "-DNDEBUG",
            *(f"-D{name}={value}" for name, value in self.defines),
        )


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Machine code and the compiler's log, with ptxas's register and spill report.

    Attributes:
      image: the ELF cubin.
      log: the compiler's. What is read from it (registers, spill_bytes, serialized_wgmma) is for people and tests,
        which hold every kernel to it; nothing is decided by it.
    """

    image: bytes
    log: str

    @property
    def registers(self) -> int:
        """The most registers a thread of any kernel uses."""
        return max((int(n) for n in re.findall(r"Used (\d+) registers", self.log)), default=0)

    @property
    def spill_bytes(self) -> int:
        """Bytes of spilled registers that are stored and loaded, over all kernels."""
        return sum(int(n) for n in re.findall(r"(\d+) bytes spill", self.log))

    @property
    def serialized_wgmma(self) -> bool:
        """ptxas had to wait after each WGMMA (its warnings C7510 to C7519)."""
        return "wgmma" in self.log and "serializ" in self.log


def _nvidia_folders() -> list[pathlib.Path]:
    spec = importlib.util.find_spec("nvidia")
    if spec is None or spec.submodule_search_locations is None:
        return []
    return [pathlib.Path(p) / "cu13" for p in spec.submodule_search_locations]


def _first(paths: Iterable[pathlib.Path], probe: str) -> pathlib.Path | None:
    return next((path for path in paths if (path / probe).exists()), None)


@functools.cache
def find_nvrtc() -> Nvrtc:
    """The compiler; raises `CompilerUnavailable` when its wheel is not installed."""
    folder = _first((f / "lib" for f in _nvidia_folders()), "libnvrtc.so.13")
    if folder is None:
        raise CompilerUnavailable(f"nvidia-cuda-nvrtc 13 is not installed: {INSTALL_HINT}")
    try:
        return Nvrtc(folder / "libnvrtc.so.13")
    except (NvrtcError, OSError) as error:
        raise CompilerUnavailable(f"{folder / 'libnvrtc.so.13'} cannot be used: {error}") from error


@functools.cache
def include_folders() -> tuple[pathlib.Path, ...]:
    """Header folders of CUTLASS, the CUDA runtime and CCCL; raises `CompilerUnavailable` naming what is missing."""
    spec = importlib.util.find_spec("cutlass_library")
    locations = spec.submodule_search_locations if spec else None
    cutlass = _first((pathlib.Path(p) / "source/include" for p in locations or ()), "cute/config.hpp")
    includes = [f / "include" for f in _nvidia_folders()]
    runtime = _first(includes, "cuda_fp16.h")
    cccl = _first((f / "cccl" for f in includes), "cuda/std/cstdint")
    if cutlass is None or runtime is None or cccl is None:
        found = {"nvidia-cutlass": cutlass, "nvidia-cuda-runtime": runtime, "nvidia-cuda-cccl": cccl}
        missing = [package for package, folder in found.items() if folder is None]
        raise CompilerUnavailable(f"the headers of {', '.join(missing)} are not installed: {INSTALL_HINT}")
    # CUTLASS includes "cccl/...", too; the wheels of CCCL and of the runtime may lie in different site folders.
    return tuple(dict.fromkeys((cutlass, runtime, cccl, cccl.parent)))


def unavailable() -> str | None:
    """None when device code can be compiled here, else the reason."""
    try:
        find_nvrtc()
        include_folders()
    except CompilerUnavailable as error:
        return str(error)
    return None


@functools.cache
def header_versions() -> dict[str, str]:
    """Versions of the packages whose headers the kernels include ('?' where a folder is there without metadata)."""
    versions = {}
    for package in _HEADER_PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "?"
    return versions


def source_files() -> list[str]:
    """The device source files, as `Source.file` names them."""
    folder = pathlib.Path(str(importlib.resources.files("jax_splitk.kernels")))
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.cu"))


def content_key(source: Source) -> str:
    """Identity of a compilation: text, options and versions."""
    return _digest((origin(source.file), source.structs, source.options()))


def origin(file: str) -> str:
    """Identity of what a source file's compilations have in common: its text but for the structs, and the versions."""
    return _digest((Source(file, ()).text(), find_nvrtc().version, *sorted(header_versions().items())))


@functools.lru_cache(maxsize=4096)
def _digest(identity: tuple[Any, ...]) -> str:
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def _pack(key: str, origin: str, compiled: Compiled) -> bytes:
    header = {"key": key, "origin": origin, "log": compiled.log}
    body = json.dumps(header).encode() + b"\0" + compiled.image
    return _FILE_MAGIC + hashlib.sha256(body).digest() + body


def _unpack(data: bytes) -> tuple[dict[str, Any], bytes] | None:
    """(header, cubin); None for anything that `_pack` did not write whole."""
    magic, rest = data[: len(_FILE_MAGIC)], data[len(_FILE_MAGIC) :]
    if magic != _FILE_MAGIC or hashlib.sha256(rest[32:]).digest() != rest[:32]:
        return None
    header, image = rest[32:].split(b"\0", 1)
    return json.loads(header), image


_memory: dict[str, Compiled] = {}
_in_flight: dict[str, threading.Lock] = {}
_lock = threading.Lock()


def compile_source(source: Source) -> Compiled:
    """Machine code for `source`: from memory, from disk, or compiled now and stored.

    Raises:
      CompilerUnavailable: NVRTC or its headers are missing.
      CompilationError: the source does not compile; the message has the macros and the log.
    """
    return _compile_once(source, in_worker=False)


def compile_sources(sources: Iterable[Source], workers: int | None = None) -> list[Compiled]:
    """`compile_source` of many, those that have to be compiled in parallel processes.

    Args:
      sources: in any order, repeats allowed.
      workers: processes at a time; None for the number of cores.
    """
    wanted = list(sources)
    with concurrent.futures.ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        in_worker = len(set(wanted)) > 1
        return list(pool.map(lambda source: _compile_once(source, in_worker), wanted))


def _compile_once(source: Source, in_worker: bool) -> Compiled:
    key = content_key(source)
    with _lock:
        own = _in_flight.setdefault(key, threading.Lock())
    with own:  # one compilation of each source at a time; the others wait for its result
        if key not in _memory:
            _memory[key] = _load(key) or _compile(source, key, in_worker)
    return _memory[key]


def _cubin_path(key: str) -> pathlib.Path:
    return disk.cache_dir() / f"cubin/{key}.cubin"


def _load(key: str) -> Compiled | None:
    path = _cubin_path(key)
    data = None if disk.mode() == "off" else disk.read(path)
    if data is None:
        return None
    header, image = _unpack(data) or ({}, b"")
    if header.get("key") != key:
        logger.warning("jax_splitk: %s is damaged or another compilation's; compiling again", path)
        return None
    return Compiled(image, header["log"])


def stored(folder: pathlib.Path) -> Iterator[tuple[pathlib.Path, str | None]]:
    """(file, origin) of the machine code that a cache folder holds; None for a file that cannot be used."""
    for path in sorted((folder / "cubin").glob("*.cubin")):
        found = _unpack(disk.read(path) or b"")
        yield path, None if found is None else found[0]["origin"]


def _compile(source: Source, key: str, in_worker: bool) -> Compiled:
    nvrtc = find_nvrtc()
    options = [*source.options(), *(f"--include-path={folder}" for folder in include_folders())]
    if in_worker:
        image, log = compile_in_worker(nvrtc.library, source.text(), source.file, options)
    else:
        image, log = nvrtc.compile(source.text(), source.file, options)
    if image is None:
        macros = " ".join(f"{name}={value}" for name, value in source.defines)
        raise CompilationError(f"{source.file} does not compile with {macros}:\n{log}")
    compiled = Compiled(image, log)
    if disk.mode() == "update":
        disk.write(_cubin_path(key), _pack(key, origin(source.file), compiled))
    return compiled
