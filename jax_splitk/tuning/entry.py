"""A tuning decision with what it rests on, and its JSON form. Reading checks everything: a file is never trusted."""

import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax_splitk import kernels
from jax_splitk.tuning.key import SCHEMA, Key
from jax_splitk.tuning.options import DEFAULT_WORKSPACE_LIMIT

XLA = "xla"


class InvalidEntry(ValueError):
    """The text is not an entry for the key it was looked up by; the message says what is wrong."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Something that can compute a problem: a family's config, or XLA (family "xla", config None)."""

    family: str
    config: Any = None

    def as_dict(self) -> dict[str, Any]:
        config = None if self.config is None else dataclasses.asdict(self.config)
        return {"family": self.family, "config": config}

    def __str__(self) -> str:
        return self.family if self.config is None else f"{self.family} {self.config}"


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Microseconds of one call of a candidate; None, with the reason in `error`, where it cannot be used."""

    candidate: Candidate
    us: float | None
    error: str | None = None

    def row(self) -> list[Any]:
        """The values of a table's `_columns`."""
        config = self.candidate.config
        values = [] if config is None else [getattr(config, field.name) for field in dataclasses.fields(config)]
        return [*values, self.us, self.error]

    def as_dict(self) -> dict[str, Any]:
        return {**self.candidate.as_dict(), "us": self.us, "error": self.error}


@dataclasses.dataclass(frozen=True)
class Entry:
    """The decision for a key.

    Attributes:
      choice: what computes the problem: the fastest that was found within the workspace limit.
      measurements: of all candidates ever timed for the key, XLA's among them; the newest of each.
      predicted: the candidate that the cost model put first.
      workspace_limit_bytes: the limit under which candidates were searched.
      metadata: versions, driver, date, seconds spent: for people, not compared.
    """

    key: dict[str, Any]
    choice: Candidate
    measurements: Sequence[Measurement]
    predicted: Candidate | None
    metadata: dict[str, Any]
    workspace_limit_bytes: int = DEFAULT_WORKSPACE_LIMIT

    def is_searched(self, workspace_limit: int) -> bool:
        """Whether the decision stands for a caller of this limit: found under one as large, or under the default."""
        return self.workspace_limit_bytes >= min(workspace_limit, DEFAULT_WORKSPACE_LIMIT)

    def best(self, key: Key, workspace_limit: int, implementation: str | None = None) -> Candidate | None:
        """The choice, if it fits the limit and is of the implementation; else the fastest measured candidate that does.
        None where no kernel is known that does: then XLA's time says nothing."""

        def serves(candidate: Candidate) -> bool:
            if candidate.family == XLA:
                return implementation is None
            family = family_named(key.problem.op, candidate.family)
            return (
                implementation in (None, family.implementation)
                and illegality(candidate, key) is None
                and family.workspace_bytes(key.problem, candidate.config) <= workspace_limit
            )

        if serves(self.choice):
            return self.choice
        timed = sorted((m for m in self.measurements if m.us), key=lambda m: m.us or 0.0)
        fitting = [m.candidate for m in timed if serves(m.candidate)]
        return fitting[0] if any(candidate.family != XLA for candidate in fitting) else None

    def us(self, candidate: Candidate | None) -> float | None:
        """The measured microseconds of a candidate."""
        return next((m.us for m in self.measurements if m.candidate == candidate), None)

    @property
    def regret(self) -> float | None:
        """How much slower the cost model's first choice is than the fastest of our candidates: 0.05 for 5%."""
        times = [m.us for m in self.measurements if m.us and m.candidate.family != XLA]
        first = self.us(self.predicted)
        return first / min(times) - 1 if times and first else None

    def dumps(self) -> str:
        """The entry's file: an object whose measurements are tables, one for each run of measurements of a family,
        since a lowering reads and checks them all."""
        fields = {
            "schema": SCHEMA,
            "key": self.key,
            "choice": self.choice.as_dict(),
            "predicted": None if self.predicted is None else self.predicted.as_dict(),
            "metadata": self.metadata,
            "workspace_limit_bytes": self.workspace_limit_bytes,
        }
        tables = [_table(family, list(group)) for family, group in itertools.groupby(self.measurements, _family_of)]
        head = json.dumps(fields, indent=1, sort_keys=True).removesuffix("\n}")
        return head + ',\n "measurements": [' + ",".join(tables) + "]\n}\n"


def _family_of(measurement: Measurement) -> str:
    return measurement.candidate.family


def _columns(config_type: type | None) -> list[str]:
    """What a table's rows hold: the fields of the family's Config, microseconds and error."""
    names = [] if config_type is None else [field.name for field in dataclasses.fields(config_type)]
    return [*names, "us", "error"]


def _table(family: str, measurements: list[Measurement]) -> str:
    """The JSON of one table, a line for each row."""
    config = measurements[0].candidate.config
    head = json.dumps({"family": family, "columns": _columns(None if config is None else type(config))})
    rows = ",\n   ".join(json.dumps(m.row()) for m in measurements)
    return "\n  " + head.removesuffix("}") + f', "rows": [\n   {rows}]}}'


def merge(old: Entry | None, new: Entry) -> Entry:
    """The new decision, unless the old one was searched under a larger limit, with the measurements of both: the old
    ones of candidates that were not timed again."""
    if old is None:
        return new
    timed = {m.candidate for m in new.measurements}
    kept = [m for m in old.measurements if m.candidate not in timed]
    decision = new if new.is_searched(old.workspace_limit_bytes) else old
    return dataclasses.replace(decision, measurements=(*new.measurements, *kept))


