"""What a kernel family offers."""

from collections.abc import Sequence
from typing import Any, Protocol

from jax_splitk.runtime.plan import CustomCall, DevicePlan
from jax_splitk.runtime.target import Target


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

    def make_plan(self, problem: Any, config: Any) -> DevicePlan | CustomCall: ...
