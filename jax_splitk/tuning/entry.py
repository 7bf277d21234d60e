"""Entries: the choice for a key, with the measurements behind it, and its JSON form. A file is never trusted."""

import dataclasses
import datetime
import functools
import json
import logging
import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeGuard

from jax_splitk import kernels
from jax_splitk.tuning.choice import XLA, Candidate
from jax_splitk.tuning.key import SCHEMA, Key, key_from_dict
from jax_splitk.tuning.options import DEFAULT_WORKSPACE_LIMIT, wrong_field

_logger = logging.getLogger("jax_splitk")

_XLA = XLA.name
# Keys in an entry's metadata: what chose for a problem that was not measured, and which programs left it.
_CHOSEN_BY, _PROGRAMS = "not measured, chosen by", "programs"
# And XLA's microseconds, where the search left XLA out.
XLA_ESTIMATE = "xla_us, estimated"
_MOST_PROGRAMS = 32  # the last ones that are kept


class InvalidEntry(ValueError):
    """The text is no entry for the key that it was looked up by; the message says why."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Microseconds of one call of a candidate; None, with the reason in `error`, for a candidate that failed."""

    candidate: Candidate
    us: float | None
    error: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return {**self.candidate.as_dict(), "us": self.us, "error": self.error}


@dataclasses.dataclass(frozen=True)
class Entry:
    """The choice for a key.

    Attributes:
      choice: the fastest candidate that was found within the workspace limit.
      workspace_limit_bytes: the limit under which candidates were searched.
      evidence: the measurements behind the choice, as plain data that is parsed only when it is read: a lowering needs
        the choice alone. Evidence that cannot be parsed counts as none.
    """

    key: Key
    choice: Candidate
    workspace_limit_bytes: int
    evidence: Mapping[str, Any]

    @staticmethod
    def of(
        key: Key,
        choice: Candidate,
        measurements: Iterable[Measurement] = (),
        predicted: Candidate | None = None,
        metadata: Mapping[str, Any] | None = None,
        workspace_limit_bytes: int = DEFAULT_WORKSPACE_LIMIT,
    ) -> "Entry":
        """The entry of a search; see the attributes and properties."""
        evidence = {
            "predicted": None if predicted is None else predicted.as_dict(),
            "metadata": dict(metadata or {}),
            "measurements": [measurement.as_dict() for measurement in measurements],
        }
        return Entry(key, choice, workspace_limit_bytes, evidence)

    @staticmethod
    def unmeasured(key: Key, choice: Candidate, because: str, more: Mapping[str, Any] | None = None) -> "Entry":
        """The entry of a problem that was not measured itself. A search takes its place where there is one.

        Args:
          because: what chose.
          more: more metadata.
        """
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        metadata = {"date": date, _CHOSEN_BY: because, **(more or {})}
        return Entry.of(key, choice, metadata=metadata, workspace_limit_bytes=0)

    @property
    def is_unmeasured(self) -> bool:
        """Whether the problem was not measured itself: it was not worth it, or a representative was measured."""
        return _CHOSEN_BY in self.metadata

    @property
    def left_by(self) -> tuple[str, ...]:
        """The digests of the programs that left the problem, since it was not worth a measurement (worth.py)."""
        found = self.metadata.get(_PROGRAMS)
        return tuple(map(str, found)) if isinstance(found, list) else ()

    def also_left_by(self, program: str) -> "Entry":
        """The entry of a problem that this program left, too."""
        programs = [*self.left_by, program][-_MOST_PROGRAMS:]
        metadata = {**self.metadata, _PROGRAMS: programs}
        return dataclasses.replace(self, workspace_limit_bytes=0, evidence={**self.evidence, "metadata": metadata})

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """The newest measurement of each candidate ever timed for the key, XLA included."""
        return self._evidence[0]

    @property
    def predicted(self) -> Candidate | None:
        """The candidate that the cost model put first."""
        return self._evidence[1]

    @property
    def metadata(self) -> dict[str, Any]:
        """Versions, driver, date and seconds spent, which inform people and decide nothing; and how a problem that was
        not measured came to its choice."""
        found = self.evidence.get("metadata")
        return found if isinstance(found, dict) else {}

    @functools.cached_property
    def _evidence(self) -> tuple[tuple[Measurement, ...], Candidate | None]:
        try:
            return self.read_evidence()
        except (InvalidEntry, RecursionError) as error:
            _logger.info("%s: the evidence of an entry is ignored: %s", self.key.problem, error)
            return (), None

    def read_evidence(self) -> tuple[tuple[Measurement, ...], Candidate | None]:
        """(measurements, predicted); raises InvalidEntry if these or the metadata cannot be read."""
        op = self.key.problem.op
        measurements, predicted, metadata = map(self.evidence.get, ("measurements", "predicted", "metadata"))
        if not isinstance(measurements, list) or not isinstance(metadata, dict):
            raise InvalidEntry("measurements must be a list and metadata an object")
        first = None if predicted is None else candidate_from(op, predicted)
        return tuple(_measurement_from(op, row) for row in measurements), first

    def us(self, candidate: Candidate | None) -> float | None:
        """The measured microseconds of a candidate."""
        return next((m.us for m in self.measurements if m.candidate == candidate), None)

    @property
    def estimated_xla_us(self) -> float | None:
        """XLA's estimated microseconds, where it was not timed since it is far slower; None otherwise."""
        found = self.metadata.get(XLA_ESTIMATE)
        return float(found) if _is_time(found) and self.us(XLA) is None else None

    @property
    def regret(self) -> float | None:
        """How much slower the cost model's first choice is than the fastest of our candidates: 0.05 for 5%."""
        times = [m.us for m in self.measurements if m.us and m.candidate != XLA]
        first = self.us(self.predicted)
        return first / min(times) - 1 if times and first else None

    def is_searched(self, workspace_limit: int) -> bool:
        """Whether a caller with this limit can take the choice. The search must have allowed as much workspace, or the
        default limit."""
        return self.workspace_limit_bytes >= min(workspace_limit, DEFAULT_WORKSPACE_LIMIT)

    def best(self, workspace_limit: int, implementation: str | None = None) -> Candidate | None:
        """The choice, if it fits the limit and is of the implementation; else the fastest measured candidate that does.
        None if no kernel does, or only one that is slower than XLA by the estimate: XLA's time alone decides nothing
        then."""

        def fits(candidate: Candidate) -> bool:
            asked = implementation is None or candidate.implementation == implementation
            return asked and candidate.workspace_bytes(self.key.problem) <= workspace_limit

        if fits(self.choice):
            return self.choice
        most = math.inf if implementation else self.estimated_xla_us or math.inf
        timed = sorted((m for m in self.measurements if m.us and m.us <= most), key=lambda m: m.us or 0.0)
        legal = (m.candidate for m in timed if m.candidate.refusal(self.key.problem, self.key.target) is None)
        fitting = [candidate for candidate in legal if fits(candidate)]
        return fitting[0] if set(fitting) - {XLA} else None

    def dumps(self) -> str:
        """The entry's file: an object, with a line for each measurement."""
        fields = {
            "schema": SCHEMA,
            "key": self.key.as_dict(),
            "choice": self.choice.as_dict(),
            "workspace_limit_bytes": self.workspace_limit_bytes,
            "predicted": None if self.predicted is None else self.predicted.as_dict(),
            "metadata": self.metadata,
        }
        head = json.dumps(fields, indent=1, sort_keys=True).removesuffix("\n}")
        rows = ",\n  ".join(json.dumps(measurement.as_dict()) for measurement in self.measurements)
        return f'{head},\n "measurements": [\n  {rows}]\n}}\n'


