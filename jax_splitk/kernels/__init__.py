"""Kernel families and their registry: which family may compute what, on which platform.

Adding one takes its module, its device source and a line in `FAMILIES`; see `Family`. One from outside of the package
is added by `register`.
"""

import dataclasses
from typing import Any

from jax_splitk.kernels.conv import depthwise as conv_depthwise
from jax_splitk.kernels.conv import gather as conv_gather
from jax_splitk.kernels.conv import grouped as conv_grouped
from jax_splitk.kernels.conv import host as conv_host
from jax_splitk.kernels.conv import im2col as conv_im2col
from jax_splitk.kernels.conv import patch, toeplitz
from jax_splitk.kernels.dot import as_wgrad, tma
from jax_splitk.kernels.family import CudaFamily as CudaFamily
from jax_splitk.kernels.family import Family as Family
from jax_splitk.kernels.family import field_refusal as field_refusal
from jax_splitk.kernels.quantized import fp8, stream, tiled
from jax_splitk.kernels.quantized import host as quantized_host
from jax_splitk.kernels.wgrad import depthwise, depthwise_any, gather, grouped, halo, im2col, tf32
from jax_splitk.kernels.wgrad import host as wgrad_host

FAMILIES: dict[str, tuple[Family, ...]] = {
    "conv_fprop": (
        *(module.FPROP for module in (conv_depthwise, toeplitz, conv_grouped, patch)),
        conv_gather.FAMILY,
        *(module.FPROP for module in (conv_im2col, conv_host)),
    ),
    "conv_dgrad": tuple(m.DGRAD for m in (conv_depthwise, toeplitz, conv_grouped, patch, conv_im2col, conv_host)),
    "conv_wgrad": (
        *(m.FAMILY for m in (depthwise, grouped, tf32, halo, gather, im2col, depthwise_any)),
        patch.WGRAD,
        wgrad_host.FAMILY,
    ),
    "dot_general": (tma.FAMILY, as_wgrad.TF32, as_wgrad.HOST),
    "quantized_matmul": tuple(m.FAMILY for m in (stream, fp8, tiled, quantized_host)),
}


def register(op: str, family: Family[Any, Any]) -> None:
    """Adds a family from outside of the package to an operation: from then on selection, the tuner, the caches,
    `config=` and `explain` treat it as one of the package's.

    Call it when the module that brings the family is imported. What was lowered before stays as it is. Decisions that
    were stored for problems that the family serves are measured again, since they were made without it.

    Args:
      op: "conv_fprop", "conv_dgrad", "conv_wgrad", "quantized_matmul" or "dot_general".
      family: an instance of a subclass of `CudaFamily` or `Family`; `Config` is a frozen dataclass, no
        other family has its name or its `Config`.

    Raises:
      TypeError: `family` is no instance of a `Family`, or its `Config` is no frozen dataclass.
      ValueError: an unknown operation; a name or a `Config` that another family has.
    """
    if op not in FAMILIES:
        raise ValueError(f"op={op!r}; accepted: {', '.join(map(repr, FAMILIES))}")
    if not isinstance(family, Family):
        raise TypeError(f"family={family!r} of type {type(family).__name__}; accepted: an instance of a Family")
    config = family.Config
    if not dataclasses.is_dataclass(config) or not config.__dataclass_params__.frozen:  # pyright: ignore
        raise TypeError(f"{family}'s Config is {config!r}; accepted: a frozen dataclass")
    for other in (other for those in FAMILIES.values() for other in those):
        if other.name == family.name or other.Config is config:
            raise ValueError(f"family {family} with {config.__module__}.{config.__name__}; {other} has one of these")
    FAMILIES[op] = (*FAMILIES[op], family)


def families(op: str, platform: str | None = None) -> tuple[Family, ...]:
    """Families of an operation, of one platform or of all."""
    return FAMILIES[op] if platform is None else tuple(f for f in FAMILIES[op] if f.platform == platform)
