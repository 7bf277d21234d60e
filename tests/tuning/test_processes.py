"""Several processes: one cache without lost or corrupt entries, one decision for a job, and exported functions that
need no cache."""

import pathlib
import socket
import textwrap
from typing import Any

import jax
import numpy as np
import pytest
from jax import export
from jax import numpy as jnp

import jax_splitk
from benchmarks.cases import Case
from jax_splitk.kernels.contraction import wgrad as im2col
from jax_splitk.kernels.cpu import wgrad as wgrad_host
from jax_splitk.runtime import toolchain
from jax_splitk.runtime.plan import HOST_WGRAD_TARGET
from jax_splitk.runtime.target import target_for
from jax_splitk.tuning import agreement, search, store
from jax_splitk.tuning import entry as entries
from jax_splitk.tuning.choice import XLA, Candidate
from jax_splitk.tuning.entry import Entry, Measurement
from jax_splitk.tuning.key import key_for
from tests.problems import SEED, generator, seeded
from tests.tuning_cache import CPU, TINY, configs, finish, start

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="these run several processes on the CPU")


# ---- a second process ----------------------------------------------------------------------------------------------

LOWER_FOR_CUDA = """
import json, sys
from unittest import mock
import jax
from jax import export, numpy as jnp
import jax_splitk
from benchmarks.cases import Case
from jax_splitk.runtime import compiler, nvrtc, toolchain
from jax_splitk.tuning import tuner
forbidden = mock.Mock(side_effect=AssertionError("measured or compiled"))
tuner.tune = forbidden
if sys.argv[1] == "second":
    nvrtc.Nvrtc.compile = compiler.compile_in_worker = forbidden
case = Case("one", 2, 12, 12, 64, 64, (3, 3))
run = jax.jit(lambda x, y: jax_splitk.conv_wgrad(x, y, case.rhs_shape, **case.lax_arguments()))
shapes = [jax.ShapeDtypeStruct(shape, case.dtype) for shape in (case.lhs_shape, case.g_shape)]
module = export.export(
    run, platforms=["cuda"], disabled_checks=[export.DisabledSafetyCheck.custom_call("jax_splitk_launch_v2")]
)(*shapes).mlir_module()
print(json.dumps([module, forbidden.call_count]))
"""


@pytest.mark.skipif(toolchain.unavailable() is not None, reason="needs NVRTC and CUTLASS's headers")
def test_a_second_process_lowers_for_cuda_without_measuring_or_compiling(tmp_path: pathlib.Path) -> None:
    target = target_for("cuda")
    problem = Case("one", 2, 12, 12, 64, 64, (3, 3)).problem()
    config = im2col.FAMILY.candidates(problem, target)[3]
    key = key_for(problem, target)
    choice = Candidate(im2col.FAMILY, config)
    path = tmp_path / key.file
    path.parent.mkdir(parents=True)
    path.write_text(Entry.of(key, choice, (Measurement(choice, 5.0),), None, {}).dumps())
    ((first, _),) = finish(start(LOWER_FOR_CUDA, "first", CACHE_DIR=str(tmp_path)))
    assert list((tmp_path / "cubin").glob("*.cubin")), "the first process compiles"
    ((second, _),) = finish(start(LOWER_FOR_CUDA, "second", CACHE_DIR=str(tmp_path)))
    assert first == second
    assert first[1] == 0
    assert str(config) in first[0]


# ---- a shared cache ------------------------------------------------------------------------------------------------

