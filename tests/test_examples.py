"""The examples run and reach their stated accuracy, or exit with an error; `make demo` runs digits.py."""

import importlib
import os
import pathlib
import re
import runpy
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
FRAMEWORKS = {"flax_linen": "flax.linen", "flax_nnx": "flax.nnx", "equinox_vmap": "equinox", "haiku_net": "haiku"}


@pytest.mark.parametrize("name", FRAMEWORKS)
@pytest.mark.filterwarnings("default")  # a framework may be behind jax
def test_frameworks(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        importlib.import_module(FRAMEWORKS[name])
    except Exception as error:
        pytest.skip(f"{FRAMEWORKS[name]} does not work with this jax: {type(error).__name__}: {error}")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert len(re.findall(r"^conv_wgrad 32, ", shown, re.MULTILINE)) == 2, shown
    assert re.search(r"apart by [\d.]+e-\d\d$", shown, re.MULTILINE)


@pytest.mark.filterwarnings("default")
def test_a_mixture_of_experts(capsys: pytest.CaptureFixture[str]) -> None:
    """It exits with an error where its losses are not lax's, or do not fall."""
    try:
        importlib.import_module("flax.nnx")
    except Exception as error:
        pytest.skip(f"flax.nnx does not work with this jax: {type(error).__name__}: {error}")
    runpy.run_path(str(EXAMPLES / "mixture_of_experts.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert re.search(r"^sum of 9 operations: ", shown, re.MULTILINE), shown  # three products, three passes each
    assert re.search(r"^loss [\d.]+ -> [\d.]+, apart from lax's by [\d.]+e-\d\d$", shown, re.MULTILINE), shown


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("default")
def test_checkpoints_of_every_format(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It exits with an error where packed weights choose another token than dequantized ones, or lose too much."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("serve_checkpoint")
    for name, small in {"LAYERS": 1, "BATCH": 8, "STEPS": 100}.items():  # training takes the time; the bounds stay
        monkeypatch.setattr(example, name, small)
    example.main()
    shown = capsys.readouterr().out
    rows = re.findall(r"^(\S.*?) +(\d+) +([\d.]+) +100%  The following ", shown, re.MULTILINE)
    assert len(rows) == 8, shown
    plain, *quantized = (int(kilobytes) for _, kilobytes, _ in rows)
    assert all(kilobytes < 0.55 * plain for kilobytes in quantized), shown


@pytest.mark.exhaustive
def test_quantized_digits() -> None:
    """It exits with an error if it misses its own bounds."""
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


@pytest.mark.gpu
def test_a_program_is_compiled_without_a_gpu() -> None:
    """XLA reads the stack of weights in place: jaxlib 0.11.1 and later."""
    command = [sys.executable, str(EXAMPLES / "compile_without_gpu.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"^calls of kernels in the scan's body: 2$", done.stdout, re.MULTILINE), done.stdout
    layer, temporary = re.findall(r"^(?:weights of a layer|temporary memory): +([\d.]+) MB$", done.stdout, re.MULTILINE)
    assert float(temporary) < 0.01 * float(layer)