class Found(NamedTuple):
    """An entry, and who had it, in the words of the log and of `explain`."""

    entry: Entry
    where: str


def merge(old: Entry | None, new: Entry) -> Entry:
    """The new choice, unless the old one was searched under a larger limit. The measurements of both: an old one stays
    unless its candidate was timed again."""
    if old is None:
        return new
    timed = {m.candidate for m in new.measurements}
    kept = [m.as_dict() for m in old.measurements if m.candidate not in timed]
    holder = new if new.is_searched(old.workspace_limit_bytes) else old
    measurements = [*(m.as_dict() for m in new.measurements), *kept]
    return dataclasses.replace(holder, evidence={**holder.evidence, "measurements": measurements})


def loads(text: str | bytes, key: Key) -> Entry:
    """Reads an entry for `key` and checks that its choice is legal; the evidence is parsed later.

    Raises:
      InvalidEntry: not JSON, another schema, another key, or a choice that is not legal for the problem.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidEntry(f"not JSON: {error}") from None
    return from_dict(data, key)


def from_dict(data: Any, key: Key) -> Entry:
    """As `loads`, from parsed JSON."""
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        schema = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise InvalidEntry(f"schema {schema!r}; accepted: {SCHEMA}")
    if data.get("key") != key.as_dict():
        raise InvalidEntry("its key is another problem's or another machine's")
    choice = legal_candidate(data.get("choice"), key)
    limit = data.get("workspace_limit_bytes")
    if type(limit) is not int or limit < 0:
        raise InvalidEntry(f"workspace_limit_bytes {limit!r}; accepted: an integer of at least 0")
    return Entry(key, choice, limit, {name: data.get(name) for name in ("predicted", "metadata", "measurements")})


def whole(data: Any) -> Entry:
    """The entry in parsed JSON, of whatever key, with its evidence parsed. Raises ValueError or RecursionError."""
    entry = from_dict(data, key_from_dict(data.get("key") if isinstance(data, dict) else None))
    entry.read_evidence()
    return entry


def legal_candidate(data: Any, key: Key) -> Candidate:
    """The candidate in a file. Raises InvalidEntry unless it can compute the key's problem."""
    choice = candidate_from(key.problem.op, data)
    reason = choice.refusal(key.problem, key.target)
    if reason is not None:
        raise InvalidEntry(f"its choice {choice} is not legal: {reason}")
    return choice


