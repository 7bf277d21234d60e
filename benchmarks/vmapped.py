"""Compares gradients of a convolution of single images under `jax.vmap` with those of a convolution of the batch. See
README.md beside this file.

python -m benchmarks.vmapped [--json FILE]
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence

import jax
from jax import numpy as jnp

import jax_splitk
from benchmarks import report, timing
from benchmarks.report import say

IMAGES, SIZE, CHANNELS, KERNEL = 32, 28, 64, 3


def _layer(x: jax.Array, w: jax.Array) -> jax.Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax_splitk.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)


def of_batch(x: jax.Array, w: jax.Array) -> jax.Array:
    return _layer(x, w)


def of_each(x: jax.Array, w: jax.Array) -> jax.Array:
    """A model of one image under vmap, as in Equinox."""
    return jax.vmap(lambda image: _layer(image[None], w)[0])(x)


def step(model: Callable[..., jax.Array], x: jax.Array, w: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
    """The output and both gradients."""
    out, pull = jax.vjp(model, x, w)
    return out, *pull(g)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vmapped", description="vmap over single images.")
    report.add_quick_and_json(parser, "fewer rounds")
    options = parser.parse_args(argv)
    image = (IMAGES, SIZE, SIZE, CHANNELS)
    shapes = (image, (KERNEL, KERNEL, CHANNELS, CHANNELS), image)
    given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    steps = {"batch": functools.partial(step, of_batch), "vmap": functools.partial(step, of_each)}
    compiled = {name: jax.jit(of).lower(*given).compile() for name, of in steps.items()}
    problems = {name: [str(d.problem) for d in jax_splitk.explain(of, *given).decisions] for name, of in steps.items()}
    limits = {} if report.on_gpu() else {"minimum_bytes": 1, "maximum_sets": 1}
    input_sets = timing.random_input_sets(shapes, "bfloat16", **limits)
    times = timing.compare(compiled, input_sets, rounds=3 if options.quick else 7)
    ratio = times["vmap"].us / times["batch"].us
    same = problems["vmap"] == problems["batch"]
    us = {name: f"{time.us:.1f} us" for name, time in times.items()}
    say(f"batch {us['batch']}, vmap {us['vmap']}, {ratio:.3f} of it; the same problems: {same}")
    if options.json:
        figures = {name: dataclasses.asdict(time) for name, time in times.items()}
        found = {"benchmark": "vmapped", "environment": report.environment(), "problems": problems, **figures}
        report.write(options.json, {**found, "ratio": ratio})
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
