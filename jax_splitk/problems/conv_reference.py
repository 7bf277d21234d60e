"""The same operations in plain lax: what the fallback runs and what kernels are checked against."""

from collections.abc import Sequence
from typing import Any, cast

import jax
from jax import lax
from jax import numpy as jnp

from jax_splitk.problems.conv_passes import transposed
from jax_splitk.problems.conv_wgrad import ConvProblem, ConvWgradProblem, dilated
from jax_splitk.runtime import _compat
from jax_splitk.runtime.arguments import RefusedValue, wider

# Taken when this module is imported: `jax_splitk.intercept`, and users, may replace lax's by ours later.
lax_conv = lax.conv_general_dilated

NHWC_SPECS = {
    rank: lax.ConvDimensionNumbers(
        lhs_spec=(0, rank + 1, *range(1, rank + 1)),
        rhs_spec=(rank + 1, rank, *range(rank)),
        out_spec=(0, rank + 1, *range(1, rank + 1)),
    )
    for rank in range(4)
}


def _swap_first_two(spec: Sequence[int]) -> tuple[int, ...]:
    return (spec[1], spec[0], *spec[2:])


def wgrad_padding(problem: ConvWgradProblem) -> list[tuple[int, int]]:
    """Padding of the convolution of lhs with g whose result is the weight gradient."""
    lhs = dilated(problem.input_spatial, problem.lhs_dilation)
    g = dilated(problem.output_spatial, problem.window_strides)
    kernel = dilated(problem.kernel_spatial, problem.rhs_dilation)
    # What the result's size must be decides the high side; it also drops input that no window reaches.
    sizes = zip(problem.padding, lhs, g, kernel, strict=True)
    return [(low, window + ct - base - low - 1) for (low, _), base, ct, window in sizes]


