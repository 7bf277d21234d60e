"""Matrix products with splits of a long reduction."""

import logging
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jax_splitk.ops import dot_primitive
from jax_splitk.problems.dot_layout import DimensionNumbers
from jax_splitk.runtime import _compat
from jax_splitk.runtime.arguments import dtype_of
from jax_splitk.tuning.options import Options, settled

_logger = logging.getLogger("jax_splitk")

_COMPUTE_DTYPES = ("bfloat16", "float16", "float32")
_DTYPES = (*_COMPUTE_DTYPES, "float64")


def dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    out_sharding: Any = None,
    compute_dtype: DTypeLike | None = None,
    implementation: str | None = None,
    config: Any = None,
) -> jax.Array:
    """`jax.lax.dot_general`, by kernels that split a long reduction over the whole GPU.

    The weight gradient of a dense layer is such a product: few weights, and a sum over every row of the batch. The
    kernels need no zeroed memory. Splits are added in a fixed order, so that results are the same, bit for bit, each
    time. Several batch and contracting dimensions are allowed, and either operand may have any of its dimensions
    contiguous but the batch's: where neighbouring dimensions are contracted together, nothing is transposed.

    It is bilinear: forward and reverse mode, vmap, scan, remat and shard_map work as with lax, and cotangents are
    products of the same kind. Use it as Flax's `dot_general=`, with `compute_dtype=jnp.bfloat16` to multiply in
    bfloat16 and to keep float32 cotangents of float32 weights.

    Args:
      lhs, rhs: arrays of a real floating dtype; others are left to lax.
      dimension_numbers: ((lhs contracting, rhs contracting), (lhs batch, rhs batch)) dimensions.
      precision: as in lax, for float32 operands: DEFAULT and HIGH multiply in tf32, HIGHEST in float32, by XLA. What
        else lax takes (a pair, an algorithm) is left to lax.
      preferred_element_type: dtype of the result; None for that of the operands.
      out_sharding: as in lax, which computes the product then.
      compute_dtype: bfloat16, float16 or float32: operands are rounded to it, and sums are float32. None for the
        operands' dtype. A cotangent has the dtype of its operand, and is not rounded to `compute_dtype`.
      implementation: "cutlass" (Hopper), "host" (CPU), "xla", or None for the fastest that serves.
      config: a family's Config; None for the tuned or predicted one.

    Returns:
      The batch dimensions, then those of lhs that are left, then those of rhs.

    Raises:
      TypeError: dimension numbers that do not belong to the operands, as from lax.
      ValueError: an unknown implementation, a config that is not legal.
      NotImplementedError: an explicit implementation or config that cannot serve; names the limit. What only the
        device can tell is raised at lowering.
      FrozenCacheMiss: at lowering, no tuning decision under `JAX_SPLITK_CACHE_MODE=frozen`.

    Example:
      >>> x, g = jnp.ones((4096, 64)), jnp.ones((4096, 32))
      >>> jax_splitk.dot_general(x, g, (((0,), (0,)), ((), ()))).shape
      (64, 32)
    """
    options = settled("dot_general", Options(config, implementation))
    x, y = jnp.asarray(lhs), jnp.asarray(rhs)
    reason = _left_to_lax(x, y, precision, preferred_element_type, out_sharding, compute_dtype)
    if reason is not None:
        if options.explicit and options.implementation != "xla":
            raise NotImplementedError(f"dot_general: {reason}. Use implementation=None or 'xla'.")
        _logger.info("dot_general: XLA (%s)", reason)
        return lax.dot_general(
            *(x, y, dimension_numbers, precision, preferred_element_type), **_given(out_sharding=out_sharding)
        )
    dimensions = _canonical(x, y, dimension_numbers)
    common = jnp.promote_types(x.dtype, y.dtype)
    compute = common if compute_dtype is None else dtype_of("compute_dtype", compute_dtype, _COMPUTE_DTYPES)
    x, y = _compat.vary_alike((x, y))
    return dot_primitive.bind(
        *(x, y, dimensions, common if preferred_element_type is None else preferred_element_type),
        compute_dtype=jnp.dtype(compute).name,
        precision=lax.Precision.DEFAULT if precision is None else lax.Precision(precision),
        options=options,
    )


