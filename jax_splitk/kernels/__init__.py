"""Kernel families and their registry: which family may compute what, on which platform.

A family is a module with `name`, `implementation`, `platform`, `ABI`, a frozen `Config`, one legality predicate
`supports`, `candidates`, `neighbours`, `estimate`, `workspace_bytes` and `make_plan`; see `Family`. Adding one takes
its module, its device source and a line in `FAMILIES`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from jax_splitk.kernels import (
    mixed_fp8,
    mixed_host,
    mixed_stream,
    mixed_wgmma,
    wgrad_depthwise,
    wgrad_gather,
    wgrad_grouped,
    wgrad_halo,
    wgrad_host,
    wgrad_sm90,
    wgrad_tf32,
)
from jax_splitk.plan import DevicePlan, HostPlan
from jax_splitk.target import Target


class Problem(Protocol):
    """What an operation computes: a frozen, hashable dataclass of integers, strings and tuples of them."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @property
    def op(self) -> str:
        """The operation's name, a key of `FAMILIES`."""
        ...

    @property
    def out_shape(self) -> tuple[int, ...]: ...

    @property
    def out_dtype(self) -> str: ...

    @property
    def limit(self) -> str | None:
        """Why no kernel on any platform takes it, None where one may."""
        ...

    @property
    def flops(self) -> int: ...

    @property
    def bytes_moved(self) -> int:
        """The fewest bytes any implementation must move."""
        ...

    def validate(self) -> None:
        """Raises ValueError unless the fields have the right types and belong together."""
        ...


class Family(Protocol):
    """What a kernel family's module offers. `problem` is of the problem type of the family's operation."""

    name: str
    implementation: str  # the word users choose it by: "cutlass" or "host"
    platform: str  # JAX's lowering platform
    Config: type

    @property
    def ABI(self) -> int:
        """Raised when earlier tuning decisions no longer hold for the family's kernels."""
        ...

    def supports(self, problem: Any, config: Any | None = None, target: Target | None = None) -> str | None:
        """None when legal, else the reason: the value and what is accepted."""
        ...

    def preferred(self, problem: Any, target: Target) -> str | None:
        """None when it should be chosen over XLA without measuring, else the reason."""
        ...

    def candidates(self, problem: Any, target: Target) -> Sequence[Any]:
        """Legal configs worth considering."""
        ...

    def neighbours(self, problem: Any, config: Any, target: Target) -> Sequence[Any]:
        """Configs one step from `config`, for refining a search; they need not be legal."""
        ...

    def estimate(self, problem: Any, config: Any, target: Target) -> float:
        """Predicted seconds."""
        ...

    def workspace_bytes(self, problem: Any, config: Any) -> int: ...

    def make_plan(self, problem: Any, config: Any) -> DevicePlan | HostPlan: ...


FAMILIES: dict[str, tuple[Family, ...]] = {
    "conv_wgrad": (wgrad_depthwise, wgrad_grouped, wgrad_tf32, wgrad_halo, wgrad_gather, wgrad_sm90, wgrad_host),
    "quantized_matmul": (mixed_stream, mixed_fp8, mixed_wgmma, mixed_host),
}


def families(op: str, platform: str | None = None) -> tuple[Family, ...]:
    """Families of an operation, of one platform or of all."""
    return FAMILIES[op] if platform is None else tuple(f for f in FAMILIES[op] if f.platform == platform)
