"""The machine that code is lowered for, as far as decisions depend on it."""

import dataclasses
import functools
import os
import platform as this_machine

import jax

from jax_splitk.runtime.cores import affinity_cores


@dataclasses.dataclass(frozen=True)
class Target:
    """A platform as JAX's lowering names it ("cuda", "cpu", ...) and what kernels need to know of it."""

    platform: str
    device_kind: str
    compute_capability: str
    cores: int  # streaming multiprocessors of a GPU, hardware threads of a CPU

    @property
    def is_local(self) -> bool:
        """Whether JAX's default device is of this platform, so that code for it can be run here."""
        return local_platform() == self.platform

    @property
    def is_hopper(self) -> bool:
        return self.platform == "cuda" and self.compute_capability == "9.0"


def local_platform() -> str:
    """The default backend, under the name that lowering uses: "cuda" if `jax.default_backend()` says "gpu"."""
    backend = jax.default_backend()
    return "cuda" if backend == "gpu" else backend


# The target of programs that are lowered for CUDA on a machine without a GPU (ahead of time, for export).
DEFAULT_CUDA = Target("cuda", "NVIDIA H200", "9.0", 132)

# For each size of a cluster, how many clusters a GPU of 132 multiprocessors runs at a time. From the times of some 400
# candidates on H200s and an H100.
_CLUSTERS_CORES = 132
_CLUSTERS = {3: 36, 4: 30, 5: 23, 6: 16, 7: 14, 8: 15}


@functools.cache
def target_for(platform: str) -> Target:
    """The target of the local devices of that platform; without any, a default target. For a CPU it is this machine,
    also in an export.
    """
    if platform == "cuda":
        if jax.default_backend() != "gpu":
            return DEFAULT_CUDA
        device = jax.local_devices(backend="gpu")[0]
        capability = str(getattr(device, "compute_capability", ""))
        cores = int(getattr(device, "core_count", DEFAULT_CUDA.cores))
        return Target("cuda", device.device_kind, capability, cores)
    kind = _cpu_model() if platform == "cpu" else platform
    return Target(platform, kind, "", _hardware_threads())


def _cpu_model() -> str:
    """The processor's name: decisions for one processor need not suit another with as many cores."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
            name = next(names, "")
    except OSError:  # not Linux
        name = ""
    return name or this_machine.processor() or "cpu"


def _hardware_threads() -> int:
    """The number of threads in XLA's pool: NPROC, else the cores that this process may use (a container may grant
    few)."""
    given = os.environ.get("NPROC", "")
    return int(given) if given.isdecimal() and int(given) > 0 else affinity_cores()


def hopper_refusal(target: Target | None) -> str | None:
    """Why kernels for Hopper cannot run on `target`; None if they can, or without a target."""
    if target is None or target.is_hopper:
        return None
    return f"needs a GPU of compute capability 9.0 (Hopper), not {target.device_kind} ({target.compute_capability})"


def resident_blocks(target: Target, cluster: int, per_core: int = 1) -> int:
    """Thread blocks that a GPU holds at a time: `per_core` of them fit on a multiprocessor, `cluster` form a cluster.

    Clusters leave a part of the GPU empty, since a cluster cannot span several GPCs: see `_CLUSTERS`.
    """
    if cluster not in _CLUSTERS:
        return max(cluster, target.cores * per_core // cluster * cluster)
    return max(1, _CLUSTERS[cluster] * target.cores // _CLUSTERS_CORES * per_core) * cluster