def matmul(
    a: ArrayLike,
    b: ArrayLike,
    *,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    compute_dtype: DTypeLike | None = None,
    implementation: str | None = None,
    config: Any = None,
) -> jax.Array:
    """`jax.numpy.matmul` by `dot_general`: [..., m, k] @ [..., k, n] with broadcast leading dimensions; vectors as in
    NumPy.

    Args:
      a, b: arrays of a real floating dtype; of at least one dimension.
      precision, preferred_element_type, compute_dtype, implementation, config: see `dot_general`.

    Raises:
      ValueError: shapes that do not belong together; and see `dot_general`.

    Example:
      >>> jax_splitk.matmul(jnp.ones((8, 64)), jnp.ones((64, 32))).shape
      (8, 32)
    """
    x, y = jnp.asarray(a), jnp.asarray(b)
    if min(x.ndim, y.ndim) < 1 or x.shape[-1] != y.shape[-2 if y.ndim > 1 else 0]:
        raise ValueError(f"a of shape {x.shape} and b of shape {y.shape}; accepted: [..., m, k] and [..., k, n]")
    rows, columns = x.ndim > 1, y.ndim > 1
    x, y = x if rows else x[None], y if columns else y[:, None]
    leading = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    # A weight that all share is no batch: the rows of all are one product.
    shared = y.ndim == 2
    batch = () if shared else tuple(range(len(leading)))
    if not shared:
        x, y = (jnp.broadcast_to(z, (*leading, *z.shape[-2:])) for z in (x, y))
    out = dot_general(
        *(x, y, (((x.ndim - 1,), (y.ndim - 2,)), (batch, batch)), precision, preferred_element_type),
        compute_dtype=compute_dtype,
        implementation=implementation,
        config=config,
    )
    out = out if columns else out[..., 0]
    return out if rows else jnp.squeeze(out, -2 if columns else -1)


def _given(**arguments: Any) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not None}


def _left_to_lax(
    x: jax.Array, y: jax.Array, precision: Any, preferred: Any, out_sharding: Any, compute_dtype: Any
) -> str | None:
    """Why lax computes the product; None where the primitive does."""
    if out_sharding is not None:
        return f"out_sharding={out_sharding}"
    for name, array in (("lhs", x), ("rhs", y)):
        if array.dtype.name not in _DTYPES:
            return f"{name} of dtype {array.dtype}; kernels take {', '.join(_DTYPES)}"
    if x.dtype != y.dtype and compute_dtype is None:
        return f"operands of dtypes {x.dtype} and {y.dtype}; give compute_dtype"
    if preferred is not None and jnp.dtype(preferred).name not in _DTYPES:
        return f"preferred_element_type={preferred!r}; accepted: {', '.join(_DTYPES)}"
    simple = precision is None or isinstance(precision, lax.Precision) or precision in ("default", "high", "highest")
    return None if simple else f"precision={precision!r}; accepted: DEFAULT, HIGH, HIGHEST"


def _canonical(x: jax.Array, y: jax.Array, dimension_numbers: Any) -> DimensionNumbers:
    """Plain tuples of dimensions; raises TypeError, as lax does, where they do not belong to the operands."""
    jax.eval_shape(lambda x, y: lax.dot_general(x, y, dimension_numbers), *_of_one_dtype(x, y))
    (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = dimension_numbers

    def plain(dims: Sequence[int]) -> tuple[int, ...]:
        return tuple(int(i) for i in dims)

    return (plain(lhs_contracting), plain(rhs_contracting)), (plain(lhs_batch), plain(rhs_batch))


def _of_one_dtype(x: jax.Array, y: jax.Array) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    return jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(y.shape, x.dtype)