TUNE_TWENTY = """
import json, logging, pathlib, random, sys, time
import jax_splitk
from benchmarks.cases import Case
from jax_splitk.tuning import measure, search
logging.basicConfig(level=logging.WARNING)
rng = random.Random(int(sys.argv[1]))

class FakeBench(measure.Bench):
    def __init__(self, problem, platform, given_up):
        self.problem, self.platform, self.given_up, self.sets = problem, platform, given_up, 1
    def prepare(self, candidates):
        return [measure.Contestant(c, lambda: None) for c in candidates], []
    def _round(self, contestant):
        time.sleep(rng.random() * 1e-4)
        return rng.uniform(10, 1000)

search.Bench = FakeBench
cases = [Case("x", 2 + i, 9, 8, 6, 10, (3, 2), dtype="float32") for i in range(20)]
(waiting := pathlib.Path(sys.argv[2])).joinpath(sys.argv[1]).touch()
while len(list(waiting.iterdir())) < int(sys.argv[3]):  # all at once
    time.sleep(1e-3)
result = jax_splitk.tune_problems([case.problem() for case in cases], seconds=0.05, again=True)
print(json.dumps([len(result), [len(e.measurements) for _, e in result]]))
"""


@pytest.mark.parametrize("count", [3, pytest.param(6, marks=pytest.mark.exhaustive)])
def test_processes_tune_the_same_problems_into_one_cache(
    count: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache, waiting = tmp_path / "cache", tmp_path / "waiting"
    waiting.mkdir()
    salts = generator(1).choice(2**31, count, replace=False)
    outcomes = finish(*(start(TUNE_TWENTY, salt, waiting, count, CACHE_DIR=str(cache)) for salt in salts))
    assert [(found[0], err) for found, err in outcomes] == [(20, "")] * count
    monkeypatch.setenv("JAX_SPLITK_CACHE_DIR", str(cache))
    files = list(store.files(cache))
    assert len(files) == 20
    for i in range(20):
        problem = Case("x", 2 + i, 9, 8, 6, 10, (3, 2), dtype="float32").problem()
        key = key_for(problem, CPU)
        entry = entries.loads((cache / key.file).read_bytes(), key)
        assert store.lookup(key) == (entry, "user cache")
        candidates = [m.candidate for m in entry.measurements]
        assert len(candidates) == len(set(candidates))
        assert {XLA, entry.choice, entry.predicted} <= set(candidates)
        # At least the measurements of the last writer.
        assert len(candidates) >= min(counts[i] for (_, counts), _ in outcomes)
    assert list(cache.rglob(".tmp-*")) == []
    assert caplog.records == []


KILLED_WRITERS = """
import hashlib, json, os, random, signal, sys, time, warnings
warnings.simplefilter("ignore")  # of fork beside threads: the children run no JAX
import logging
import jax_splitk
from benchmarks.cases import Case
from jax_splitk.runtime import compiler, disk
from jax_splitk.runtime.source import Source
from jax_splitk.runtime.target import target_for
from jax_splitk.tuning import search, store
from jax_splitk.tuning.choice import XLA
from jax_splitk.tuning.entry import Entry, Measurement
from jax_splitk.tuning.key import key_for

seed, kills = int(sys.argv[1]), int(sys.argv[2])
warned = []
handler = logging.Handler()
handler.emit = lambda record: warned.append(record.getMessage())
logging.getLogger("jax_splitk").addHandler(handler)
target = target_for("cpu")
keys = [key_for(Case("x", 2 + i, 9, 8, 6, 10, (3, 2), dtype="float32").problem(), target) for i in range(5)]
ranked = {key: search.ranked(key) for key in keys}
names = [f"{hashlib.sha256(bytes([i])).hexdigest()}-1" for i in range(5)]
# Made ahead: it is writers that are to be killed.
source = Source("contraction/wgrad.cu", ())
images = [random.Random(seed + i).randbytes(30_000 * i) for i in range(11)]
cubins = [compiler.Compiled(image, hashlib.sha256(image).hexdigest()) for image in images]

def write_entries(rng):
    while True:
        key = rng.choice(keys)
        times = [Measurement(c, rng.uniform(1, 100)) for c in ranked[key]] + [Measurement(XLA, 9.0)]
        # Entries of many sizes, so that one written over another would show.
        metadata = {"padding": "x" * rng.randrange(200_000)}
        store.save(Entry.of(key, rng.choice(ranked[key]), tuple(times), ranked[key][0], metadata))

def write_cubins(rng):
    while True:
        name = rng.choice(names)
        disk.write(disk.cache_dir() / compiler._file(name), compiler._pack(name, "", source, rng.choice(cubins)))

def check():
    for key in keys:
        there = (disk.cache_dir() / key.file).exists()  # before it is read: a writer may live
        found = store.lookup(key)
        assert found is not None or not there, key
        if found is not None:
            found[0].read_evidence()
        entries_seen[key] = entries_seen.get(key, False) or found is not None
        assert (found is not None) == entries_seen[key], key  # none is lost
    for name in names:
        there = (disk.cache_dir() / compiler._file(name)).exists()
        found = compiler._load(name)
        assert found is not None or not there, name
        assert found is None or hashlib.sha256(found.image).hexdigest() == found.log, name
    return sum(entries_seen.values())

entries_seen = {}
rng = random.Random(seed)
for i in range(2 * kills):
    child = os.fork()
    if child == 0:
        (write_entries if i % 2 else write_cubins)(random.Random(seed + i))
    time.sleep(rng.uniform(0, 0.02))
    if i % 4 == 0:
        check()  # while it writes
    time.sleep(rng.uniform(0, 0.01))
    os.kill(child, signal.SIGKILL)
    pid, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
    check()
root = disk.cache_dir()
left = len(list((root / "tuning").rglob(".tmp-*"))), len(list((root / "cubin").rglob(".tmp-*")))
print(json.dumps({"entries": check(), "cubins": len(list((root / "cubin").glob("*.cubin"))), "left": left,
                  "warned": warned}))
"""


@pytest.mark.parametrize("salt", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_writers_killed_at_random_points_leave_no_damage(
    salt: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 of 60 writers of entries and 60 writers of cubins: each file that remains is complete, or a temporary
    file."""
    ((found, _),) = finish(start(KILLED_WRITERS, (SEED + salt) % 2**31, 60, CACHE_DIR=str(tmp_path)), seconds=240)
    assert found["warned"] == []
    assert (found["entries"], found["cubins"]) == (5, 5)
    # Some were caught in the middle of writing, or the test would show nothing.
    assert sum(found["left"]) > 0
    monkeypatch.setenv("JAX_SPLITK_CACHE_DIR", str(tmp_path))
    assert len(list(store.files(tmp_path))) == 5
    key = key_for(Case("x", 2, 9, 8, 6, 10, (3, 2), dtype="float32").problem(), CPU)
    choice = search.ranked(key)[0]
    assert store.save(Entry.of(key, choice, (), None, {"last": True}))
    last = store.lookup(key)
    assert last is not None
    assert last[0].metadata == {"last": True}


# ---- a job of two processes ----------------------------------------------------------------------------------------

LOWER = """
import json, logging, sys, time, pathlib
import jax
jax.distributed.initialize(f"localhost:{sys.argv[1]}", num_processes=2, process_id=int(sys.argv[2]))
from jax import numpy as jnp
import jax_splitk
from benchmarks.cases import Case
messages = []
handler = logging.Handler()
handler.emit = lambda record: messages.append(record.getMessage())
logging.getLogger("jax_splitk").addHandler(handler)
logging.getLogger("jax_splitk").setLevel(logging.INFO)
process, flag = int(sys.argv[2]), pathlib.Path(sys.argv[3])

def lower(batch, *shift):
    case = Case("tiny", batch, 9, 8, 6, 10, (3, 2), dtype="float32")
    fn = lambda x, g: jax_splitk.conv_wgrad(x + len(shift), g, case.rhs_shape, **case.lax_arguments())
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (case.lhs_shape, case.g_shape)]
    return jax.jit(fn).lower(*shapes).as_text()

assert jax.process_count() == 2 and len(jax.local_devices()) == 1
out = []
BODY
print(json.dumps([out, messages]))
"""


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("localhost", 0))
        return held.getsockname()[1]


def job(body: str, tmp_path: pathlib.Path, caches: list[pathlib.Path], **variables: str) -> list[tuple[Any, str]]:
    port = free_port()
    script = LOWER.replace("BODY", textwrap.dedent(body))
    flag = tmp_path / "flag"
    variables = {"AGREEMENT_TIMEOUT_S": "60", **variables}
    return finish(*(start(script, port, i, flag, CACHE_DIR=str(caches[i]), **variables) for i in range(2)))


def decided(folder: pathlib.Path, config: wgrad_host.Config | None, batch: int = 4) -> pathlib.Path:
    """A cache with a decision for a batch of `TINY`'s geometry."""
    key = key_for(Case("tiny", batch, 9, 8, 6, 10, (3, 2), dtype="float32").problem(), CPU)
    choice = XLA if config is None else Candidate(wgrad_host.FAMILY, config)
    entry = Entry.of(key, choice, (Measurement(choice, 5.0),), None, {})
    path = folder / key.file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(entry.dumps())
    return folder


ONE, TWO = wgrad_host.Config(3, 64), wgrad_host.Config(5, 96)


# A process with JAX takes a second to start, so one job serves three tests, with batches of their own.
DIFFERENT_CACHES = """
lowered = [lower(batch, *shift) for shift in ((), (1,)) for batch in (4, 5, 6, 7, 8)]

from jax.sharding import AxisType, NamedSharding, PartitionSpec
mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
split, parted = NamedSharding(mesh, PartitionSpec("data")), []
for batch in (14, 16, 17):
    case = Case("tiny", 2 * batch, 9, 8, 6, 10, (3, 2), dtype="float32")
    fn = jax.jit(lambda x, g: jax_splitk.conv_wgrad(x, g, case.rhs_shape, **case.lax_arguments()))
    whole = [jnp.full(shape, 1.0) for shape in (case.lhs_shape, case.g_shape)]
    parts = [jax.make_array_from_callback(x.shape, split, lambda index, x=x: x[index]) for x in whole]
    text = fn.lower(*parts).compile().as_text()
    parted.append((text, float(fn(*parts).addressable_data(0).sum()), float(fn(*whole).sum())))

from jax_splitk.runtime import plan
from jax_splitk.runtime.compiler import CompilationError
from jax_splitk.runtime.toolchain import CompilerUnavailable
build, asked = plan.CustomCall.custom_call, []

def failing(error):
    def custom_call(self):
        asked.append(1)
        if process == 1:
            raise error
        return build(self)
    return custom_call

plan.CustomCall.custom_call = failing(CompilationError("wgrad.cu does not compile with A=1:\\nand why"))
failed = [lower(24), lower(24, 1)]
plan.CustomCall.custom_call = failing(CompilerUnavailable("nvidia-cuda-nvrtc 13 is not installed"))
failed.append(lower(25))
plan.CustomCall.custom_call = build
failed += [lower(26), lower(24, 1, 2)]
out = {"lowered": lowered, "parted": parted, "failed": failed}
"""


@pytest.fixture(scope="module")
def with_different_caches(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """(what it made, its messages) of each of two processes: the caches have different decisions, only one has any, or
    one says XLA."""
    folder = tmp_path_factory.mktemp("caches")
    caches = [folder / "zero", folder / "one"]
    for batch in (4, 14):
        decided(caches[0], ONE, batch), decided(caches[1], TWO, batch)
    for batch in (5, 24):
        decided(caches[0], ONE, batch)
    for batch in (6, 16):
        decided(caches[1], TWO, batch)
    for batch in (7, 17):
        decided(caches[0], None, batch), decided(caches[1], TWO, batch)
    return [found for found, _ in job(DIFFERENT_CACHES, folder, caches)]


def test_two_processes_with_different_caches_lower_the_same(with_different_caches: list[Any]) -> None:
    """Each problem is in two programs."""
    (zero, zero_log), (one, _) = with_different_caches
    zero, one = zero["lowered"], one["lowered"]
    assert zero == one
    both = [configs(text) for text in zero]
    assert both[:5] == both[5:]
    assert both[:2] == [[ONE], [ONE]]
    assert both[2] not in ([ONE], [TWO], [])  # a miss in process 0 is a miss
    assert both[3] == []
    assert any("not tuned" in line for line in zero_log)


def test_two_processes_with_different_caches_compile_the_same_parts(with_different_caches: list[Any]) -> None:
    """The processes choose while XLA compiles one partitioned program, and its result is right."""
    (zero, _), (one, _) = with_different_caches
    zero, one = zero["parted"], one["parted"]
    for (text, total, expected), (other_text, other_total, _) in zip(zero, one, strict=True):
        assert configs(text) == configs(other_text)
        assert total == other_total == expected
        assert "all-reduce" in text
    assert configs(zero[0][0]) == [ONE]
    assert configs(zero[1][0]) not in ([TWO], [])  # a miss in process 0 is a miss
    assert configs(zero[2][0]) == []


def test_what_one_process_cannot_compile_is_left_to_xla_in_all(with_different_caches: list[Any]) -> None:
    """This holds also when it is lowered again. Kernels that all can compile are used."""
    (zero, zero_log), (one, one_log) = with_different_caches
    zero, one = zero["failed"], one["failed"]
    assert zero == one
    assert [len(configs(text)) for text in zero] == [0, 0, 0, 1, 0]
    for log, where in ((zero_log, "process 1: "), (one_log, "")):
        (first,) = [line for line in log if f"XLA instead of wgrad_host {ONE}: {where}wgrad_host: wgrad.cu" in line]
        assert ("and why" in first) is (where == "")
        missing = f": {where}wgrad_host: nvidia-cuda-nvrtc 13 is not installed"
        (second,) = [line for line in log if missing in line and "XLA instead" in line]
        assert "lhs 25x9x8x6" in second


def test_process_0_measures_for_all(tmp_path: pathlib.Path) -> None:
    body = """
    from jax_splitk.tuning import search
    run, count = search.Search.run, []
    search.Search.run = lambda self: count.append(1) or run(self)
    search.FIRST_ROUND = 3
    out.append([lower(4), lower(5)])
    out.append(len(count))
    """
    caches = [tmp_path / "zero", tmp_path / "one"]
    outcomes = job(body, tmp_path, caches, AUTOTUNE="on_miss", TUNE_BUDGET_S="0.05")
    (zero, one) = (found[0] for found, _ in outcomes)
    assert zero[0] == one[0]
    assert (zero[1], one[1]) == (2, 0)
    assert [len(list(store.files(cache))) for cache in caches] == [2, 0]


def test_without_agreement_no_cache_decides(tmp_path: pathlib.Path) -> None:
    """First one process alone lowers the problem, then the other: neither may use its own cache."""
    caches = [decided(tmp_path / "zero", ONE), decided(tmp_path / "one", TWO)]
    body = """
    if process == 0:
        out.append(lower(4))
        flag.touch()
    else:
        while not flag.exists():
            time.sleep(0.05)
        out.append(lower(4))
    """
    outcomes = job(body, tmp_path, caches, AGREEMENT_TIMEOUT_S="2")
    (zero, one) = (found[0] for found, _ in outcomes)
    assert zero == one
    assert len(configs(zero[0])) == 1
    assert configs(zero[0])[0] not in (ONE, TWO)
    for (_, log), _ in outcomes:
        assert any("the processes did not agree" in line and "no cache is asked" in line for line in log)
        assert any("the cost model's best" in line for line in log)


# ---- how long they wait -------------------------------------------------------------------------------------------


def test_an_endless_wait_is_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Infinity is a number of seconds above 0, or is refused as one: it does not crash."""
    monkeypatch.setenv("JAX_SPLITK_AGREEMENT_TIMEOUT_S", "inf")
    waits = []

    class Client:
        def wait_at_barrier(self, name: str, milliseconds: int) -> None:
            waits.append(milliseconds)
            raise TimeoutError

    monkeypatch.setattr(agreement._compat, "distributed", lambda: (Client(), 0, 2))
    key = key_for(TINY.problem(), CPU)
    try:
        assert agreement.agree(key, 0, lambda: None) == (False, None)
    except ValueError as error:
        assert "accepted" in str(error)
    else:
        assert waits


@pytest.mark.parametrize(("seconds", "decision_ms"), [(5, 3_600_000), (7200, 7_200_000)])
def test_the_wait_for_a_measurement_is_an_hour_at_least(
    seconds: int, decision_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_SPLITK_AGREEMENT_TIMEOUT_S", str(seconds))
    waits = []

    class Client:
        def wait_at_barrier(self, name: str, milliseconds: int) -> None:
            waits.append((name.rpartition("/")[2], milliseconds))

        def blocking_key_value_get(self, name: str, milliseconds: int) -> str:
            waits.append((name.rpartition("/")[2], milliseconds))
            return "miss"

        def key_value_dir_get(self, name: str) -> list[tuple[str, str]]:
            return []

    monkeypatch.setattr(agreement._compat, "distributed", lambda: (Client(), 1, 2))
    key = key_for(TINY.problem(), CPU)
    assert agreement.agree(key, 0, lambda: None) == (True, None)
    assert agreement.obstacle(key, Candidate(wgrad_host.FAMILY, ONE), None) is None
    assert waits == [("barrier", 1000 * seconds), ("entry", decision_ms), ("compiled", 1000 * seconds)]


def test_kernels_that_differ_in_their_epilogue_do_not_share_a_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have one key, and a barrier serves once."""
    barriers: list[str] = []

    class Client:
        def wait_at_barrier(self, name: str, milliseconds: int) -> None:
            barriers.append(name)

        def key_value_dir_get(self, name: str) -> list[tuple[str, str]]:
            return []

    monkeypatch.setattr(agreement._compat, "distributed", lambda: (Client(), 1, 2))
    key = key_for(TINY.problem(), CPU)
    for _ in range(2):
        assert agreement.obstacle(key, Candidate(wgrad_host.FAMILY, ONE), None) is None
    assert len(set(barriers)) == 2


# ---- artefacts -----------------------------------------------------------------------------------------------------

RUN_EXPORTED = (pathlib.Path(__file__).parents[1] / "run_exported.py").read_text()


def test_an_exported_function_needs_no_cache_and_no_compiler(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_SPLITK_CACHE_DIR", str(decided(tmp_path / "cache", TWO)))
    with seeded(3) as rng:
        lhs, g = (rng.standard_normal(shape, np.float32) for shape in (TINY.lhs_shape, TINY.g_shape))
    run = jax.jit(lambda x, y: jax_splitk.conv_wgrad(x, y, TINY.rhs_shape, **TINY.lax_arguments()))
    allowed = [export.DisabledSafetyCheck.custom_call(HOST_WGRAD_TARGET)]
    exported = export.export(run, disabled_checks=allowed)(jnp.asarray(lhs), jnp.asarray(g))
    assert configs(exported.mlir_module()) == [TWO]
    (tmp_path / "exported").write_bytes(exported.serialize())
    np.savez(tmp_path / "inputs.npz", lhs=lhs, g=g)
    empty = tmp_path / "empty"
    ((found, err),) = finish(start(RUN_EXPORTED, tmp_path, CACHE_DIR=str(empty), CACHE_MODE="frozen"))
    assert found == [0, ["cpu"], False], err
    with np.load(tmp_path / "outputs.npz") as outputs:
        np.testing.assert_array_equal(outputs["arr_0"], run(lhs, g))
    # The fresh process does refuse to lower anything new: there, nothing is decided without a cache.
    refused = start(
        """
        import jax, jax_splitk
        from jax import numpy as jnp
        jax_splitk.conv_wgrad(jnp.ones((2, 5, 5, 3)), jnp.ones((2, 5, 5, 4)), (3, 3, 3, 4), (1, 1), "SAME",
                              dimension_numbers=("NHWC", "HWIO", "NHWC"), implementation="host")
        """,
        CACHE_DIR=str(empty),
        CACHE_MODE="frozen",
    )
    _, err = refused.communicate(timeout=60)
    assert refused.returncode == 1
    assert "FrozenCacheMiss" in err
