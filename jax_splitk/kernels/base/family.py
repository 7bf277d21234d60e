"""Kernel families: their Config, refusals, candidates, estimates and plans."""

import abc
import collections
import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from jax import numpy as jnp

from jax_splitk.kernels.base import cost_model
from jax_splitk.kernels.base.work import Work
from jax_splitk.kernels.device.structs import Struct, declarations
from jax_splitk.problems.conv_wgrad import ConvProblem
from jax_splitk.problems.problem import Problem, nbytes
from jax_splitk.runtime.plan import Buffer, CustomCall, DevicePlan, Im2colMap, Launch, TiledMap, tensor_map_strides
from jax_splitk.runtime.source import Source
from jax_splitk.runtime.target import Target, hopper_refusal

_Problem = TypeVar("_Problem")
_Config = TypeVar("_Config")

# Number of candidates that are ranked by more than the rates: ranking thousands would take a tenth of a second.
_PROMISING = 128

# JAX's platform on which an implementation runs.
_PLATFORMS = {"cutlass": "cuda", "host": "cpu"}


class Family(abc.ABC, Generic[_Problem, _Config]):
    """One way to compute an operation's problems. `kernels.catalogue.FAMILIES` has an instance.

    Attributes:
      name: no other family has it.
      implementation: the word with which users choose it: "cutlass" or "host".
      ABI: raised when earlier tuning decisions no longer hold for the family's kernels.
      Config: a frozen dataclass with the parameters that the tuner chooses.
      competes: whether the family is considered for implied passes.
      few_rows: whether it is for products of few rows, whose time is that of the bytes of one operand.
      traced_as: its name in HLO and in profiles. A `Translated` family has the name of the family that it uses.
    """

    name: str
    implementation: str
    ABI: int
    competes: ClassVar[bool] = True
    few_rows: ClassVar[bool] = False

    def __init__(self, config: type[_Config], name: str | None = None) -> None:
        """Takes a frozen dataclass of configs, and a name if the class has none."""
        self.name = self.traced_as = name or self.name
        self.Config = config

    def __repr__(self) -> str:
        return self.name

    @property
    def platform(self) -> str:
        """JAX's lowering platform."""
        return _PLATFORMS[self.implementation]

    def trace_name(self, problem: Any) -> str:
        """The operation's name in HLO, with which its kernels' names begin: an identifier in C."""
        del problem
        return self.traced_as

    def refusal(self, problem: _Problem, config: _Config | None = None, target: Target | None = None) -> str | None:
        """Why the family cannot compute the problem (with that config, on that target): the value, and the accepted
        values. None if it can."""
        reason = self.target_refusal(target) or self.problem_refusal(problem)
        return self.config_refusal(problem, config) if reason is None and config is not None else reason

    def target_refusal(self, target: Target | None) -> str | None:
        """Why the family cannot run on `target`."""
        return None

    @abc.abstractmethod
    def problem_refusal(self, problem: _Problem) -> str | None:
        """Why no config can compute the problem."""

    @abc.abstractmethod
    def config_refusal(self, problem: _Problem, config: _Config) -> str | None:
        """Why `config` cannot compute a problem that the family serves."""

    def why_xla_untuned(self, problem: _Problem) -> str | None:
        """Why XLA is preferred for an unmeasured problem; None if the family is preferred."""
        return None

    def why_not_tuned(self, problem: _Problem) -> str | None:
        """Why lowering need not measure the problem: XLA is known to be as fast. None if it should."""
        del problem
        return None

    @abc.abstractmethod
    def candidates(self, problem: _Problem, target: Target) -> Sequence[_Config]:
        """Legal configs worth considering."""

    @abc.abstractmethod
    def neighbours(self, problem: _Problem, config: _Config, target: Target) -> Sequence[_Config]:
        """Configs one step from `config`, for refining a search; they need not be legal."""

    def swept(self, config: Any, splits: int) -> Sequence[_Config]:
        """`config` with another number of splits, for a sweep: one config for each way to add the splits. They need not
        be legal."""
        return [dataclasses.replace(config, splits=splits)]

    @abc.abstractmethod
    def estimate(self, problem: _Problem, config: _Config, target: Target) -> float:
        """Predicted seconds."""

    def estimates(self, problem: _Problem, configs: Sequence[_Config], target: Target) -> list[float]:
        """Predicted seconds of each config."""
        return [self.estimate(problem, config, target) for config in configs]

    def by_estimate(self, problem: _Problem, configs: Iterable[_Config], target: Target) -> list[_Config]:
        """The configs, fastest first by the estimates; equal ones in their given order."""
        found = list(dict.fromkeys(configs))
        seconds = dict(zip(found, self.estimates(problem, found, target), strict=True))
        return sorted(found, key=seconds.__getitem__)

    def best_of_each(
        self, problem: _Problem, groups: Iterable[Iterable[_Config]], count: int, target: Target
    ) -> list[_Config]:
        """The fastest `count` configs of each group by the estimates, in one order."""
        listed = [list(group) for group in groups]
        ranked = self.by_estimate(problem, itertools.chain.from_iterable(listed), target)
        place = {config: i for i, config in enumerate(ranked)}
        kept = {i for group in listed for i in sorted({place[config] for config in group})[:count]}
        return [ranked[i] for i in sorted(kept)]

    def fastest_of_kinds(
        self, problem: _Problem, configs: Iterable[_Config], kind: Callable[[_Config], Any], count: int, target: Target
    ) -> list[_Config]:
        """The configs, fastest first by the estimates, with at most `count` of each kind."""
        found, seen = [], collections.Counter[Any]()
        for config in self.by_estimate(problem, configs, target):
            seen[kind(config)] += 1
            if seen[kind(config)] <= count:
                found.append(config)
        return found

    def uncertainty(self, problem: Any, target: Target) -> float:
        """The standard deviation of the logarithms of its estimates over times."""
        del problem
        return cost_model.uncertainty(self.name, target)

    def finishes(self, problem: _Problem, config: _Config) -> bool:
        """Whether the kernel of a legal config also computes the epilogue of a `ConvEpilogueProblem`. Then `plan` and
        `workspace_bytes` get this problem. All other methods get the convolution alone."""
        del problem, config
        return False

    def workspace_bytes(self, problem: _Problem, config: _Config) -> int:
        """Bytes of the workspace, the custom call's last result."""
        return 0

    @abc.abstractmethod
    def plan(self, problem: _Problem, config: _Config) -> DevicePlan | CustomCall:
        """The custom call for a legal config."""


