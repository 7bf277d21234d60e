"""Parts and other shapes of packed weights, as far as whole tiles allow. `w` is a PackedWeight throughout."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jax_splitk.quantized.matrix import features_of
from jax_splitk.quantized.packing import TILE, packed_groups
from jax_splitk.runtime.arguments import RefusedValue, integer

_WHOLE = slice(None)
_LEAVES = ("words", "scale", "zero_point", "channel_scale", "guard")


def indexed(w: Any, index: Any) -> Any:
    """`w[index]`: see `PackedWeight.__getitem__`."""
    entries = index if isinstance(index, tuple) else (index,)
    before = next((i for i, entry in enumerate(entries) if entry is ...), len(entries))
    missing = w.ndim - (len(entries) - (before < len(entries)))
    if missing < 0 or any(entry is ... for entry in entries[before + 1 :]) or any(entry is None for entry in entries):
        raise IndexError(f"index {index!r} of a PackedWeight of shape {w.shape}; accepted: at most {w.ndim} indices")
    full = (*entries[:before], *[_WHOLE] * missing, *entries[before + 1 :])
    of_stack, of_dims = full[: len(w.stack)], full[len(w.stack) :]
    if any(entry != _WHOLE for entry in of_stack):
        leaves = {name: getattr(w, name) for name in _LEAVES}
        w = dataclasses.replace(w, **{name: None if leaf is None else leaf[of_stack] for name, leaf in leaves.items()})
    for axis, entry in enumerate(of_dims):
        if not isinstance(entry, slice):
            raise IndexError(f"index {entry!r} of axis {axis} of a PackedWeight of dims {w.dims}; accepted: a slice")
        if entry.indices(w.dims[axis]) != (0, w.dims[axis], 1):
            w = _cut(w, axis, entry)
    return w


def _cut(w: Any, axis: int, entry: slice) -> Any:
    """The weight with a slice of one of its own axes, which falls on bounds of tiles and groups."""
    (k, features), size = w.matrix, w.dims[axis]
    start, stop, step = entry.indices(size)
    along_k = axis in w.contracted
    alike = w.contracted if along_k else features_of(len(w.dims), w.contracted)
    inner, whole = math.prod(w.dims[i] for i in alike if i > axis), k if along_k else features
    unit = math.lcm(TILE, w.group_size) if along_k else TILE
    first, last = start * inner, stop * inner
    outer = [w.dims[i] for i in alike if i < axis]
    aligned = first % unit == 0 and (last % unit == 0 or last == whole) and first < last
    if step != 1 or math.prod(outer) != 1 or not aligned or (along_k and w.group_size == k):
        each = unit // math.gcd(unit, inner)
        accepted = f"multiples of {each}, or the end {size}" if math.prod(outer) == 1 else f"all of {size}"
        accepted = f"all of {size}, since one scale serves all of k" if along_k and w.group_size == k else accepted
        raise IndexError(
            f"{start}:{stop}:{step} of axis {axis} of a PackedWeight of dims {w.dims}; accepted: {accepted}"
        )
    tiles = slice(first // TILE, -(-last // TILE))
    groups = slice(first // w.group_size, first // w.group_size + packed_groups(last - first, w.group_size))

    def part(leaf: Any, of_k: slice) -> Any:
        return None if leaf is None else leaf[..., of_k, :] if along_k else leaf[..., tiles, :, :]

    dims = (*w.dims[:axis], stop - start, *w.dims[axis + 1 :])
    leaves = {
        "words": part(w.words, tiles),
        **{name: part(getattr(w, name), groups) for name in ("scale", "zero_point")},
        "channel_scale": w.channel_scale if along_k else part(w.channel_scale, tiles),
    }
    return dataclasses.replace(w, **leaves, dims=dims)


def reshaped(w: Any, shape: Sequence[Any]) -> Any:
    """`w.reshape(shape)`: see `PackedWeight.reshape`."""
    sizes = [integer(size) for size in shape]
    given = f"shape {tuple(shape)} of a PackedWeight of shape {w.shape}, contracted {w.contracted}"
    known = math.prod(size for size in sizes if size is not None and size >= 0)
    if None in sizes or sizes.count(-1) > 1 or any(size is not None and size < -1 for size in sizes):
        raise RefusedValue(f"{given}; accepted: sizes, one of them -1")
    total = math.prod(w.shape)
    target = [total // known if size == -1 and known else size or 0 for size in sizes]
    # Runs of axes that stay together: the stack, then each run of contracted or of other axes.
    runs = [(math.prod(w.stack), "stack")] if w.stack else []
    for axis, size in enumerate(w.dims):
        kind = "k" if axis in w.contracted else "features"
        runs = [*runs[:-1], (runs[-1][0] * size, kind)] if runs and runs[-1][1] == kind else [*runs, (size, kind)]
    split = _split(target, [size for size, _ in runs])
    if split is None:
        accepted = " then ".join(f"axes that make the {kind} of {size}" for size, kind in runs)
        raise RefusedValue(f"{given}; accepted: {accepted}")
    kinds = [kind for (_, kind), count in zip(runs, split, strict=True) for _ in range(count)]
    stack = [size for size, kind in zip(target, kinds, strict=True) if kind == "stack"]
    dims = [size for size, kind in zip(target, kinds, strict=True) if kind != "stack"]
    contracted = tuple(i for i, kind in enumerate(kinds[len(stack) :]) if kind == "k")
    depth = len(w.stack)
    leaves = {name: getattr(w, name) for name in _LEAVES}
    moved = {
        name: leaf if leaf is None or tuple(stack) == w.stack else leaf.reshape(*stack, *leaf.shape[depth:])
        for name, leaf in leaves.items()
    }
    return dataclasses.replace(w, **moved, dims=tuple(dims), contracted=contracted)


def transposed(w: Any, axes: Sequence[Any]) -> Any:
    """`w.transpose(axes)`: see `PackedWeight.transpose`."""
    given, depth = f"axes {tuple(axes)} of a PackedWeight of shape {w.shape}, contracted {w.contracted}", len(w.stack)
    order = [None if integer(axis) is None else integer(axis) % w.ndim for axis in axes]  # pyright: ignore
    own = [axis - depth for axis in order[depth:] if axis is not None]
    kept = [axis for axis in own if axis not in w.contracted]
    contracted = [axis for axis in own if axis in w.contracted]
    whole = sorted(own) == list(range(len(w.dims))) and order[:depth] == list(range(depth))
    if not whole or contracted != sorted(contracted) or kept != sorted(kept):
        raise RefusedValue(
            f"{given}; accepted: all axes, the stack first, contracted axes in their order, and the others in theirs"
        )
    of_new = tuple(i for i, axis in enumerate(own) if axis in w.contracted)
    return dataclasses.replace(w, dims=tuple(w.dims[axis] for axis in own), contracted=of_new)


def _split(sizes: Sequence[int], products: Sequence[int]) -> list[int] | None:
    """How many of the leading sizes make each product, one after the other; None if they do not."""
    counts, at = [], 0
    for position, product in enumerate(products):
        made, count = 1, 0
        last = position == len(products) - 1
        while at < len(sizes) and (count == 0 or made < product or (last and sizes[at] == 1)):
            made, count, at = made * sizes[at], count + 1, at + 1
        if made != product or count == 0:
            return None
        counts.append(count)
    return counts if at == len(sizes) else None
