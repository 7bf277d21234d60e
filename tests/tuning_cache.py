"""Keys, entries and a cache of their own, for tests of the tuning cache."""

import dataclasses
import pathlib
from typing import Any

import numpy as np
import pytest

from benchmarks import tables
from benchmarks.cases import Case
from jax_splitk import kernels
from jax_splitk.kernels.wgrad import host as wgrad_host
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.quantized.formats import FORMATS, SCALE_DTYPES
from jax_splitk.runtime.target import Target, target_for
from jax_splitk.tuning import search, session, table
from jax_splitk.tuning.choice import XLA, Candidate
from jax_splitk.tuning.entry import Entry, Measurement
from jax_splitk.tuning.key import Key, key_for
from jax_splitk.tuning.options import DEFAULT_WORKSPACE_LIMIT
from tests.problems import random_case

CPU = target_for("cpu")
CASE = Case("small", 3, 9, 8, 6, 10, (3, 2), dtype="float32")
HUGE = "9" * 400  # an integer of JSON that no float holds
ENVIRONMENT = ("CACHE_DIR", "CACHE_PATH", "CACHE_MODE", "AUTOTUNE", "TUNE_BUDGET_S", "AGREEMENT_TIMEOUT_S")


def isolate(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    """Empty layers of this test's own; the writable one is returned."""
    for name in ENVIRONMENT:
        monkeypatch.delenv(f"JAX_SPLITK_{name}", raising=False)
    monkeypatch.setenv("JAX_SPLITK_CACHE_DIR", str(tmp_path / "user"))
    monkeypatch.setattr(table, "FOLDER", tmp_path / "shipped")
    return tmp_path / "user"


def random_tiny(rng: np.random.Generator, **changes: Any) -> Case:
    """A case that no other test has."""
    sizes = [int(n) for n in rng.integers(5, 14, 2)]
    channels = [int(n) for n in rng.integers(4, 20, 2)]
    kernel = tuple(int(n) for n in rng.integers(1, 4, 2))
    return dataclasses.replace(
        Case("random", int(rng.integers(2, 9)), *sizes, *channels, kernel, dtype="float32"), **changes
    )


def random_product(rng: np.random.Generator) -> QuantizedMatmulProblem:
    qtype = str(rng.choice(list(FORMATS)))
    pick = lambda *values: str(rng.choice(values))  # noqa: E731
    k = 64 * int(rng.integers(2, 40))
    zero_dtype = pick("none", *SCALE_DTYPES) if FORMATS[qtype].integer else "none"
    problem = QuantizedMatmulProblem(
        rows=int(rng.integers(1, 300)),
        k=k,
        features=int(rng.integers(64, 2000)),
        x_dtype=pick("bfloat16", "float16"),
        out_dtype=pick("bfloat16", "float16", "float32"),
        qtype=qtype,
        group_size=int(rng.choice([32, 64, k])),
        scale_dtype=pick(*SCALE_DTYPES),
        zero_dtype=zero_dtype,
    )
    problem.validate()
    return problem


def random_key(rng: np.random.Generator, target: Target, op: str = "conv_wgrad") -> Key:
    """A key with at least four legal candidates."""
    dtypes = ("bfloat16", "float16") if target.platform == "cuda" else ("float32", "bfloat16", "float16")
    while True:
        dtype = str(rng.choice(dtypes))
        if op == "conv_wgrad":
            problem = random_case(rng, dtype).problem(str(rng.choice([dtype, "float32"])))
        else:
            problem = random_product(rng)
        key = key_for(problem, target)
        if len(search.ranked(key)) >= 4:
            return key


def random_entry(rng: np.random.Generator, key: Key, target: Target) -> Entry:
    """A legal choice, timings of several candidates and XLA, and failures."""
    ranked = search.ranked(key)
    picked = [ranked[i] for i in rng.permutation(len(ranked))[:12]]
    failed = max(0, len(picked) - 3)
    measurements = [Measurement(XLA, float(rng.uniform(1, 1e4)))]
    measurements += [Measurement(c, float(rng.uniform(1, 1e4))) for c in picked[:failed]]
    measurements += [Measurement(c, None, f"wrong result: {rng.random()} \u00b5 \"'\n") for c in picked[failed:]]
    choice = XLA if rng.random() < 0.2 else picked[0]
    predicted = ranked[0] if rng.random() < 0.8 else None
    metadata = {"date": "now", "seconds": float(rng.random())}
    limit = DEFAULT_WORKSPACE_LIMIT if rng.random() < 0.7 else int(rng.integers(2**20, 2**26))
    return Entry.of(key, choice, tuple(measurements), predicted, metadata, limit)


def entry_of(key: Key, config: Any, family: kernels.Family = wgrad_host.FAMILY) -> Entry:
    return Entry.of(key, Candidate(family, config))


def ship(key: Key, choice: Candidate, us: float = 5.0, xla_us: float = 9.0) -> pathlib.Path:
    """A row of a shipped table, which the process has not read yet."""
    times = {choice: us, XLA: xla_us}
    (path,) = tables.update([Entry.of(key, choice, [Measurement(c, us) for c, us in times.items()])])
    session._session = session.Session()
    return path


def put(folder: pathlib.Path, key: Key, text: str | bytes) -> pathlib.Path:
    path = folder / key.file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def assert_legal(candidate: Candidate, key: Key, target: Target) -> None:
    """By the family's own predicate, and with fields of exactly the right types."""
    family = candidate.family
    if family is None:
        return
    assert family in kernels.families(key.problem.op, target.platform)
    assert type(candidate.config) is family.Config
    for field in dataclasses.fields(family.Config):
        assert type(getattr(candidate.config, field.name)) is field.type
    assert family.refusal(key.problem, candidate.config, target) is None
