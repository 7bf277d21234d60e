"""Passes of unusual convolutions, drawn by a seed: jax_splitk against XLA by kind. See README.md beside this file.

python -m benchmarks.kinds [--seed N] [--draws N] [--cases KIND_PASS_OR_NAME ...] [--quick] [--json FILE]
"""

import argparse
import dataclasses
import functools
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks import conv
from benchmarks.against_xla import Benchmark, Result
from benchmarks.conv_cases import ALL, Case
from benchmarks.report import percent

SEED = 43
DRAWS = 6  # convolutions of a kind, each in all passes
ELEMENTS = 2**24  # of the larger of input and output, about
NEAR, NEAR_US = 0.4, 6.0  # share of the floor's rate, or microseconds above the floor, of a pass that is near it

Rng = np.random.Generator


def _one(rng: Rng, *values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


def _padding(kernel: Sequence[int], dilation: int, causal: bool = False) -> tuple[tuple[int, int], ...]:
    """Padding for as many output pixels as input pixels, at the beginning only if `causal`."""
    reach = [(k - 1) * dilation for k in kernel]
    return tuple((r, 0) if causal else (r // 2, r - r // 2) for r in reach)


def _drawn(kind: str, size: tuple[int, ...], channels: tuple[int, int], kernel: tuple[int, ...], **more: Any) -> Case:
    """The forward pass with as many images as make `ELEMENTS`."""
    batch = max(1, ELEMENTS // (math.prod(size) * max(channels)))
    more = {"padding": _padding(kernel, more.get("dilation", 1)), **more}
    return Case(kind, "fprop", batch, size, channels, kernel, **more)


def _depthwise_1d(rng: Rng) -> Case:
    """Long filters, causal and centred."""
    channels, kernel = _one(rng, 64, 144, 256, 512, 37), (int(rng.integers(8, 65)),)
    padding = _padding(kernel, 1, _one(rng, False, True))
    dtype = _one(rng, "float32", "bfloat16")
    more: dict[str, Any] = {"groups": channels, "padding": padding, "dtype": dtype}
    return _drawn("depthwise-1d", (_one(rng, 512, 1024, 4000),), (channels, channels), kernel, **more)


def _depthwise_odd(rng: Rng) -> Case:
    """Few and odd channels."""
    channels, rank = _one(rng, 12, 20, 37, 61, 99), int(rng.integers(1, 4))
    size = ((4096,), (64, 64), (16, 32, 32))[rank - 1]
    kernel = (_one(rng, 3, 5, 11),) if rank == 1 else _one(rng, (3, 3), (1, 11), (5, 5)) if rank == 2 else (3, 3, 3)
    dtype = _one(rng, "float32", "bfloat16", "float16")
    return _drawn("depthwise-odd", size, (channels, channels), kernel, groups=channels, dtype=dtype)


def _depthwise_large(rng: Rng) -> Case:
    """Large filters in two and three dimensions."""
    channels = _one(rng, 64, 96, 192)
    size, side = _one(rng, ((28, 28), 9), ((56, 56), 11), ((32, 32), 15), ((14, 14), 13), ((8, 28, 28), 5))
    kernel = (side,) * len(size)
    return _drawn("depthwise-large", size, (channels, channels), kernel, groups=channels, dtype="float32")


def _depthwise_dilated(rng: Rng) -> Case:
    channels, dtype = _one(rng, 96, 256, 512), _one(rng, "float32", "bfloat16")
    size, kernel = _one(rng, ((2048,), (7,)), ((4096,), (3,)), ((56, 56), (3, 3)), ((64, 64), (7, 7)))
    more = {"groups": channels, "dilation": _one(rng, 2, 4, 8), "dtype": dtype}
    return _drawn("depthwise-dilated", size, (channels, channels), kernel, **more)


def _multiplier(rng: Rng) -> Case:
    """Several output channels for each input channel."""
    channels, each = _one(rng, 3, 16, 32, 96), _one(rng, 2, 3, 4)
    kernel, dtype = _one(rng, (3, 3), (5, 5)), _one(rng, "float32", "bfloat16")
    return _drawn("multiplier", (56, 56), (channels, each * channels), kernel, groups=channels, dtype=dtype)


def _groups(rng: Rng) -> Case:
    """Groups of regularly designed networks."""
    width, groups = _one(rng, 24, 40, 48, 56, 72, 80, 104, 112, 120), _one(rng, 2, 4, 8)
    size, steps = _one(rng, 14, 28, 56), _one(rng, 1, 1, 2)
    return _drawn("groups", (size, size), (width * groups,) * 2, (3, 3), groups=groups, steps=steps, padding=1)


def _narrow_groups(rng: Rng) -> Case:
    """Groups that no vector of eight channels divides, and small ones of float32."""
    width, dtype = _one(rng, (5, "bfloat16"), (7, "float16"), (9, "bfloat16"), (10, "bfloat16"), (20, "bfloat16"),
                        (8, "float32"), (4, "float32"))  # fmt: skip
    size, groups = _one(rng, 14, 28, 56), _one(rng, 4, 8, 16)
    return _drawn("narrow-groups", (size, size), (width * groups,) * 2, (3, 3), groups=groups, dtype=dtype)


def _positional(rng: Rng) -> Case:
    """Long filters with wide groups."""
    width, kernel = _one(rng, 48, 64), _one(rng, 63, 95, 128)
    return _drawn("positional", (_one(rng, 400, 750, 1500),), (16 * width,) * 2, (kernel,), groups=16)


def _odd(rng: Rng) -> Case:
    """Channels that TMA cannot load."""
    channels = _one(rng, (37, 53), (3, 5), (1, 512), (20, 36), (61, 24), (5, 64), (100, 33))
    size, kernel = _one(rng, ((64, 64), (3, 3)), ((112, 112), (1, 1)), ((2000,), (5,)), ((28, 28), (3, 3)))
    return _drawn("odd", size, channels, kernel, dtype=_one(rng, "bfloat16", "float16"))


def _wide_odd(rng: Rng) -> Case:
    """Many channels that TMA cannot load: in one group, and in groups, which few families serve."""
    width, groups = _one(rng, (129, 1), (255, 1), (301, 1), (513, 1), (65, 4), (9, 33), (201, 2), (257, 4))
    size, kernel = _one(rng, ((28, 28), (3, 3)), ((14, 14), (3, 3)), ((56, 56), (1, 1)), ((1000,), (5,)))
    dtype = _one(rng, "bfloat16", "float16")
    return _drawn("wide-odd", size, (width * groups,) * 2, kernel, groups=groups, dtype=dtype)


def _few_outputs(rng: Rng) -> Case:
    channels, kernel = _one(rng, (256, 2), (128, 1), (64, 3), (256, 4)), _one(rng, (1, 1), (1, 1), (3, 3))
    return _drawn("few-outputs", (64, 64), channels, kernel)


def _float32(rng: Rng) -> Case:
    """Few channels of float32, on small images and with strides."""
    channels = _one(rng, (16, 16), (16, 32), (32, 32), (32, 64), (64, 64), (24, 48))
    size, kernel, steps = _one(rng, (56, 3, 1), (32, 3, 1), (19, 3, 1), (28, 5, 1), (20, 4, 2), (33, 3, 2))
    padding = _one(rng, 0, kernel // 2)
    return _drawn("float32", (size, size), channels, (kernel, kernel), steps=steps, padding=padding, dtype="float32")


def _float32_stem(rng: Rng) -> Case:
    """First layers in float32."""
    channels = _one(rng, 1, 2, 3, 4, 8), _one(rng, 16, 32, 64)
    size, kernel, steps, padding = _one(rng, (224, 7, 2, 3), (84, 8, 4, 0), (64, 3, 1, 1), (96, 5, 2, 2), (28, 3, 1, 0))
    more = {"steps": steps, "padding": padding, "dtype": "float32"}
    return _drawn("float32-stem", (size, size), channels, (kernel, kernel), **more)


KINDS: tuple[Callable[[Rng], Case], ...] = (
    *(_depthwise_1d, _depthwise_odd, _depthwise_large, _depthwise_dilated, _multiplier),
    *(_groups, _positional, _odd, _few_outputs, _float32, _float32_stem, _narrow_groups, _wide_odd),
)


def drawn(seed: int = SEED, draws: int = DRAWS) -> Iterator[Case]:
    """Each kind's convolutions in all passes. A seed always gives the same ones."""
    for number, kind in enumerate(KINDS):
        rng, found = np.random.default_rng([seed, number]), dict[str, Case]()
        while len(found) < draws:
            case = kind(rng)
            found.setdefault(case.name, case)
        for case in found.values():
            yield from (dataclasses.replace(case, which=which) for which in ALL)


def summary(results: Sequence[Result], seed: int) -> tuple[dict[str, Any], list[str]]:
    """For each kind, the geometric mean and the least of XLA's time over ours, the geometric mean of our share of the
    floor's rate, and the share of passes that are near the floor."""
    found, lines = {}, list[str]()
    for kind in dict.fromkeys(r.case.group for r in results):
        some = [r for r in results if r.case.group == kind]
        speedups = [r.speedup for r in some]
        figures = {"mean": statistics.geometric_mean(speedups), "least": min(speedups)}
        line = f"{kind}: XLA/ours {figures['mean']:.2f}, least {figures['least']:.2f}"
        if floors := [(r.floor_us, r.ours.us) for r in some if r.floor_us is not None]:
            figures["of_floor"] = statistics.geometric_mean(floor / us for floor, us in floors)
            figures["near"] = statistics.mean(us <= max(floor / NEAR, floor + NEAR_US) for floor, us in floors)
            line += f"; {percent(figures['of_floor'])} of the floor, {percent(figures['near'])} near it"
        found[kind] = figures
        lines.append(line)
    return {"seed": seed, "summary": found}, lines


def benchmark(seed: int, draws: int) -> Benchmark:
    return dataclasses.replace(
        conv.BENCHMARK,
        name="kinds",
        about="Passes of unusual convolutions, drawn by a seed (--seed N, --draws N of each kind)",
        cases=tuple(drawn(seed, draws)),
        summary=functools.partial(summary, seed=seed),
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--draws", type=int, default=DRAWS)
    own, others = parser.parse_known_args(argv)
    return benchmark(own.seed, own.draws).main(others)


if __name__ == "__main__":
    sys.exit(main())
