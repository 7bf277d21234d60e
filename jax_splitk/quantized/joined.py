"""Packed weights of the gate and of the up projection as one, for products with a gated activation."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import jax
import numpy as np
from jax import numpy as jnp

from jax_splitk.quantized.formats import FORMATS, as_bytes, from_bytes
from jax_splitk.quantized.packed_weight import PackedWeight, checked, prepack
from jax_splitk.quantized.packing import GATE_BLOCK, pack_codes, pack_groups, unpack_codes, unpack_groups
from jax_splitk.quantized.wrapping import WrappingWeight, register
from jax_splitk.runtime.arguments import quoted, require
from jax_splitk.runtime.computation import one_computation

ORDERS = ("concatenated", "interleaved")
# The key of `weight` in a tree's paths, and so in files.
KEY = "joined"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class JoinedWeight(WrappingWeight):
    """The packed weights of gate and up as one; `join_gate_up` makes it.

    Only a product with a gated activation takes it, such as `quantized_matmul(x, w, activation="swiglu")`. It is a
    pytree.

    Attributes:
      weight: a PackedWeight [*stack, k, 2 * features], whose features are 8 of gate and 8 of up in turn.

    Examples:
      >>> gate = up = jax_splitk.quantize(jnp.ones((128, 256)), "int4", group_size=64)
      >>> w = jax_splitk.join_gate_up(gate, up)
      >>> w.shape, jax_splitk.quantized_matmul(jnp.ones((8, 128), jnp.bfloat16), w, activation="swiglu").shape
      ((128, 512), (8, 256))
    """

    key = KEY
    weight: Any

    def __repr__(self) -> str:
        return f"JoinedWeight({self.weight!r})"

    def __getitem__(self, index: Any) -> "JoinedWeight":
        """A part of a stack: any index of the stack's axes. Raises IndexError for any other index."""
        if index is ...:
            return self
        part = self.weight[index]
        if part.dims != self.weight.dims:
            raise IndexError(f"index {index!r} of a JoinedWeight of shape {self.shape}; accepted: one of the stack")
        return JoinedWeight(part)

    def __iter__(self) -> Iterator["JoinedWeight"]:
        """The weights of a stack. Without it Python would end a loop at the first IndexError, without an error."""
        return map(JoinedWeight, iter(self.weight))

    def split(self) -> tuple[PackedWeight, PackedWeight]:
        """(gate, up): the exact inverse of `join_gate_up`."""
        both = _reordered(self.weight, _inverse)
        return both[0], both[1]


register(JoinedWeight)


def join_gate_up(
    gate: Any, up: Any = None, *, order: Literal["concatenated", "interleaved"] | None = None
) -> JoinedWeight:
    """Joins the weights of a gated layer, so that one product computes gate and up, and the gated activation with them.

    Runs under jit, on any platform. Values do not change.

    Args:
      gate: the weight of the gate, [k, features]: what `prepack` takes, or a PackedWeight, also one with a stack. Its
        features are a multiple of 8. Or both weights as one, [k, 2 * features], with `order`.
      up: the weight of the other product, with the same shape, format, groups and dtypes. None with `order`.
      order: the order of the features where `gate` has both weights: "concatenated" for all of gate and then all of up,
        "interleaved" for gate and up in turn (gpt-oss).

    Raises:
      TypeError, ValueError: what `prepack` raises; two weights that differ in shape, format, groups or dtypes;
        features that are no multiple of 8; `up` and `order` together, or neither; tiles of padding (`with_shards`).

    Examples:
      >>> both = jax_splitk.quantize(jnp.ones((128, 512)), "int4", group_size=64)
      >>> jax_splitk.join_gate_up(both, order="concatenated").shape
      (128, 512)
    """
    if order is not None:
        require(order in ORDERS, f"order={order!r}", f"None, {quoted(ORDERS)}")
    if (up is None) == (order is None):
        given = f"up of type {type(up).__name__} with order={order!r}"
        raise ValueError(f"{given}; accepted: up alone, or order alone, with which gate holds both weights")
    weights = [_as_matrix(name, w) for name, w in (("gate", gate), ("up", up)) if w is not None]
    first, *others = weights
    for other in others:
        require(_kind(other) == _kind(first), f"gate {_kind(first)} and up {_kind(other)}", "the same of both")
    features = first.matrix[1] if up is not None else first.matrix[1] / 2
    require(features % GATE_BLOCK == 0, f"{features:g} features of gate", f"multiples of {GATE_BLOCK}")
    interleaved = order == "interleaved"
    return JoinedWeight(_reordered(weights, _forward_interleaved if interleaved else _forward)[0])


