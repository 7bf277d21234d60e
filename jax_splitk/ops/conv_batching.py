"""vmap of the passes of a convolution: a mapped axis becomes a part of dimensions that the pass has anyway."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax import numpy as jnp
from jax.extend import core
from jax.interpreters import batching

from jax_splitk.ops.convolution import Convolution
from jax_splitk.ops.folding import fold_into, mapped_size, one_by_one, unfold_from
from jax_splitk.problems.conv_wgrad import ConvProblem
from jax_splitk.runtime import _compat


def define(primitive: core.Primitive, kind: type[ConvProblem]) -> None:
    """Gives the primitive of a pass its rule for vmap. A config is for the pass that the caller sees, so it gets a
    loop."""
    shape_name = f"{kind.result}_shape"

    def batch(axis: Any, args: Sequence[jax.Array], dims: Sequence[int | None], **params: Any) -> tuple[Any, Any]:
        if all(dim is None for dim in dims):  # JAX calls a fancy rule also where no operand is mapped
            return primitive.bind(*args, **params), None
        conv, mapped = params["convolution"], dict(zip(kind.operands, zip(args, dims, strict=True), strict=True))
        size = mapped_size(args, dims)
        if size == 0:
            shapes = ([n for i, n in enumerate(x.shape) if i != dim] for x, dim in mapped.values())
            one = [jax.ShapeDtypeStruct(tuple(shape), jnp.float32) for shape in shapes]
            shape = params[shape_name] if shape_name in params else jax.eval_shape(conv, *one).shape
            return _compat.vary_like(jnp.zeros((0, *shape), params["out_dtype"]), *args), 0
        if params["options"].config is not None:
            return one_by_one(primitive, args, dims, params), 0
        arrays = {kind.result, *(name for name, (_, dim) in mapped.items() if dim is not None)}
        params["convolution"], places = _widened(conv, arrays, size)
        operands = (x if dim is None else fold_into(x, dim, *places[name]) for name, (x, dim) in mapped.items())
        out_dim, groups = places[kind.result]
        if shape_name in params:
            params[shape_name] = tuple(n * size if i == out_dim else n for i, n in enumerate(params[shape_name]))
        if "out_sharding" in params:
            params["out_sharding"] = _compat.mapped_sharding(params["out_sharding"], axis, out_dim)
        return unfold_from(primitive.bind(*operands, **params), out_dim, size, groups), out_dim

    batching.fancy_primitive_batchers[primitive] = batch


def _widened(conv: Convolution, mapped: Collection[str], size: int) -> tuple[Convolution, dict[str, tuple[int, int]]]:
    """The convolution of all along a mapped axis, and for each array that is `mapped` (lhs, rhs, g) the dimension that
    takes the axis, inside each of so many groups.

    An axis that the weight lacks widens the batch, one that the input lacks the output channels, one that the output
    lacks the input channels; and one that all have makes groups.
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
