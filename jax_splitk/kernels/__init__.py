"""Kernel families and their registry: which family may compute what, on which platform.

A family is a module with `name`, `implementation`, `platform`, `ABI`, a frozen `Config`, one legality predicate
`supports`, `candidates`, `neighbours`, `estimate`, `workspace_bytes` and `make_plan`; see `Family`. Adding one takes
its module, its device source and a line in `FAMILIES`.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from jax_splitk.kernels import wgrad_depthwise, wgrad_gather, wgrad_grouped, wgrad_halo, wgrad_host, wgrad_sm90
from jax_splitk.plan import DevicePlan, HostPlan
from jax_splitk.problem import ConvWgradProblem
from jax_splitk.target import Target


class Family(Protocol):
    """What a kernel family's module offers."""

    name: str
    implementation: str  # the word users choose it by: "cutlass" or "host"
    platform: str  # JAX's lowering platform
    Config: type

    @property
    def ABI(self) -> int:
        """Raised when earlier tuning decisions no longer hold for the family's kernels."""
        ...

    def supports(
        self, problem: ConvWgradProblem, config: Any | None = None, target: Target | None = None
    ) -> str | None:
        """None when legal, else the reason: the value and what is accepted."""
        ...

    def preferred(self, problem: ConvWgradProblem, target: Target) -> str | None:
        """None when it should be chosen over XLA without measuring, else the reason."""
        ...

    def candidates(self, problem: ConvWgradProblem, target: Target) -> Sequence[Any]:
        """Legal configs worth considering."""
        ...

    def neighbours(self, problem: ConvWgradProblem, config: Any, target: Target) -> Sequence[Any]:
        """Configs one step from `config`, for refining a search; they need not be legal."""
        ...

    def estimate(self, problem: ConvWgradProblem, config: Any, target: Target) -> float:
        """Predicted seconds."""
        ...

    def workspace_bytes(self, problem: ConvWgradProblem, config: Any) -> int: ...

    def make_plan(self, problem: ConvWgradProblem, config: Any) -> DevicePlan | HostPlan: ...


FAMILIES: dict[str, tuple[Family, ...]] = {
    "conv_wgrad": (wgrad_depthwise, wgrad_grouped, wgrad_halo, wgrad_gather, wgrad_sm90, wgrad_host),
}


def families(op: str, platform: str | None = None) -> tuple[Family, ...]:
    """Families of an operation, of one platform or of all."""
    return tuple(f for f in FAMILIES[op] if platform is None or f.platform == platform)
