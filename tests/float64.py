"""Passes of a convolution in float64, by matrix products over windows of the input: independent of any convolution
code."""

import functools
import math
from collections.abc import Iterator

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from jax_splitk.problems.conv_wgrad import ConvProblem, ConvWgradProblem

# Most bytes of an operand's images in float64 at a time: processes that share a GPU never return its memory.
PART_BYTES = 256 << 20


def conv_wgrad(problem: ConvWgradProblem, lhs: jax.Array, g: jax.Array) -> np.ndarray:
    """dW in float64, [*kernel, C/groups, K], by one matrix product for each filter tap and part of the batch on the
    default device.

    Batch groups are not covered, and a dilated lhs only on the host.
    """
    if set(problem.lhs_dilation) != {1}:
        return conv_wgrad_on_host(problem, *(np.asarray(array, np.float64) for array in (lhs, g)))
    image_bytes = 8 * max(math.prod(problem.lhs_shape[1:]), math.prod(problem.g_shape[1:]))
    images = max(1, PART_BYTES // image_bytes)
    parts = (slice(first, first + images) for first in range(0, problem.batch, images))
    return sum((_conv_wgrad(problem, lhs[part], g[part]) for part in parts), np.zeros(problem.out_shape))


def _conv_wgrad(problem: ConvWgradProblem, lhs: jax.Array, g: jax.Array) -> np.ndarray:
    with jax.enable_x64(True):
        return np.asarray(_products_of_taps(problem, lhs, g)).reshape(problem.out_shape)


@functools.partial(jax.jit, static_argnums=0)
def _products_of_taps(problem: ConvWgradProblem, lhs: jax.Array, g: jax.Array) -> jax.Array:
    """One matrix product for each tap, in a loop: XLA compiles it once for a shape."""
    p, groups, (c, k) = problem, problem.feature_group_count, problem.group_channels
    extents = _extents(p)
    sizes = zip(p.input_spatial, p.padding, extents, strict=True)
    edges = [(0, 0, 0), *((low, extent - size - low, 0) for size, (low, _), extent in sizes), (0, 0, 0)]
    covered = lax.pad(lhs.astype(jnp.float64), jnp.float64(0), edges)  # or cropped
    columns = g.astype(jnp.float64).reshape(-1, groups, k)
    reach = [(out - 1) * stride + 1 for out, stride in zip(p.output_spatial, p.window_strides, strict=True)]

    def product(tap: jax.Array) -> jax.Array:
        start = [0, *(tap * np.array(p.rhs_dilation)), 0]
        window = lax.dynamic_slice(covered, start, (lhs.shape[0], *reach, p.in_channels))
        rows = lax.slice(window, [0] * window.ndim, window.shape, (1, *p.window_strides, 1)).reshape(-1, groups, c)
        return jnp.einsum("xgc,xgk->cgk", rows, columns, precision="highest")

    return lax.map(product, jnp.array(list(np.ndindex(*p.kernel_spatial))))


def conv_wgrad_on_host(p: ConvWgradProblem, lhs: np.ndarray, g: np.ndarray) -> np.ndarray:
    """dW, tap by tap, by one matrix product for each feature group; batch groups are not covered."""
    groups, (c, k) = p.feature_group_count, p.group_channels
    covered = _covered(p, lhs).reshape(p.batch, *_extents(p), groups, c)
    given = g.astype(np.float64).reshape(p.reduction_size, groups, k)
    out = np.zeros((*p.kernel_spatial, c, groups, k))
    for tap, pixels in _taps(p):
        rows = covered[pixels].reshape(p.reduction_size, groups, c)
        if c < 16:  # matmul is up to 60 times as slow: the elements of a row are far apart in memory
            out[tap] = np.einsum("xgc,xgk->cgk", rows, given)
        else:
            out[tap] = (rows.transpose(1, 2, 0) @ given.transpose(1, 0, 2)).transpose(1, 0, 2)
    return out.reshape(p.out_shape)


def conv_fprop_on_host(p: ConvProblem, lhs: np.ndarray, rhs: np.ndarray) -> np.ndarray:
    """The forward pass, tap by tap."""
    groups, (c, k) = p.feature_group_count, p.group_channels
    weight = rhs.astype(np.float64).reshape(*p.kernel_spatial, c, groups, k)
    covered = _covered(p, lhs).reshape(p.batch, *_extents(p), groups, c)
    out = np.zeros((p.batch, *p.output_spatial, groups, k))
    for tap, pixels in _taps(p):
        out += _product(covered[pixels], weight[tap])
    return out.reshape(p.g_shape)


def conv_dgrad_on_host(p: ConvProblem, g: np.ndarray, rhs: np.ndarray) -> np.ndarray:
    """The input gradient, tap by tap: each tap adds to the pixels that it reads."""
    groups, (c, k) = p.feature_group_count, p.group_channels
    weight = rhs.astype(np.float64).reshape(*p.kernel_spatial, c, groups, k)
    covered = np.zeros((p.batch, *_extents(p), groups, c))
    given = g.astype(np.float64).reshape(p.batch, *p.output_spatial, groups, k)
    for tap, pixels in _taps(p):
        covered[pixels] += _product(given, weight[tap].transpose(2, 1, 0))
    out = np.zeros(p.lhs_shape)
    inside, places = _places(p)
    out[inside] = covered.reshape(p.batch, *_extents(p), p.in_channels)[places]
    return out


def _product(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """[..., groups, a] by [a, groups, b]."""
    if w.shape[0] == 1:
        return x * w[0]
    # Each group's rows of pixels are a matrix product.
    of_group = w.transpose(1, 0, 2).reshape(w.shape[1], *[1] * (x.ndim - 3), w.shape[0], w.shape[2])
    return np.moveaxis(np.moveaxis(x, -2, 0) @ of_group, 0, -2)


def _taps(p: ConvProblem) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """Each tap, and the pixels of the dilated and padded input that it reads."""
    for tap in np.ndindex(*p.kernel_spatial):
        steps = zip(tap, p.rhs_dilation, p.output_spatial, p.window_strides, strict=True)
        starts = [(at * dilation, (out - 1) * stride, stride) for at, dilation, out, stride in steps]
        yield tap, (slice(None), *(slice(start, start + reach + 1, step) for start, reach, step in starts))


def _extents(p: ConvProblem) -> list[int]:
    """The sizes of the part of the dilated and padded (or cropped) input that the windows cover."""
    sizes = zip(p.output_spatial, p.window_strides, p.kernel_spatial, p.rhs_dilation, strict=True)
    return [(out - 1) * stride + (k - 1) * dilation + 1 for out, stride, k, dilation in sizes]


def _places(p: ConvProblem) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """The covered pixels of the input, and their places in the covered part."""
    inside, places = [np.arange(p.batch)], [np.arange(p.batch)]
    steps = zip(p.input_spatial, p.lhs_dilation, p.padding, _extents(p), strict=True)
    for size, dilation, (low, _), extent in steps:
        place = np.arange(size) * dilation + low
        inside.append(np.flatnonzero((place >= 0) & (place < extent)))
        places.append(place[inside[-1]])
    return np.ix_(*inside), np.ix_(*places)


def _covered(p: ConvProblem, lhs: np.ndarray) -> np.ndarray:
    """The part of the input that the windows cover: [batch, pixels of each axis, C]."""
    covered = np.zeros((p.batch, *_extents(p), p.in_channels))
    inside, places = _places(p)
    covered[places] = lhs[inside]
    return covered


def rounded(exact: np.ndarray, dtype: str) -> np.ndarray:
    """Rounds to float32 first, and then to `dtype`, as results are defined."""
    with np.errstate(over="ignore"):
        return exact.astype(np.float32).astype(jnp.dtype(dtype))


ON_HOST = {"conv_fprop": conv_fprop_on_host, "conv_dgrad": conv_dgrad_on_host, "conv_wgrad": conv_wgrad_on_host}
