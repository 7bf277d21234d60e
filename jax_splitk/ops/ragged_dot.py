"""Grouped matrix products, as mixtures of experts have them."""

import functools
import logging
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jax_splitk.ops import ragged_gradient as _gradient  # noqa: F401 - the primitive's rules
from jax_splitk.ops.call import MEMORY
from jax_splitk.ops.dot_general import dot_general
from jax_splitk.ops.group_arguments import int32_offset, int32_sizes
from jax_splitk.ops.quantized_ragged import quantized_ragged_dot
from jax_splitk.ops.ragged_call import RaggedDotCall
from jax_splitk.problems import ragged_layout
from jax_splitk.problems.conv_reference import precision_name
from jax_splitk.problems.dot_general import E4M3, Activation
from jax_splitk.problems.epilogue import GatedActivation
from jax_splitk.problems.ragged_reference import lax_ragged_dot_general
from jax_splitk.quantized.array import is_weight
from jax_splitk.runtime import _compat
from jax_splitk.runtime.arguments import RefusedImplementation, dtype_of, require, wider
from jax_splitk.tuning.options import Implementation, Options, settled

_logger = logging.getLogger("jax_splitk")

_COMPUTE_DTYPES = ("bfloat16", "float16", "float32")
_DTYPES = (*_COMPUTE_DTYPES, "float64")

# Those of `lax.ragged_dot`: [m, k], [g, k, n].
_NUMBERS = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])


