"""Shared set-up: an isolated cache for every test run, the GPU marker, and device code compiled ahead."""

import atexit
import fcntl
import gc
import importlib.metadata
import os
import pathlib
import secrets
import tempfile
from collections.abc import Generator

# Before jax_splitk or XLA start: tests must not read or write the user's cache, and need several CPU devices.
if "JAX_SPLITK_CACHE_DIR" not in os.environ:
    # One for all processes of a run (pytest-xdist's inherit the environment), deleted when the first of them ends.
    cache = tempfile.TemporaryDirectory(prefix="jax_splitk-test-", ignore_cleanup_errors=True)
    os.environ["JAX_SPLITK_CACHE_DIR"] = cache.name
    atexit.register(cache.cleanup)  # by itself it would warn, behind pytest's summary
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
if not pathlib.Path("/dev/nvidiactl").exists():
    # Half of a run was XLA:CPU's compilation, and its code need not be fast. jaxlib 0.12 lacks the second flag.
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
if "PYTEST_XDIST_WORKER" in os.environ:
    # NumPy's matrix products would take every core, in each of the processes.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "2")
# Processes of pytest-xdist share the machine's GPUs evenly.
if "JAX_SPLITK_TEST_GPUS" in os.environ and "PYTEST_XDIST_WORKER" in os.environ:
    gpus = os.environ["JAX_SPLITK_TEST_GPUS"].split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")) % len(gpus)]
# Another one in each run, the same in all its processes.
os.environ.setdefault("JAX_SPLITK_TEST_SEED", str(secrets.randbits(32)))
# XLA:CPU takes one to three seconds to compile the default generator, for each shape.
os.environ.setdefault("JAX_DEFAULT_PRNG_IMPL", "rbg")

import jax
import pytest

from jax_splitk.kernels.cpu import passes as conv_host
from jax_splitk.runtime import compiler, disk
from jax_splitk.tuning import store
from tests import shared_contexts
from tests.problems import SEED
from tests.tuning_cache import isolate, new_session

shared_contexts.install()


def pytest_report_header() -> list[str]:
    left_out = [] if pathlib.Path("/dev/nvidiactl").exists() else ["no NVIDIA driver: tests marked gpu are left out"]
    return [f"JAX_SPLITK_TEST_SEED={SEED} draws this run's random cases again", *left_out]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if jax.default_backend() == "gpu":
        return
    config.hook.pytest_deselected(items=[item for item in items if "gpu" in item.keywords])
    items[:] = [item for item in items if "gpu" not in item.keywords]


def pytest_collection_finish() -> None:
    """What is imported stays, so the garbage collector need not look at it during the tests. It took 3% of their time
    with Python's threshold, which jax's many small objects reach often."""
    gc.freeze()
    gc.set_threshold(50_000)


@pytest.fixture(autouse=True)
def session_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test has a tuning session of its own. The run's cache has compiled kernels only."""
    save, shared = store.save, pathlib.Path(os.environ["JAX_SPLITK_CACHE_DIR"])
    monkeypatch.setattr(store, "save", lambda entry: disk.cache_dir() != shared and save(entry))
    new_session(monkeypatch)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    """The writable layer of a cache of the test's own; all layers are empty."""
    return isolate(monkeypatch, tmp_path)


@pytest.fixture
def competing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretends that the CPU's kernels of forward passes and input gradients are faster than XLA's."""
    monkeypatch.setattr(conv_host.ConvHost, "competes", True)
    monkeypatch.setattr(conv_host.ConvHost, "why_xla_untuned", lambda self, problem: None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Makes reports valid Unicode: pytest-xdist ends the run if it cannot send a report, and tests of damaged files log
    arbitrary bytes."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Appends each failure to the file that JAX_SPLITK_TEST_FAILURES names. pytest-xdist reports failures only at the
    end, so a run that is cut off would lose them."""
    path = os.environ.get("JAX_SPLITK_TEST_FAILURES")
    if path and report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        worker = getattr(report, "worker_id", "")
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"== {worker} {report.when} {report.nodeid}\n{report.longreprtext[-1500:]}\n")


@pytest.fixture(scope="module", autouse=True)
def device_code_first(request: pytest.FixtureRequest) -> None:
    """Compiles what a module's `device_code()` lists in parallel, since its tests would compile one by one.

    One of several processes (pytest-xdist) compiles; the others wait, and read the kernels from disk. Nothing is to be
    done where `tests.compile_ahead` has run before: .ci/gpu sets JAX_SPLITK_TEST_COMPILED.
    """
    wanted = getattr(request.module, "device_code", None)
    if wanted is None or "JAX_SPLITK_TEST_COMPILED" in os.environ:
        return
    folder = pathlib.Path(os.environ["JAX_SPLITK_CACHE_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", os.getpid())
    compiled = folder / f"tests.{run}.{request.module.__name__}"
    with (folder / "tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not compiled.exists():
            compiler._memory.clear()  # a test with a cache of its own does not compile into this folder
            compiler.compile_sources(wanted())
            compiled.touch()
