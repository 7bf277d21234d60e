"""Operands, keys, entries and a cache of their own, for tests of tuning."""

import dataclasses
import functools
import itertools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import jax_splitk
from benchmarks import tables
from benchmarks.cases import Case
from jax_splitk import kernels
from jax_splitk.kernels.cpu import wgrad as wgrad_host
from jax_splitk.problems.dot_general import DotProblem
from jax_splitk.problems.operations import OPERATIONS
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.problems.ragged_dot import MODES, RaggedDotProblem
from jax_splitk.quantized.formats import FLOAT_DTYPES, FORMATS, SCALE_DTYPES
from jax_splitk.runtime import disk
from jax_splitk.runtime.target import Target, target_for
from jax_splitk.tuning import device, once, search, searches, table, watch
from jax_splitk.tuning.check import Check
from jax_splitk.tuning.choice import XLA, Candidate
from jax_splitk.tuning.entry import Entry, Measurement
from jax_splitk.tuning.key import Key, key_for
from jax_splitk.tuning.measure import Bench
from jax_splitk.tuning.options import DEFAULT_WORKSPACE_LIMIT
from jax_splitk.tuning.result import TuningResult
from tests.problems import on_device, random_case

BenchType = TypeVar("BenchType", bound=Bench)

CPU = target_for("cpu")
CASE = Case("small", 3, 9, 8, 6, 10, (3, 2), dtype="float32")
TINY = Case("tiny", 4, 9, 8, 6, 10, (3, 2), dtype="float32")
HUGE = "9" * 400  # an integer of JSON that no float holds
ENVIRONMENT = (
    *("CACHE_DIR", "CACHE_PATH", "CACHE_MODE", "PROGRESS"),
    *("AUTOTUNE", "COMPILE_AHEAD", "TUNE_BUDGET_S", "TUNE_LOSS", "AGREEMENT_TIMEOUT_S"),
)


# Marks of modules that tune the CPU's family.
TUNES_THE_CPU = [
    pytest.mark.usefixtures("cache"),
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="these tune the CPU's family"),
]


def key_of(case: Case = CASE) -> Key:
    return key_for(case.problem(), CPU)


def bench_without_operands(kind: type[BenchType]) -> BenchType:
    """A bench of a tiny problem on a GPU that a test plays: contestants bring their own calls."""
    bench = kind.__new__(kind)
    bench.problem, bench.platform, bench.sets = TINY.problem(), "cuda", 1
    bench.operation = OPERATIONS[bench.problem.op]
    bench.given_up = threading.Event()
    bench._check = Check(bench.problem, [], {})
    return bench