def cropped(
    lhs: jax.Array, axes: Sequence[int], padding: Sequence[tuple[Any, Any]], dilation: Sequence[int]
) -> tuple[jax.Array, list[tuple[Any, Any]]]:
    """lhs and padding for the same convolution without a low side that crops while the high side extends: the pixels
    that the low side would crop are sliced off before. `dilation` is lhs's.

    XLA:CPU of jaxlib 0.10 and 0.11 gives wrong results for a convolution with both, or ends the process.
    """
    padding = list(padding)
    for i, axis in enumerate(axes):
        low, high = padding[i]
        if not (_compat.is_known(low, high, lhs.shape[axis]) and low < 0 < high):
            continue
        size, step = lhs.shape[axis], dilation[i]
        off = -(low // step)  # the first pixel that stays is at or behind the crop
        if off < size:
            lhs, padding[i] = lax.slice_in_dim(lhs, off, size, axis=axis), (low + off * step, high)
        else:  # none stays: a zero, and what padding there is
            shape = tuple(1 if j == axis else n for j, n in enumerate(lhs.shape))
            (places,) = dilated((size,), (step,))
            lhs, padding[i] = _compat.vary_like(jnp.zeros(shape, lhs.dtype), lhs), (0, places + low + high - 1)
    return lhs, padding


def conv_wgrad(
    lhs: jax.Array, g: jax.Array, problem: ConvWgradProblem, specs: lax.ConvDimensionNumbers | None = None
) -> jax.Array:
    """The weight gradient as one lax convolution, as lax's own transpose rule builds it.

    The batch dimension of lhs and g is contracted, so it plays the feature dimension; channels play batch and output
    features. Strides and kernel dilation change places. Unlike through `jax.vjp`, the result's dtype can be chosen.
    """
    specs = specs or NHWC_SPECS[problem.rank]
    if problem.reduction_size == 0 or 0 in lhs.shape:  # XLA refuses a window, and jax an image, without pixels
        zeros = jnp.zeros(rhs_shape(problem, specs), problem.out_dtype)
        return _compat.vary_like(zeros, lhs, g)
    swapped = lax.ConvDimensionNumbers(*map(_swap_first_two, (specs.lhs_spec, specs.out_spec, specs.rhs_spec)))
    return _convolved(
        lhs,
        g,
        problem,
        swapped,
        wgrad_padding(problem),
        window_strides=problem.rhs_dilation,
        rhs_dilation=problem.window_strides,
        feature_group_count=problem.batch_group_count,
        batch_group_count=problem.feature_group_count,
    )


def _convolved(
    lhs: jax.Array,
    rhs: jax.Array,
    problem: ConvProblem,
    specs: lax.ConvDimensionNumbers,
    padding: Sequence[tuple[int, int]],
    **window: Any,
) -> jax.Array:
    """lax's convolution. A result of fewer bits than the operands is converted afterwards: lax does not narrow."""
    lhs, padding = cropped(lhs, specs.lhs_spec[2:], padding, problem.lhs_dilation)
    window |= {"padding": padding, "lhs_dilation": problem.lhs_dilation, "dimension_numbers": specs}
    precision, wide = lax_precision(problem.precision), wider(problem.dtype, problem.out_dtype)
    return lax_conv(lhs, rhs, **window, precision=precision, preferred_element_type=wide).astype(problem.out_dtype)


def conv_fprop(lhs: jax.Array, rhs: jax.Array, problem: ConvProblem) -> jax.Array:
    """The convolution, in canonical layouts."""
    return _convolved(
        lhs,
        rhs,
        problem,
        NHWC_SPECS[problem.rank],
        problem.padding,
        window_strides=problem.window_strides,
        rhs_dilation=problem.rhs_dilation,
        feature_group_count=problem.feature_group_count,
        batch_group_count=problem.batch_group_count,
    )


def conv_dgrad(g: jax.Array, rhs: jax.Array, problem: ConvProblem) -> jax.Array:
    """The gradient of the input, in canonical layouts and without batch groups, as one convolution of g, as lax's own
    transpose rule builds it. Unlike through `jax.vjp`, the result's dtype can be chosen."""
    return conv_fprop(g, mirrored(rhs, problem.feature_group_count), transposed(problem))


def mirrored(rhs: jax.Array, groups: int) -> jax.Array:
    """The weight of the transposed convolution (`conv_passes.transposed`): from [*kernel, C / groups, K] to
    [*kernel, K / groups, C], with reversed taps."""
    *kernel, in_channels, out_channels = rhs.shape
    rhs = jnp.moveaxis(rhs.reshape(*kernel, in_channels, groups, out_channels // groups), -1, -3)
    rhs = jnp.swapaxes(rhs, -1, -2).reshape(*kernel, out_channels // groups, groups * in_channels)
    return lax.rev(rhs, range(len(kernel)))


def rhs_shape(problem: ConvWgradProblem, specs: lax.ConvDimensionNumbers) -> tuple[int, ...]:
    """The weight's shape in the order of `specs`."""
    *kernel, in_channels, out_channels = problem.out_shape
    sizes = dict(zip(specs.rhs_spec, (out_channels, in_channels, *kernel), strict=True))
    return tuple(sizes[axis] for axis in range(len(sizes)))


def lax_precision(name: str) -> lax.Precision | tuple[lax.Precision, lax.Precision]:
    """Inverse of `precision_name`."""
    parts = [lax.Precision[part.upper()] for part in name.split(",")]
    return parts[0] if len(parts) == 1 else (parts[0], parts[1])


def precision_name(precision: lax.PrecisionLike) -> str:
    """A canonical name for lax's `precision` argument: "default", "high", "highest", or "lhs,rhs".

    None means jax's `jax_default_matmul_precision`, as in lax. An algorithm for matrix products, such as
    "BF16_BF16_F32", counts as "default", as in lax's convolutions. Raises ValueError for what no convolution accepts.
    """
    if precision is None:
        return _PRECISION_NAMES.get(str(getattr(jax.config, "jax_default_matmul_precision", None)), "default")
    if _is_algorithm(precision):
        return "default"
    if isinstance(precision, tuple | list) and len(precision) == 2 and not any(map(_is_algorithm, precision)):
        lhs, rhs = (precision_name(side) for side in cast(tuple[lax.PrecisionLike, ...], precision))
        return lhs if lhs == rhs else f"{lhs},{rhs}"
    if isinstance(precision, str):
        if precision not in _PRECISION_NAMES:
            raise RefusedValue(f"precision={precision!r}; accepted: {', '.join(map(repr, _PRECISION_NAMES))}")
        return _PRECISION_NAMES[precision]
    if not isinstance(precision, lax.Precision):
        raise RefusedValue(f"precision={precision!r}; accepted: None, a jax.lax.Precision, its name, or a pair of them")
    return precision.name.lower()


def _is_algorithm(precision: object) -> bool:
    if isinstance(precision, str):
        return precision in lax.DotAlgorithmPreset.__members__
    return isinstance(precision, lax.DotAlgorithm | lax.DotAlgorithmPreset)


# lax's names and their aliases.
_PRECISION_NAMES = {
    "default": "default",
    "fastest": "default",
    "bfloat16": "default",
    "high": "high",
    "bfloat16_3x": "high",
    "tensorfloat32": "high",
    "highest": "highest",
    "float32": "highest",
}
