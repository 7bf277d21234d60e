"""A transposed convolution in 3D, forward and its two gradients: jax_splitk against PyTorch on the same GPU. See
README.md beside this file.

python -m benchmarks.transposed [--json FILE]
"""

import argparse
import dataclasses
import importlib
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import numpy as jnp

import jax_splitk
from benchmarks import report, timing
from benchmarks.report import say

# 32^3 -> 64^3.
IMAGES, SIZE, CHANNELS, KERNEL, STRIDE = 2, 32, 64, 4, 2
CALLS, ROUNDS = 50, 7  # of PyTorch's
PASSES = ("forward", "input gradient", "weight gradient")


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    """The layer in NDHWC and DHWIO; its output is STRIDE times as large as its input."""
    side, numbers = KERNEL - STRIDE, ("NDHWC", "DHWIO", "NDHWC")
    return jax_splitk.conv_general_dilated(x, w, (1,) * 3, [(side, side)] * 3, (STRIDE,) * 3, dimension_numbers=numbers)


def ours(shapes: Sequence[tuple[int, ...]], rounds: int) -> dict[str, timing.Timing]:
    """By pass; Our times. `shapes`: of input, weight and output."""
    passes: dict[str, Callable[..., Any]] = {
        "forward": lambda x, w, g: layer(x, w),
        "input gradient": lambda x, w, g: jax.vjp(lambda x: layer(x, w), x)[1](g),
        "weight gradient": lambda x, w, g: jax.vjp(lambda w: layer(x, w), w)[1](g),
    }
    given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    compiled = {name: jax.jit(of).lower(*given).compile() for name, of in passes.items()}
    limits = {} if report.on_gpu() else {"minimum_bytes": 1, "maximum_sets": 1}
    return timing.compare(compiled, timing.random_input_sets(shapes, "bfloat16", **limits), rounds=rounds)


def installed_torch() -> Any:
    """The module; PyTorch, or None if it is not installed."""
    try:
        return importlib.import_module("torch")
    except ImportError:
        return None


def pytorch(torch: Any, shapes: Sequence[tuple[int, ...]]) -> dict[str, dict[str, float]]:
    """Microseconds of a call, by memory format and pass: the median of rounds of queued calls, with cuDNN's search."""
    torch.backends.cudnn.benchmark = True
    (batch, *size, channels), (*kernel, _, _), (_, *larger, _) = shapes
    channels_first = [(batch, channels, *size), (channels, channels, *kernel), (batch, channels, *larger)]
    sets = max(2, -(-timing.MIN_INPUT_BYTES // sum(2 * torch.Size(shape).numel() for shape in channels_first)))
    options = ([STRIDE] * 3, [(KERNEL - STRIDE) // 2] * 3, [1] * 3, True, [0] * 3, 1)

    def gradient(mask: list[bool]) -> Callable[..., Any]:
        of = torch.ops.aten.convolution_backward
        return lambda x, w, g: of(g, x, w, None, *options, mask)

    passes = {
        "forward": lambda x, w, g: torch.ops.aten.convolution(x, w, None, *options),
        "input gradient": gradient([True, False, False]),
        "weight gradient": gradient([False, True, False]),
    }
    found: dict[str, dict[str, float]] = {}
    for name in ("contiguous_format", "channels_last_3d"):
        layout = {"memory_format": getattr(torch, name)}
        inputs = [
            [torch.randn(s, dtype=torch.bfloat16, device="cuda").contiguous(**layout) for s in channels_first]
            for _ in range(sets)
        ]
        found[name] = {of: _queued_us(torch, function, inputs) for of, function in passes.items()}
    return found


def _queued_us(torch: Any, function: Callable[..., Any], inputs: Sequence[Any]) -> float:
    def calls(count: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for i in range(count):
            function(*inputs[i % len(inputs)])
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / count

    calls(10)
    return statistics.median(calls(CALLS) for _ in range(ROUNDS))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transposed", description="Against PyTorch.")
    report.add_quick_and_json(parser, "fewer rounds")
    options = parser.parse_args(argv)
    image, larger = ((IMAGES, *(size,) * 3, CHANNELS) for size in (SIZE, SIZE * STRIDE))
    shapes = (image, (KERNEL,) * 3 + (CHANNELS,) * 2, larger)
    times = ours(shapes, 3 if options.quick else 7)
    torch = installed_torch()
    theirs = pytorch(torch, shapes) if torch is not None and torch.cuda.is_available() else {}
    if not theirs:
        say("PyTorch sees no GPU here, or is not installed: our times alone")
    ratios = {}
    for name in PASSES:
        best = min((us[name], layout) for layout, us in theirs.items()) if theirs else None
        said = f"{name}: {times[name].us:.1f} us"
        if best is not None:
            ratios[name] = times[name].us / best[0]
            said += f", PyTorch {best[0]:.1f} us ({best[1]}), {ratios[name]:.2f} of it"
        say(said)
    if options.json:
        figures = {name: dataclasses.asdict(times[name]) for name in PASSES}
        found = {"benchmark": "transposed", "environment": report.environment(), "ours": figures, "pytorch": theirs}
        report.write(options.json, {**found, "ratios": ratios})
    return 0


if __name__ == "__main__":
    sys.exit(main())
