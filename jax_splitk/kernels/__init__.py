"""Kernel families and their registry: which family may compute what, on which platform.

A family is a module with `name`, `implementation`, `platform`, `ABI`, a frozen `Config`, one legality predicate
`supports`, `candidates`, `neighbours`, `estimate`, `workspace_bytes` and `make_plan`; see `Family`. Adding one takes
its module, its device source and a line in `FAMILIES`.
"""

from jax_splitk.kernels.family import Family as Family
from jax_splitk.kernels.quantized import fp8, stream, tiled
from jax_splitk.kernels.quantized import host as quantized_host
from jax_splitk.kernels.wgrad import depthwise, gather, grouped, halo, im2col, tf32
from jax_splitk.kernels.wgrad import host as wgrad_host

FAMILIES: dict[str, tuple[Family, ...]] = {
    "conv_wgrad": (depthwise, grouped, tf32, halo, gather, im2col, wgrad_host),
    "quantized_matmul": (stream, fp8.FAMILY, tiled.FAMILY, quantized_host),
}


def families(op: str, platform: str | None = None) -> tuple[Family, ...]:
    """Families of an operation, of one platform or of all."""
    return FAMILIES[op] if platform is None else tuple(f for f in FAMILIES[op] if f.platform == platform)
