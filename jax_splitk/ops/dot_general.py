"""Matrix products with splits of a long reduction."""

import functools
import logging
import operator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jax_splitk.ops import dot_gradient as _gradient  # noqa: F401 - the primitive's rules
from jax_splitk.ops.call import MEMORY
from jax_splitk.ops.dot_calls import DotCall, Epilogue
from jax_splitk.ops.epilogue_arguments import floating_operand, known_activation
from jax_splitk.problems.conv_reference import precision_name
from jax_splitk.problems.dot_general import E4M3, Activation
from jax_splitk.problems.dot_layout import DimensionNumbers, free_dimensions
from jax_splitk.problems.dot_reference import finished, lax_dot_general
from jax_splitk.runtime.arguments import dtype_of, require, wider
from jax_splitk.tuning.options import Implementation, Options, settled

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
    bias: ArrayLike | None = None,
    activation: Activation | None = None,
    residual: ArrayLike | None = None,
    compute_dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
    config: Any = None,
) -> jax.Array:
    """A product with the arguments of `jax.lax.dot_general`, whose long sum is split over the whole GPU.

    The weight gradient of a dense layer is such a product: few weights, and a sum over every row of the batch. The
    kernels need no zeroed memory. Splits are added in a fixed order, so that results are the same, bit for bit, each
    time. Several batch and contracting dimensions are allowed, and either operand may have any of its dimensions
    contiguous but the batch's: where neighbouring dimensions are contracted together, nothing is transposed.

    It is bilinear: forward and reverse mode, vmap, scan, remat and shard_map work as with lax, and cotangents are
    products of the same kind. Use it as Flax's `dot_general=`, with `compute_dtype=jnp.bfloat16` to multiply in
    bfloat16 and to keep float32 cotangents of float32 weights.

    With an epilogue the result is activation(product + bias) + residual, computed in float32 of the whole sum and then
    rounded, in the same kernels. Under differentiation the product of an activation is kept in float32, and XLA
    computes its epilogue; without an activation bias and residual stay in the kernel.

    Args:
      lhs: array of a real floating dtype; others are left to lax. float8_e4m3fn with preferred_element_type only.
      rhs: likewise.
      dimension_numbers: ((lhs contracting, rhs contracting), (lhs batch, rhs batch)) dimensions.
      precision: as in lax, for float32 operands: DEFAULT and HIGH multiply in tf32, HIGHEST in float32, by XLA. What
        else lax takes (a pair, an algorithm) is left to lax.
      preferred_element_type: dtype of the result; None for that of the operands.
      out_sharding: as in lax, which computes the product then.
      bias: of the shape of rhs's dimensions in the result, or of lhs's with a 1 for each of rhs's; any real floating
        dtype.
      activation: "relu", "gelu" (`jax.nn.gelu`, by tanh), "gelu_exact" (the same with approximate=False), "silu".
      residual: of the result's shape; any real floating dtype.
      compute_dtype: bfloat16, float16 or float32: operands are rounded to it, and sums are float32. None for the
        operands' dtype. A cotangent has the dtype of its operand, and is not rounded to `compute_dtype`.
      implementation: "cutlass" (Hopper), "host" (CPU), "xla", or None for the fastest that serves.
      config: a family's Config; None for the tuned or predicted one.

    Returns:
      The batch dimensions, then those of lhs that are left, then those of rhs.

    Raises:
      TypeError: dimension numbers that do not belong to the operands, as from lax; an epilogue's dtypes.
      ValueError: an unknown activation or implementation, a shape of an epilogue, a config that is not legal.
      NotImplementedError: an explicit implementation or config that cannot serve; names the limit. Limits that depend
        on the device raise it at lowering.
      FrozenCacheMiss: at lowering, no tuning decision under `JAX_SPLITK_CACHE_MODE=frozen`.

    Example:
      >>> x, g = jnp.ones((4096, 64)), jnp.ones((4096, 32))
      >>> jax_splitk.dot_general(x, g, (((0,), (0,)), ((), ()))).shape
      (64, 32)
    """
    options = settled("dot_general", Options(config, implementation))
    numbers = (dimension_numbers, precision, preferred_element_type, out_sharding, compute_dtype)
    return _routed(jnp.asarray(lhs), jnp.asarray(rhs), *numbers, options, (bias, activation, residual))