def _as_matrix(name: str, w: Any) -> PackedWeight:
    """A packed weight with the axes (k, features)."""
    if isinstance(w, JoinedWeight):
        raise TypeError(f"{name} of type JoinedWeight; accepted: PackedWeight, QuantizedArray, a qwix QArray")
    packed = checked(w) if isinstance(w, PackedWeight) else prepack(w)
    given = f"{name} of shape {packed.shape} with tiles of padding"
    require(packed.padded_matrix == packed.matrix, given, "a weight without `with_shards`")
    return dataclasses.replace(packed, dims=packed.matrix, contracted=(0,))


def _kind(w: PackedWeight) -> dict[str, Any]:
    """What the two weights must have in common."""
    kind = {"shape": w.shape, "qtype": w.qtype, "group_size": w.group_size, "scale": w.scale.dtype.name}
    kind["zero_dtype"] = None if w.zero_point is None else (w.zero_dtype, w.zero_point.dtype.name)
    return {**kind, "channel_scale": w.channel_scale is not None}


def _forward(features: int) -> np.ndarray:
    """The places in [gate, up] of the features of a joined weight, of so many features."""
    return np.arange(features).reshape(2, -1, GATE_BLOCK).transpose(1, 0, 2).reshape(-1)


def _forward_interleaved(features: int) -> np.ndarray:
    """The same places in gate and up in turn."""
    return np.arange(features).reshape(-1, GATE_BLOCK, 2).transpose(0, 2, 1).reshape(-1)


def _inverse(features: int) -> np.ndarray:
    """The places in a joined weight of the features of [gate, up]."""
    return np.argsort(_forward(features))


def _reordered(weights: Any, order: Any) -> list[PackedWeight]:
    """The features of one weight or several, in the order `order(features)`: of one joined weight the two parts, else
    one weight."""
    parts = 2 if isinstance(weights, PackedWeight) else 1
    given = [weights] if isinstance(weights, PackedWeight) else list(weights)
    k, features = given[0].matrix
    features *= len(given)
    static = {**given[0].static, "dims": (k, features // parts)}
    leaves = [(w.words, w.scale, w.zero_point, w.channel_scale) for w in given]
    found = _taken(tuple(order(features).tolist()), (k, parts), tuple(sorted(static.items())), leaves)
    names = ("words", "scale", "zero_point", "channel_scale")
    return [PackedWeight(**dict(zip(names, part, strict=True)), **static) for part in found]


@one_computation(0, 1, 2)
def _taken(order: tuple[int, ...], sizes: tuple[int, int], static: Any, leaves: Any) -> Any:
    (k, parts), fields = sizes, dict(static)
    fmt, group = FORMATS[fields["qtype"]], fields["group_size"]
    features, places = len(order) // len(leaves), np.array(order)

    def in_order(arrays: list[jax.Array]) -> list[jax.Array]:
        """The columns of all arrays, in the wanted order, in as many parts as there shall be."""
        dtype = arrays[0].dtype
        columns = jnp.concatenate([as_bytes(x) for x in arrays], axis=1)[:, places]
        return [from_bytes(part, dtype) for part in jnp.split(columns, parts, axis=1)]

    def of_one(leaves: Any) -> Any:
        words, scales, zeros, channels = zip(*leaves, strict=True)

        def groups(arrays: Any, size: int) -> list[Any]:
            if arrays[0] is None:
                return [None] * parts
            unpacked = [unpack_groups(x, k // size, features) for x in arrays]
            return [pack_groups(x, k, size) for x in in_order(unpacked)]

        codes = in_order([unpack_codes(fmt, x, (k, features)) for x in words])
        packed = [pack_codes(fmt, x) for x in codes]
        return list(zip(packed, groups(scales, group), groups(zeros, group), groups(channels, k), strict=True))

    for _ in range(leaves[0][0].ndim - 3):
        of_one = jax.vmap(of_one)
    return of_one(leaves)