class CudaFamily(Family[_Problem, _Config]):
    """Kernels for Hopper, compiled from one source.

    Attributes:
      file: the device source, relative to this folder; in another package an absolute path.
      chainable: whether its source knows the macro CHAINED (`runtime/joined_plan.py`). Its plans have no workspace.
    """

    implementation = "cutlass"
    file: ClassVar[str]
    chainable: ClassVar[bool] = False

    def target_refusal(self, target: Target | None) -> str | None:
        return hopper_refusal(target)

    def blocks_per_sm(self, problem: _Problem, config: _Config) -> int:
        """Thread blocks that share a multiprocessor (CTAS_PER_SM in device code)."""
        return 1

    @abc.abstractmethod
    def macros(self, problem: _Problem, config: _Config) -> dict[str, int]:
        """Macros that specialise the device code."""

    def buffers(self, problem: Any, config: _Config) -> tuple[Buffer, ...]:
        """The custom call's operands and results; the last is the workspace."""
        return call_buffers(problem, self.workspace_bytes(problem, config))

    def maps(self, problem: _Problem, config: _Config) -> tuple[TiledMap | Im2colMap, ...]:
        """Tensor maps of the buffers."""
        return ()

    @abc.abstractmethod
    def launches(self, problem: _Problem, config: _Config) -> tuple[Launch, ...]:
        """The kernels, in their order."""

    def kernel_name(self, problem: _Problem, role: str = "") -> str:
        """The name of the kernel `KERNEL(role)` of the device source."""
        return self.trace_name(problem) + role

    def defines(self, problem: _Problem, config: _Config) -> tuple[tuple[str, str | int], ...]:
        """`macros`, and the macro KERNEL(role)."""
        return ("KERNEL(role)", f"{self.kernel_name(problem)}##role"), *self.macros(problem, config).items()

    def structs(self, problem: _Problem, config: _Config) -> list[Struct]:
        """The structs that the launches pass. Their declarations replace `#include "structs.cuh"` in the device
        source."""
        return [p for launch in self.launches(problem, config) for p in launch.params if isinstance(p, Struct)]

    def source(self, problem: _Problem, config: _Config) -> Source:
        """The specialised device code."""
        structs = declarations(*self.structs(problem, config))
        return Source(self.file, self.defines(problem, config), structs)

    def plan(self, problem: _Problem, config: _Config) -> DevicePlan:
        given = (problem, config)
        label = f"{self.traced_as} {config}"
        return DevicePlan(self.source(*given), self.buffers(*given), self.maps(*given), self.launches(*given), label)


class ModelledFamily(CudaFamily[_Problem, _Config]):
    """A family of the package, whose times the cost model predicts from its work."""

    @abc.abstractmethod
    def work(self, problem: _Problem, config: _Config, target: Target) -> Work:
        """The work of the config's kernels."""

    def estimate(self, problem: _Problem, config: _Config, target: Target) -> float:
        return self.estimates(problem, [config], target)[0]

    def estimates(self, problem: Any, configs: Sequence[_Config], target: Target) -> list[float]:
        works = [self.work(problem, config, target) for config in configs]
        return cost_model.estimates(self.name, problem, configs, works, target)

    def by_estimate(self, problem: Any, configs: Iterable[_Config], target: Target) -> list[_Config]:
        """Ranks only the most promising configs by the full estimates; the others follow, by the rates alone."""
        found = list(dict.fromkeys(configs))
        works = [self.work(problem, config, target) for config in found]
        order = cost_model.by_rates(works, target)
        first = [found[i] for i in order[:_PROMISING]]
        seconds = cost_model.estimates(self.name, problem, first, [works[i] for i in order[:_PROMISING]], target)
        ranked = sorted(range(len(first)), key=seconds.__getitem__)
        return [*(first[i] for i in ranked), *(found[i] for i in order[_PROMISING:])]


