"""Problems of the CPU's family, candidates and entries, for tests of the command line."""

import dataclasses
import json
import pathlib
from typing import Any

from benchmarks.cases import Case
from jax_splitk.kernels.cpu import wgrad as host
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.problems.problem import stored_fields
from jax_splitk.runtime.target import target_for
from jax_splitk.tuning import store
from jax_splitk.tuning.choice import XLA, Candidate
from jax_splitk.tuning.entry import Entry, Measurement
from jax_splitk.tuning.key import Key, key_for
from tests import tuning_cache

PROBLEM = Case("small", 4, 8, 8, 8, 8, (3, 3), dtype="float32").problem()
PROBLEMS = [dataclasses.replace(PROBLEM, batch=batch) for batch in (4, 5, 6, 7)]
A, B, C = (Candidate(host.FAMILY, host.Config(splits, 128)) for splits in (1, 2, 4))
X = XLA
OLD, NEW = "2024-01-01T00:00:00+00:00", "2025-06-01T12:00:00+00:00"


def key_of(problem: ConvWgradProblem = PROBLEM, **environment: Any) -> Key:
    key = key_for(problem, target_for("cpu"))
    return dataclasses.replace(key, environment=dataclasses.replace(key.environment, **environment))


def entry_of(key: Key, times: dict[Candidate, float], date: Any = OLD) -> Entry:
    measurements = tuple(Measurement(candidate, us) for candidate, us in times.items())
    return Entry.of(key, min(times, key=lambda c: times[c]), measurements, A, {"date": date, "jax": "0"})


def put(folder: pathlib.Path, key: Key, times: dict[Candidate, float], date: Any = OLD) -> pathlib.Path:
    return tuning_cache.put(folder, key, entry_of(key, times, date).dumps())


def got(folder: pathlib.Path, key: Key) -> Entry | None:
    return store.read(folder / key.file, key)


def as_dict(problem: ConvWgradProblem) -> dict[str, Any]:
    return json.loads(json.dumps({"op": problem.op, **stored_fields(problem)}))


def as_json(*problems: ConvWgradProblem) -> str:
    return json.dumps(as_dict(problems[0]) if len(problems) == 1 else list(map(as_dict, problems)))
