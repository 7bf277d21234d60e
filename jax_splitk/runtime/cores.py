"""How many cores this process may use: in a container or under `taskset`, fewer than the machine has."""

import contextlib
import math
import os
import pathlib

_V2 = pathlib.Path("/sys/fs/cgroup/cpu.max")
_V1 = tuple(pathlib.Path("/sys/fs/cgroup/cpu", f"cpu.cfs_{name}_us") for name in ("quota", "period"))


def affinity_cores() -> int:
    """The cores that the process's affinity allows."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_cores() -> int:
    """The cores that the process's affinity and its container's share of time allow."""
    cores = affinity_cores()
    for files in ((_V2,), _V1):
        with contextlib.suppress(OSError, ValueError):  # no such limit: no such file, or "max" or -1 in it
            quota, period = (int(word) for file in files for word in file.read_text().split())
            if quota > 0 and period > 0:
                cores = min(cores, math.ceil(quota / period))
    return cores
