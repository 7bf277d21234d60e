"""What this installation can do: versions, the GPU, the settings, and each implementation with what it lacks."""

import argparse
import importlib.metadata
import os
import pathlib
import platform
from collections.abc import Callable
from typing import Any

import jax

from jax_splitk import _ffi
from jax_splitk.cli import output
from jax_splitk.runtime import disk, source, toolchain
from jax_splitk.runtime.target import Target, local_platform, target_for
from jax_splitk.tuning import agreement, decide, store, tuner

_PACKAGES = (
    "jax_splitk",
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "nvidia-cutlass",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-cccl",
    "nvidia-cuda-runtime",
)


def add_parser(commands: Any) -> None:
    about = "what is installed, which GPU, which implementations can run"
    parser = commands.add_parser("doctor", help=about, description=about)
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.epilog = "Exit code 1: something has to be mended before everything runs as it is set up to."
    parser.set_defaults(run=_command, parser=parser)


def _command(arguments: argparse.Namespace) -> int:
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
    backend, devices, without = _backend()
    settings, problems = _settings(backend)
    return {
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in _PACKAGES},
        "backend": backend,
        "devices": devices,
        "compiler": missing or "NVRTC {}.{} for {}".format(*toolchain.find_nvrtc().version, source.ARCH),
        "cache_dir": str(disk.cache_dir()),
        "settings": settings,
        "implementations": {"cutlass": _cutlass_reason(backend), "host": without, "xla": without},
        "problems": [*([without] if without else ()), *problems],
    }


def text(report: dict[str, Any]) -> str:
    """The report for people."""
    implementations = report["implementations"].items()
    return "\n".join(
        [
            f"python {report['python']}",
            *(f"{name} {version or 'not installed'}" for name, version in report["versions"].items()),
            f"backend {report['backend'] or 'none'}: {', '.join(report['devices'])}",
            f"device code compiler: {report['compiler']}",
            f"cache {report['cache_dir']}",
            *(f"{name}={value}" for name, value in report["settings"].items()),
            *(f"implementation {name}: {reason or 'can run'}" for name, reason in implementations),
            *(f"problem: {problem}" for problem in report["problems"]),
        ]
    )


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


def _settings(backend: str | None) -> tuple[dict[str, str], list[str]]:
    """(the variables with their values in force, what is wrong with them)."""
    # Without a backend only the word can be checked: what is the default depends on the platform.
    target = target_for(local_platform()) if backend else Target("", "", "", 0)
    read: dict[str, Callable[[], object]] = {
        "JAX_SPLITK_CACHE_MODE": disk.mode,
        "JAX_SPLITK_AUTOTUNE": lambda: "on_miss" if decide.autotune(target) else "off",
        "JAX_SPLITK_TUNE_BUDGET_S": tuner.budget_seconds,
        "JAX_SPLITK_AGREEMENT_TIMEOUT_S": agreement.timeout_seconds,
    }
    settings, problems = {}, []
    for name, value in read.items():
        try:
            settings[name] = str(value())
        except ValueError as error:
            settings[name] = os.environ[name]
            problems.append(str(error))
    read_only = [folder for name, folder in store.layers() if name == store.READ_ONLY]
    settings["JAX_SPLITK_CACHE_PATH"] = os.pathsep.join(map(str, read_only))
    problems += [
        f"JAX_SPLITK_CACHE_PATH: {folder} is not a folder" for folder in read_only if not os.path.isdir(folder)
    ]
    if settings["JAX_SPLITK_CACHE_MODE"] == "update" and not _can_be_written(disk.cache_dir()):
        problems.append(f"the cache {disk.cache_dir()} cannot be written: nothing that is decided or compiled is kept")
    return settings, problems


def _can_be_written(folder: pathlib.Path) -> bool:
    """Whether files can be made in a folder, which may have to be made first."""
    there = next((f for f in (folder, *folder.parents) if os.path.exists(f)), None)
    return there is not None and os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK)


def _cutlass_reason(backend: str | None) -> str | None:
    missing = toolchain.unavailable()
    if missing is not None:
        return f"cannot compile: {missing}"
    driver = _ffi.driver_error()
    if driver:
        return f"compiles, but cannot run here: {driver}"
    if backend != "gpu":
        return "compiles, but jax sees no GPU (is jax[cuda13] installed?)"
    target = target_for("cuda")
    if not target.is_hopper:
        return f"needs compute capability 9.0 (Hopper); {target.device_kind} has {target.compute_capability}"
    return None
