"""Weight gradients in float64, by one matrix product for each filter tap: independent of any convolution code."""

import itertools

import jax
import numpy as np
from jax import numpy as jnp

from jax_splitk.problem import ConvWgradProblem


def conv_wgrad(problem: ConvWgradProblem, lhs: jax.Array, g: jax.Array) -> np.ndarray:
    """dW in float64, [*kernel, C/groups, K]; lhs_dilation and batch groups are not covered."""
    groups = problem.feature_group_count
    with jax.enable_x64(True):
        lhs, g = jnp.asarray(lhs, jnp.float64), jnp.asarray(g, jnp.float64)
        # Zeros around the input, as far as any window reaches.
        pads = [(0, 0)]
        for size, out, k, stride, dilation, (low, _) in zip(
            problem.input_spatial,
            problem.output_spatial,
            problem.kernel_spatial,
            problem.window_strides,
            problem.rhs_dilation,
            problem.padding,
            strict=True,
        ):
            last = (out - 1) * stride + (k - 1) * dilation + 1 - low
            pads.append((low, max(0, last - size)))
        lhs = jax.lax.pad(lhs, jnp.float64(0), [(lo, hi, 0) for lo, hi in [*pads, (0, 0)]])
        columns = jnp.reshape(g, (-1, groups, problem.out_channels // groups))
        taps = []
        for tap in itertools.product(*map(range, problem.kernel_spatial)):
            window = tuple(
                slice(t * d, t * d + (out - 1) * s + 1, s)
                for t, d, s, out in zip(
                    tap, problem.rhs_dilation, problem.window_strides, problem.output_spatial, strict=True
                )
            )
            rows = lhs[(slice(None), *window)].reshape(-1, groups, problem.in_channels // groups)
            product = jnp.einsum("xgc,xgk->cgk", rows, columns, precision="highest")
            taps.append(np.asarray(product).reshape(problem.in_channels // groups, problem.out_channels))
    return np.stack(taps).reshape(problem.out_shape)