def ragged_dot(
    lhs: ArrayLike,
    rhs: Any,
    group_sizes: ArrayLike,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: ArrayLike | None = None,
    out_sharding: Any = None,
    *,
    compute_dtype: DTypeLike | None = None,
    bias: ArrayLike | None = None,
    activation: Activation | GatedActivation | None = None,
    implementation: Implementation | None = None,
    config: Any = None,
    workspace_limit_bytes: int | None = None,
) -> jax.Array:
    """A matrix product for each group of neighbouring rows, with the arguments of `jax.lax.ragged_dot`.

    The layers of a mixture of experts are such products: rows of lhs are tokens, sorted by expert, rhs has the weights
    of all experts, and group_sizes says how many tokens each has. lax multiplies every token with every expert and
    discards most of the results; here each token is multiplied with its own expert only.

    Group i has group_sizes[i] rows, which follow the rows of the groups before it. A negative size counts as 0. Rows at
    and beyond the sum of the sizes belong to no group: their results are zeros, and nothing in them, not even NaN,
    reaches any result or gradient. If the sum of the sizes is larger than m, the groups end at the last row of lhs. An
    empty group is not computed; its gradient is zeros.

    It is bilinear in lhs and rhs: forward and reverse mode of any order, vmap of any of the operands, scan, remat and
    shard_map work, and cotangents are grouped products as well. Under jit over sharded arrays tokens, experts and
    columns may be divided among devices. Results are the same, bit for bit, each time.

    Experts of 4 or 8 bits: rhs may be a stack of quantized weights, as `quantized_matmul` takes one of them. On Hopper
    a kernel dequantizes the packed weights of groups that have rows, and reads no others. `precision` then has no
    effect, as in `quantized_dot_general`. The gradient of lhs is a grouped product with the dequantized weights, which
    XLA writes to memory first; scales and floating zero points have gradients, too.

    With `bias` or `activation` a row r of group i gives activation(lhs[r] @ rhs[i] + bias[i]), and a row of no group
    zeros. As in `quantized_matmul`, it is computed in float32 of the whole sum and rounded once, in the kernel. XLA
    computes it on a CPU, and from the rounded product where an activation is differentiated, where devices divide k,
    and where the weights have tiles of padding in n.

    Args:
      lhs: [m, k], of a real floating dtype; two operands of other dtypes are left to lax.
      rhs: [g, k, n], likewise. Where the dtypes differ both are converted to the one that holds them, as in lax. Or a
        stack of quantized weights: a PackedWeight (of `prepack` with stack=1), for which there are kernels, a
        QuantizedArray or a qwix QArray. lhs is then bfloat16, float16, float8_e4m3fn or float32.
      group_sizes: [g], of an integer dtype; summed in int32.
      precision: as in lax, for float32 operands. On a GPU DEFAULT and HIGH add three products of bfloat16 parts, and
        the error is about 1e-5 (that of tf32 is 3e-4); HIGHEST adds six, with an error as of float32. What else lax
        takes (a pair, an algorithm) is left to lax.
      preferred_element_type: dtype of the result; None for that of the operands.
      group_offset: [1], of an integer dtype: the first group whose matrix is in rhs. rhs then has the matrices of some
        neighbouring groups, and group_sizes has the sizes of all groups. Results of rows of other groups are zeros. lax
        refuses this argument.
      out_sharding: as in lax, which computes the product then.
      compute_dtype: bfloat16, float16 or float32: operands are rounded to it, and sums are float32. None for the
        operands' dtype. A cotangent has the dtype of its operand, and is not rounded to `compute_dtype`.
      bias: for a quantized rhs, added to the product: [g, n], or [n] for the same of all groups. With a gated
        activation [g, 2, n / 2] or [2, n / 2]: the bias of the gate, and that of the other part. None: nothing is
        added.
      activation: for a quantized rhs: "relu", "gelu", "gelu_exact" or "silu". Or a gated one, if rhs is a stack of gate
        and up as one (a JoinedWeight, of `join_gate_up`): "swiglu", "geglu" or "swigluoai" (gpt-oss's). See
        `quantized_matmul`. None: none.
      implementation: "cutlass" (Hopper), "host" (CPU), "xla" (`lax.ragged_dot`), or None for the fastest that serves.
      config: a family's Config; None for the tuned or predicted one.
      workspace_limit_bytes: the most scratch memory that a kernel may ask of XLA; None for 256 MiB.

    Returns:
      [m, n], or [m, n / 2] with a gated activation.

    Raises:
      TypeError: shapes or dtypes that do not belong together, as from lax; `bias` or `activation` with a rhs that is
        not quantized.
      ValueError: a group_offset of another shape, an unknown implementation, a config that is not legal; a quantized
        rhs or a bias of another shape; an unknown activation, or a gated one without a JoinedWeight.
      NotImplementedError: an explicit implementation or config that cannot serve; names the limit. Limits that depend
        on the device raise it at lowering. `out_sharding` with a quantized rhs.
      FrozenCacheMiss: at lowering, no tuning decision under `JAX_SPLITK_CACHE_MODE=frozen`.

    Example:
      >>> tokens, experts = jnp.ones((6, 4)), jnp.arange(3.0)[:, None, None] * jnp.ones((3, 4, 2))
      >>> jax_splitk.ragged_dot(tokens, experts, jnp.array([1, 3, 1]))[:, 0]
      Array([0., 4., 4., 4., 8., 0.], dtype=float32)
    """
    asked = Options(config, implementation, workspace_limit_bytes)
    if is_weight(rhs):
        options = settled("quantized_ragged_dot", asked)
        more = {"group_offset": group_offset, "out_sharding": out_sharding, "compute_dtype": compute_dtype}
        more |= {"bias": bias, "activation": activation}
        return quantized_ragged_dot(lhs, rhs, group_sizes, options, preferred_element_type, **more)
    for name, value in (("bias", bias), ("activation", activation)):
        given = f"{name} with rhs of type {type(rhs).__name__}"
        require(value is None, given, f"{name}=None, or a stack of quantized weights", TypeError)
    given = (precision, preferred_element_type, group_offset, out_sharding, compute_dtype)
    return _routed(lhs, rhs, group_sizes, _NUMBERS, *given, settled("ragged_dot", asked))


