"""Other GPUs of one architecture, with as many multiprocessors: what is the fastest on one of them is nearly so on the
others (benchmarks/notes/relatives.md has by how much)."""

import dataclasses
import functools
from collections.abc import Iterator

from jax_splitk.runtime import disk
from jax_splitk.tuning import buckets, table
from jax_splitk.tuning.buckets import Found
from jax_splitk.tuning.key import Key

_KINDS = ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H100 NVL", "NVIDIA GH200 480GB")


def keys(key: Key) -> Iterator[Key]:
    """The keys of the same problem on its GPU's relatives."""
    return (_on(kind, key) for kind in _kinds(key))


def shipped(key: Key, workspace_limit: int) -> Found | None:
    """What a relative's shipped table decides for the problem, or for a representative. Not its caches: each process of
    a job has the same tables."""
    if disk.mode() == "off":
        return None
    for kind in _kinds(key):
        find = functools.partial(_row, kind)
        own = find(key)
        if own is not None and own[0].best(workspace_limit) is not None:
            return own
        if (served := buckets.served(key, workspace_limit, find)) is not None:
            return served
    return None


def _kinds(key: Key) -> Iterator[str]:
    own = key.environment.device_kind
    return (kind for kind in _KINDS if own in _KINDS and kind != own)


def _on(kind: str, key: Key) -> Key:
    return dataclasses.replace(key, environment=dataclasses.replace(key.environment, device_kind=kind))


def _row(kind: str, key: Key) -> Found | None:
    """What that GPU's table has of a problem."""
    entry = table.lookup(_on(kind, key))
    return None if entry is None else (entry, f"{kind}'s shipped table")
