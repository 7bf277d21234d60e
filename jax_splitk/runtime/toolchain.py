"""NVRTC and the headers that device code includes, from their wheels: no CUDA toolkit, no nvcc and no GPU is needed."""

import functools
import importlib.metadata
import pathlib
import re
import sys
from collections.abc import Iterable

from jax_splitk.runtime.nvrtc import Nvrtc, NvrtcError

_PACKAGES = ("nvidia-cuda-nvrtc", "nvidia-cutlass", "nvidia-cuda-cccl", "nvidia-cuda-runtime")
# The extra `compiler` of pyproject.toml.
REQUIREMENTS = (
    "nvidia-cutlass>=4.2,<5",
    "nvidia-cuda-nvrtc>=13.0,<14",
    "nvidia-cuda-cccl>=13.0,<13.2",
    "nvidia-cuda-runtime>=13.0,<14",
)


class CompilerUnavailable(RuntimeError):
    """NVRTC or the headers it needs are not installed; the message names what is missing."""


@functools.cache
def find_nvrtc() -> Nvrtc:
    """The compiler. Raises `CompilerUnavailable` if its wheel is not installed."""
    folder = _installed()["nvidia-cuda-nvrtc"]
    if folder is None:
        raise CompilerUnavailable(_what_is_missing())
    try:
        return Nvrtc(folder / "libnvrtc.so.13")
    except (NvrtcError, OSError) as error:
        raise CompilerUnavailable(f"{folder / 'libnvrtc.so.13'} cannot be used: {error}") from error


@functools.cache
def include_folders() -> tuple[pathlib.Path, ...]:
    """Header folders of CUTLASS, the CUDA runtime and CCCL; raises `CompilerUnavailable` naming what is missing."""
    installed = _installed()
    cutlass, runtime, cccl = (installed[f"nvidia-{name}"] for name in ("cutlass", "cuda-runtime", "cuda-cccl"))
    if cutlass is None or runtime is None or cccl is None:
        raise CompilerUnavailable(_what_is_missing())
    # CUTLASS includes "cccl/...", too; the wheels of CCCL and of the runtime may lie in different site folders.
    return tuple(dict.fromkeys((cutlass, runtime, cccl, cccl.parent)))


def _installed() -> dict[str, pathlib.Path | None]:
    """The folder of each package of `REQUIREMENTS`; None if the package is not installed."""
    folders, cutlass = _nvidia_folders(), _package_folders("cutlass_library")
    includes = [folder / "include" for folder in folders]
    return {
        "nvidia-cuda-nvrtc": _first((folder / "lib" for folder in folders), "libnvrtc.so.13"),
        "nvidia-cutlass": _first((folder / "source/include" for folder in cutlass), "cute/config.hpp"),
        "nvidia-cuda-cccl": _first((folder / "cccl" for folder in includes), "cuda/std/cstdint"),
        "nvidia-cuda-runtime": _first(includes, "cuda_fp16.h"),
    }


def _what_is_missing() -> str:
    """All packages that are not installed, and the one command that installs them."""
    missing = [package for package, folder in _installed().items() if folder is None]
    named = ["nvidia-cuda-nvrtc 13" if package == "nvidia-cuda-nvrtc" else package for package in missing]
    wanted = (line for line in REQUIREMENTS if re.split("[<>=]", line)[0] in missing)
    verb = "is" if len(missing) == 1 else "are"
    return f"{', '.join(named)} {verb} not installed: pip install {' '.join(map(repr, wanted))}"


def unavailable() -> str | None:
    """Why device code cannot be compiled here; None if it can."""
    try:
        find_nvrtc()
        include_folders()
    except CompilerUnavailable as error:
        return str(error)
    return None


@functools.cache
def package_versions() -> dict[str, str]:
    """Versions of the packages of compiler and headers ('?' for a folder without metadata)."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "?"
    return versions


def identity() -> str:
    """The versions of the compiler and headers, as text. Raises `CompilerUnavailable`."""
    major, minor = find_nvrtc().version
    return ", ".join((f"NVRTC {major}.{minor}", *(f"{name} {version}" for name, version in package_versions().items())))


def _nvidia_folders() -> list[pathlib.Path]:
    return [folder / "cu13" for folder in _package_folders("nvidia")]


def _package_folders(name: str) -> list[pathlib.Path]:
    """The folder of a package, even if `sys.modules` has a stub in its place, which `importlib.util.find_spec` would
    ask first."""
    for finder in sys.meta_path:
        spec = finder.find_spec(name, None)
        if spec is not None and spec.submodule_search_locations is not None:
            return [pathlib.Path(folder) for folder in spec.submodule_search_locations]
    return []


def _first(paths: Iterable[pathlib.Path], probe: str) -> pathlib.Path | None:
    return next((path for path in paths if (path / probe).exists()), None)
