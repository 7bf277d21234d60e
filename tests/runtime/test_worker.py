"""Programs whose `sys.executable` is not a Python interpreter: they compile themselves, and do not start themselves as
workers."""

import json
import os
import pathlib
import stat
import subprocess
import sys
import time

import pytest

import jax_splitk
from jax_splitk.runtime import toolchain

pytestmark = pytest.mark.skipif(toolchain.unavailable() is not None, reason="needs NVRTC")

# A program that compiles two kernels, ahead and on demand. It first sets `sys.executable`, and the mark of a frozen
# program.
PROGRAM = """
import json, logging, os, sys, time, types
package = sys.modules["jax_splitk"] = types.ModuleType("jax_splitk")  # without jax, which takes seconds to load
package.__path__ = [os.environ["TEST_PACKAGE"]]
starts = os.environ["TEST_STARTS"]
if len(open(starts).read().split()) > 20:
    sys.exit("it starts itself again and again")
exec(os.environ["TEST_SETTING"])
logging.basicConfig()
from jax_splitk.runtime import compiler, worker
worker._ANSWER_SECONDS = 1.0
compiler.Source.text = lambda source, *, with_lines=False: 'extern "C" __global__ void tiny(int* x) { *x = VALUE; }'
sources = [compiler.Source("tiny.cu", (("VALUE", value),)) for value in range(3)]
begun = time.monotonic()
compiler.compile_ahead(sources[:1])
compiled = [compiler.compile_source(sources[0]), *compiler.compile_sources(sources[1:]),
            compiler.compile_anew(sources[0])]
print(json.dumps([time.monotonic() - begun, [b"tiny" in each.image for each in compiled]]))
"""


def program(folder: pathlib.Path, setting: str, script: str, name: str) -> tuple[float, int, str]:
    """(seconds of the compilations, starts of the executable, the log) of a program whose `sys.executable` is a shell
    script of that name."""
    executable, starts, main = folder / name, folder / "starts", folder / "program.py"
    executable.write_text(f"#!/bin/sh\necho start >> {starts}\n{script}\n")
    executable.chmod(executable.stat().st_mode | stat.S_IXUSR)
    starts.touch()
    main.write_text(PROGRAM)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "JAX_SPLITK_CACHE_DIR": str(folder / "cache"),
        "TEST_PACKAGE": os.path.dirname(jax_splitk.__file__),
        "TEST_STARTS": str(starts),
        "TEST_SETTING": f"sys.executable = {str(executable)!r}\n{setting}",
        "REAL_PYTHON": sys.executable,
        "PROGRAM": str(main),
    }
    done = subprocess.run(
        [sys.executable, main], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    seconds, right = json.loads(done.stdout)
    assert right == [True] * 4
    return seconds, len(starts.read_text().split()), done.stderr


# The program's own executable runs the program, whatever its arguments are.
ITSELF = 'exec "$REAL_PYTHON" "$PROGRAM"'


@pytest.mark.parametrize(("setting", "name", "reason"), [
    ("sys.frozen = True", "python3", "is a frozen program"),
    ("sys._MEIPASS = '/nowhere'", "python3", "is a frozen program"),
    ("import __main__; __main__.__compiled__ = object()", "python3", "is a frozen program"),
    ("", "my-application", "is not called as a Python is"),
    ("sys.executable = None", "python3", "sys.executable is not set"),
    ("sys.executable = ''", "python3", "sys.executable is not set"),
])  # fmt: skip
def test_what_is_known_to_be_no_python_is_never_started(
    setting: str, name: str, reason: str, tmp_path: pathlib.Path
) -> None:
    seconds, starts, log = program(tmp_path, setting, ITSELF, name)
    assert starts == 0
    assert seconds < 30
    assert reason in log
    assert log.count("kernels are compiled in this process") == 1, log


@pytest.mark.parametrize("script", [
    ITSELF,
    "sleep 60",
    "echo Usage: python3 FILE",
    "exit 3",
    "echo some trouble >&2; sleep 60",
    "cat",
], ids=["itself", "silent", "usage", "ends", "errors", "echoes"])  # fmt: skip
def test_what_does_not_answer_is_started_once(script: str, tmp_path: pathlib.Path) -> None:
    """Also if several threads would start one."""
    begun = time.monotonic()
    seconds, starts, log = program(tmp_path, "", script, "python3")
    assert starts == 1
    assert seconds < 30
    assert "is no Python that runs a script (no answer from it within 1 seconds)" in log
    assert log.count("kernels are compiled in this process") == 1, log
    assert time.monotonic() - begun < 60, "what was started is ended, too"


def test_an_executable_that_is_not_there(tmp_path: pathlib.Path) -> None:
    _, starts, log = program(tmp_path, "sys.executable += '-gone'", ITSELF, "python3")
    assert starts == 0
    assert "No such file or directory" in log


def test_a_program_that_finds_itself_a_worker_starts_none(tmp_path: pathlib.Path) -> None:
    _, starts, log = program(tmp_path, "os.environ['_JAX_SPLITK_WORKER'] = '1'", ITSELF, "python3")
    assert starts == 0
    assert "this process was itself started as a compiler's worker" in log


def test_a_wrapper_of_a_python_is_one(tmp_path: pathlib.Path) -> None:
    _, starts, log = program(tmp_path, "", 'exec "$REAL_PYTHON" "$@"', "python3.11-wrapped")
    assert starts in (3, 4)  # what is asked for before a worker begins it is compiled here
    assert "compiled in this process" not in log


def test_the_python_that_multiprocessing_was_told(tmp_path: pathlib.Path) -> None:
    """Programs that embed Python set it, as multiprocessing's documentation requires."""
    setting = "import multiprocessing\nmultiprocessing.set_executable(sys.executable)\nsys.executable = '/opt/host'"
    _, starts, log = program(tmp_path, setting, 'exec "$REAL_PYTHON" "$@"', "any-name")
    assert starts in (3, 4)  # what is asked for before a worker begins it is compiled here
    assert "compiled in this process" not in log
