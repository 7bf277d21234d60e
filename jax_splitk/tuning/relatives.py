"""Other GPUs of one architecture, with as many multiprocessors: what is the fastest on one of them is nearly so on the
others (benchmarks/notes/relatives.md has by how much)."""

import dataclasses
from collections.abc import Iterator

from jax_splitk.tuning import buckets, table
from jax_splitk.tuning.buckets import Found
from jax_splitk.tuning.key import Key

_RELATIVES = ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H100 NVL", "NVIDIA GH200 480GB")


def keys(key: Key) -> Iterator[Key]:
    """The keys of the same problem on its GPU's relatives."""
    if key.environment.device_kind in _RELATIVES:
        for kind in _RELATIVES:
            if kind != key.environment.device_kind:
                yield dataclasses.replace(key, environment=dataclasses.replace(key.environment, device_kind=kind))


def shipped(key: Key, workspace_limit: int) -> Found | None:
    """What a relative's shipped table decides for the problem, or for a representative. Not its caches: each process of
    a job has the same tables."""
    for other in keys(key):
        kind = other.environment.device_kind

        def find(found: Key, kind: str = kind) -> Found | None:
            environment = dataclasses.replace(found.environment, device_kind=kind)
            entry = table.lookup(dataclasses.replace(found, environment=environment))
            return None if entry is None else (entry, f"{kind}'s shipped table")

        own = find(other)
        if own is not None and own[0].best(workspace_limit) is not None:
            return own
        if (served := buckets.served(key, workspace_limit, find)) is not None:
            return served
    return None
