"""What this installation can do: versions, the GPU, the settings, and each implementation with what it lacks."""

import dataclasses
import importlib.metadata
import os
import pathlib
import platform
from collections.abc import Callable
from typing import Any

import jax

from jax_splitk import _ffi
from jax_splitk.runtime import compiler, disk
from jax_splitk.runtime.target import Target, local_platform, target_for
from jax_splitk.tuning import agreement, select, store, tuner

PACKAGES = (
    "jax_splitk",
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "nvidia-cutlass",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-cccl",
    "nvidia-cuda-runtime",
    "scipy",
)


@dataclasses.dataclass(frozen=True)
class Report:
    """Findings of `examine`; `str()` of it is for people.

    Attributes:
      versions: by package; None where it is not installed.
      backend: JAX's default one; None where it cannot start.
      settings: the environment variables that `jax_splitk` reads, with the values in force.
      implementations: by name, why it cannot run; None where it can.
      problems: what has to be mended before anything runs as it is set up to.
    """

    python: str
    versions: dict[str, str | None]
    backend: str | None
    devices: tuple[str, ...]
    compiler: str
    cache_dir: str
    settings: dict[str, str]
    implementations: dict[str, str | None]
    problems: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        lines = [f"python {self.python}"]
        lines += [f"{name} {version or 'not installed'}" for name, version in self.versions.items()]
        lines.append(f"backend {self.backend or 'none'}: {', '.join(self.devices)}")
        lines.append(f"device code compiler: {self.compiler}")
        lines.append(f"cache {self.cache_dir}")
        lines += [f"{name}={value}" for name, value in self.settings.items()]
        for name, reason in self.implementations.items():
            lines.append(f"implementation {name}: {'can run' if reason is None else reason}")
        lines += [f"problem: {problem}" for problem in self.problems]
        return "\n".join(lines)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _backend() -> tuple[str | None, tuple[str, ...], str | None]:
    """(the default backend, its devices, why there is none)."""
    try:
        return jax.default_backend(), tuple(device.device_kind for device in jax.local_devices()), None
    except Exception as error:  # JAX raises several kinds, AssertionError among them, some without a message
        said = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(": ")
        chosen = os.environ.get("JAX_PLATFORMS")
        where = f" with JAX_PLATFORMS={chosen}" if chosen else ""
        return None, (), f"jax starts no backend{where} ({said})"


def _settings(backend: str | None) -> tuple[dict[str, str], list[str]]:
    """(the variables with their values in force, what is wrong with them)."""
    # Without a backend only the word can be checked: what is the default depends on the platform.
    target = target_for(local_platform()) if backend else Target("", "", "", 0)
    read: dict[str, Callable[[], object]] = {
        "JAX_SPLITK_CACHE_MODE": disk.mode,
        "JAX_SPLITK_AUTOTUNE": lambda: "on_miss" if select.autotune(target) else "off",
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
    missing = compiler.unavailable()
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


def examine() -> Report:
    """Looks at this process's installation; runs nothing on a device."""
    reason = compiler.unavailable()
    if reason is None:
        major, minor = compiler.find_nvrtc().version
        found = f"NVRTC {major}.{minor} for {compiler.ARCH}"
    else:
        found = reason
    backend, devices, without = _backend()
    settings, problems = _settings(backend)
    return Report(
        python=platform.python_version(),
        versions={package: _version(package) for package in PACKAGES},
        backend=backend,
        devices=devices,
        compiler=found,
        cache_dir=str(disk.cache_dir()),
        settings=settings,
        implementations={"cutlass": _cutlass_reason(backend), "host": without, "xla": without},
        problems=(*([without] if without else ()), *problems),
    )
