"""Sibling GPUs: GPUs of one architecture with as many multiprocessors. The fastest choice on one is nearly the fastest
on the others (benchmarks/notes/relatives.md has figures)."""

import dataclasses
from collections.abc import Iterator

from jax_splitk.tuning import store
from jax_splitk.tuning.entry import Found
from jax_splitk.tuning.key import Key

_KINDS = ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H100 NVL", "NVIDIA GH200 480GB")


def keys(key: Key) -> Iterator[Key]:
    """The keys of the same problem on the siblings of the key's GPU; none for another device."""
    environment = key.environment
    for kind in _KINDS if environment.device_kind in _KINDS else ():
        if kind != environment.device_kind:
            yield dataclasses.replace(key, environment=dataclasses.replace(environment, device_kind=kind))


def tables(key: Key) -> Iterator[Found]:
    """The entries in the siblings' tables. The siblings' caches are not asked, since only tables are the same in all
    processes."""
    for sibling in keys(key):
        for entry, where in store.shipped(sibling):
            yield Found(entry, f"{sibling.environment.device_kind}'s {where}")
