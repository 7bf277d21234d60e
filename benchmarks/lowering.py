"""Times lowering a model's training step without tuning, or tuning it, from an empty cache.

    python -m benchmarks.lowering resnet50_b256 diffusion_unet        # lowering, for CUDA, with or without a GPU
    python -m benchmarks.lowering resnet50_b256 --tune                # tuning, on a GPU
    python -m benchmarks.lowering convnext_t --compile-ahead off      # each kernel when its operation is lowered

Models are those of `benchmarks.models`. Each runs in a process of its own, and prints a line of JSON. The line has
seconds of wall clock, and figures that depend less on a busy machine: the numbers of compilations by workers and by the
lowering itself, how many ran at once, and the processor time of the process and its workers.
"""

import argparse
import functools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

import jax_splitk
from benchmarks import models
from benchmarks.models.layers import OURS
from benchmarks.models.measure import train_step
from jax_splitk.ops import trace
from jax_splitk.runtime import compiler, nvrtc


class Compilations:
    """When each compilation began and ended, and whether a worker did it."""

    def __init__(self) -> None:
        self.done: list[tuple[bool, float, float]] = []

    def counted(self, compile_text: Callable[..., Any], in_worker: bool) -> Callable[..., Any]:
        def counting(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return compile_text(*arguments)
            finally:
                self.done.append((in_worker, began, time.perf_counter()))

        return counting

    def at_once(self) -> int:
        changes = sorted(change for _, began, ended in self.done for change in ((began, 1), (ended, -1)))
        under_way = [sum(step for _, step in changes[: i + 1]) for i in range(len(changes))]
        return max(under_way, default=0)


def measure(name: str, tiny: bool, tune: bool) -> dict[str, Any]:
    """Measures in this process, whose cache is empty."""
    (model,) = models.find([name], tiny)
    step = functools.partial(train_step, model, OURS)
    shapes = functools.partial(jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
    params, data = shapes(model.initial()), shapes(model.data(np.random.default_rng(1)))
    compilations = Compilations()
    nvrtc.Nvrtc.compile = compilations.counted(nvrtc.Nvrtc.compile, in_worker=False)
    compiler.compile_in_worker = compilations.counted(compiler.compile_in_worker, in_worker=True)
    jax.block_until_ready(jnp.zeros(()))  # starts the backend
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
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    workers = sum(in_worker for in_worker, *_ in compilations.done)
    found |= {"compiled_by_workers": workers, "compiled_here": len(compilations.done) - workers}
    found |= {"at_once": compilations.at_once(), "processor_s": sum(use.ru_utime + use.ru_stime for use in used)}
    device = jax.devices()[0].device_kind
    return {"model": name, "device": device, "cores": len(os.sched_getaffinity(0)), **found}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=list(models.MODELS), metavar="MODEL")
    parser.add_argument("--tiny", action="store_true", help="small networks, to try it")
    parser.add_argument("--tune", action="store_true", help="tune, in place of lowering")
    parser.add_argument("--compile-ahead", choices=("on", "off"), default="on")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.here:
        print(json.dumps(measure(options.models[0], options.tiny, options.tune)))
        return
    for model in options.models:
        with tempfile.TemporaryDirectory() as cache:
            given = {"CACHE_DIR": cache, "AUTOTUNE": "off", "COMPILE_AHEAD": options.compile_ahead}
            environment = {**os.environ, **{f"JAX_SPLITK_{name}": value for name, value in given.items()}}
            command = [sys.executable, "-m", "benchmarks.lowering", model, "--here"]
            command += ["--tune"] * options.tune + ["--tiny"] * options.tiny
            subprocess.run(command, env=environment, check=True)


if __name__ == "__main__":
    main()