def ragged_dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    group_sizes: ArrayLike,
    ragged_dot_dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: ArrayLike | None = None,
    out_sharding: Any = None,
    *,
    compute_dtype: DTypeLike | None = None,
    implementation: Implementation | None = None,
    config: Any = None,
    workspace_limit_bytes: int | None = None,
) -> jax.Array:
    """A grouped product with the arguments of `jax.lax.ragged_dot_general`: `ragged_dot` for any dimensions.

    lax's three modes follow from the kind of lhs's ragged dimension. If it is not contracted, the product is that of
    `ragged_dot`: [b, m, k] and [g, b, k, n] give [b, m, n]. If it is contracted, the product is that of the gradient of
    rhs: [b, m, k] and [b, m, n] give [g, b, k, n], a sum over the rows of each group. If it is a batch dimension, the
    product is a `dot_general`, which ignores the groups. Batch dimensions and several dimensions of a kind are allowed,
    and rhs may have the contracted ones last: it is not transposed.

    Args:
      lhs: as in `ragged_dot`.
      rhs: as in `ragged_dot`.
      group_sizes: [g], or with the batch and the outer dimensions of lhs in front, as in lax.
      ragged_dot_dimension_numbers: a `jax.lax.RaggedDotDimensionNumbers`.
      precision: as in `ragged_dot`.
      preferred_element_type: as in `ragged_dot`.
      group_offset: as in `ragged_dot`. With a contracted ragged dimension the result has as many groups as group_sizes,
        of which those that are not there are zeros.
      out_sharding: as in `ragged_dot`.
      compute_dtype: as in `ragged_dot`.
      implementation: as in `ragged_dot`.
      config: as in `ragged_dot`.
      workspace_limit_bytes: as in `ragged_dot`.

    Raises:
      TypeError: dimension numbers that do not belong to the operands, as from lax; and see `ragged_dot`.

    Example:
      >>> tokens, cotangents = jnp.ones((6, 4)), jnp.ones((6, 2))
      >>> numbers = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
      >>> jax_splitk.ragged_dot_general(tokens, cotangents, jnp.array([1, 3, 1]), numbers)[:, 0, 0]
      Array([1., 3., 1.], dtype=float32)
    """
    given = (precision, preferred_element_type, group_offset, out_sharding, compute_dtype)
    options = settled("ragged_dot", Options(config, implementation, workspace_limit_bytes))
    return _routed(lhs, rhs, group_sizes, ragged_dot_dimension_numbers, *given, options)


def _routed(
    lhs: ArrayLike,
    rhs: ArrayLike,
    group_sizes: ArrayLike,
    numbers: Any,
    precision: Any,
    preferred: Any,
    group_offset: ArrayLike | None,
    out_sharding: Any,
    compute_dtype: Any,
    options: Options,
) -> jax.Array:
    """The product by the primitive that computes it, or by lax."""
    x, y, sizes = jnp.asarray(lhs), jnp.asarray(rhs), jnp.asarray(group_sizes)
    offset = None if group_offset is None else int32_offset(group_offset)
    reason = _left_to_lax(x, y, precision, preferred, out_sharding, compute_dtype)
    if reason is not None:
        if options.explicit and options.implementation != "xla":
            raise RefusedImplementation(f"ragged_dot: {reason}. Use implementation=None or 'xla'.")
        _logger.info("ragged_dot: XLA (%s)", reason)
        more = {} if out_sharding is None else {"out_sharding": out_sharding}
        return lax_ragged_dot_general(x, y, sizes, numbers, precision, preferred, group_offset=offset, **more)
    common = wider(x.dtype, y.dtype)
    _check(x, y, sizes, numbers, offset is not None)
    compute = common if compute_dtype is None else dtype_of("compute_dtype", compute_dtype, _COMPUTE_DTYPES)
    out_dtype = jnp.dtype(preferred or (compute if common == E4M3 else _laxs_dtype(x.dtype, y.dtype)))
    if ragged_layout.is_batch(numbers):
        x, y = x.astype(common), y.astype(common)
        of_dot = {"compute_dtype": compute_dtype, "implementation": options.implementation}
        return dot_general(x, y, numbers.dot_dimension_numbers, precision, out_dtype, **of_dot)
    found = ragged_layout.layout(x.shape, y.shape, sizes.shape, numbers)
    call = RaggedDotCall(
        mode=found.mode,
        groups=found.groups,
        rhs_order=found.rhs_order,
        has_offset=offset is not None,
        compute_dtype=jnp.dtype(compute).name,
        out_dtype=(wider(out_dtype, jnp.float32) if found.summed else out_dtype).name,
        precision=_precision(precision, jnp.dtype(compute)),
        batch=found.batch,
        options=options,
    )
    operands = [_as_operand(x, found.lhs), _as_operand(y, found.rhs), _sizes(sizes, found)]
    operands += [] if offset is None else [offset]
    out = call.bind(*operands)
    if found.summed:
        out = out.sum(found.summed).astype(out_dtype)
    out = _reshaped(out, found.split)
    return _transposed(out, found.transpose)


