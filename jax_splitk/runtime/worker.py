"""Processes that compile kernels: how to start them, and whether this program can.

A worker is a Python interpreter that runs `nvrtc.py`. `sys.executable` need not be an interpreter: programs made by
PyInstaller or Nuitka name themselves there, as may a host that embeds Python. Running it would start the whole program
again. So a worker is started only if `sys.executable` looks like an interpreter, and it must answer as `nvrtc.py` does,
in limited time. A variable marks a worker's environment, so that a program that was started as a worker starts no
workers itself.
"""

import contextlib
import dataclasses
import os
import pathlib
import pickle
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping

from jax_splitk.runtime import disk, nvrtc
from jax_splitk.runtime.nvrtc import NvrtcError

# The variable that marks a worker's environment.
_MARK = "_JAX_SPLITK_WORKER"
# How long a program may take to answer: Python starts in 20 ms, and from a slow disk in seconds.
_ANSWER_SECONDS = 10.0
_PYTHON = re.compile(r"(python|pypy|graalpy)[\w.-]*", re.IGNORECASE)


class NoWorker(RuntimeError):
    """This program cannot have workers; the message says why."""


@dataclasses.dataclass
class _Started:
    """The result of the first start. Other threads wait for it.

    Attributes:
      executable: the program that answered.
      refusal: why there are no workers.
    """

    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    executable: str | None = None
    refusal: str | None = None


_started = _Started()


def _reset_after_fork() -> None:
    """Replaces the lock in a forked process, where nobody would release it."""
    _started.lock = threading.Lock()


os.register_at_fork(after_in_child=_reset_after_fork)


def available() -> bool:
    """Whether this program may have workers, as far as is known without starting one. Warns once if it cannot."""
    try:
        _executable()
    except NoWorker as error:
        _warn(error)
        return False
    return True


def _warn(error: NoWorker) -> None:
    disk.warn_once(f"kernels are compiled in this process, one after the other: {error}")


def compile_in_worker(
    library: pathlib.Path, text: str, name: str, options: list[str], headers: Mapping[str, str] | None = None
) -> tuple[bytes | None, str]:
    """`Nvrtc.compile` in a process of its own, which ends with this one.

    Raises:
      NoWorker: no process was started, or the process is not a worker.
      NvrtcError: the worker failed.
    """
    request = pickle.dumps((os.getpid(), str(library), text, name, options, headers))
    with _worker() as process:
        try:
            out, err = process.communicate(request)
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        tail = err.decode(errors="replace")[-2000:]
        raise NvrtcError(f"the compiler's process ended with status {process.returncode}: {tail}")
    image, log = pickle.loads(out)
    return image, log


def _worker() -> subprocess.Popen[bytes]:
    """A process that has answered. All threads wait for the first one, so that a wrong program is started only once."""
    with _started.lock:
        executable = _executable()
        if executable != _started.executable:
            process = _answering(executable)
            _started.executable = executable
            return process
    return _answering(executable)


def _executable() -> str:
    """The interpreter for workers, which may turn out not to be one. Raises `NoWorker`."""
    if _MARK in os.environ:
        raise NoWorker("this process was itself started as a compiler's worker")
    if _started.refusal is not None:
        raise NoWorker(_started.refusal)
    if not os.path.isfile(nvrtc.__file__):
        raise NoWorker(f"{nvrtc.__file__} is no file that a Python could run")
    # The argument of `multiprocessing.set_executable`, which loads this module.
    spawn = sys.modules.get("multiprocessing.spawn")
    chosen = os.fsdecode(spawn.get_executable() or "") if spawn is not None else ""
    if (reason := _no_python()) is None:
        return sys.executable
    if chosen and chosen != sys.executable:
        return chosen
    raise NoWorker(f"{reason}; multiprocessing.set_executable(PATH) names a Python")


def _no_python() -> str | None:
    """Why `sys.executable` is known not to be an interpreter."""
    if not sys.executable:
        return "sys.executable is not set"
    frozen = getattr(sys, "frozen", False) or hasattr(sys, "_MEIPASS")
    if frozen or "__compiled__" in globals() or hasattr(sys.modules.get("__main__"), "__compiled__"):
        return f"sys.executable={sys.executable!r} is a frozen program"
    if _PYTHON.fullmatch(os.path.basename(sys.executable)) is None:
        return f"sys.executable={sys.executable!r} is not called as a Python is"
    return None


def _answering(executable: str) -> subprocess.Popen[bytes]:
    """The process, once it has answered. Raises `NoWorker`, then and always after, if it does not answer."""
    command = [executable, "-I", "-S", str(pathlib.Path(nvrtc.__file__).resolve())]
    why = f"no answer from it within {_ANSWER_SECONDS:g} seconds"
    try:
        # In a process group of its own: a terminal's Ctrl-C ends the waiting program, but is not a failed compilation.
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
            env={**os.environ, _MARK: "1"},
        )
    except OSError as error:
        why = str(error)
    else:
        try:
            if _answers(process):
                return process
        except BaseException:
            _end(process)
            raise
        _end(process)
    _started.refusal = f"{executable!r} is no Python that runs a script ({why})"
    error = NoWorker(_started.refusal)
    _warn(error)
    raise error


def _answers(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process writes a worker's first output in time."""
    assert process.stdout is not None
    handle, got, until = process.stdout.fileno(), b"", time.monotonic() + _ANSWER_SECONDS
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    while got != nvrtc.ANSWER:
        if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
            return False
        more = os.read(handle, len(nvrtc.ANSWER) - len(got))
        got += more
        if not more or not nvrtc.ANSWER.startswith(got):
            return False
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and its children."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with process:
        pass
