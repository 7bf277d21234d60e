"""What a weight's arrays do not say about it, in the forms in which files keep it.

Checkpoints know arrays by the names of a tree's keys. So the first leaf of a weight has a key that says the rest, such
as `words-int4-group64-128x256-contracts0-layout1`: a file of another type, group size, shape or layout has other keys
than the target, and cannot be restored into it.
"""

import json
import operator
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax import export

_PACKED = re.compile(
    r"words-(?P<qtype>\w+)-group(?P<group_size>\d+)-(?P<dims>\d+(x\d+)*)-contracts(?P<contracted>\d+(_\d+)*)"
    r"(-zeros_(?P<zero_dtype>\w+))?-layout(?P<layout>\d+)"
)
_PLAIN = re.compile(r"qvalue-(?P<qtype>\w+?)(-zeros_(?P<zero_dtype>\w+))?")
PACKED, PLAIN = ("words", "scale", "zero_point"), ("qvalue", "scale", "zero_point")
CHANNEL = "channel_scale"  # the last leaf of a weight that has it; other weights have no place for it in their trees
_HAS_CHANNEL = "_has_channel"  # an attribute of weights that were made of leaves
_GUARD = "guard-use-jax_splitk-shardings"  # in JAX's errors


def leaf_names(static: dict[str, Any]) -> tuple[str, ...]:
    """The fields of a weight with this static part that hold arrays, or may."""
    return *(PACKED if "layout" in static else PLAIN), CHANNEL


def key(static: dict[str, Any]) -> str:
    """The static part of a weight as the key of its first leaf."""
    zeros = f"-zeros_{static['zero_dtype']}" if static.get("zero_dtype") else ""
    if "layout" not in static:
        return f"qvalue-{static['qtype']}{zeros}"
    dims, contracted = "x".join(map(str, static["dims"])), "_".join(map(str, static["contracted"]))
    group = f"{static['qtype']}-group{static['group_size']}"
    return f"words-{group}-{dims}-contracts{contracted}{zeros}-layout{static['layout']}"


def is_guard(text: Any) -> bool:
    """Whether a key is that of a packed weight's guard, which files need not hold."""
    return text == _GUARD


def parsed(text: Any) -> dict[str, Any] | None:
    """The static part that `key` gives this text; None for any other text."""
    if not isinstance(text, str):
        return None
    if found := _PLAIN.fullmatch(text):
        return found.groupdict()
    if not (found := _PACKED.fullmatch(text)):
        return None
    fields = found.groupdict()
    counts = {name: int(fields[name]) for name in ("group_size", "layout")}
    lists = {name: tuple(map(int, re.split("[x_]", fields[name]))) for name in ("dims", "contracted")}
    return fields | counts | lists


def register(cls: Any, names: Sequence[str], static_names: Sequence[str]) -> Any:
    """Makes a class of weights a pytree, which `jax.export` can serialize. Its first leaf has a key that says the
    static part (`cls.static`)."""

    # Each call of a jitted function flattens its arguments: itemgetter takes a twentieth of getattr's time in a loop.
    leaves_of, static_of = operator.itemgetter(*names), operator.itemgetter(*static_names)

    def flatten(weight: Any) -> tuple[tuple[Any, ...], Any]:
        fields = weight.__dict__
        leaves, channel = leaves_of(fields), fields[CHANNEL]
        # JAX and others put None and other objects in the place of leaves, and then want as many again.
        has_channel = fields.get(_HAS_CHANNEL, channel is not None)
        return ((*leaves, channel) if has_channel else leaves), static_of(fields)

    def flatten_with_keys(weight: Any) -> Any:
        leaves, static = flatten(weight)
        keys = (key(weight.static), *(_GUARD if name == "guard" else name for name in names[1:]), CHANNEL)
        return tuple(zip(map(jax.tree_util.GetAttrKey, keys[: len(leaves)]), leaves, strict=True)), static

    def unflatten(static: Any, leaves: Any) -> Any:
        weight = object.__new__(cls)
        has_channel = len(leaves) > len(names)
        weight.__dict__.update({CHANNEL: leaves[-1] if has_channel else None, _HAS_CHANNEL: has_channel})
        weight.__dict__.update(zip(names, leaves[: len(names)], strict=True))
        weight.__dict__.update(zip(static_names, static if len(static_names) > 1 else (static,), strict=True))
        return weight

    def restored(data: bytes) -> Any:
        static = json.loads(bytes(data))
        if isinstance(static, list):
            return tuple(tuple(value) if isinstance(value, list) else value for value in static)
        return static

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return export.register_pytree_node_serialization(
        cls,
        serialized_name=f"jax_splitk.{cls.__name__}",
        serialize_auxdata=lambda static: json.dumps(static).encode(),
        deserialize_auxdata=restored,
    )
