"""What this installation can do: versions, the GPU, the settings, and each implementation with what it lacks."""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import os
import pathlib
import platform
import tempfile
from typing import Any

import jax

from jax_splitk import _ffi
from jax_splitk.cli import output
from jax_splitk.runtime import disk, nvml, settings, source, toolchain
from jax_splitk.runtime.target import target_for

_PACKAGES = (
    *("jax_splitk", "jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cutlass", "nvidia-cuda-nvrtc"),
    *("nvidia-cuda-cccl", "nvidia-cuda-runtime"),
)


def doctor(arguments: argparse.Namespace) -> int:
    """The command."""
    report = examine()
    output.emit(report, text(report), arguments.json)
    return 1 if report["problems"] else 0


def examine() -> dict[str, Any]:
    """Looks at this process's installation; runs nothing on a device.

    None stands for the version of a package that is not installed, a backend that cannot start, and an implementation
    that can run; the others' values say why they cannot. "settings" are the variables that jax_splitk reads, with the
    values in force, "problems" what has to be mended.
    """
    missing = toolchain.unavailable()
    driver, gpus = nvml.driver()  # before jax takes most of the memory
    backend, devices, without = _backend()
    own = _own_cache()
    values = settings.in_force()
    values["JAX_SPLITK_AUTOTUNE"] = values["JAX_SPLITK_AUTOTUNE"] or ("on_miss" if backend == "gpu" else "off")
    return {
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in _PACKAGES},
        "backend": backend,
        "devices": devices,
        "driver": driver,
        "gpus": [dataclasses.asdict(gpu) for gpu in gpus],
        "compiler": missing or "NVRTC {}.{} for {}".format(*toolchain.find_nvrtc().version, source.ARCH),
        "cache_dir": str(own),
        "cache_can_be_written": own is not None and _can_be_written(own),
        "settings": values,
        "implementations": {"cutlass": _cutlass_reason(backend), "host": without, "xla": without},
        "problems": [*([without] if without else ()), *settings.mistakes(), *_cache_problems(values)],
    }


def text(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [
        f"python {report['python']}",
        *(f"{name} {version or 'not installed'}" for name, version in report["versions"].items()),
        f"backend {report['backend'] or 'none'}: {', '.join(report['devices'])}",
        f"NVIDIA driver {report['driver'] or 'none'}",
        *(
            f"GPU {i}: {gpu['name']}, {gpu['memory_bytes'] / 2**30:.1f} GiB, {gpu['free_bytes'] / 2**30:.1f} free"
            for i, gpu in enumerate(report["gpus"])
        ),
        f"device code compiler: {report['compiler']}",
        f"cache {report['cache_dir']} ({'can' if report['cache_can_be_written'] else 'cannot'} be written)",
        *(f"{name}={value}" for name, value in report["settings"].items()),
        *(f"implementation {name}: {why or 'can run'}" for name, why in report["implementations"].items()),
        *(f"problem: {problem}" for problem in report["problems"]),
    ]
    return "\n".join(lines)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _backend() -> tuple[str | None, list[str], str | None]:
    """(the default backend, its devices, why there is none)."""
    try:
        return jax.default_backend(), [device.device_kind for device in jax.local_devices()], None
    except Exception as error:  # JAX raises several kinds, AssertionError among them, some without a message
        said = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(": ")
        chosen = os.environ.get("JAX_PLATFORMS")
        where = f" with JAX_PLATFORMS={chosen}" if chosen else ""
        return None, [], f"jax starts no backend{where} ({said})"


def _own_cache() -> pathlib.Path | None:
    """None also where the setting is wrong."""
    with contextlib.suppress(settings.SettingError):
        return disk.cache_dir()
    return None


def _cache_problems(values: dict[str, str]) -> list[str]:
    try:
        own, folders = disk.cache_dir(), disk.folders()
    except settings.SettingError:  # which is a mistake by itself
        return []
    found = [refusal for folder in folders if (refusal := disk.code_refusal(folder)) is not None]
    if own is None:
        return [*found, disk.no_place()]
    if values["JAX_SPLITK_CACHE_MODE"] == "update" and not _can_be_written(own):
        found.append(f"the cache {own} cannot be written: nothing that is decided or compiled is kept")
    return found


def _can_be_written(folder: pathlib.Path) -> bool:
    """Whether files can be made in a folder, which may have to be made first. One is made, which leaves nothing."""
    there = next((f for f in (folder, *folder.parents) if os.path.exists(f)), None)
    try:
        with tempfile.TemporaryFile(dir=there):
            return there is not None
    except OSError:
        return False


def _cutlass_reason(backend: str | None) -> str | None:
    missing = toolchain.unavailable()
    if missing is not None:
        return f"cannot compile: {missing}; kernels that a cache or an exported function has need no compiler"
    driver = _ffi.driver_error()
    if driver:
        return f"compiles, but cannot run here: {driver}"
    if backend != "gpu":
        return "compiles, but jax sees no GPU (is jax[cuda13] installed?)"
    target = target_for("cuda")
    if not target.is_hopper:
        return f"needs compute capability 9.0 (Hopper); {target.device_kind} has {target.compute_capability}"
    return None
