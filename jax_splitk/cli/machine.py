"""What this machine offers: backends, the GPU, the compiler, the cache, and what each implementation lacks."""

import contextlib
import dataclasses
import os
import pathlib
import tempfile
from typing import Any

import jax

from jax_splitk import _ffi
from jax_splitk.runtime import disk, nvml, requirements, settings, source, toolchain
from jax_splitk.runtime.target import target_for


def examine() -> dict[str, Any]:
    """What `doctor` reports of the machine; runs nothing on a device.

    "backend" is None if none can start. "implementations" says why each cannot run; None if it can. "settings" are
    the variables that jax_splitk reads, with the values in force. "problems" lists what has to be mended.
    """
    missing = toolchain.unavailable()
    driver, gpus = nvml.driver()  # before jax takes most of the memory
    backend, devices, without = _backend()
    own = _own_cache()
    values = settings.in_force()
    values["JAX_SPLITK_AUTOTUNE"] = values["JAX_SPLITK_AUTOTUNE"] or ("on_miss" if backend == "gpu" else "off")
    stale = ["the compiled module is of other C++ sources: pip install -e ."] if requirements.is_stale(_ffi) else []
    return {
        "backend": backend,
        "devices": devices,
        "driver": driver,
        "gpus": [dataclasses.asdict(gpu) for gpu in gpus],
        "compiler": missing or "NVRTC {}.{} for {}".format(*toolchain.find_nvrtc().version, source.ARCH),
        "cache_dir": str(own),
        "cache_can_be_written": own is not None and _can_be_written(own),
        "settings": values,
        "implementations": {"cutlass": _cutlass_reason(backend), "host": without, "xla": without},
        "problems": [*([without] if without else ()), *stale, *settings.mistakes(), *_cache_problems(values)],
    }


def _backend() -> tuple[str | None, list[str], str | None]:
    """(the default backend, its devices, why none can start)."""
    try:
        return jax.default_backend(), [device.device_kind for device in jax.local_devices()], None
    except Exception as error:  # JAX raises several kinds, AssertionError among them, some without a message
        said = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(": ")
        chosen = os.environ.get("JAX_PLATFORMS")
        where = f" with JAX_PLATFORMS={chosen}" if chosen else ""
        return None, [], f"jax starts no backend{where} ({said})"


def _own_cache() -> pathlib.Path | None:
    """The user's cache; None if there is none, or the setting is wrong."""
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
    """Whether files can be made in a folder, which need not exist. A temporary file is made, and deleted."""
    there = next((f for f in (folder, *folder.parents) if os.path.exists(f)), None)
    try:
        with tempfile.TemporaryFile(dir=there):
            return there is not None
    except OSError:
        return False


def _cutlass_reason(backend: str | None) -> str | None:
    if toolchain.unavailable() is not None:
        return "no compiler for device code; kernels that a cache or an exported function has need none"
    driver = _ffi.driver_error()
    if driver:
        return f"compiles, but cannot run here: {driver}"
    if backend != "gpu":
        return "compiles, but jax sees no GPU (is jax[cuda13] installed?)"
    target = target_for("cuda")
    if not target.is_hopper:
        return f"needs compute capability 9.0 (Hopper); {target.device_kind} has {target.compute_capability}"
    return None
