"""A training step of adapters on frozen weights (QLoRA): int4 weights by jax_splitk, the same weights dequantized by
XLA before each product, and bfloat16 weights. See README.md beside this file.

python -m benchmarks.qlora [--rows N ...] [--layers N] [--qtype NAME] [--group N] [--quick] [--json FILE]

A layer multiplies by a weight [4096, 14336] and one [14336, 4096], as in the MLP of Llama 3 8B, and adds the products
with adapters of rank 16. The step computes the result, and the gradients of x and of the adapters.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

import jax_splitk
from benchmarks import report, timing
from benchmarks.report import say

WIDTH, HIDDEN, RANK = 4096, 14336, 16
ROWS = (1024, 8192)
Layers = list[Any]


def shapes() -> tuple[tuple[int, int], ...]:
    return (WIDTH, HIDDEN), (HIDDEN, WIDTH)


@functools.partial(jax.jit, static_argnums=1)
def drawn(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """A weight that keeps the size of what it multiplies."""
    return jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(shape[0] ** -0.5)


def adapters(layers: int) -> Layers:
    keys = iter(jax.random.split(jax.random.key(1), 4 * layers))
    each = [((k, RANK), (RANK, n)) for _ in range(layers) for k, n in shapes()]
    return [tuple(drawn(next(keys), shape) for shape in pair) for pair in each]


def weights(layers: int, convert: Callable[[jax.Array], Any]) -> Layers:
    keys = jax.random.split(jax.random.key(2), 2 * layers)
    jitted = jax.jit(convert)
    return [jitted(drawn(key, shape)) for key, shape in zip(keys, shapes() * layers, strict=True)]


def step(multiply: Callable[..., jax.Array], frozen: Layers, trained: Layers, x: jax.Array, g: jax.Array) -> Any:
    """(the result, the gradients of the adapters and of x) for a cotangent g."""

    def model(trained: Layers, x: jax.Array) -> jax.Array:
        for w, (a, b) in zip(frozen, trained, strict=True):
            x = multiply(x, w) + (x @ a) @ b
        return x

    out, pull = jax.vjp(model, trained, x)
    return out, pull(g)


def contestants(qtype: Any, group: int) -> dict[str, tuple[Callable[[jax.Array], Any], Callable[..., jax.Array]]]:
    """By name: how a weight is stored, and how x is multiplied by it."""
    quantized = lambda w: jax_splitk.quantize(w, qtype, group_size=group)  # noqa: E731
    return {
        "ours": (lambda w: jax_splitk.prepack(quantized(w)), jax_splitk.quantized_matmul),
        "dequantized": (quantized, lambda x, w: x @ jax_splitk.dequantize(w, jnp.bfloat16)),
        "bf16": (lambda w: w, jnp.dot),
    }


def error_of_dx(qtype: str, group: int, rows: int) -> float:
    """The relative error of one product's gradient of x, of 16 rows of it, against float64 and the packed weight."""
    w = weights(1, contestants(qtype, group)["ours"][0])[0]
    x = jax.ShapeDtypeStruct((rows, WIDTH), jnp.bfloat16)
    g = drawn(jax.random.key(3), (rows, HIDDEN))
    dx = jax.jit(lambda g, w: jax.linear_transpose(lambda x: jax_splitk.quantized_matmul(x, w), x)(g)[0])(g, w)
    few = slice(0, min(rows, 16))
    dense = np.asarray(jax_splitk.dequantize(jax_splitk.unpack(w), jnp.float32), np.float64)
    exact = np.asarray(g[few].astype(jnp.float32), np.float64) @ dense.T
    return report.distance(np.asarray(dx[few].astype(jnp.float32), np.float64), exact)


def measured(options: argparse.Namespace, rows: int) -> dict[str, Any]:
    """Times of the step by each contestant, from one run."""
    trained = adapters(options.layers)
    x = jax.ShapeDtypeStruct((rows, WIDTH), jnp.bfloat16)
    compiled, bytes_of, explained = {}, {}, []
    for name, (convert, multiply) in contestants(options.qtype, options.group).items():
        frozen = weights(options.layers, convert)
        run = functools.partial(step, multiply)
        program = jax.jit(run).lower(frozen, trained, x, x).compile()
        compiled[name] = functools.partial(program, frozen, trained)
        bytes_of[name] = sum(leaf.nbytes for leaf in jax.tree.leaves(frozen))
        if name == "ours":
            explained = [f"{d.count} x {d.problem.brief}: {d.family or 'xla'}"
                         for d in jax_splitk.explain(run, frozen, trained, x, x).decisions]  # fmt: skip
    limits = {} if report.on_gpu() else {"minimum_bytes": 1, "maximum_sets": 1}
    inputs = timing.random_input_sets(((rows, WIDTH), (rows, WIDTH)), "bfloat16", **limits)
    times = timing.compare(compiled, inputs, rounds=3 if options.quick else 7)
    us = {name: time.us for name, time in times.items()}
    error = error_of_dx(options.qtype, options.group, rows)
    said = ", ".join(f"{name} {each:.0f} us" for name, each in us.items())
    ratios = {name: us[name] / us["ours"] for name in ("dequantized", "bf16")}
    faster = ", ".join(f"{ratio:.2f} times {name}'s speed" for name, ratio in ratios.items())
    say(f"{rows} rows: {said}; ours has {faster}; error of dx {error:.1e}")
    figures = {name: dataclasses.asdict(time) for name, time in times.items()}
    return {"rows": rows, "times": figures, "ratios": ratios, "bytes": bytes_of, "error_of_dx": error,
            "explained": explained}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.qlora", description="A training step of adapters.")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="tokens of a batch")
    parser.add_argument("--layers", type=int, default=4, help="pairs of weights")
    parser.add_argument("--qtype", default="int4", help="the weights' format")
    parser.add_argument("--group", type=int, default=64, help="the weights' group size")
    report.add_quick_and_json(parser, "fewer rounds")
    options = parser.parse_args(argv)
    found = [measured(options, rows) for rows in options.rows]
    for line in found[0]["explained"]:
        say(line)
    if options.json:
        sizes = {"width": WIDTH, "hidden": HIDDEN, "rank": RANK, "layers": options.layers}
        weight = {"qtype": options.qtype, "group": options.group}
        report.write(options.json, {"benchmark": "qlora", "environment": report.environment(), **sizes, **weight,
                                    "cases": found})  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
