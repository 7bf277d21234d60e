"""Candidates, which may compute a problem, and choices, which selection returns."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from jax_splitk.kernels import Family
from jax_splitk.problems.conv_epilogue import decisive
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime.plan import CustomCall, DevicePlan
from jax_splitk.runtime.target import Target


@dataclasses.dataclass(frozen=True, repr=False)
class Candidate:
    """A kernel family with a config, or `XLA`, which has neither."""

    family: Family | None = None
    config: Any = None

    @property
    def name(self) -> str:
        """The family's name in files and messages."""
        return "xla" if self.family is None else self.family.name

    @property
    def implementation(self) -> str:
        return "xla" if self.family is None else self.family.implementation

    def refusal(self, problem: Problem, target: Target) -> str | None:
        """Why it cannot compute the problem on the target, None if it can."""
        if self.family is None:
            return None
        reason = _refusal(self.family, problem, target)
        return reason if reason or self.config is None else self.family.config_refusal(problem, self.config)

    def workspace_bytes(self, problem: Problem) -> int:
        """Scratch memory that XLA allocates for it; XLA's own operation counts as 0."""
        return 0 if self.family is None else self.family.workspace_bytes(problem, self.config)

    def computed(self, problem: Problem) -> Problem:
        """What a kernel that was chosen for a problem computes of it: without its epilogue, if XLA computes that."""
        alone = decisive(problem)
        finishes = alone is problem or (self.family is not None and self.family.finishes(problem, self.config))
        return problem if finishes else alone

    def plan(self, problem: Problem) -> DevicePlan | CustomCall:
        """The launches of a legal candidate that is not XLA."""
        if self.family is None:
            raise TypeError("XLA's operation has no plan")
        return _planned(self.family.plan, problem, self.config)

    def custom_call(self, problem: Problem) -> CustomCall:
        """The custom call of a legal candidate that is not XLA; raises the errors of compiling its kernels."""
        if self.family is None:
            raise TypeError("XLA's operation has no custom call")
        return dataclasses.replace(self.plan(problem).custom_call(), name=self.family.trace_name(problem))

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for files."""
        config = None if self.config is None else dataclasses.asdict(self.config)
        return {"family": self.name, "config": config}

    def __repr__(self) -> str:
        return f"Candidate({self})"

    def __str__(self) -> str:
        return self.name if self.config is None else f"{self.name} {self.config}"


@functools.lru_cache(maxsize=16384)  # asked several times for each pass, and for each config of a search
def _refusal(family: Family, problem: Problem, target: Target) -> str | None:
    """Why no config of the family can compute the problem on the target."""
    if family.platform != target.platform:
        return f"runs on {family.platform}, not {target.platform}"
    return family.refusal(problem, None, target)


XLA = Candidate()


@functools.lru_cache(maxsize=1024)
def _planned(plan: Callable[..., DevicePlan | CustomCall], problem: Problem, config: Any) -> DevicePlan | CustomCall:
    """The plan of a family, which is the same each time that a program is lowered."""
    return plan(problem, config)


@dataclasses.dataclass(frozen=True)
class Times:
    """Microseconds of our best candidate and of XLA; None if not known. Our best candidate is the choice, unless
    that is XLA.

    Attributes:
      predicted: whether our time is the cost model's prediction.
    """

    us: float | None = None
    xla_us: float | None = None
    predicted: bool = False


def gain(us: float, xla_us: float) -> str:
    """The gain in words, from our time and XLA's."""
    return f"gain {xla_us - us:.1f} us ({xla_us / us:.2f} times as fast)"


@dataclasses.dataclass(frozen=True)
class Choice:
    """The candidate that computes a problem.

    Attributes:
      because: what decided.
      read_times: returns the times that were measured or predicted; called only if somebody asks for them.
      kernel_blocked: whether the choice is XLA although a kernel could serve, were it not for an obstacle.
    """

    problem: Problem
    candidate: Candidate
    because: str
    read_times: Callable[[], Times] = dataclasses.field(default=Times, compare=False, repr=False)
    kernel_blocked: bool = dataclasses.field(default=False, compare=False)

    @property
    def implementation(self) -> str:
        return self.candidate.implementation

    @property
    def family(self) -> Family | None:
        return self.candidate.family

    @property
    def config(self) -> Any:
        return self.candidate.config

    @functools.cached_property
    def workspace_bytes(self) -> int:
        return self.candidate.workspace_bytes(self.problem)

    @functools.cached_property
    def times(self) -> Times:
        return self.read_times()

    @functools.cached_property
    def why(self) -> str:
        """One sentence, for logs and `jax_splitk.explain`."""
        us, xla_us = self.times.us, self.times.xla_us
        if us is not None and self.times.predicted:
            return f"{self.because} ({us:.1f} us predicted)"
        if us is None or (xla_us is None and self.candidate == XLA):
            return self.because
        if xla_us is None:
            return f"{self.because}: {us:.1f} us"
        if self.candidate == XLA:
            return f"{self.because}: XLA {xla_us:.1f} us, ours {us:.1f} us"
        return f"{self.because}: {us:.1f} us, XLA {xla_us:.1f} us"
