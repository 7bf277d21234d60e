"""Ctrl-C at random moments of tuning: KeyboardInterrupt as usual, no damage, and the process goes on."""

import json
import os
import pathlib
import signal
import subprocess
import time
from collections.abc import Callable

import jax
import pytest

from jax_splitk.cli import stored
from jax_splitk.runtime import toolchain
from tests.problems import SEED, generator
from tests.tuning_cache import start

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="tunes the CPU's family")

# A process that a shell starts in the background, as this one may be, ignores Ctrl-C.
LISTEN = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
"""

# Problems that take longer than the test waits; the message says how many are done.
TUNE = """
import json, logging, pathlib, sys
import jax
from jax import numpy as jnp
import jax_splitk
from benchmarks.cases import Case
logging.basicConfig(level=logging.WARNING)
cases = [Case("x", 3 + i, 24, 25, 8, 16, (3, 3), dtype="float32") for i in range(300)]
print("ready", flush=True)
if sys.argv[1] == "uncaught":
    jax_splitk.tune_problems([case.problem() for case in cases], seconds=0.5)
try:
    jax_splitk.tune_problems([case.problem() for case in cases], seconds=0.5)
    raise SystemExit("it came too late")
except KeyboardInterrupt:
    pass
case = cases[20]  # one that is not tuned yet
run = jax.jit(lambda x, g: jax_splitk.conv_wgrad(x, g, case.rhs_shape, **case.lax_arguments()))
out = run(jnp.ones(case.lhs_shape), jnp.ones(case.g_shape))
((_, entry),) = jax_splitk.tune_problems([cases[21].problem()], seconds=0.05)
print(json.dumps([float(out[1, 1, 0, 0]), len(entry.measurements)]), flush=True)
"""


def interrupted(
    process: subprocess.Popen[str], delay: float, *, times: int = 1, send: Callable[[int, int], None] = os.kill
) -> tuple[str, str]:
    """The output of a process after `times` Ctrl-C."""
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    for _ in range(times):
        time.sleep(delay)
        send(process.pid, signal.SIGINT)
    for _ in range(6):
        try:
            return process.communicate(timeout=20)
        except subprocess.TimeoutExpired as error:
            # Python loses a Ctrl-C that comes inside a garbage collector's callback, such as jax's: one more is sent.
            if b"Exception ignored in" in (error.stderr or b""):
                send(process.pid, signal.SIGINT)
    os.killpg(process.pid, signal.SIGKILL)
    raise AssertionError(f"it goes on: {process.communicate()[1]}")


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_ctrl_c_at_random_moments(count: int, tmp_path: pathlib.Path) -> None:
    rng = generator(60 + count)
    for i in range(count):
        delay, kind = float(rng.uniform(0, 1.5)), ("caught", "uncaught")[i % 2]  # in the first three problems
        process = start(LISTEN + TUNE, kind, CACHE_DIR=str(tmp_path), AUTOTUNE="on_miss", TUNE_BUDGET_S="0.1")
        out, err = interrupted(process, delay)
        said = f"seed {SEED}, moment {i}, after {delay:.3f} s, {kind}: {process.returncode}\n{err}"
        assert "the device fails" not in err, said
        assert "FATAL" not in err, said
        if kind == "caught":
            assert process.returncode == 0, said
            value, measurements = json.loads(out)
            assert value == 23 * 24 * 25, said
            assert measurements > 1, said
        else:
            assert process.returncode == -signal.SIGINT, said
            assert err.rstrip().endswith("KeyboardInterrupt"), said
        items = stored.read_folder(tmp_path)
        assert [item.reason for item in items if item.entry is None] == [], said
    # Measurements are kept, also those of interrupted problems.
    assert items
    assert all(item.entry and len(item.entry.measurements) > 1 for item in items)


def test_a_second_ctrl_c_ends_the_process_at_once(tmp_path: pathlib.Path) -> None:
    process = start(LISTEN + TUNE, "uncaught", CACHE_DIR=str(tmp_path))
    _, err = interrupted(process, 0.3, times=2)
    assert process.returncode in (-signal.SIGINT, 128 + signal.SIGINT), err
    assert "FATAL" not in err


COMPILE = """
import concurrent.futures, time
from jax_splitk.runtime import toolchain, worker
library, text = toolchain.find_nvrtc().library, 'extern "C" __global__ void tiny(int* x) { *x = 1; }'
with concurrent.futures.ThreadPoolExecutor(1) as pool:
    compiled = pool.submit(worker.compile_in_worker, library, text, "tiny.cu", ["--gpu-architecture=sm_90a"])
    print("ready", flush=True)
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        print(len(compiled.result()[0]))
"""


@pytest.mark.skipif(toolchain.unavailable() is not None, reason="needs NVRTC")
def test_a_terminals_ctrl_c_does_not_fail_a_compilation() -> None:
    """A terminal sends it to every process of its group."""
    process = start(LISTEN + COMPILE)
    out, err = interrupted(process, 0.05, send=os.killpg)
    assert process.returncode == 0, err
    assert int(out) > 0
