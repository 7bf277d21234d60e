"""Parting a tree into what is trained and what is not: `jax.grad` and optimizers take no packed integers."""

import re
from typing import Any

import jax
from jax import numpy as jnp

from jax_splitk.quantized.array import is_weight
from jax_splitk.quantized.formats import E8M0
from jax_splitk.quantized.params import path_of


def partition(tree: Any, trainable: str | None = None) -> tuple[Any, Any]:
    """Parts a tree of parameters into those that are trained and those that are not.

    `jax.grad` and optimizers then see only what is trained. `combine` is the inverse.

    Args:
      tree: a pytree with quantized weights and arrays.
      trainable: None trains all floating arrays outside of quantized weights. Or a regular expression: it trains the
        floating arrays in whose path it is found. The path joins the keys by "/". A quantized weight continues it:
        "up/kernel/scale" are its scales.

    Returns:
      Two trees of the same structure: the trained one and the frozen one. Each has None in place of the other's arrays.

    Raises:
      ValueError: `trainable` is found in the path of no floating array.

    Examples:
      >>> w = jax_splitk.prepack(jax_splitk.quantize(jnp.ones((64, 64)), "int4", group_size=64))
      >>> trained, frozen = jax_splitk.partition({"kernel": w, "lora": jnp.zeros((64, 8))})
      >>> jax.tree.map(jnp.shape, trained)["lora"], jax_splitk.combine(trained, frozen)["kernel"].shape
      ((64, 8), (64, 64))
    """
    outer = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_weight)[0]
    flat, structure = jax.tree_util.tree_flatten_with_path(tree)
    packed = [is_weight(node) for _, node in outer for _ in jax.tree.leaves(node)]
    chosen = [
        floating(leaf) and (not inside if trainable is None else re.search(trainable, path_of(keys)) is not None)
        for (keys, leaf), inside in zip(flat, packed, strict=True)
    ]
    if trainable is not None and not any(chosen):
        accepted = sorted(path_of(keys) for keys, leaf in flat if floating(leaf))
        raise ValueError(
            f"trainable={trainable!r} is found in no path of a floating array; accepted: a regular expression that is "
            f"found in one of {', '.join(accepted[:8]) or '(none)'}{', ...' if len(accepted) > 8 else ''}"
        )
    parts = (
        [leaf if one == side else None for (_, leaf), one in zip(flat, chosen, strict=True)] for side in (True, False)
    )
    trained, frozen = (jax.tree.unflatten(structure, part) for part in parts)
    return trained, frozen


def floating(leaf: Any) -> bool:
    """Whether an array can be trained: E8M0 has neither signs nor 0."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact) and leaf.dtype.name != E8M0


def combine(trained: Any, frozen: Any) -> Any:
    """The inverse of `partition`: the tree with the arrays of both.

    Args:
      trained: a tree with None in some places.
      frozen: one of the same structure, with None in all other places.

    Raises:
      ValueError: both trees have an array in the same place, or their structures differ.

    Examples:
      >>> jax_splitk.combine({"a": 1.0, "b": None}, {"a": None, "b": 2})
      {'a': 1.0, 'b': 2}
    """

    def one(keys: Any, a: Any, b: Any) -> Any:
        if a is not None and b is not None:
            raise ValueError(f"{path_of(keys)} is in both trees; accepted: trees that `partition` returned")
        return b if a is None else a

    return jax.tree_util.tree_map_with_path(one, trained, frozen, is_leaf=lambda x: x is None)
