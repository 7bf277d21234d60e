"""vmap of a convolution's passes: the mapped axis is folded into a dimension that the pass already has."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax import numpy as jnp
from jax.extend import core
from jax.interpreters import batching

from jax_splitk.ops.conv_calls import ConvCall
from jax_splitk.ops.convolution import Convolution
from jax_splitk.ops.folding import fold_into, mapped_size, one_by_one, unfold_from
from jax_splitk.runtime import _compat


def define(primitive: core.Primitive) -> None:
    """Gives the primitive of a pass its rule for vmap.

    With an explicit config it is a loop: the config was made for the pass that the caller sees.
    """

    def batch(
        axis: Any, args: Sequence[jax.Array], dims: Sequence[int | None], *, call: ConvCall
    ) -> tuple[jax.Array, int | None]:
        if all(dim is None for dim in dims):  # JAX calls a fancy rule also where no operand is mapped
            return call.bind(*args), None
        conv, kind, shape = call.convolution, call.kind, call.shape
        mapped = dict(zip(kind.operands, zip(args, dims, strict=True), strict=True))
        size = mapped_size(args, dims)
        if size == 0:
            shapes = ([n for i, n in enumerate(x.shape) if i != dim] for x, dim in mapped.values())
            one = [jax.ShapeDtypeStruct(tuple(shape), jnp.float32) for shape in shapes]
            shape = jax.eval_shape(conv, *one).shape if shape is None else shape
            return _compat.vary_like(jnp.zeros((0, *shape), call.out_dtype), *args), 0
        if call.options.config is not None:
            return one_by_one(args, dims, call), 0
        arrays = {kind.result, *(name for name, (_, dim) in mapped.items() if dim is not None)}
        conv, places = _widened(conv, arrays, size)
        operands = (x if dim is None else fold_into(x, dim, *places[name]) for name, (x, dim) in mapped.items())
        out_dim, groups = places[kind.result]
        shape = shape and tuple(n * size if i == out_dim else n for i, n in enumerate(shape))
        sharding = _compat.mapped_sharding(call.out_sharding, axis, out_dim)
        call = dataclasses.replace(call, convolution=conv, shape=shape, out_sharding=sharding)
        return unfold_from(call.bind(*operands), out_dim, size, groups), out_dim

    batching.fancy_primitive_batchers[primitive] = batch


def _widened(conv: Convolution, mapped: Collection[str], size: int) -> tuple[Convolution, dict[str, tuple[int, int]]]:
    """One convolution for all along a mapped axis, and where the axis goes in each array of `mapped` (lhs, rhs, g): a
    dimension, and the number of groups of this dimension, each of which takes the axis.

    An axis that the weight lacks widens the batch. One that the input lacks widens the output channels, and one that
    the output lacks, the input channels. One that all arrays have makes groups.
    """
    specs, features, batches = conv.dimension_numbers, conv.feature_group_count, conv.batch_group_count
    (n, c), (rhs_k, rhs_c), (g_n, g_k) = (spec[:2] for spec in (specs.lhs_spec, specs.rhs_spec, specs.out_spec))
    if "rhs" not in mapped:
        return conv, {"lhs": (n, batches), "g": (g_n, 1)}
    if "lhs" not in mapped:
        return conv, {"rhs": (rhs_k, features * batches), "g": (g_k, features * batches)}
    if "g" not in mapped:
        return conv, {"lhs": (c, features), "rhs": (rhs_c, 1)}
    which, lhs_dim = ("batch_group_count", n) if batches > 1 else ("feature_group_count", c)
    conv = dataclasses.replace(conv, **{which: getattr(conv, which) * size})
    return conv, {"lhs": (lhs_dim, 1), "rhs": (rhs_k, 1), "g": (g_k, 1)}
