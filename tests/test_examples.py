"""The examples run and reach what they promise; `make demo` runs the other one."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


@pytest.mark.exhaustive
def test_quantized_digits() -> None:
    """It exits with an error where it misses its own bounds."""
    command = [sys.executable, str(EXAMPLES / "quantized_digits.py")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    smaller = re.findall(r"^int4, (.*?) +[\d.]+% +[\d,]+  ([\d.]+)x smaller$", done.stdout, re.MULTILINE)
    assert [name for name, _ in smaller] == ["groups of 32", "groups of 64", "per channel"]
    assert all(float(factor) > 6 for _, factor in smaller)
    before, after = re.findall(r"Upside down: accuracy ([\d.]+)% before, ([\d.]+)% with adapters", done.stdout)[0]
    assert float(before) < 60
    assert float(after) > 90
