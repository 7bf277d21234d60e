"""A training step from exported decisions and kernels, in a process that has no compiler.

    python -m benchmarks.frozen resnet50_b32 diffusion_unet [--json benchmarks/results/frozen_h200.json]

Models are those of `benchmarks.models`. One process tunes a model's step from an empty cache and runs it; `jax-splitk
cache export` writes a folder. Another process has that folder, an empty cache, frozen mode and no NVRTC: it lowers and
runs the step. The two processes must make the same choices, and their losses may differ by rounding only.
"""

import argparse
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import jax_splitk
from benchmarks import models, report
from benchmarks.models.layers import OURS
from benchmarks.models.measure import compiled, train_step
from jax_splitk.runtime import toolchain
from jax_splitk.tuning.choice import XLA

STEPS = 5
ROUNDING = 0.02  # of losses, relative: XLA may choose other kernels of its own


def run_step(name: str, tiny: bool, frozen: bool) -> dict[str, Any]:
    """The figures of one of the two processes."""
    (model,) = models.find([name], tiny)
    data, params = jax.device_put((model.data(np.random.default_rng(1)), model.initial()))
    found: dict[str, Any] = {}
    if frozen:
        toolchain._nvidia_folders = list  # none of these folders has the compiler's wheels
        found["compiler"] = toolchain.unavailable()
    else:
        began = time.perf_counter()
        jax_splitk.tune(functools.partial(train_step, model, OURS), params, *data, again=True)
        found["tuning_seconds"] = time.perf_counter() - began
    variant = compiled(model, OURS, params, data, tune=False)
    choices = {each["problem"]: each["choice"] for each in variant.figures["operations"]}
    found |= {"lowering_seconds": variant.figures["lowering_seconds"], "choices": choices}
    return {**found, "losses": variant.run(data, STEPS)[1], "environment": report.environment()}


def tune_and_run(name: str, tiny: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The figures of a model, and the environment in which they were found.

    Raises:
      RuntimeError: a process fails, chooses otherwise, or computes something else.
    """
    with tempfile.TemporaryDirectory() as folder:
        bundle = str(pathlib.Path(folder, "bundle"))
        command = [sys.executable, "-m", "benchmarks.frozen", name, *["--tiny"] * tiny, "--here"]
        tuned = _run([*command, "tuned"], CACHE_DIR=f"{folder}/tuned", AUTOTUNE="off")
        _run([sys.executable, "-m", "jax_splitk", "cache", "export", bundle], CACHE_DIR=f"{folder}/tuned")
        settings = {"CACHE_DIR": f"{folder}/empty", "CACHE_PATH": bundle, "CACHE_MODE": "frozen"}
        frozen = _run([*command, "frozen"], **settings)
    one, other = (json.loads(text.splitlines()[-1]) for text in (tuned, frozen))
    if one["choices"] != other["choices"]:
        raise RuntimeError(f"{name}: choices {other['choices']}; accepted: {one['choices']}")
    losses = [np.array(found["losses"]) for found in (one, other)]
    apart = float(np.max(np.abs(losses[1] - losses[0]) / np.abs(losses[0])))
    if not apart <= ROUNDING:
        raise RuntimeError(
            f"{name}: losses {other['losses']}; accepted: those of {one['losses']} but for {ROUNDING:.0%}"
        )
    figures = {
        "model": name,
        "operations": len(other["choices"]),
        "ours": sum(choice != str(XLA) for choice in other["choices"].values()),
        "tuning_seconds": one["tuning_seconds"],
        "lowering_seconds": other["lowering_seconds"],
        "loss_difference": apart,
        "compiler": other["compiler"],
    }
    return figures, other["environment"]


def _run(command: Sequence[str], **settings: str) -> str:
    """Runs a command with these `JAX_SPLITK_` variables only. Returns its standard output; a crash shows its stack."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JAX_SPLITK_")}
    own = {f"JAX_SPLITK_{name}": value for name, value in settings.items()}
    environment = {**kept, **own, "PYTHONFAULTHANDLER": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command[1:])} ended with {done.returncode}: {done.stderr[-16000:]}")
    return done.stdout


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=list(models.MODELS), metavar="MODEL")
    parser.add_argument("--tiny", action="store_true", help="small networks, to try it")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="the figures")
    parser.add_argument("--here", choices=("tuned", "frozen"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.here:
        print(json.dumps(run_step(options.models[0], options.tiny, options.here == "frozen")))
        return 0
    found = [tune_and_run(name, options.tiny) for name in options.models]
    for figures, _ in found:
        report.say(json.dumps(figures))
    if options.json is not None:
        results, (environment, *_) = zip(*found, strict=True)
        report.write(options.json, {"benchmark": "frozen", "environment": environment, "results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