class Translated(Family[_Problem, _Config]):
    """A family that turns its problems into those of another family, and uses its configs, estimates and kernels."""

    def __init__(self, inner: Family[Any, _Config], name: str | None = None) -> None:
        """`inner` is the other family."""
        super().__init__(inner.Config, name)
        self.inner, self.implementation, self.ABI = copy.copy(inner), inner.implementation, inner.ABI
        self.inner.traced_as = self.name

    @abc.abstractmethod
    def translated(self, problem: _Problem) -> Any:
        """The other family's problem."""

    def target_refusal(self, target: Target | None) -> str | None:
        return self.inner.target_refusal(target)

    def problem_refusal(self, problem: _Problem) -> str | None:
        return self.inner.problem_refusal(self.translated(problem))

    def config_refusal(self, problem: _Problem, config: _Config) -> str | None:
        return self.inner.config_refusal(self.translated(problem), config)

    def candidates(self, problem: _Problem, target: Target) -> Sequence[_Config]:
        return self.inner.candidates(self.translated(problem), target)

    def neighbours(self, problem: _Problem, config: _Config, target: Target) -> Sequence[_Config]:
        return self.inner.neighbours(self.translated(problem), config, target)

    def swept(self, config: _Config, splits: int) -> Sequence[_Config]:
        return self.inner.swept(config, splits)

    def estimate(self, problem: _Problem, config: _Config, target: Target) -> float:
        return self.estimates(problem, [config], target)[0]

    def estimates(self, problem: Any, configs: Sequence[_Config], target: Target) -> list[float]:
        inner, translated = self.inner, self.translated(problem)
        if not isinstance(inner, ModelledFamily):
            return inner.estimates(translated, configs, target)
        works = [inner.work(translated, config, target) for config in configs]
        return cost_model.estimates(self.name, problem, configs, works, target)

    def workspace_bytes(self, problem: _Problem, config: _Config) -> int:
        return self.inner.workspace_bytes(self.translated(problem), config)

    def plan(self, problem: _Problem, config: _Config) -> DevicePlan | CustomCall:
        return self.inner.plan(self.translated(problem), config)


def call_buffers(problem: Problem | ConvProblem, workspace_bytes: int = 0) -> tuple[Buffer, ...]:
    """The custom call's buffers: the operands, the result, the workspace."""
    sizes = [nbytes(*array) for array in (*problem.operand_types, (problem.out_shape, problem.out_dtype))]
    return tuple(Buffer(size, 16) for size in (*sizes, workspace_bytes))


def box_map(p: Any, buffer: int, shape: tuple[int, ...], box: tuple[int, ...]) -> TiledMap:
    """The tensor map of an operand, read in boxes (innermost dimension first) as an array of `shape`. The swizzle fits
    a box's rows of 16 to 128 bytes."""
    dims, item = shape[::-1], jnp.dtype(p.dtype).itemsize
    swizzle = (box[0] * item // 16).bit_length() - 1  # CUtensorMapSwizzle
    return TiledMap(buffer, p.dtype, dims, tensor_map_strides(dims, item), box, swizzle)


def field_refusal(config: Any, **accepted: Sequence[Any]) -> str | None:
    """Why a field of `config` has a value that is not accepted. The accepted values of each field are a list or a
    range."""
    for field, values in accepted.items():
        if (value := getattr(config, field)) not in values:
            said = f"{values[0]} to {values[-1]}" if isinstance(values, range) else ", ".join(map(str, values))
            return f"{field} {value}; accepted: {said}"
    return None


def limits_refusal(*limits: tuple[int, str, int]) -> str | None:
    """The first value that is above its limit. Each limit is (value, what it counts, most)."""
    return next((f"{value} {what}; accepted: up to {most}" for value, what, most in limits if value > most), None)


def field_macros(of: Any, *fields: str, name: str = "{}") -> dict[str, int]:
    """Macros of the named fields, or of all fields of a dataclass. `name` is a format string for a field's name in
    capitals."""
    return {name.format(field.upper()): int(getattr(of, field)) for field in fields or vars(of)}


def varied(config: _Config, **values: Iterable[Any]) -> list[_Config]:
    """Copies of the config, each with one field replaced by one of the given values."""
    return [dataclasses.replace(config, **{field: v}) for field, given in values.items() for v in given]  # pyright: ignore[reportArgumentType, reportUnknownVariableType] - a dataclass
