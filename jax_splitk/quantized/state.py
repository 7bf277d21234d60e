"""Trees with quantized weights as trees of plain dictionaries and arrays, for libraries that store no other types."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from jax_splitk.quantized import description, joined
from jax_splitk.quantized.array import QuantizedArray, Weight, as_quantized, brief
from jax_splitk.quantized.formats import FORMATS
from jax_splitk.quantized.joined import JoinedWeight
from jax_splitk.quantized.packed_weight import PackedWeight, checked
from jax_splitk.quantized.permuted import KEY, PermutedWeight


def to_state(tree: Any) -> Any:
    """The tree with a plain dictionary of arrays in the place of each quantized weight.

    One key of the dictionary says everything that the arrays do not: `words-int4-group64-128x256-contracts0-layout1`.
    So whatever stores trees by their keys stores it, too, and refuses a target with other keys. Elements of uint4 are
    widened to uint8, since some libraries cannot store them. The tree may be an abstract one (jax.eval_shape).

    Args:
      tree: a pytree with PackedWeight, QuantizedArray, PermutedWeight and JoinedWeight leaves, among others, which stay
        as they are.

    Examples:
      >>> w = jax_splitk.prepack(jax_splitk.quantize(jnp.ones((128, 256)), "nf4", group_size=32))
      >>> list(jax_splitk.to_state({"up": w})["up"])
      ['words-nf4-group32-128x256-contracts0-layout1', 'scale']
    """
    return jax.tree.map(lambda leaf: _dictionary(leaf) if is_quantized(leaf) else leaf, tree, is_leaf=is_quantized)


def from_state(state: Any, like: Any = None) -> Any:
    """The tree whose `to_state` was stored and read back.

    It reads what `to_state` makes, and what orbax restores without a target from a tree with quantized weights.

    Args:
      state: a pytree with such dictionaries.
      like: None, or a tree with the expected structure, weights and arrays, or their shapes (jax.eval_shape). Types of
        containers may differ from those of `state`, which readers change.

    Returns:
      The tree, with the containers of `like`, if it is given.

    Raises:
      ValueError: a weight of another layout version; leaves that do not fit together; with `like` also another name,
        type, group size, shape or dtype than that of `like`. The message names both.

    Examples:
      >>> w = jax_splitk.quantize(jnp.ones((128, 256)), "nf4", group_size=32)
      >>> jax_splitk.from_state(jax_splitk.to_state([w]))[0].qtype
      'nf4'
    """
    rebuilt = jax.tree.map(lambda node: _rebuilt(node) if _is_stored(node) else node, state, is_leaf=_is_stored)
    return rebuilt if like is None else as_like(rebuilt, like, "the stored tree")


def as_like(tree: Any, like: Any, where: str) -> Any:
    """The leaves of `tree` in the structure of `like`. Raises ValueError unless both have the same names, weights,
    shapes and dtypes; `where` names the tree."""
    given, wanted = named(tree), named(like)
    if given.keys() != wanted.keys():
        sides = (", ".join(sorted(one.keys() - other.keys())) for one, other in ((given, wanted), (wanted, given)))
        extra, missing = sides
        lacks = f"{where} has also {extra or 'nothing'}, and lacks {missing or 'nothing'}"
        raise ValueError(f"{lacks}; accepted: the names of `like`")
    for name, (_, expected) in wanted.items():
        value = given[name][1]
        found, accepted = _type(value), _type(expected)
        if found != accepted:
            raise ValueError(f"{name or 'the leaf'} of {where}: {found}; accepted: {accepted}, that of `like`")
    structure = jax.tree.structure(like, is_leaf=is_quantized)
    return jax.tree.unflatten(structure, [_of_class(given[name][1], leaf) for name, (_, leaf) in wanted.items()])


def _of_class(weight: Any, like: Any) -> Any:
    """A weight in the class of `like`, which may be derived from that of the weight; any other value unchanged."""
    if not is_quantized(weight) or type(weight) is type(like):
        return weight
    return type(like)(**{field.name: getattr(weight, field.name) for field in dataclasses.fields(weight)})


def named(tree: Any) -> dict[str, tuple[tuple[Any, ...], Any]]:
    """The path to each leaf, and the leaf, by the leaf's name: the keys of its path, joined with dots. A quantized
    weight is one leaf. Raises ValueError if two leaves have the same name."""
    found: dict[str, tuple[tuple[Any, ...], Any]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_quantized):
        keys = tuple(next(getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name)) for key in path)
        name = ".".join(map(str, keys))
        if name in found:
            raise ValueError(f"a tree with two leaves of the name {name!r}; accepted: names that differ")
        found[name] = (path, leaf)
    return found


def is_quantized(x: Any) -> bool:
    return isinstance(x, Weight)


def arrays_of(weight: Any) -> dict[str, Any]:
    """The arrays of a weight by name; None for zero points or channel scales that it does not have."""
    if isinstance(weight, JoinedWeight):
        return arrays_of(weight.weight)
    if isinstance(weight, PermutedWeight):
        return {**arrays_of(weight.weight), "order": weight.order}
    return {name: getattr(weight, name) for name in description.leaf_names(weight.static)}


def built(static: dict[str, Any], leaves: dict[str, Any]) -> Weight:
    """The weight with this static part and these leaves. Raises TypeError or ValueError if they make none."""
    if static.get(joined.KEY):
        return _joined(built({name: value for name, value in static.items() if name != joined.KEY}, leaves))
    if static.get(KEY):
        inner = {name: value for name, value in static.items() if name != KEY}
        others = {name: value for name, value in leaves.items() if name != "order"}
        return _permuted(built(inner, others), leaves.get("order"))
    names = description.leaf_names(static)
    if not {*names[:2]} <= leaves.keys() <= {*names}:
        raise ValueError(
            f"a weight with the arrays {', '.join(leaves)}; accepted: {', '.join(names)} (the last two, or not)"
        )
    if static["qtype"] not in FORMATS:
        raise ValueError(f"a weight of qtype {static['qtype']!r}; accepted: {', '.join(FORMATS)}")
    values = {"zero_point": None, **leaves}
    if "layout" in static:
        return checked(PackedWeight(**values, **static))
    plain = QuantizedArray(**values, qtype=static["qtype"])
    jax.eval_shape(as_quantized, plain)
    return plain


def _permuted(weight: Any, order: Any) -> PermutedWeight:
    """The weight with this order of its rows. Raises ValueError if they do not fit together."""
    dtype = getattr(order, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer) or order.shape != weight.shape[:-1]:
        raise ValueError(f"order {brief(order)} of a weight of shape {weight.shape}; accepted: an integer for each row")
    return PermutedWeight(weight, order)


def _joined(weight: Any) -> JoinedWeight:
    """Gate and up of a weight of both. Raises ValueError if it cannot be one."""
    shape = weight.shape
    if not isinstance(weight, PackedWeight) or weight.contracted != (0,) or len(weight.dims) != 2 or shape[-1] % 16:
        raise ValueError(f"joined {weight!r}; accepted: a PackedWeight [k, features], features a multiple of 16")
    return JoinedWeight(weight)


def _dictionary(weight: Any) -> dict[str, Any]:
    if isinstance(weight, JoinedWeight):
        return {joined.KEY: _dictionary(weight.weight)}
    if isinstance(weight, PermutedWeight):
        return {KEY: _dictionary(weight.weight), "order": weight.order}
    static = weight.static
    first, *others = description.leaf_names(static)
    if "layout" not in static and weight.zero_point is not None:
        static |= {"zero_dtype": weight.zero_point.dtype.name}
    leaves = {description.key(static): getattr(weight, first)}
    leaves |= {name: getattr(weight, name) for name in others if getattr(weight, name) is not None}
    return {name: _recast(leaf, "uint4", "uint8") for name, leaf in leaves.items()}


def _is_stored(node: Any) -> bool:
    if not isinstance(node, Mapping):
        return False
    for key, keys in ((KEY, {KEY, "order"}), (joined.KEY, {joined.KEY})):
        if node.keys() == keys and _is_stored(node[key]):
            return True
    return any(description.parsed(key) is not None for key in node)


def _rebuilt(node: Mapping[str, Any]) -> Weight:
    if joined.KEY in node:
        return _joined(_rebuilt(node[joined.KEY]))
    if KEY in node:
        return _permuted(_rebuilt(node[KEY]), node["order"])
    key, *more = [key for key in node if description.parsed(key) is not None]
    static: Any = description.parsed(key)
    if more:
        raise ValueError(f"a weight stored as {key} and as {', '.join(more)}; accepted: one of them")
    first, *_ = description.leaf_names(static)
    leaves = {first if name == key else name: leaf for name, leaf in node.items() if not description.is_guard(name)}
    if "layout" not in static and static["qtype"] in FORMATS:
        dtypes = {first: FORMATS[static["qtype"]].storage.name, "zero_point": static["zero_dtype"]}
        leaves = {
            name: _recast(leaf, "uint8", "uint4") if dtypes.get(name) == "uint4" else leaf
            for name, leaf in leaves.items()
        }
    return built(static, leaves)


def _recast(leaf: Any, dtype: str, other: str) -> Any:
    """The array, or its type, in the other dtype if it has the first one."""
    if getattr(leaf, "dtype", None) != jnp.dtype(dtype):
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(dtype=jnp.dtype(other))
    return leaf.astype(other)


def _type(leaf: Any) -> str:
    """Everything but the values of a leaf that files keep."""
    if not is_quantized(leaf):
        return brief(leaf if hasattr(leaf, "dtype") else np.asarray(leaf))
    arrays = arrays_of(leaf)
    parts = ", ".join(f"{name} {brief(array)}" for name, array in arrays.items() if array is not None)
    kind = next(one for one in (PackedWeight, QuantizedArray, PermutedWeight, JoinedWeight) if isinstance(leaf, one))
    return f"{kind.__name__} {description.key(leaf.static)} of shape {leaf.shape} ({parts})"