def matmul(
    a: ArrayLike,
    b: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    activation: Activation | None = None,
    residual: ArrayLike | None = None,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    compute_dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
    config: Any = None,
) -> jax.Array:
    """A matrix product with the arguments of `jax.numpy.matmul`, and bias, activation and residual in the same kernel.

    [..., m, k] @ [..., k, n] with broadcast leading dimensions; vectors as in NumPy. The result is
    activation(a @ b + bias) + residual. It is a `dot_general`, which says what kernels serve.

    Args:
      a: [..., m, k] or [k], of a real floating dtype; with a bias or a residual of two dimensions at least.
      b: [..., k, n] or [k], likewise.
      bias: [n], or [m, 1] where a has no leading dimensions or b has them, too (else all of a's, then 1).
      activation: "relu", "gelu", "gelu_exact" or "silu".
      residual: of the result's shape.
      precision: as in `dot_general`.
      preferred_element_type: dtype of the result, as in `dot_general`.
      compute_dtype: as in `dot_general`.
      implementation: as in `dot_general`.
      config: as in `dot_general`.

    Raises:
      ValueError: shapes that do not belong together; and see `dot_general`.

    Examples:
      >>> jax_splitk.matmul(jnp.ones((8, 64)), jnp.ones((64, 32))).shape
      (8, 32)
      >>> x = jnp.ones((8, 64))
      >>> jax_splitk.matmul(x, jnp.ones((64, 64)), bias=jnp.ones(64), activation="gelu", residual=x).shape
      (8, 64)
    """
    x, y = jnp.asarray(a), jnp.asarray(b)
    if min(x.ndim, y.ndim) < 2 and (bias is not None or residual is not None):
        raise ValueError(f"bias or residual with a of shape {x.shape} and b of shape {y.shape}; accepted: no vectors")
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
        **{"bias": bias, "activation": activation, "residual": residual},
        compute_dtype=compute_dtype,
        implementation=implementation,
        config=config,
    )
    out = out if columns else out[..., 0]
    return out if rows else jnp.squeeze(out, -2 if columns else -1)


def _routed(
    x: jax.Array,
    y: jax.Array,
    dimension_numbers: Any,
    precision: Any,
    preferred: Any,
    out_sharding: Any,
    compute_dtype: Any,
    options: Options,
    after: tuple[Any, Any, Any],
) -> jax.Array:
    """The product by the primitive that computes it, or by lax; `after`: bias, activation and residual."""
    reason = _left_to_lax(x, y, precision, preferred, out_sharding, compute_dtype)
    if reason is not None:
        if options.explicit and options.implementation != "xla":
            raise NotImplementedError(f"dot_general: {reason}. Use implementation=None or 'xla'.")
        _logger.info("dot_general: XLA (%s)", reason)
        out = lax_dot_general(x, y, dimension_numbers, precision, preferred, out_sharding=out_sharding)
        return _finished(out, x, y, dimension_numbers, *after)
    dimensions = _canonical(x, y, dimension_numbers)
    common = wider(x.dtype, y.dtype)
    compute = common if compute_dtype is None else dtype_of("compute_dtype", compute_dtype, _COMPUTE_DTYPES)
    epilogue, operands = _epilogue(x, y, dimensions, *after)
    call = DotCall(
        dimensions=dimensions,
        epilogue=epilogue,
        out_dtype=jnp.dtype(preferred or (compute if common == E4M3 else common)).name,
        compute_dtype=jnp.dtype(compute).name,
        precision=lax.Precision[precision_name(precision).upper()],
        options=options,
    )
    return call.bind(x, y, *operands)


