"""Running `python -m jax_splitk`, in this process and in one of its own."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from jax_splitk.__main__ import main


def run(capsys: Any, *arguments: Any, code: int = 0) -> Any:
    """What the command prints as JSON, and nothing else, on stdout."""
    words = [str(a) for a in arguments]
    at = words.index("--") if "--" in words else len(words)
    assert main([*words[:at], "--json", *words[at:]]) == code
    return json.loads(capsys.readouterr().out)


def text(capsys: Any, *arguments: Any, code: int = 0) -> str:
    assert main([str(a) for a in arguments]) == code
    return capsys.readouterr().out


def refused(capsys: Any, *arguments: Any) -> str:
    with pytest.raises(SystemExit) as exit_:
        main([str(a) for a in arguments])
    assert exit_.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def command(*arguments: str, stdout: int = subprocess.PIPE, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(p for p in sys.path if p)
    return subprocess.run(
        [sys.executable, "-m", "jax_splitk", *arguments],
        env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", **environment},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
