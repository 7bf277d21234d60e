"""The kernel families of each operation: those of the package, and those that `kernels.register` added.

`kernels` imports this when a family is first needed: building the dataclasses of these modules takes 0.1 s, and
`import jax_splitk` needs none of them.
"""

from jax_splitk.kernels.base.adapted import Adapted, Merged, Padded
from jax_splitk.kernels.base.family import Family
from jax_splitk.kernels.contraction import few_rows, halo, patch
from jax_splitk.kernels.contraction import im2col as conv_im2col
from jax_splitk.kernels.contraction import products as tma
from jax_splitk.kernels.contraction import wgrad as im2col
from jax_splitk.kernels.cpu import dot as as_wgrad
from jax_splitk.kernels.cpu import experts as experts_host
from jax_splitk.kernels.cpu import passes as conv_host
from jax_splitk.kernels.cpu import quantized as quantized_host
from jax_splitk.kernels.cpu import ragged as ragged_host
from jax_splitk.kernels.cpu import wgrad as wgrad_host
from jax_splitk.kernels.depthwise import passes as conv_depthwise
from jax_splitk.kernels.depthwise import toeplitz
from jax_splitk.kernels.depthwise import wgrad as depthwise
from jax_splitk.kernels.depthwise import wgrad_any as depthwise_any
from jax_splitk.kernels.gather import fprop as conv_gather
from jax_splitk.kernels.gather import wgrad as gather
from jax_splitk.kernels.grouped import passes as conv_grouped
from jax_splitk.kernels.grouped import wgrad as grouped
from jax_splitk.kernels.quantized import experts, fp8, stream, tiled, transposed
from jax_splitk.kernels.ragged import ragged_k, ragged_m
from jax_splitk.kernels.tf32 import wgrad as tf32

# Families that use others' kernels, with operations of XLA's around them.
ADAPTED: dict[str, tuple[Adapted, ...]] = {
    "conv_fprop": (
        Padded(conv_grouped.FPROP, "fprop_grouped_padded", where_refused=True),
        Padded(conv_im2col.FPROP, "fprop_im2col_padded", long_rows=True),
    ),
    "conv_dgrad": (
        Padded(conv_grouped.DGRAD, "dgrad_grouped_padded", where_refused=True),
        Padded(conv_im2col.DGRAD, "dgrad_im2col_padded", long_rows=True),
    ),
    "conv_wgrad": (
        Padded(grouped.FAMILY, "wgrad_grouped_padded", where_refused=True),
        Padded(im2col.FAMILY, "wgrad_im2col_padded", long_rows=True),
        Merged(tf32.FAMILY, "wgrad_tf32_merged"),
        Merged(gather.FAMILY, "wgrad_gather_merged", grouped.FAMILY, im2col.FAMILY),
    ),
}
FAMILIES: dict[str, tuple[Family, ...]] = {
    "conv_fprop": (
        *(m.FPROP for m in (conv_depthwise, toeplitz, conv_grouped, patch, conv_gather, conv_im2col)),
        *ADAPTED["conv_fprop"],
        conv_host.FPROP,
    ),
    "conv_dgrad": (
        *(m.DGRAD for m in (conv_depthwise, toeplitz, conv_grouped, conv_gather, conv_im2col)),
        *ADAPTED["conv_dgrad"],
        conv_host.DGRAD,
    ),
    "conv_wgrad": (
        *(m.FAMILY for m in (depthwise, grouped, tf32, halo, gather, im2col, depthwise_any)),
        patch.WGRAD,
        *ADAPTED["conv_wgrad"],
        wgrad_host.FAMILY,
    ),
    "dot_general": (tma.FAMILY, few_rows.FAMILY, as_wgrad.HOST),
    "quantized_matmul": tuple(m.FAMILY for m in (stream, fp8, tiled, quantized_host)),
    "quantized_matmul_epilogue": tuple(m.FAMILY for m in (stream, fp8, tiled)),
    "quantized_matmul_transposed": (transposed.FAMILY,),
    "quantized_ragged_dot": (experts.FAMILY, experts_host.FAMILY),
    "quantized_ragged_dot_epilogue": (experts.FAMILY,),
    "ragged_dot": tuple(module.FAMILY for module in (ragged_m, ragged_k, ragged_host)),
}