def candidate_from(op: str, data: Any) -> Candidate:
    """The inverse of `Candidate.as_dict` for an operation. Raises InvalidEntry."""
    if not isinstance(data, dict) or not isinstance(name := data.get("family"), str):
        raise InvalidEntry(f"candidate {data!r}; accepted: an object with family and config")
    if name == _XLA:
        return XLA
    family = next((family for family in kernels.families(op) if family.name == name), None)
    if family is None:
        names = ", ".join(family.name for family in kernels.families(op))
        raise InvalidEntry(f"family {name!r}; accepted: {names}, {_XLA}")
    fields, every = data.get("config"), dataclasses.fields(family.Config)
    names = [field.name for field in every]
    # A config of an older version may lack fields: their defaults mean the same, or the family's ABI was raised.
    needed = {field.name for field in every if field.default is dataclasses.MISSING}
    if not isinstance(fields, dict) or not needed <= fields.keys() <= set(names):
        raise InvalidEntry(f"config {fields!r}; accepted: {', '.join(names)}")
    config = family.Config(**fields)
    if (wrong := wrong_field(config)) is not None:
        raise InvalidEntry(f"config has {wrong}")
    return Candidate(family, config)


def _measurement_from(op: str, data: Any) -> Measurement:
    candidate = candidate_from(op, data)
    us, error = data.get("us"), data.get("error")
    if us is None and isinstance(error, str):
        return Measurement(candidate, None, error)
    if error is not None:
        raise InvalidEntry(f"measurement {data!r}; accepted: us or an error")
    if _is_time(us):
        return Measurement(candidate, float(us))
    raise InvalidEntry(f"us {us!r}; accepted: a finite number above 0")


def _is_time(value: Any) -> TypeGuard[float]:
    """Whether a value in a file is a number above 0. True is an int, and an integer may be larger than all floats."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max
