"""Kernel families and their registry, by operation and platform.

A new family needs a module, a device source and a line in `catalogue.FAMILIES`; see `Family`. `register` adds a family
of another package. The families' modules are imported when a family is first needed.
"""

import dataclasses
from typing import Any

from jax_splitk.kernels.base.family import CudaFamily as CudaFamily
from jax_splitk.kernels.base.family import Family as Family
from jax_splitk.kernels.base.family import field_refusal as field_refusal


def register(op: str, family: Family[Any, Any]) -> None:
    """Adds a family from outside of the package to an operation: from then on selection, the tuner, the caches,
    `config=` and `explain` treat it as one of the package's.

    Call it when the module that brings the family is imported. Functions that were lowered before do not change. Stored
    decisions for problems that the family serves are measured again, since they were made without it.

    Args:
      op: "conv_fprop", "conv_dgrad", "conv_wgrad", "dot_general", "quantized_matmul", "quantized_matmul_epilogue",
        "quantized_matmul_transposed", "ragged_dot", "quantized_ragged_dot" or "quantized_ragged_dot_epilogue".
      family: an instance of a subclass of `CudaFamily` or `Family`; its `Config` is a frozen dataclass, and no other
        family has its name or `Config`.

    Raises:
      TypeError: `family` is not an instance of a `Family`, or its `Config` is not a frozen dataclass.
      ValueError: the operation is unknown, or another family has the name or the `Config`.
    """
    every = _catalogue()
    if op not in every:
        raise ValueError(f"op={op!r}; accepted: {', '.join(map(repr, every))}")
    if not isinstance(family, Family):
        raise TypeError(f"family={family!r} of type {type(family).__name__}; accepted: an instance of a Family")
    config = family.Config
    if not dataclasses.is_dataclass(config) or not config.__dataclass_params__.frozen:  # pyright: ignore
        raise TypeError(f"{family}'s Config is {config!r}; accepted: a frozen dataclass")
    for other in (other for those in every.values() for other in those):
        if other.name == family.name or other.Config is config:
            raise ValueError(f"family {family} with {config.__module__}.{config.__name__}; {other} has one of these")
    every[op] = (*every[op], family)


def families(op: str, platform: str | None = None) -> tuple[Family, ...]:
    """The families of an operation, for one platform or for all."""
    every = _catalogue()[op]
    return every if platform is None else tuple(family for family in every if family.platform == platform)


def _catalogue() -> dict[str, tuple[Family, ...]]:
    from jax_splitk.kernels.catalogue import FAMILIES  # noqa: PLC0415 - loaded late: see its docstring

    return FAMILIES