def isolate(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    """Empty layers of this test's own; the writable one is returned."""
    for name in ENVIRONMENT:
        monkeypatch.delenv(f"JAX_SPLITK_{name}", raising=False)
    monkeypatch.setenv("JAX_SPLITK_CACHE_DIR", str(tmp_path / "user"))
    monkeypatch.setattr(table, "FOLDER", tmp_path / "shipped")
    return tmp_path / "user"


def new_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process that has just started, the package knows only what is on disk."""
    kinds = ((once, once.Once), (device, device.Device), (searches, searches.Searches), (watch, watch.Watch))
    for module, kind in kinds:
        monkeypatch.setattr(module, "state", kind())
    disk._warn.cache_clear()


def operands(rng: np.random.Generator, case: Case = CASE) -> tuple[jax.Array, jax.Array, np.ndarray]:
    """(lhs, g, the weight gradient), of small integers, so that every order of summation gives the same."""
    shapes = (case.lhs_shape, case.g_shape)
    lhs, g = (on_device(rng.integers(-3, 4, shape), case.dtype) for shape in shapes)
    return lhs, g, lax_wgrad(lhs, g, case)


def lax_wgrad(lhs: jax.Array, g: jax.Array, case: Case = CASE) -> np.ndarray:
    forward = lambda w: jax.lax.conv_general_dilated(lhs, w, **case.lax_arguments())  # noqa: E731
    return np.asarray(jax.vjp(forward, on_device(np.zeros(case.rhs_shape), lhs.dtype))[1](g)[0])


def wgrad(lhs: jax.Array, g: jax.Array, case: Case = CASE, **options: Any) -> jax.Array:
    return jax_splitk.conv_wgrad(lhs, g, case.rhs_shape, **case.lax_arguments(), **options)


def configs(text: str) -> list[wgrad_host.Config]:
    """The host family's configs in a lowered program."""
    found = re.findall(r"block = (\d+) : i64.*?splits = (\d+) : i64", text)
    return [wgrad_host.Config(int(splits), int(block)) for block, splits in found]


def lowered_config(fn: Callable[..., Any], *args: Any) -> wgrad_host.Config | None:
    """The host family's config in the lowered program of a function that jit has not seen before; None if there is
    none."""
    return next(iter(configs(jax.jit(functools.partial(fn)).lower(*args).as_text())), None)


def start(
    script: str, *arguments: Any, environment: Mapping[str, str] | None = None, **variables: str
) -> subprocess.Popen[str]:
    """A Python process on one CPU device that sees none of our variables but those given."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("JAX_SPLITK_")}
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", "")).strip()
    inherited |= {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    given = {f"JAX_SPLITK_{name}": value for name, value in variables.items()}
    env = {**inherited, **given, **(environment or {})}
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    # A session of its own, so that its children can be ended with it: one left over would hold the pipes open.
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=env, text=True, start_new_session=True, **pipes)


def finish(*processes: subprocess.Popen[str], seconds: float = 120) -> list[tuple[Any, str]]:
    """(last line of the output as JSON, standard error) of each; all must succeed."""
    outputs = []
    deadline = time.monotonic() + seconds
    for process in processes:
        try:
            outputs.append(process.communicate(timeout=max(0.1, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            outputs.append(process.communicate())
    report = "\n".join(err for _, err in outputs)
    assert [process.returncode for process in processes] == [0] * len(processes), report
    return [(json.loads(out.splitlines()[-1]), err) for out, err in outputs]


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
    zero_dtype = pick("none", *FLOAT_DTYPES) if FORMATS[qtype].integer else "none"
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
        channel_dtype=pick("none", "float32"),
        compute_dtype=pick("none", "float8_e4m3fn"),
    )
    problem.validate()
    return problem


def served(targets: Iterable[Target]) -> list[tuple[Target, str]]:
    """Each target with each operation that has kernels on it."""
    return [(target, op) for target in targets for op in OPERATIONS if kernels.families(op, target.platform)]


def random_key(rng: np.random.Generator, target: Target, op: str = "conv_wgrad") -> Key:
    """A key with at least four legal candidates."""
    dtypes = ("bfloat16", "float16") if target.platform == "cuda" else ("float32", "bfloat16", "float16")
    while True:
        dtype = str(rng.choice(dtypes))
        out_dtype = str(rng.choice([dtype, "float32"]))
        if op.startswith("conv_"):
            fields = vars(random_case(rng, dtype).problem(out_dtype))
            if op != "conv_wgrad" and target.platform == "cuda":  # there is a kernel for
                channels = dict.fromkeys(("out_channels", "feature_group_count"), fields["in_channels"])
                fields = {**fields, **channels}
            problem = OPERATIONS[op].problem(**fields)
        elif op == "dot_general":
            m, n, k = (8 * int(rng.integers(1, 40)) for _ in range(3))
            problem = DotProblem(1, m, n, 8 * k, "bkm", "bkn", dtype, out_dtype)
        elif op == "ragged_dot":
            m, k, n = (8 * int(rng.integers(1, 40)) for _ in range(3))
            mode, groups = MODES[rng.integers(len(MODES))], int(rng.integers(1, 9))
            problem = RaggedDotProblem(mode, groups, m, k, n, dtype, out_dtype)
        elif op.startswith("quantized_ragged_dot"):
            fields = dict(vars(random_product(rng)))
            del fields["compute_dtype"]
            renamed = {"m": fields.pop("rows"), "n": fields.pop("features"), "dtype": fields.pop("x_dtype")}
            problem = OPERATIONS[op].problem(groups=int(rng.integers(1, 9)), **renamed, **fields)
        else:
            problem = OPERATIONS[op].problem(**vars(random_product(rng)))
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
    once.state = once.Once()
    return path


def put(folder: pathlib.Path, key: Key, text: str | bytes) -> pathlib.Path:
    path = folder / key.file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def assert_legal(candidate: Candidate, key: Key, target: Target) -> None:
    """Asserts that the family's own predicate accepts the candidate, and that its fields have exactly the right
    types."""
    family = candidate.family
    if family is None:
        return
    assert family in kernels.families(key.problem.op, target.platform)
    assert type(candidate.config) is family.Config
    for field in dataclasses.fields(family.Config):
        assert type(getattr(candidate.config, field.name)) is field.type
    assert family.refusal(key.problem, candidate.config, target) is None


def product(rows: int) -> tuple[jax.Array, jax_splitk.PackedWeight]:
    """Operands of `quantized_matmul` that the host kernel takes."""
    w = jax_splitk.quantize(jnp.ones((64, 64)), "int4", group_size=64)
    return jnp.ones((rows, 64), jnp.bfloat16), jax_splitk.prepack(w)


def result_of(config: Any, case: Case = CASE) -> TuningResult:
    """A result that has the host kernel's `config` for a case."""
    key = key_for(case.problem(), CPU)
    return TuningResult(((key, entry_of(key, config)),))


# Different configs of the host kernel.
ONE, TWO, THREE, FOUR, FIVE, SIX = (wgrad_host.Config(s, b) for s, b in itertools.product((3, 5, 7), (64, 96)))
