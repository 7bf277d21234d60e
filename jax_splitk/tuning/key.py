"""Keys of entries: the problem and the machine. No path and no option of a caller is part of a key."""

import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jax_splitk import kernels
from jax_splitk.kernels import Family
from jax_splitk.problems.conv_epilogue import decisive
from jax_splitk.problems.operations import OPERATIONS
from jax_splitk.problems.problem import Problem, stored_fields
from jax_splitk.runtime import toolchain
from jax_splitk.runtime.target import Target
from jax_splitk.tuning.serving import serving

SCHEMA = 3

# How the names of folders with entries of this schema begin.
FOLDER_PREFIX = f"v{SCHEMA}-"


@dataclasses.dataclass(frozen=True)
class Environment:
    """The machine, as far as timings and machine code depend on it.

    Attributes:
      abi: versions of the kernel families that can compute the problem. A new version retires old entries.
    """

    platform: str
    device_kind: str
    compute_capability: str
    cores: int
    cuda_major: int
    abi: tuple[str, ...]

    def __str__(self) -> str:
        machine = f"{self.platform}, {self.cores} cores, CUDA {self.cuda_major}"
        return f"{self.device_kind} ({machine}, {', '.join(self.abi)})"

    @functools.lru_cache(maxsize=256)  # noqa: B019 - few, small, and each lowering asks
    def folder(self) -> str:
        """The folder of its entries in a cache."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return f"{FOLDER_PREFIX}{hashlib.sha256(text.encode()).hexdigest()[:16]}"


@dataclasses.dataclass(frozen=True)
class Key:
    """Identifies an entry."""

    problem: Problem
    environment: Environment

    @functools.cached_property
    def target(self) -> Target:
        e = self.environment
        return Target(e.platform, e.device_kind, e.compute_capability, e.cores)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as in an entry's file (tuples become lists)."""
        return json.loads(self._text)

    @functools.cached_property
    def _text(self) -> str:
        problem, environment = stored_fields(self.problem), dataclasses.asdict(self.environment)
        fields = {"schema": SCHEMA, "op": self.problem.op, "problem": problem, "environment": environment}
        return json.dumps(fields, sort_keys=True)

    @functools.cached_property
    def digest(self) -> str:
        return hashlib.sha256(self._text.encode()).hexdigest()

    @functools.cached_property
    def file(self) -> str:
        """The path of the entry's file in a cache."""
        return f"tuning/{self.environment.folder()}/{self.digest[:40]}.json"


def key_for(problem: Problem, target: Target) -> Key:
    """The key of a problem's entry on `target`: for a convolution with an epilogue, that of the convolution."""
    return _key(decisive(problem), target, serving(problem, target))


@functools.lru_cache(maxsize=4096)  # a key keeps its text and file, which take longer than the rest of a lookup
def _key(problem: Problem, target: Target, families: tuple[Family, ...]) -> Key:
    return Key(problem, _environment(families, target))


def folders(op: str, target: Target) -> frozenset[str]:
    """The folders of every environment that problems of an operation can have on `target`."""
    return _folders(kernels.families(op, target.platform), target)


@functools.lru_cache(maxsize=64)  # of 12 families it takes 0.2 s
def _folders(families: tuple[Family, ...], target: Target) -> frozenset[str]:
    some = (itertools.combinations(families, count) for count in range(len(families) + 1))
    return frozenset(_environment(each, target).folder() for each in itertools.chain.from_iterable(some))


def _environment(families: Sequence[Family], target: Target) -> Environment:
    abi = tuple(f"{family.name}:{family.ABI}" for family in families)
    machine = (target.platform, target.device_kind, target.compute_capability, target.cores)
    return Environment(*machine, _cuda_major(target.platform), abi)


@functools.cache
def _cuda_major(platform: str) -> int:
    if platform != "cuda":
        return 0
    return 13 if toolchain.unavailable() else toolchain.find_nvrtc().version[0]


def key_from_dict(data: Any) -> Key:
    """The inverse of `Key.as_dict`; raises ValueError."""
    names = {"schema", "op", "problem", "environment"}
    if not isinstance(data, Mapping) or set(data) != names or data["schema"] != SCHEMA:
        raise ValueError(f"key {data!r}; accepted: an object of schema {SCHEMA} with {', '.join(sorted(names))}")
    if not isinstance(data["problem"], Mapping):
        raise ValueError(f"problem {data['problem']!r}; accepted: an object")
    return Key(problem_from_dict(data["op"], data["problem"]), environment_from_dict(data["environment"]))


def environment_from_dict(data: Any) -> Environment:
    """An environment from plain data; raises ValueError. A number of the wrong type, e.g. 132.0 cores, is refused: it
    would equal the right one and have another key.
    """
    types = {field.name: list if field.name == "abi" else field.type for field in dataclasses.fields(Environment)}
    if not isinstance(data, Mapping) or {name: type(value) for name, value in data.items()} != types:
        raise ValueError(f"environment {data!r}; accepted: {', '.join(types)}")
    if not all(isinstance(name, str) for name in data["abi"]):
        raise ValueError(f"abi {data['abi']!r}; accepted: strings")
    return Environment(**{**data, "abi": tuple(data["abi"])})


def problem_as_dict(problem: Problem) -> dict[str, Any]:
    """Plain data that the command line accepts: of a convolution with an epilogue, that of the convolution."""
    return {"op": problem.op, **stored_fields(decisive(problem))}


def problem_from_dict(op: str, fields: Mapping[str, Any]) -> Problem:
    """A problem from plain data, e.g. from an entry or a command line.

    Raises:
      ValueError: an unknown operation, or fields that are missing, unknown or of the wrong type.
    """
    if not isinstance(op, str) or op not in OPERATIONS:
        raise ValueError(f"op={op!r}; accepted: {', '.join(map(repr, OPERATIONS))}")
    problem_type = OPERATIONS[op].problem
    known = {field.name: field.default is dataclasses.MISSING for field in dataclasses.fields(problem_type)}
    unknown = sorted(set(fields) - set(known))
    missing = sorted(name for name, is_needed in known.items() if is_needed and name not in fields)
    if unknown or missing:
        raise ValueError(f"{op} problem: unknown fields {unknown}, missing fields {missing}")
    problem = problem_type(**{name: as_tuple(value) for name, value in fields.items()})
    problem.validate()
    return problem


def as_tuple(value: Any) -> Any:
    """A value of plain data, whose lists become tuples, at any depth."""
    return tuple(as_tuple(v) for v in value) if isinstance(value, list | tuple) else value
