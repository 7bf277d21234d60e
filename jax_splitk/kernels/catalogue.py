"""The package's kernel families, and those that `kernels.register` added, by operation.

`kernels` imports this when a family is first needed: building the dataclasses of these modules takes 0.1 s, and
`import jax_splitk` needs none of them.
"""

from jax_splitk.kernels.conv import depthwise as conv_depthwise
from jax_splitk.kernels.conv import gather as conv_gather
from jax_splitk.kernels.conv import grouped as conv_grouped
from jax_splitk.kernels.conv import host as conv_host
from jax_splitk.kernels.conv import im2col as conv_im2col
from jax_splitk.kernels.conv import patch, toeplitz
from jax_splitk.kernels.dot import as_wgrad, tma
from jax_splitk.kernels.family import Family
from jax_splitk.kernels.quantized import fp8, stream, tiled
from jax_splitk.kernels.quantized import host as quantized_host
from jax_splitk.kernels.ragged import host as ragged_host
from jax_splitk.kernels.ragged import ragged_k, ragged_m
from jax_splitk.kernels.wgrad import depthwise, depthwise_any, gather, grouped, halo, im2col, tf32
from jax_splitk.kernels.wgrad import host as wgrad_host

FAMILIES: dict[str, tuple[Family, ...]] = {
    "conv_fprop": (
        *(module.FPROP for module in (conv_depthwise, toeplitz, conv_grouped, patch)),
        conv_gather.FAMILY,
        *(module.FPROP for module in (conv_im2col, conv_host)),
    ),
    "conv_dgrad": tuple(m.DGRAD for m in (conv_depthwise, toeplitz, conv_grouped, conv_im2col, conv_host)),
    "conv_wgrad": (
        *(m.FAMILY for m in (depthwise, grouped, tf32, halo, gather, im2col, depthwise_any)),
        patch.WGRAD,
        wgrad_host.FAMILY,
    ),
    "dot_general": (tma.FAMILY, as_wgrad.HOST),
    "quantized_matmul": tuple(m.FAMILY for m in (stream, fp8, tiled, quantized_host)),
    "ragged_dot": tuple(module.FAMILY for module in (ragged_m, ragged_k, ragged_host)),
}