def _left_to_lax(
    x: jax.Array, y: jax.Array, precision: Any, preferred: Any, out_sharding: Any, compute_dtype: Any
) -> str | None:
    """Why lax computes the product; None if the primitive does."""
    if out_sharding is not None:
        return f"out_sharding={out_sharding}"
    for name, array in (("lhs", x), ("rhs", y)):
        if array.dtype.name not in (*_DTYPES, E4M3):
            return f"{name} of dtype {array.dtype}; kernels take {', '.join((*_DTYPES, E4M3))}"
        if array.dtype.name == E4M3 and preferred is None and compute_dtype is None:
            return f"{name} of dtype {E4M3} with preferred_element_type=None; accepted: {', '.join(_DTYPES)}"
    if x.dtype != y.dtype and compute_dtype is None:
        return f"operands of dtypes {x.dtype} and {y.dtype}; give compute_dtype"
    if preferred is not None and jnp.dtype(preferred).name not in _DTYPES:
        return f"preferred_element_type={preferred!r}; accepted: {', '.join(_DTYPES)}"
    simple = precision is None or isinstance(precision, lax.Precision) or precision in ("default", "high", "highest")
    return None if simple else f"precision={precision!r}; accepted: DEFAULT, HIGH, HIGHEST"


def _epilogue(
    x: jax.Array, y: jax.Array, dimensions: DimensionNumbers, bias: Any, activation: Any, residual: Any
) -> tuple[Epilogue, list[jax.Array]]:
    """The epilogue that the arguments ask for, and its operands, in the primitive's form. Raises an error if they do
    not fit the product."""
    (x_contracting, y_contracting), (x_batch, y_batch) = dimensions
    rows = tuple(x.shape[i] for i in free_dimensions(x.ndim, x_contracting, x_batch))
    columns = tuple(y.shape[i] for i in free_dimensions(y.ndim, y_contracting, y_batch))
    operands, over = [], "none"
    if bias is not None:
        given, of_rows = floating_operand("bias", bias), (*rows, *(1,) * len(columns))
        require(given.shape in (columns, of_rows), f"bias of shape {given.shape}", f"{columns} or {of_rows}")
        over = "n" if given.shape == columns else "m"
        operands.append(given if over == "n" else given.reshape(rows))
    activation = known_activation(activation)
    if residual is not None:
        given, shape = floating_operand("residual", residual), (*(x.shape[i] for i in x_batch), *rows, *columns)
        require(given.shape == shape, f"residual of shape {given.shape}", str(shape))
        operands.append(given)
    return Epilogue(over, activation, residual is not None), operands


def _finished(product: jax.Array, x: jax.Array, y: jax.Array, dimension_numbers: Any, *after: Any) -> jax.Array:
    """The epilogue of lax's product."""
    if all(each is None for each in after):
        return product
    floating = jnp.issubdtype(product.dtype, jnp.floating)
    require(floating, f"bias, activation or residual of a product of dtype {product.dtype}", "floating", TypeError)
    _epilogue(x, y, _canonical(x, y, dimension_numbers), *after)
    activation, (bias, residual) = after[1], (None if each is None else jnp.asarray(each) for each in after[::2])
    wide = product.astype(wider(product.dtype, jnp.float32))
    return finished(wide, bias, activation or "none", residual).astype(product.dtype)


def _canonical(x: jax.Array, y: jax.Array, dimension_numbers: Any) -> DimensionNumbers:
    """Plain tuples of dimensions; raises TypeError, as lax does, where they do not belong to the operands."""
    (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = dimension_numbers

    def plain(dims: Sequence[int]) -> tuple[int, ...]:
        return tuple(operator.index(i) for i in dims)

    found = (plain(lhs_contracting), plain(rhs_contracting)), (plain(lhs_batch), plain(rhs_batch))
    _accepted_by_lax(x.shape, y.shape, x.dtype, found)
    return found


@functools.lru_cache(maxsize=MEMORY)
def _accepted_by_lax(
    lhs_shape: Sequence[Any], rhs_shape: Sequence[Any], dtype: Any, dimension_numbers: DimensionNumbers
) -> None:
    """Raises lax's error for dimension numbers that do not belong to operands of these shapes."""
    types = (jax.ShapeDtypeStruct(shape, dtype) for shape in (lhs_shape, rhs_shape))
    jax.eval_shape(functools.partial(lax_dot_general, dimension_numbers=dimension_numbers), *types)
