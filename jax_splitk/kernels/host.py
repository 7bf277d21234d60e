"""What the families for the CPU share."""

import abc
from typing import Any, ClassVar, TypeVar

from jax_splitk.kernels.family import Family
from jax_splitk.runtime.plan import CustomCall
from jax_splitk.runtime.target import Target

_Problem = TypeVar("_Problem")
_Config = TypeVar("_Config")

INT32_MAX = 2**31 - 1

# The constants of the workspace formulas; ffi/host_split.h has the same.
ALIGN = 64
MAX_SLOTS = 64
MAX_SPLITS = 256

# What one core of an AMD EPYC (Zen 4, 2.6 GHz base) did. Only the proportions of this and of the families' rates
# matter: they rank the configs of one problem.
PARTIAL_RATE = 2e10  # bytes a second
TASK_SECONDS = 1e-6
CALL_SECONDS = 1e-5


class HostFamily(Family[_Problem, _Config]):
    """A C++ handler, which runs on XLA's threads on any CPU.

    Attributes:
      handler: the name of its custom call, which is registered for the platform "cpu" (`jax.ffi.register_ffi_target`).
    """

    implementation = "host"
    handler: ClassVar[str]

    @abc.abstractmethod
    def attributes(self, problem: _Problem, config: _Config) -> dict[str, Any]:
        """What the handler is told."""

    def plan(self, problem: _Problem, config: _Config) -> CustomCall:
        workspace = self.workspace_bytes(problem, config)
        return CustomCall(self.handler, self.attributes(problem, config), workspace)


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def aligned(size: int) -> int:
    """In whole cache lines."""
    return ceil_div(size, ALIGN) * ALIGN


def halved_and_doubled(value: int, most: int, multiple: int = 1) -> list[int]:
    """Half and twice the value, in multiples and at most `most`, but not itself."""
    return sorted({min(most, value * 2), max(multiple, value // 2 // multiple * multiple)} - {value})


def sum_seconds(moved: int, target: Target) -> float:
    """What adding up partial sums takes; nothing where no bytes are moved."""
    return TASK_SECONDS + moved / (PARTIAL_RATE * min(target.cores, 4)) if moved else 0.0
