"""What the command line says where there is nothing to say, or nobody who listens any more."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import jax
import pytest

from jax_splitk.__main__ import main
from jax_splitk.tuning import tuner
from tests.tuning_cache import CASE, isolate

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="tunes the host family")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    return isolate(monkeypatch, tmp_path)


def test_tune_says_so_where_nothing_was_tuned(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def failing(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(tuner, "tune", failing)
    problem = json.dumps({"op": "conv_wgrad", **dataclasses.asdict(CASE.problem())})
    assert main(["tune", problem]) == 1
    assert capsys.readouterr().out == "nothing was tuned\n"
    empty = tmp_path / "empty.py"
    empty.write_text("")
    assert main(["tune", str(empty)]) == 0
    assert capsys.readouterr().out == "no jax_splitk operations were lowered\n"


@pytest.mark.parametrize("command", [("cache", "ls"), ("cache", "ls", "--json"), ("doctor",)])
def test_a_reader_that_has_enough_is_no_error(command: tuple[str, ...]) -> None:
    """As in `cache ls | head`."""
    read, write = os.pipe()
    os.close(read)
    path = os.pathsep.join(p for p in sys.path if p)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "jax_splitk", *command],
            env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(write)
    # An entry that cannot be used may be mentioned.
    assert (done.returncode, "Error" in done.stderr) == (1, False), done.stderr


def test_a_layer_that_no_file_system_can_hold(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    impossible = str(tmp_path / ("a" * 300))
    monkeypatch.setenv("JAX_SPLITK_CACHE_PATH", impossible)
    assert main(["cache", "ls", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"][1]["folder"] == impossible
    assert main(["cache", "verify", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unusable"] == []
    main(["doctor", "--json"])
    assert f"JAX_SPLITK_CACHE_PATH: {impossible} is not a folder" in json.loads(capsys.readouterr().out)["problems"]
