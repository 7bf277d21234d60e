"""What this installation can do: versions, the GPU, and each implementation with what it lacks."""

import dataclasses
import importlib.metadata
import platform
from typing import Any

import jax

from jax_splitk import _ffi, compiler, storage
from jax_splitk.target import target_for

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
    """Findings of `examine`; `str()` of it is for people. A version of None means not installed; a reason of None
    means that the implementation can run."""

    python: str
    versions: dict[str, str | None]
    backend: str
    devices: tuple[str, ...]
    compiler: str
    cache_dir: str
    implementations: dict[str, str | None]

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        lines = [f"python {self.python}"]
        lines += [f"{name} {version or 'not installed'}" for name, version in self.versions.items()]
        lines.append(f"backend {self.backend}: {', '.join(self.devices)}")
        lines.append(f"device code compiler: {self.compiler}")
        lines.append(f"cache {self.cache_dir}")
        for name, reason in self.implementations.items():
            lines.append(f"implementation {name}: {'can run' if reason is None else reason}")
        return "\n".join(lines)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cutlass_reason() -> str | None:
    missing = compiler.unavailable()
    if missing is not None:
        return f"cannot compile: {missing}"
    driver = _ffi.driver_error()
    if driver:
        return f"compiles, but cannot run here: {driver}"
    target = target_for("cuda")
    if jax.default_backend() != "gpu":
        return "compiles, but jax sees no GPU (is jax[cuda13] installed?)"
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
    return Report(
        python=platform.python_version(),
        versions={package: _version(package) for package in PACKAGES},
        backend=jax.default_backend(),
        devices=tuple(device.device_kind for device in jax.local_devices()),
        compiler=found,
        cache_dir=str(storage.cache_dir()),
        implementations={"cutlass": _cutlass_reason(), "host": None, "xla": None},
    )