def loads(text: str | bytes, key: Key) -> Entry:
    """Reads an entry for `key` and checks it, down to the legality of its choice.

    Raises:
      InvalidEntry: not JSON, another schema, another key, or a choice that is not legal for the problem.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidEntry(f"not JSON: {error}") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        schema = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise InvalidEntry(f"schema {schema!r}; accepted: {SCHEMA}")
    if data.get("key") != key.as_dict():
        raise InvalidEntry("its key is another problem's or another machine's")
    read = _Reader(key.problem.op)
    choice = read.candidate(data.get("choice"))()
    reason = illegality(choice, key)
    if reason is not None:
        raise InvalidEntry(f"its choice {choice} is not legal: {reason}")
    predicted = data.get("predicted")
    measurements, metadata, limit = map(data.get, ("measurements", "metadata", "workspace_limit_bytes"))
    if not isinstance(measurements, list) or not isinstance(metadata, dict):
        raise InvalidEntry("measurements must be a list and metadata an object")
    if type(limit) is not int or limit < 0:
        raise InvalidEntry(f"workspace_limit_bytes {limit!r}; accepted: an integer of at least 0")
    return Entry(
        key=data["key"],
        choice=choice,
        measurements=_Measurements([make for table in measurements for make in read.table(table)]),
        predicted=None if predicted is None else read.candidate(predicted)(),
        metadata=metadata,
        workspace_limit_bytes=limit,
    )


def illegality(candidate: Candidate, key: Key) -> str | None:
    """None when the candidate may compute the key's problem, else the reason."""
    if candidate.family == XLA:
        return None
    family = family_named(key.problem.op, candidate.family)
    if family.platform != key.environment.platform:
        return f"runs on {family.platform}"
    return family.refusal(key.problem, candidate.config, key.target)


def family_named(op: str, name: str) -> kernels.Family:
    """Raises InvalidEntry for a name that is not registered."""
    for family in kernels.families(op):
        if family.name == name:
            return family
    raise InvalidEntry(f"family {name!r}; accepted: {', '.join(f.name for f in kernels.families(op))}, {XLA}")


class _Measurements(Sequence[Measurement]):
    """A file's measurements: checked when it is read, made when they are looked at, since a lowering, which should
    take no time, wants the choice alone."""

    def __init__(self, makers: list[Callable[[], Measurement]]) -> None:
        self._makers = makers

    @functools.cached_property
    def _made(self) -> tuple[Measurement, ...]:
        return tuple(make() for make in self._makers)

    def __len__(self) -> int:
        return len(self._makers)

    def __getitem__(self, index: Any) -> Any:
        return self._made[index]

    def __iter__(self) -> Iterator[Measurement]:
        return iter(self._made)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._made == tuple(other)

    def __hash__(self) -> int:
        return hash(self._made)

    def __repr__(self) -> str:
        return repr(self._made)


class _Reader:
    """Checks the candidates of one file and says how to make them."""

    def __init__(self, op: str) -> None:
        self._op = op
        self._forms: dict[str, tuple[type, dict[str, Any]]] = {}

    def _form(self, name: str) -> tuple[type, dict[str, Any]]:
        """A family's Config and the types of its fields."""
        if name not in self._forms:
            config_type = family_named(self._op, name).Config
            self._forms[name] = config_type, {field.name: field.type for field in dataclasses.fields(config_type)}
        return self._forms[name]

    def candidate(self, data: Any) -> Callable[[], Candidate]:
        if not isinstance(data, dict) or not isinstance(name := data.get("family"), str):
            raise InvalidEntry(f"candidate {data!r}; accepted: an object with family and config")
        if name == XLA:
            return lambda: Candidate(XLA)
        config_type, types = self._form(name)
        config = data.get("config")
        if not isinstance(config, dict) or config.keys() != types.keys():
            raise InvalidEntry(f"config {config!r}; accepted: {', '.join(types)}")
        for field, value in config.items():
            if type(value) is not types[field]:  # bool is an int, and 1.0 equals 1: only the exact type will do
                raise InvalidEntry(f"config field {field}={value!r}; accepted: {types[field]}")
        return lambda: Candidate(name, config_type(**config))

    def table(self, data: Any) -> list[Callable[[], Measurement]]:
        """Checks a table of measurements; how to make each of them."""
        if not isinstance(data, dict) or not isinstance(name := data.get("family"), str):
            raise InvalidEntry(f"measurements {data!r}; accepted: objects with family, columns and rows")
        config_type, types = (None, {}) if name == XLA else self._form(name)
        columns, rows = data.get("columns"), data.get("rows")
        if columns != (accepted := _columns(config_type)):
            raise InvalidEntry(f"columns {columns!r}; accepted: {', '.join(accepted)}")
        if not isinstance(rows, list):
            raise InvalidEntry(f"rows {rows!r}; accepted: a list of lists")
        fields = tuple(types.values())
        timed, failed = (float, type(None)), (type(None), str)
        forms = {(*fields, *timed): True, (*fields, int, type(None)): True, (*fields, *failed): False}
        makers = []
        for row in rows:
            # Exact types, since bool is an int and 1.0 equals 1.
            is_timed = forms.get(tuple(map(type, row))) if isinstance(row, list) else None
            # By comparison: math.isfinite raises for an integer that no float holds.
            if is_timed is None or (is_timed and not 0 < row[-2] <= sys.float_info.max):
                raise InvalidEntry(f"measurement {row!r}; accepted: {_accepted(types)}, positive us or an error")
            makers.append(functools.partial(_measurement, name, config_type, row))
        return makers


def _accepted(types: dict[str, Any]) -> str:
    return ", ".join(f"{name} ({kind.__name__})" for name, kind in types.items())


def _measurement(family: str, config_type: Any, row: list[Any]) -> Measurement:
    *values, us, error = row
    config = None if config_type is None else config_type(*values)
    return Measurement(Candidate(family, config), None if us is None else float(us), error)
