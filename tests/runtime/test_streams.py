"""Closed standard streams, or None: tuning, the log and commands still work."""

import functools
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax import numpy as jnp

import jax_splitk
from jax_splitk.runtime import disk
from jax_splitk.tuning import bar, progress
from jax_splitk.tuning.key import problem_as_dict
from tests.exhaustive import crossed
from tests.tuning.test_progress import KEYS, Terminal
from tests.tuning_cache import CASE

cpu_only = pytest.mark.skipif(jax.default_backend() != "cpu", reason="tunes the CPU's family")


def closed() -> Any:
    with open(os.devnull, "w") as stream:  # a file's `isatty` fails once it is closed
        return stream


def none() -> None:
    return None


@cpu_only
@pytest.mark.parametrize("stderr", [closed, none])
def test_tuning_without_stderr(stderr: Callable[[], Any], cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stderr())
    monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", "on_miss")
    monkeypatch.setenv("JAX_SPLITK_TUNE_BUDGET_S", "0.05")
    wgrad = functools.partial(jax_splitk.conv_wgrad, rhs_shape=CASE.rhs_shape, **CASE.lax_arguments())
    operands = jnp.ones(CASE.lhs_shape), jnp.ones(CASE.g_shape)
    jax.jit(wgrad).lower(*operands)
    assert list(cache.rglob("*.json")), "nothing was tuned"


@pytest.mark.usefixtures("cache")
def test_stderr_that_is_closed_under_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    run = progress.Run(2)
    run.begin(KEYS[0], 1.0)
    assert run._bar is not None
    stream.close()
    run.tick()
    run.best(1.0, 2.0)
    run.end()
    run.begin(KEYS[1], 1.0)
    run.close()
    bar.write("a line")


@pytest.mark.parametrize("stderr", [closed, none])
def test_a_warning_without_stderr(stderr: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """If `logging` cannot write a line, it reports that on stderr, which fails again."""
    monkeypatch.setattr(sys, "stderr", stderr())
    logger, handler = logging.getLogger("jax_splitk"), logging.StreamHandler()
    logger.addHandler(handler)
    try:
        disk.warn_once("a warning of test_a_warning_without_stderr")
    finally:
        logger.removeHandler(handler)


def test_other_errors_of_a_handler_are_the_users() -> None:
    class Strict(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise ValueError("a strict handler")

    logger, handler = logging.getLogger("jax_splitk"), Strict()
    logger.addHandler(handler)
    try:
        with pytest.raises(ValueError, match="a strict handler"):
            logger.warning("a line")
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize(("words", "closing"), crossed(
    ['explain --json "$PROBLEM"', "doctor"], [">&-", "<&- >&- 2>&-"]
))  # fmt: skip
def test_a_command_whose_streams_are_closed(words: str, closing: str) -> None:
    command = f'exec "$PYTHON" -m jax_splitk {words} {closing}'
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "JAX_PLATFORMS": "cpu",
        "PROBLEM": json.dumps(problem_as_dict(CASE.problem())).replace(" ", ""),
    }
    done = subprocess.run(["sh", "-c", command], env=environment, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
