"""Times lowering a model's training step, tuning it, or its whole first run, from an empty cache.

    python -m benchmarks.lowering resnet50_b256 diffusion_unet        # lowering, for CUDA, with or without a GPU
    python -m benchmarks.lowering resnet50_b256 --tune                # tuning, on a GPU
    python -m benchmarks.lowering convnext_t --compile-ahead off      # each kernel when its operation is lowered
    python -m benchmarks.lowering resnet50_b256 hifigan --first-run --json benchmarks/results/first_run_h100.json
    python -m benchmarks.lowering resnet50_b256 --first-run --devices 2

Models are those of `benchmarks.models`. Each runs in a process of its own, and prints a line of JSON. The line has
seconds of wall clock, and figures that depend less on a busy machine: the numbers of compilations by workers and by the
lowering itself, how many ran at once, and the processor time of the process and its workers.

A first run is that of the unchanged step, by stock JAX and inside `jax_splitk.intercept()`, each in a process of its
own (benchmarks/first_run.py).
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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

import jax_splitk
from benchmarks import first_run, models, report
from benchmarks.models.layers import OURS
from benchmarks.models.measure import train_step
from jax_splitk.ops import trace


def measure(name: str, tiny: bool, tune: bool) -> dict[str, Any]:
    """Measures in this process, whose cache is empty."""
    (model,) = models.find([name], tiny)
    step = functools.partial(train_step, model, OURS)
    shapes = functools.partial(jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
    params, data = shapes(model.initial()), shapes(model.data(np.random.default_rng(1)))
    jax.block_until_ready(jnp.zeros(()))  # starts the backend
    with first_run.watched() as work:
        began = time.perf_counter()
        if tune:
            entries = [entry for _, entry in jax_splitk.tune(step, params, *data, again=True)]
            found = {
                "problems": len(entries),
                "tune_s": time.perf_counter() - began,
                "each_s": sorted(entry.metadata["seconds"] for entry in entries),
                "candidates": sum(entry.metadata["candidates"] for entry in entries),
            }
        else:
            traced = jax.jit(step).trace(params, *data)
            after_trace = time.perf_counter()
            traced.lower(lowering_platforms=("cuda",))
            ended = time.perf_counter()
            problems = {problem for _, problem in trace.ours(traced.jaxpr.jaxpr, "cuda")}
            found = {"problems": len(problems), "trace_s": after_trace - began, "lower_s": ended - after_trace}
    return {"model": name, **machine(), **found, **work.figures()}


def machine() -> dict[str, Any]:
    return {"device": jax.devices()[0].device_kind, "cores": len(os.sched_getaffinity(0))}


def run_here(model: str, options: Sequence[str], settings: Mapping[str, str]) -> dict[str, Any]:
    """What a process of its own, with an empty cache, finds for a model."""
    with tempfile.TemporaryDirectory() as cache:
        given = {"CACHE_DIR": cache, **settings}
        # NVRTC has a cache of its own, which a user's first run finds empty.
        environment = {**os.environ, "CUDA_CACHE_DISABLE": "1"}
        environment |= {f"JAX_SPLITK_{name}": value for name, value in given.items()}
        command = [sys.executable, "-m", "benchmarks.lowering", model, *options]
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def first_runs(names: Sequence[str], options: Sequence[str], settings: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Reports of the first runs by stock JAX and inside `intercept`, one after each model. This process leaves the
    devices' memory to the others."""
    results: list[dict[str, Any]] = []
    for name in names:
        stock, ours = (run_here(name, [*options, "--here", who], settings) for who in ("stock", "ours"))
        environment = [found.pop("environment") for found in (stock, ours)]
        results.append({"name": name, "stock": stock, "ours": ours, **first_run.compared(stock, ours)})
        yield {"benchmark": "first_run", "environment": environment[0], "results": results}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=list(models.MODELS), metavar="MODEL")
    parser.add_argument("--tiny", action="store_true", help="small networks, to try it")
    parser.add_argument("--tune", action="store_true", help="tune, in place of lowering")
    parser.add_argument("--first-run", action="store_true", help="first runs by stock JAX and by jax_splitk")
    parser.add_argument(
        "--devices", type=int, default=1, metavar="N", help="devices among which a first run's batch is"
    )
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the first runs")
    parser.add_argument("--compile-ahead", choices=("on", "off"), default="on")
    parser.add_argument("--here", choices=("lowering", "stock", "ours"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.here == "lowering":
        print(json.dumps(measure(options.models[0], options.tiny, options.tune)))
        return
    if options.here:
        figures = first_run.measure(options.models[0], options.tiny, options.here == "ours", options.devices)
        print(json.dumps({"environment": report.environment(), **machine(), **figures}))
        return
    settings = {"COMPILE_AHEAD": options.compile_ahead}
    passed = ["--tiny"] * options.tiny
    if not options.first_run:
        passed += ["--tune"] * options.tune + ["--here", "lowering"]
        for model in options.models:
            print(json.dumps(run_here(model, passed, {**settings, "AUTOTUNE": "off"})), flush=True)
        return
    if not options.tiny:  # the first process on a machine reads CUDA's libraries from the disk
        run_here(options.models[0], ["--tiny", "--here", "stock"], settings)
    for whole in first_runs(options.models, [*passed, "--devices", str(options.devices)], settings):
        print(json.dumps(whole["results"][-1]), flush=True)
        if options.json:
            report.write(options.json, whole)


if __name__ == "__main__":
    main()
