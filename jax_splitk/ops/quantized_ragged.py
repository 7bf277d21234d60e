"""Grouped products with a stack of quantized weights, as mixtures of experts in 4 bits have them."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jax_splitk.ops import quantized_ragged_gradient as _gradient  # noqa: F401 - the primitive's rules
from jax_splitk.ops.epilogue_arguments import WeightAxes, epilogue_operands, unjoined
from jax_splitk.ops.group_arguments import int32_offset, int32_sizes
from jax_splitk.ops.quantized_matmul import constant, resized, weight_leaves
from jax_splitk.ops.quantized_ragged_epilogue import RaggedEpilogueCall
from jax_splitk.problems import quantized_matmul as problems
from jax_splitk.problems import quantized_reference
from jax_splitk.problems.dot_general import Activation
from jax_splitk.problems.epilogue import GatedActivation
from jax_splitk.problems.quantized_matmul import OUT_DTYPES
from jax_splitk.problems.quantized_reference import Layout, Leaves
from jax_splitk.quantized.array import as_quantized, unwrapped
from jax_splitk.quantized.packed_weight import PackedWeight, per_feature
from jax_splitk.quantized.permuted import PermutedWeight
from jax_splitk.runtime import _compat
from jax_splitk.runtime.arguments import RefusedImplementation, dtype_of, require
from jax_splitk.tuning.options import Options

_X_DTYPES = (*problems.X_DTYPES, "float32")
_COMPUTE_DTYPES = ("bfloat16", "float16", "float32")


def quantized_ragged_dot(
    lhs: ArrayLike,
    rhs: Any,
    group_sizes: ArrayLike,
    options: Options,
    preferred_element_type: DTypeLike | None = None,
    *,
    group_offset: ArrayLike | None = None,
    out_sharding: Any = None,
    compute_dtype: DTypeLike | None = None,
    bias: ArrayLike | None = None,
    activation: Activation | GatedActivation | None = None,
) -> jax.Array:
    """`ragged_dot` whose rhs is a stack of quantized weights; `options` are settled."""
    x, sizes = jnp.asarray(lhs), jnp.asarray(group_sizes)
    if out_sharding is not None:
        given = f"out_sharding={out_sharding} with quantized experts"
        raise NotImplementedError(f"{given}; accepted: None (jax.lax.with_sharding_constraint places the result)")
    if x.dtype.name not in _X_DTYPES:
        raise TypeError(f"lhs of dtype {x.dtype} with quantized experts; accepted: {', '.join(_X_DTYPES)}")
    leaves, layout, (groups, k, n) = _stack(unjoined("rhs", rhs, activation))
    if x.ndim != 2 or x.shape[1] != k:
        raise ValueError(f"lhs of shape {x.shape} and quantized experts of shape {(groups, k, n)}; accepted: (m, {k})")
    offset = [] if group_offset is None else [int32_offset(group_offset)]
    _check_sizes(sizes, groups, bool(offset))
    preferred = quantized_reference.widened(x.dtype) if preferred_element_type is None else preferred_element_type
    out_dtype = dtype_of("preferred_element_type", preferred, OUT_DTYPES)
    if compute_dtype is not None:
        x = x.astype(dtype_of("compute_dtype", compute_dtype, _COMPUTE_DTYPES))
    _check_limit(x, layout, options)
    after = epilogue_operands(bias, None, WeightAxes((groups,), (k,), (n,), (groups, k, n)), (), activation)
    call = RaggedEpilogueCall(
        layout=layout,
        has_zero=leaves[2] is not None,
        has_offset=bool(offset),
        out_dtype=out_dtype.name,
        options=options,
        activation=activation or "none",
        bias=bool(after),
    )
    of_weights = [leaf for leaf in leaves if leaf is not None]
    operands = (resized(x, layout.shape[0]), *of_weights, int32_sizes(sizes), *offset)
    if not call.is_product and layout.shape[1] == n:
        return call.bind(*operands, *after)
    out = resized(call.product.bind(*operands), n)
    return out if call.is_product else call.around(out, *operands[-1 - call.has_offset :], *after)


def _stack(rhs: Any) -> tuple[Leaves, Layout, tuple[int, int, int]]:
    """The arrays of a stack of weights, the layout of one of them, and (groups, k, n)."""
    w = unwrapped(rhs)
    accepted = "[g, k, n]: a stack of matrices whose first axis the product contracts"
    if isinstance(w, PermutedWeight):
        raise TypeError("rhs of type PermutedWeight; accepted: PackedWeight, QuantizedArray, a qwix QArray")
    if isinstance(w, PackedWeight):
        leaves, layout, axes = weight_leaves(w)
        if len(axes.stack) != 1 or w.contracted != (0,) or len(w.dims) != 2:
            given = f"a PackedWeight of shape {w.shape} with a stack of {axes.stack}, contracted {w.contracted}"
            raise ValueError(f"rhs is {given}; accepted: {accepted}, as prepack(..., stack=1) packs it")
        return leaves, layout, (axes.stack[0], axes.contracted[0], axes.kept[0])
    q = as_quantized(w)
    require(q.ndim == 3, f"rhs of shape {q.shape}", accepted)
    groups, k, n = q.shape

    def of_each(x: Any) -> Any:
        """Scales that all weights share are repeated."""
        return x if x is None or x.shape[0] == groups else jnp.repeat(x, groups // x.shape[0], axis=0)

    leaves = (q.qvalue, of_each(q.scale), of_each(q.zero_point), q.qtype, of_each(q.channel_scale))
    each = jax.vmap(per_feature)(type(q)(*leaves))
    layout = Layout((k, n), str(q.qtype), k // each.scale.shape[1], None, each.channel_scale is not None)
    return (each.qvalue, constant(each.scale), each.zero_point, each.channel_scale), layout, (groups, k, n)


def _check_sizes(sizes: jax.Array, groups: int, has_offset: bool) -> None:
    integer = jnp.issubdtype(sizes.dtype, jnp.integer)
    require(integer, f"group_sizes of dtype {sizes.dtype}", "an integer dtype", TypeError)
    fits: Sequence[Any] = sizes.shape
    known = len(fits) == 1 and (
        not _compat.is_known(fits[0], groups) or fits[0] == groups or (has_offset and fits[0] > groups)
    )
    most = f"({groups},)" + (", or more groups" if has_offset else "")
    require(known, f"group_sizes of shape {sizes.shape} with {groups} quantized experts", most, TypeError)


def _check_limit(x: jax.Array, layout: Layout, options: Options) -> None:
    limit = problems.refusal(x.shape, x.dtype.name, layout.shape, layout.version)
    if limit is not None and options.explicit and options.implementation != "xla":
        raise RefusedImplementation(f"ragged_dot: {limit}. Use implementation=None or 'xla'.")
