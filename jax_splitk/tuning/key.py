"""What a tuning decision depends on: the problem, the caller's constraints and the machine. Never a path."""

import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from jax_splitk import compiler, kernels
from jax_splitk.operations import OPERATIONS
from jax_splitk.target import Target
from jax_splitk.tuning.options import Options

SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Environment:
    """The machine as far as timings and machine code depend on it.

    Attributes:
      abi: versions of the kernel families that can compute the problem; a new one retires old decisions.
    """

    platform: str
    device_kind: str
    cores: int
    cuda_major: int
    abi: tuple[str, ...]

    def digest(self) -> str:
        return _digest(dataclasses.asdict(self))[:16]


@dataclasses.dataclass(frozen=True)
class Key:
    """Identity of a tuning decision."""

    problem: kernels.Problem
    deterministic: bool
    workspace_limit_bytes: int
    environment: Environment

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as it stands in an entry's file (tuples become lists)."""
        fields = {
            "schema": SCHEMA,
            "op": self.problem.op,
            "problem": dataclasses.asdict(self.problem),
            "deterministic": self.deterministic,
            "workspace_limit_bytes": self.workspace_limit_bytes,
            "environment": dataclasses.asdict(self.environment),
        }
        return json.loads(json.dumps(fields))

    @functools.cached_property
    def digest(self) -> str:
        return _digest(self.as_dict())

    @property
    def file(self) -> str:
        """The entry's file, relative to a layer of the cache."""
        return f"tuning/{self.environment.digest()}/{self.digest[:40]}.json"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def environment(problem: kernels.Problem, target: Target) -> Environment:
    """The environment for a problem's decisions on `target`."""
    families = kernels.families(problem.op, target.platform)
    return _environment(tuple(f for f in families if f.supports(problem, None, target) is None), target)


def environments(op: str, target: Target) -> Iterator[Environment]:
    """Every environment that `environment` may give for an operation's problems."""
    families = kernels.families(op, target.platform)
    for count in range(len(families) + 1):
        for serving in itertools.combinations(families, count):
            yield _environment(serving, target)


def _environment(families: Sequence[kernels.Family], target: Target) -> Environment:
    abi = tuple(f"{family.name}:{family.ABI}" for family in families)
    return Environment(target.platform, target.device_kind, target.cores, _cuda_major(target.platform), abi)


@functools.cache
def _cuda_major(platform: str) -> int:
    if platform != "cuda":
        return 0
    return 13 if compiler.unavailable() else compiler.find_nvrtc().version[0]


def key_for(problem: kernels.Problem, target: Target, options: Options) -> Key:
    return Key(problem, options.deterministic, options.workspace_limit, environment(problem, target))


def problem_from_dict(op: str, fields: dict[str, Any]) -> kernels.Problem:
    """A problem from plain data, e.g. from an entry or a command line.

    Raises:
      ValueError: an unknown operation, or fields that are missing, unknown or of the wrong type.
    """
    if op not in OPERATIONS:
        raise ValueError(f"op={op!r}; accepted: {', '.join(map(repr, OPERATIONS))}")
    problem_type = OPERATIONS[op].problem
    known = {field.name: field for field in dataclasses.fields(problem_type)}
    unknown = sorted(set(fields) - set(known))
    missing = sorted(
        name for name, field in known.items() if name not in fields and field.default is dataclasses.MISSING
    )
    if unknown or missing:
        raise ValueError(f"{op} problem: unknown fields {unknown}, missing fields {missing}")
    problem = problem_type(**{name: _as_tuple(value) for name, value in fields.items()})
    problem.validate()
    return problem


def _as_tuple(value: Any) -> Any:
    return tuple(_as_tuple(v) for v in value) if isinstance(value, list | tuple) else value
