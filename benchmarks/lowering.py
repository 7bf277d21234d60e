"""How long a model's weight gradients take to be lowered without tuning, or to be tuned, from an empty cache.

    python -m benchmarks.lowering resnet50 unet             # lowering, for CUDA, with or without a GPU
    python -m benchmarks.lowering resnet50 --tune           # tuning, on a GPU
    python -m benchmarks.lowering unet --compile-ahead off  # each kernel when its operation is lowered

Each model runs in a process of its own, and prints a line of JSON. Besides seconds of wall clock it has what depends
less on a busy machine: compilations by workers and by the lowering itself, how many were under way at once, and the
seconds of processor time that the process and its workers took.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

# (height and width, input channels, output channels, filter, stride), in the order of the backward pass.
Convolution = tuple[int, int, int, int, int]
NUMBERS = ("NHWC", "HWIO", "NHWC")


def resnet50() -> list[Convolution]:
    """ResNet-50: He et al., arXiv:1512.03385; the stride is in the 3x3 convolution."""
    found, channels, size = [(224, 3, 64, 7, 2)], 64, 56
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            found += [(size, channels, width, 1, 1), (size, width, width, 3, stride)]
            found += [(size // stride, width, 4 * width, 1, 1)]
            if not block:
                found.append((size, channels, 4 * width, 1, stride))
            size, channels = size // stride, 4 * width
    return found[::-1]


def unet() -> list[Convolution]:
    """The residual blocks of a latent diffusion UNet: Rombach et al., arXiv:2112.10752."""
    found, kept, channels, size = [(64, 4, 320, 3, 1)], [320], 320, 64
    widths = (320, 640, 1280, 1280)

    def block(size: int, channels: int, width: int) -> list[Convolution]:
        shortcut = [] if channels == width else [(size, channels, width, 1, 1)]
        return [(size, channels, width, 3, 1), (size, width, width, 3, 1), *shortcut]

    for level, width in enumerate(widths):
        for _ in range(2):
            found += block(size, channels, width)
            channels = width
            kept.append(channels)
        if level < 3:
            found.append((size, channels, channels, 3, 2))
            size //= 2
            kept.append(channels)
    found += 2 * block(size, channels, channels)
    for level, width in reversed(list(enumerate(widths))):
        for _ in range(3):
            found += block(size, channels + kept.pop(), width)
            channels = width
        if level:
            size *= 2
            found.append((size, channels, channels, 3, 1))
    return [*found, (64, 320, 4, 3, 1)][::-1]


MODELS: dict[str, tuple[Callable[[], list[Convolution]], int]] = {"resnet50": (resnet50, 256), "unet": (unet, 16)}


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


def measure(model: str, batch: int | None, tune: bool) -> dict[str, Any]:
    """In this process, whose cache is empty."""
    import jax  # noqa: PLC0415 - the environment is set by now
    from jax import numpy as jnp  # noqa: PLC0415

    import jax_splitk  # noqa: PLC0415
    from jax_splitk.ops import trace  # noqa: PLC0415
    from jax_splitk.runtime import compiler, nvrtc  # noqa: PLC0415

    make, usual_batch = MODELS[model]
    convolutions, n = make(), batch or usual_batch
    compilations = Compilations()
    nvrtc.Nvrtc.compile = compilations.counted(nvrtc.Nvrtc.compile, in_worker=False)
    compiler.compile_in_worker = compilations.counted(compiler.compile_in_worker, in_worker=True)

    def gradients(operands: Sequence[tuple[jax.Array, jax.Array]]) -> list[jax.Array]:
        found = []
        for (_, c, k, r, stride), (x, g) in zip(convolutions, operands, strict=True):
            pads = ((r // 2, r // 2),) * 2
            found.append(jax_splitk.conv_wgrad(x, g, (r, r, c, k), (stride,) * 2, pads, dimension_numbers=NUMBERS))
        return found

    def shape(size: int, channels: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((n, size, size, channels), jnp.bfloat16)

    operands = [(shape(size, c), shape(-(-size // stride), k)) for size, c, k, _, stride in convolutions]
    jax.block_until_ready(jnp.zeros(()))  # starts the backend
    began = time.perf_counter()
    if tune:
        result = jax_splitk.tune(gradients, operands, again=True)
        entries = [entry for _, entry in result]
        found = {
            "problems": len(entries),
            "tune_s": time.perf_counter() - began,
            "each_s": sorted(entry.metadata["seconds"] for entry in entries),
            "candidates": sum(entry.metadata["candidates"] for entry in entries),
        }
    else:
        traced = jax.jit(gradients).trace(operands)
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
    return {"model": model, "batch": n, "device": device, "cores": len(os.sched_getaffinity(0)), **found}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=list(MODELS))
    parser.add_argument("--batch", type=int, help="images; the model's usual number by default")
    parser.add_argument("--tune", action="store_true", help="tune, in place of lowering")
    parser.add_argument("--compile-ahead", choices=("on", "off"), default="on")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.here:
        print(json.dumps(measure(options.models[0], options.batch, options.tune)))
        return
    for model in options.models:
        with tempfile.TemporaryDirectory() as cache:
            given = {"CACHE_DIR": cache, "AUTOTUNE": "off", "COMPILE_AHEAD": options.compile_ahead}
            environment = {**os.environ, **{f"JAX_SPLITK_{name}": value for name, value in given.items()}}
            command = [sys.executable, "-m", "benchmarks.lowering", model, "--here"]
            command += ["--tune"] * options.tune + ([] if options.batch is None else ["--batch", str(options.batch)])
            subprocess.run(command, env=environment, check=True)


if __name__ == "__main__":
    main()