def _left_to_lax(
    x: jax.Array, y: jax.Array, precision: Any, preferred: Any, out_sharding: Any, compute_dtype: Any
) -> str | None:
    """Why lax computes the product; None if the primitive does."""
    if out_sharding is not None:
        return f"out_sharding={out_sharding}"
    floating = [array.dtype for array in (x, y) if jnp.issubdtype(array.dtype, jnp.floating)]
    others = [array.dtype for array in (x, y) if array.dtype not in floating]
    known = all(dtype.name in (*_DTYPES, E4M3) for dtype in floating) and floating
    integers = all(jnp.issubdtype(dtype, jnp.integer) for dtype in others)
    if not known or not integers or (E4M3 in floating and x.dtype != y.dtype):
        return f"operands of dtypes {x.dtype} and {y.dtype}; kernels take {', '.join((*_DTYPES, E4M3))}"
    if E4M3 in floating and preferred is None and compute_dtype is None:
        return f"operands of dtype {E4M3} with preferred_element_type=None; accepted: {', '.join(_DTYPES)}"
    if preferred is not None and jnp.dtype(preferred).name not in _DTYPES:
        return f"preferred_element_type={preferred!r}; accepted: {', '.join(_DTYPES)}"
    simple = precision is None or isinstance(precision, lax.Precision) or precision in ("default", "high", "highest")
    return None if simple else f"precision={precision!r}; accepted: DEFAULT, HIGH, HIGHEST"


def _laxs_dtype(*dtypes: Any) -> Any:
    """The dtype of lax's result for floating operands, or integers and a floating operand: the one with the largest
    exponents."""

    def exponents_and_bits(dtype: Any) -> tuple[int, int]:
        info = jnp.finfo(dtype) if jnp.issubdtype(dtype, jnp.floating) else None
        return (-1, -1) if info is None else (info.maxexp, info.nmant)

    return max(dtypes, key=exponents_and_bits)


def _check(x: jax.Array, y: jax.Array, sizes: jax.Array, numbers: Any, offset: bool) -> None:
    """Raises TypeError, as lax does, if operands and dimension numbers do not fit together. With a group_offset, rhs
    may have fewer groups than group_sizes."""
    shape = list(sizes.shape)
    if offset and shape and len(numbers.rhs_group_dimensions) == 1:
        groups = dict(enumerate(y.shape)).get(numbers.rhs_group_dimensions[0], shape[-1])
        fits = not _compat.is_known(groups, shape[-1]) or groups <= shape[-1]
        require(
            fits, f"rhs of {groups} groups with group_offset", f"at most {shape[-1]}, as group_sizes has", TypeError
        )
        shape[-1] = groups
    # On a mesh of explicit axes lax does not find out the sharding.
    explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    types = ((x.shape, jnp.float32), (y.shape, jnp.float32), (tuple(shape), sizes.dtype))
    _accepted_by_lax(types, numbers, PartitionSpec() if explicit else None)


@functools.lru_cache(maxsize=MEMORY)
def _accepted_by_lax(types: Sequence[tuple[Sequence[Any], Any]], numbers: Any, out_sharding: Any) -> None:
    """Raises lax's error for operands of these shapes and dtypes, if there is one. lax takes 0.4 ms to tell."""
    more = {} if out_sharding is None else {"out_sharding": out_sharding}
    product = functools.partial(lax_ragged_dot_general, ragged_dot_dimension_numbers=numbers, **more)
    jax.eval_shape(product, *(jax.ShapeDtypeStruct(*each) for each in types))


def _precision(precision: Any, dtype: np.dtype) -> str:
    return precision_name(precision) if dtype == jnp.float32 else "default"


def _sizes(sizes: jax.Array, found: ragged_layout.RaggedLayout) -> jax.Array:
    """group_sizes in int32, of the product's rows."""
    sizes = int32_sizes(sizes)
    each = found.rows_each
    if _compat.is_known(each) and each == 1:
        return sizes
    return jnp.clip(sizes, 0, found.lhs.shape[-2] // each) * each


def _as_operand(x: jax.Array, operand: ragged_layout.Operand) -> jax.Array:
    return _reshaped(_transposed(x, operand.transpose), operand.shape)


# Each is an equation in the user's program, where it changes anything.


def _transposed(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    return x if axes == tuple(range(x.ndim)) else x.transpose(axes)


def _reshaped(x: jax.Array, shape: Sequence[Any]) -> jax.Array:
    return x if x.shape == tuple(shape) else x.reshape(shape)
