"""Kernel families and their registry: which family may compute what, on which platform.

Adding one takes its module, its device source and a line in `FAMILIES`; see `Family`.
"""

from jax_splitk.kernels.dot import as_wgrad, tma
from jax_splitk.kernels.family import Family as Family
from jax_splitk.kernels.quantized import fp8, stream, tiled
from jax_splitk.kernels.quantized import host as quantized_host
from jax_splitk.kernels.wgrad import depthwise, gather, grouped, halo, im2col, tf32
from jax_splitk.kernels.wgrad import host as wgrad_host

FAMILIES: dict[str, tuple[Family, ...]] = {
    "conv_wgrad": tuple(m.FAMILY for m in (depthwise, grouped, tf32, halo, gather, im2col, wgrad_host)),
    "dot_general": (tma.FAMILY, as_wgrad.TF32, as_wgrad.HOST),
    "quantized_matmul": tuple(m.FAMILY for m in (stream, fp8, tiled, quantized_host)),
}


def families(op: str, platform: str | None = None) -> tuple[Family, ...]:
    """Families of an operation, of one platform or of all."""
    return FAMILIES[op] if platform is None else tuple(f for f in FAMILIES[op] if f.platform == platform)
