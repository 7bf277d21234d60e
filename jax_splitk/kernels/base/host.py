"""Shared by the families for the CPU: split products on XLA's threads, in float32 (see ffi/host_product.h)."""

import abc
import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar, TypeVar

import numpy as np
from jax import numpy as jnp

from jax_splitk.kernels.base.cost_model import HostRates, rates
from jax_splitk.kernels.base.family import Family
from jax_splitk.runtime.around import Around, Cast
from jax_splitk.runtime.plan import CustomCall
from jax_splitk.runtime.target import Target

_Problem = TypeVar("_Problem")
_Config = TypeVar("_Config")

INT32_MAX = 2**31 - 1
MAX_SPLITS = 256

# The constants of the workspace formula; ffi/host_product.h has the same.
_ALIGN = 64
_MAX_SLOTS = 64
_TILE_COLUMNS = 64
_CHUNK = 24
_ROWS_AT_ONCE = 6
_RUN = 512


@dataclasses.dataclass(frozen=True)
class Product:
    """A product of [rows, k] by [k, columns] for each group, and its division into tasks.

    Twin of `Product` in ffi/host_product.h, which refuses any other workspace.

    Attributes:
      depth: elements of k that are loaded at a time.
      row_block: rows of a task.
      more_blocks: further blocks of rows, if each of several parts of the rows ends in a block of its own.
      span: number of parts of a group's rows and columns; the result has only products of rows and columns of the same
        part.
      row_cost, column_cost: time to load an element of each operand, relative to a plain element.
    """

    rows: int
    k: int
    columns: int
    groups: int
    splits: int
    depth: int
    row_block: int
    span: int = 1
    row_cost: float = 1.0
    column_cost: float = 1.0
    more_blocks: int = 0

    @property
    def tasks(self) -> int:
        blocks = ceil_div(self.rows, self.row_block) + self.more_blocks
        return self.splits * blocks * self.groups * ceil_div(self.columns, _TILE_COLUMNS)

    @property
    def slots(self) -> int:
        """The number of threads that have memory of their own."""
        return min(self.tasks, _MAX_SLOTS)

    @property
    def partial_bytes(self) -> int:
        """Bytes of the partial sums of all splits."""
        size = self.rows // self.span * self.groups * self.columns
        return 0 if self.splits == 1 else self.splits * _rounded_up(4 * size, _ALIGN)

    @property
    def workspace_bytes(self) -> int:
        """Partial sums, each thread's operands and sums, alignment slack."""
        sums = _rounded_up(min(self.row_block, self.rows), _ROWS_AT_ONCE) * _TILE_COLUMNS
        sums *= 3 if self.k > _RUN * self.splits else 1
        slot_bytes = 4 * (self.depth * (_TILE_COLUMNS + _CHUNK) + sums)
        return _ALIGN + self.partial_bytes + self.slots * slot_bytes

    def seconds(self, target: Target) -> float:
        """Predicted seconds: the largest task, times the number of tasks of a thread, plus the addition of the partial
        sums."""
        of: HostRates = rates(target.platform, target.device_kind)
        rows, columns = min(self.row_block, self.rows), min(_TILE_COLUMNS, self.columns)
        products = _rounded_up(rows, _ROWS_AT_ONCE) * _rounded_up(columns, _TILE_COLUMNS // 2)
        loads = rows * self.row_cost / of.row_rate + columns * self.column_cost / of.column_rate
        each = loads + 2 * products / of.flops
        task = of.task_seconds + ceil_div(self.k, self.splits) * each
        rounds = ceil_div(self.tasks, max(1, min(target.cores, self.slots)))
        sums = 0.0
        if self.splits > 1:
            sums = of.task_seconds + 2 * self.partial_bytes / (of.sum_bytes * min(target.cores, 4))
        return of.call_seconds + rounds * task + sums


class HostFamily(Family[_Problem, _Config]):
    """A C++ handler of the package, which runs on XLA's threads on any CPU. A config's fields are numbers.

    Attributes:
      handler: its name.
    """

    implementation = "host"
    handler: ClassVar[str]

    @abc.abstractmethod
    def product(self, problem: _Problem, config: _Config) -> Product:
        """The product that the handler computes."""

    @abc.abstractmethod
    def divisions(self, problem: _Problem, target: Target) -> Iterable[_Config]:
        """Configs of which the legal ones are the candidates."""

    @abc.abstractmethod
    def attributes(self, problem: _Problem) -> dict[str, Any]:
        """The handler's attributes beside the config's fields."""

    def candidates(self, problem: _Problem, target: Target) -> list[_Config]:
        return [c for c in self.divisions(problem, target) if self.config_refusal(problem, c) is None]

    def estimate(self, problem: _Problem, config: _Config, target: Target) -> float:
        return self.product(problem, config).seconds(target)

    def neighbours(self, problem: _Problem, config: Any, target: Target) -> list[Any]:
        """Each of the config's numbers doubled and halved."""
        numbers = dataclasses.asdict(config).items()
        found = [dataclasses.replace(config, **{name: n}) for name, value in numbers for n in (value // 2, 2 * value)]
        return [changed for changed in found if self.config_refusal(problem, changed) is None]

    def workspace_bytes(self, problem: _Problem, config: _Config) -> int:
        return self.product(problem, config).workspace_bytes

    def plan(self, problem: _Problem, config: _Config) -> CustomCall:
        fields = {name: np.int64(value) for name, value in vars(config).items()}
        workspace = self.workspace_bytes(problem, config)
        return CustomCall(self.handler, {**self.attributes(problem), **fields}, workspace, _in_float32(problem))


def _in_float32(problem: Any) -> Around:
    """Handlers take and return float32: XLA converts from and to the problem's dtypes."""
    to = Cast("float32")
    casts = tuple(to if jnp.issubdtype(jnp.dtype(dtype), jnp.floating) else None for _, dtype in problem.operand_types)
    return Around(casts, Cast(problem.out_dtype), (problem.out_shape, to.dtype))


def too_large(problem: Any, *sizes: str) -> str | None:
    """The first of a problem's sizes that an int32 does not hold."""
    large = ((name, value) for name in sizes if (value := getattr(problem, name)) > INT32_MAX)
    return next((f"{name}={value}; accepted: at most {INT32_MAX}" for name, value in large), None)


def too_small(problem: Any) -> str | None:
    if problem.flops >= 512:
        return None
    return "the problem is so small that the call itself takes most of the time"


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def _rounded_up(size: int, multiple: int) -> int:
    return ceil_div(size, multiple) * multiple
