"""Records of measurements, as lines of JSON: a problem, the machine, and the time of each candidate."""

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

from jax_splitk.problems.conv_passes import canonical
from jax_splitk.problems.conv_wgrad import ConvProblem
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime.target import Target
from jax_splitk.tuning import table
from jax_splitk.tuning.choice import XLA, Candidate
from jax_splitk.tuning.entry import candidate_from
from jax_splitk.tuning.key import problem_as_dict, problem_from_dict

DATA = pathlib.Path(__file__).parent / "data"


@dataclasses.dataclass(frozen=True)
class Timed:
    """A candidate's time in microseconds with the relative spread of its rounds, or the reason why it has none."""

    candidate: Candidate
    us: float | None
    spread: float = 0.0
    error: str | None = None

    def as_dict(self) -> dict[str, Any]:
        found = {**self.candidate.as_dict(), "us": self.us, "spread": round(self.spread, 4)}
        return found if self.error is None else {**found, "error": self.error}


@dataclasses.dataclass(frozen=True)
class Record:
    """One problem.

    Attributes:
      index: the problem's index in its seed.
      kind: the kind from which it was drawn.
    """

    problem: Problem
    target: Target
    timed: tuple[Timed, ...]
    index: int = -1
    kind: str = ""

    def times(self) -> dict[Candidate, float]:
        """The times of our measured candidates, in microseconds."""
        return {t.candidate: t.us for t in self.timed if t.us is not None and t.candidate != XLA}

    @property
    def xla_us(self) -> float | None:
        return next((t.us for t in self.timed if t.candidate == XLA), None)

    def dumps(self, seed: int | None = None) -> str:
        """The record as a line, with the seed of its index."""
        fields = {
            **({} if seed is None else {"seed": seed}),
            "index": self.index,
            "kind": self.kind,
            "problem": problem_as_dict(self.problem),
            "target": dataclasses.asdict(self.target),
            "timed": [t.as_dict() for t in self.timed],
        }
        return json.dumps(fields)


def loads(text: str) -> Record:
    """Inverse of `Record.dumps`. Reads a record, without candidates that this version does not have or refuses."""
    data = json.loads(text)
    op = data["problem"].pop("op")
    problem, target = problem_from_dict(op, data["problem"]), Target(**data["target"])
    timed = []
    for each in data["timed"]:
        try:
            candidate = candidate_from(op, {name: each[name] for name in ("family", "config")})
        except ValueError:
            continue
        if candidate == XLA or candidate.refusal(problem, target) is None:
            timed.append(Timed(candidate, each["us"], each.get("spread", 0.0), each.get("error")))
    return Record(problem, target, tuple(timed), data["index"], data["kind"])


def lines(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    """The objects in a file; none if the file is missing. Skips an incomplete last line."""
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def read(paths: Iterable[pathlib.Path]) -> list[Record]:
    """The records in the files, without convolutions that this version computes as other convolutions."""
    found = (loads(json.dumps(each)) for path in paths for each in lines(path) if "timed" in each)
    return [r for r in found if not isinstance(r.problem, ConvProblem) or canonical(r.problem) == r.problem]


def shipped(target: Target) -> list[Record]:
    """The rows of the tables that ship with the package for a device."""
    found = []
    for op in ("conv_wgrad", "quantized_matmul"):
        shipped = table.read(table.path_for(op, target.device_kind))
        for text, row in shipped.rows.items():
            ours = Timed(candidate_from(op, {name: row[name] for name in ("family", "config")}), row["us"])
            timed = tuple(t for t in (ours, Timed(XLA, row["xla_us"])) if t.us is not None)
            found.append(Record(problem_from_dict(op, json.loads(text)), target, timed, kind="suite"))
    return found
