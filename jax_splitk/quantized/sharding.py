"""Shardings of quantized weights, from a specification of the weight's own axes."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jax_splitk.quantized.array import QuantizedArray
from jax_splitk.quantized.joined import JoinedWeight
from jax_splitk.quantized.matrix import features_of
from jax_splitk.quantized.packed_weight import PackedWeight
from jax_splitk.quantized.packing import cuts
from jax_splitk.quantized.permuted import PermutedWeight
from jax_splitk.quantized.state import is_quantized
from jax_splitk.runtime.arguments import RefusedValue

_OPEN = PartitionSpec.UNCONSTRAINED


def shardings(tree: Any, spec: Any) -> Any:
    """The shardings of a quantized weight's arrays, from one of the weight's own axes.

    `P(None, "tp")` of a weight [k, features] divides its features over "tp", and `P("tp", None)` its k. In a packed
    weight other dimensions stand for these axes, so JAX cannot use such a specification for its arrays. The result
    serves as in_shardings and out_shardings of jit, in device_put, with_sharding_constraint, and as in_specs of
    shard_map.

    Args:
      tree: a weight (PackedWeight or QuantizedArray), or a pytree of weights and arrays, or of their shapes.
      spec: a PartitionSpec or NamedSharding of the weight's shape (its stack, then its axes), or a tree of them of
        which each leaf belongs to a subtree, such as flax.linen.get_partition_spec returns. Logical names work, too:
        apply flax.linen.logical_to_mesh or logical_to_mesh_sharding before or afterwards.

    Returns:
      The tree with a PartitionSpec or NamedSharding in the place of each array. Arrays that are no weights have `spec`.

    Raises:
      ValueError: a specification that is longer than the weight's rank; axes that cannot be divided so, for example
        parts that are no whole tiles of 64 (`PackedWeight.with_shards` pads them). Sizes are checked if the mesh is
        known, by a NamedSharding or by jax.set_mesh.

    Examples:
      >>> w = jax_splitk.prepack(jax_splitk.quantize(jnp.ones((128, 256)), "int4", group_size=64))
      >>> jax_splitk.shardings(w, jax.P(None, "tp")).words == jax.P("tp", None)  # tiles of features, then of k
      True
    """
    specs, structure = jax.tree.flatten(spec, is_leaf=_is_spec)
    subtrees = structure.flatten_up_to(tree)
    return structure.unflatten(
        [
            jax.tree.map(lambda leaf, spec=spec: _of_leaf(leaf, spec), subtree, is_leaf=is_quantized)
            for spec, subtree in zip(specs, subtrees, strict=True)
        ]
    )


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, PartitionSpec | NamedSharding)


def _of_leaf(leaf: Any, spec: Any) -> Any:
    if spec is None or not is_quantized(leaf):
        return spec
    if not _is_spec(spec):
        raise RefusedValue(f"spec={spec!r} of a {type(leaf).__name__}; accepted: a PartitionSpec or NamedSharding")
    named = spec if isinstance(spec, NamedSharding) else None
    of_axes: Any = named.spec if named else spec
    entries = tuple(of_axes)
    if len(entries) > len(leaf.shape):
        given = f"spec={PartitionSpec(*entries)} of a {type(leaf).__name__} of shape {leaf.shape}"
        raise RefusedValue(f"{given}; accepted: at most {len(leaf.shape)} entries, one for each axis of the weight")
    mesh = named.mesh if named else jax.sharding.get_abstract_mesh()
    sizes = None if mesh.empty else dict(mesh.shape)
    found = _of_weight(leaf, (*entries, *[None] * (len(leaf.shape) - len(entries))), sizes)
    return found if named is None else jax.tree.map(lambda one: named.update(spec=one), found)


def _of_weight(w: Any, entries: Sequence[Any], sizes: Mapping[str, int] | None) -> Any:
    if isinstance(w, JoinedWeight):
        return JoinedWeight(_of_weight(w.weight, entries, sizes))
    if isinstance(w, PermutedWeight):
        order = PartitionSpec(*entries[: w.order.ndim - 1])
        return PermutedWeight(_of_weight(w.weight, entries, sizes), order)
    return (_of_packed if isinstance(w, PackedWeight) else _of_plain)(w, entries, sizes)


def _of_plain(q: QuantizedArray, entries: Sequence[Any], sizes: Mapping[str, int] | None) -> QuantizedArray:
    groups = PartitionSpec(*(e if count > 1 else None for e, count in zip(entries, q.scale.shape, strict=True)))
    for axis, (entry, count) in enumerate(zip(groups, q.scale.shape, strict=True)):
        parts = _parts(entry, sizes)
        if count % parts:
            given = f"axis {axis} of a QuantizedArray of shape {q.shape} with {count} groups, in {parts} parts"
            raise RefusedValue(f"{given}; accepted: divisors of {count}")
    more = {"zero_point": None if q.zero_point is None else groups}
    if q.channel_scale is not None:
        channels = (e if count > 1 else None for e, count in zip(groups, q.channel_scale.shape, strict=True))
        more["channel_scale"] = PartitionSpec(*channels)
    return dataclasses.replace(q, qvalue=PartitionSpec(*entries), scale=groups, **more)


def _of_packed(w: PackedWeight, entries: Sequence[Any], sizes: Mapping[str, int] | None) -> PackedWeight:
    stack, of_dims = entries[: len(w.stack)], entries[len(w.stack) :]
    cut_k, cut_features = cuts(w.padded_matrix, w.padded_group)
    k = _joined(w, "k", w.contracted, of_dims, sizes, cut_k)
    features = _joined(w, "features", features_of(len(w.dims), w.contracted), of_dims, sizes, cut_features)
    groups = PartitionSpec(*stack, features, k if w.scale.shape[-2] > 1 else None)
    zero_point = None if w.zero_point is None else groups
    channels = None if w.channel_scale is None else PartitionSpec(*stack, features, None)
    leaves = {"words": PartitionSpec(*stack, features, k), "scale": groups, "zero_point": zero_point}
    leaves["channel_scale"] = channels
    return dataclasses.replace(w, **leaves, guard=None if w.guard is None else PartitionSpec(*stack))


def _joined(
    w: PackedWeight, name: str, axes: Sequence[int], of_dims: Sequence[Any], sizes: Mapping[str, int] | None, cut: int
) -> Any:
    """The entry of the tiles of k, or of features, from those of the axes that make them, in row-major order."""
    depth, over, whole = len(w.stack), [], True
    for axis in axes:
        entry = of_dims[axis]
        if entry is _OPEN:
            return _OPEN
        if entry and not whole:
            outer = ", ".join(str(depth + i) for i in axes if i < axis and w.dims[i] > 1)
            given = f"spec of axis {depth + axis} of a PackedWeight of shape {w.shape}: {entry!r}"
            raise RefusedValue(
                f"{given}; accepted: None, unless axes {outer} before it are divided into single elements"
            )
        over += [entry] if isinstance(entry, str) else entry or ()
        whole = whole and (w.dims[axis] == 1 or (sizes is not None and _parts(entry, sizes) == w.dims[axis]))
    parts = _parts(tuple(over), sizes)
    if cut % parts:
        of = f"{name} of a PackedWeight of shape {w.shape}, groups of {w.group_size}, in {parts} parts"
        shards = (parts, 1) if name == "k" else (1, parts)
        counts = ", ".join(str(n) for n in range(1, cut + 1) if cut % n == 0)
        raise RefusedValue(
            f"{of}; accepted: {counts} (whole tiles and groups), or w.with_shards({shards}), which pads it"
        )
    return None if not over else over[0] if len(over) == 1 else tuple(over)


def _parts(entry: Any, sizes: Mapping[str, int] | None) -> int:
    """How many parts an entry of a specification makes; 1 if the mesh is not known."""
    names = () if entry is None or entry is _OPEN or sizes is None else (entry,) if isinstance(entry, str) else entry
    return math.prod(sizes[name] for name in names) if sizes else 1
