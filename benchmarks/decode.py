"""Decoding with a Llama-8B-shaped stack of layers: one program computes a loop over tokens. Layers are unrolled, or run
under `lax.scan` over stacked weights. See README.md beside this file.

python -m benchmarks.decode [--layers N] [--rows N ...] [--[no-]scan] [--only NAME ...] [--quick] [--json FILE]

Contestants: XLA's bfloat16 and fp8 products, and jax_splitk's bfloat16, fp8 and int4 products; and the int4 weights in
fewer and larger products: q, k and v are one, gate and up are one with the gated activation behind it, the products
normalize x and add residuals. Each product is a custom call, or those between two attentions are one; then a step of
`lax.scan` ends with the next layer's q, k and v. Under `lax.scan` XLA's bfloat16 product also runs with options with
which XLA may read the stack in place.
"""

import argparse
import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

import jax_splitk
from benchmarks import report, timing
from benchmarks.quantized_products import FP8, FP8_ROWS
from benchmarks.report import say

GROUP = 64  # k of an int4 weight's scale
TOKENS = 16
EPSILON = 1e-5  # of the norms
# Slices become part of cuBLASLt's products, and all products are cuBLASLt's. The first is the default from jaxlib
# 0.11.1 on.
IN_PLACE: dict[str, str | bool] = {"xla_gpu_enable_dynamic_slice_fusion": True, "xla_gpu_enable_triton_gemm": False}
Layer = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A layer's sizes: the hidden state, the MLP, how many heads of queries and of keys and values, a head."""

    width: int
    hidden: int
    heads: int
    kv_heads: int
    head: int

    @property
    def weights(self) -> dict[str, tuple[int, int]]:
        """[k, n] of a layer's weights."""
        heads, kv = self.heads * self.head, self.kv_heads * self.head
        return {"q": (self.width, heads), "k": (self.width, kv), "v": (self.width, kv), "o": (heads, self.width),
                "gate": (self.width, self.hidden), "up": (self.width, self.hidden),
                "down": (self.hidden, self.width)}  # fmt: skip


LLAMA_8B = Sizes(4096, 14336, 32, 8, 128)
SMALL = Sizes(64, 192, 4, 2, 16)


# ---- the weights' formats --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Contestant:
    """A format of the weights and its product.

    Attributes:
      convert: maps a bfloat16 weight [k, n] to the stored one; traced.
      multiply: maps (x, stored weight) to the product; traced.
      xla_options: options for XLA's compiler.
      scan_only: whether it runs under `lax.scan` only.
      joined: whether products are joined, by `fused_layer_step` with the weights of `_joined`.
      chained: whether consecutive products are one custom call (`jax_splitk.chained`).
    """

    convert: Callable[[jax.Array], Any]
    multiply: Callable[..., jax.Array]
    xla_options: dict[str, str | bool] = dataclasses.field(default_factory=dict)
    scan_only: bool = False
    joined: bool = False
    chained: bool = False

    @property
    def format(self) -> Any:
        """Contestants with the same format share their arrays."""
        return self.convert, self.joined


def _fp8(w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[n, k] in e4m3, in cuBLASLt's order, and its scale."""
    scale = jnp.max(jnp.abs(w)).astype(jnp.float32) / 448
    return (w.T / scale).astype(FP8), scale


def _multiply_fp8(x: jax.Array, weight: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Activations in e4m3, with a scale of 1. cuBLASLt wants multiples of 16 rows."""
    w, scale = weight
    rows = x.shape[0]
    x = jnp.pad(x, ((0, -rows % FP8_ROWS), (0, 0))).astype(FP8)
    out = lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return (out * scale).astype(jnp.bfloat16)[:rows]


def _kernel() -> Any:
    return "cutlass" if report.on_gpu() else None


def _multiply_ours(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax_splitk.matmul(x, w, implementation=_kernel())


def _multiply_fp8_ours(x: jax.Array, weight: tuple[jax.Array, jax.Array]) -> jax.Array:
    w, scale = weight
    numbers = (((1,), (1,)), ((), ()))
    out = jax_splitk.dot_general(x.astype(FP8), w, numbers, None, jnp.bfloat16, implementation=_kernel())
    return (out * scale).astype(jnp.bfloat16)


def _bf16(w: jax.Array) -> jax.Array:
    return w


def _int4(w: jax.Array) -> Any:
    return jax_splitk.prepack(jax_splitk.quantize(w, "int4", group_size=GROUP))


CONTESTANTS = {
    "bf16": Contestant(_bf16, jnp.dot),
    "bf16_in_place": Contestant(_bf16, jnp.dot, IN_PLACE, scan_only=True),
    "bf16_ours": Contestant(_bf16, _multiply_ours),
    "fp8": Contestant(_fp8, _multiply_fp8),
    "fp8_ours": Contestant(_fp8, _multiply_fp8_ours),
    "int4_ours": Contestant(_int4, jax_splitk.quantized_matmul),
    "int4_fused": Contestant(_int4, jax_splitk.quantized_matmul, joined=True),
    "int4_chained": Contestant(_int4, jax_splitk.quantized_matmul, joined=True, chained=True),
}


@jax.jit
def _joined(layer: Layer) -> Layer:
    """The weights of `fused_layer_step`, from a layer's packed weights."""
    qkv = [jax_splitk.unpack(layer[name]) for name in "qkv"]
    side_by_side = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), *qkv)
    both = jax_splitk.join_gate_up(layer["gate"], layer["up"])
    return {"qkv": jax_splitk.prepack(side_by_side), "o": layer["o"], "gate_up": both, "down": layer["down"]}


@functools.partial(jax.jit, static_argnums=(1, 2))
def _drawn(key: jax.Array, shape: tuple[int, int], convert: Callable[[jax.Array], Any]) -> Any:
    """A weight that keeps the size of what it multiplies."""
    return convert(jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(shape[0] ** -0.5))


def weights(sizes: Sizes, layers: int, convert: Callable[[jax.Array], Any]) -> list[Layer]:
    """The same weights in each format."""
    shapes = sizes.weights
    keys = iter(jax.random.split(jax.random.key(0), layers * len(shapes)))
    return [{name: _drawn(next(keys), shape, convert) for name, shape in shapes.items()} for _ in range(layers)]


@jax.jit
def _stacked(layers: list[Layer]) -> Layer:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


@jax.jit
def _stacked_behind_attention(layers: list[Layer]) -> dict[str, Any]:
    """The weights of `scan_behind_attention`."""
    following = [*layers[1:], layers[0]]
    steps = [{**layer, "qkv": after["qkv"]} for layer, after in zip(layers, following, strict=True)]
    return {"first": layers[0]["qkv"], "steps": _stacked(steps)}


# ---- the model -------------------------------------------------------------------------------------------------------


def _normalized(x: jax.Array) -> jax.Array:
    square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return (x * lax.rsqrt(square + EPSILON)).astype(x.dtype)


def layer_step(sizes: Sizes, multiply: Callable[..., jax.Array], layer: Layer, x: jax.Array) -> jax.Array:
    """A layer without a cache of keys and values: the token attends to itself, with a gate in place of the softmax, so
    that XLA cannot drop the products of q and k."""
    y = _normalized(x)
    x = x + multiply(_attention(sizes, *(multiply(y, layer[name]) for name in "qkv")), layer["o"])
    y = _normalized(x)
    return x + multiply(jax.nn.silu(multiply(y, layer["gate"])) * multiply(y, layer["up"]), layer["down"])


def fused_layer_step(sizes: Sizes, multiply: Callable[..., jax.Array], layer: Layer, x: jax.Array) -> jax.Array:
    """The same layer in four products, of which two normalize x."""
    qkv = multiply(x, layer["qkv"], norm_epsilon=EPSILON)
    return _behind_attention(multiply, layer, _fused_attention(sizes, qkv), x)


def _fused_attention(sizes: Sizes, qkv: jax.Array) -> jax.Array:
    heads, kv = sizes.heads * sizes.head, sizes.kv_heads * sizes.head
    return _attention(sizes, *jnp.split(qkv, (heads, heads + kv), axis=-1))


def _behind_attention(multiply: Callable[..., jax.Array], layer: Layer, attended: jax.Array, x: jax.Array) -> jax.Array:
    """The layer's result, from that of its attention."""
    x = multiply(attended, layer["o"], residual=x)
    y = multiply(x, layer["gate_up"], norm_epsilon=EPSILON, activation="swiglu")
    return multiply(y, layer["down"], residual=x)


def scan_behind_attention(
    sizes: Sizes, multiply: Callable[..., jax.Array], weights: dict[str, Any], x: jax.Array
) -> jax.Array:
    """The fused layers under `lax.scan`, each step of which ends with the next layer's q, k and v: so the products
    between two attentions are one chain. The last step's q, k and v are not used."""

    @jax_splitk.chained
    def products(attended: jax.Array, x: jax.Array, layer: Layer) -> tuple[jax.Array, jax.Array]:
        x = _behind_attention(multiply, layer, attended, x)
        return x, multiply(x, layer["qkv"], norm_epsilon=EPSILON)

    def step(carry: tuple[jax.Array, jax.Array], layer: Layer) -> tuple[tuple[jax.Array, jax.Array], None]:
        x, qkv = carry
        return products(_fused_attention(sizes, qkv), x, layer), None

    qkv = multiply(x, weights["first"], norm_epsilon=EPSILON)
    return lax.scan(step, (x, qkv), weights["steps"])[0][0]


def _attention(sizes: Sizes, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    rows, heads = q.shape[0], (sizes.kv_heads, sizes.heads // sizes.kv_heads)
    q = q.reshape(rows, *heads, sizes.head)
    k, v = (each.reshape(rows, sizes.kv_heads, 1, sizes.head) for each in (k, v))
    weight = jax.nn.sigmoid(jnp.sum((q * k).astype(jnp.float32), axis=-1, keepdims=True) * sizes.head**-0.5)
    return (weight.astype(v.dtype) * v).reshape(rows, -1)


def decode(sizes: Sizes, contestant: Contestant, scan: bool, tokens: int, layers: Any, x: jax.Array) -> jax.Array:
    """The hidden state after `tokens` steps. A step's input is x and a little of the last step's result: it has to wait
    for that result, but differences between formats do not grow from token to token."""

    step = functools.partial(fused_layer_step if contestant.joined else layer_step, sizes, contestant.multiply)

    def unrolled(layers: list[Layer], hidden: jax.Array) -> jax.Array:
        for layer in layers:
            hidden = step(layer, hidden)
        return hidden

    def token(_: Any, last: jax.Array) -> jax.Array:
        hidden = x + last * jnp.bfloat16(2**-8)
        if scan and contestant.chained:
            hidden = scan_behind_attention(sizes, contestant.multiply, layers, hidden)
        elif scan:
            hidden, _ = lax.scan(lambda h, layer: (step(layer, h), None), hidden, layers)
        else:
            hidden = (jax_splitk.chained(unrolled) if contestant.chained else unrolled)(layers, hidden)
        return _normalized(hidden)

    return lax.fori_loop(0, tokens, token, jnp.zeros_like(x))


# ---- times -----------------------------------------------------------------------------------------------------------


def compiled_program(
    sizes: Sizes, contestant: Contestant, scan: bool, tokens: int, stored: Any, x: jax.Array
) -> tuple[Any, list[str]]:
    """(the compiled program, which kernels jax_splitk chose in it)."""
    run = functools.partial(decode, sizes, contestant, scan, tokens)
    program = jax.jit(run).lower(stored, x).compile(compiler_options=contestant.xla_options or None)
    decisions = jax_splitk.explain(run, stored, x).decisions
    return program, [f"{d.count} x {d.problem.brief}: {d.family or 'xla'} {d.config or ''}" for d in decisions]


def measured(options: argparse.Namespace, rows: int, stored: dict[tuple[str, bool], Any]) -> dict[str, Any]:
    """Times of a token by each contestant, unrolled and under `lax.scan`, from one run. All contestants take turns."""
    sizes, tokens = (SMALL, 2) if options.quick else (LLAMA_8B, TOKENS)
    x = jax.random.normal(jax.random.key(1), (rows, sizes.width), jnp.bfloat16)
    functions, cases, results = {}, {}, {}
    for (name, scan), layers in stored.items():
        label = f"{name}, scan" if scan else name
        try:
            program, explained = compiled_program(sizes, CONTESTANTS[name], scan, tokens, layers, x)
            results[label] = np.asarray(program(layers, x).astype(jnp.float32), np.float64)
        except Exception as error:  # the other contestants go on
            say(report.failed_line(label, error))
            cases[label] = {"error": str(error)}
            continue
        functions[label] = functools.partial(program, layers)
        weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(layers))
        cases[label] = {"weight_bytes": weight_bytes, "temp_bytes": report.temp_bytes(program), "explained": explained}
    rounds = 3 if options.quick else 7
    wall = timing.compare(functions, [(x,)], rounds, wall=True)
    busy = timing.compare(functions, [(x,)], 1, calls=1) if report.on_gpu() else wall
    copied = report.copy_rate(jax.devices()[0].device_kind) or report.COPY_BYTES["H200"]
    reference = results.get("bf16", next(iter(results.values())))
    for label in functions:
        floor = cases[label]["weight_bytes"] / copied * 1e6
        us = wall[label].us / tokens
        cases[label] |= {
            "us": us,
            "low_us": wall[label].low_us / tokens,
            "high_us": wall[label].high_us / tokens,
            "busy_us": busy[label].us / tokens,
            "launches": sum(busy[label].launches.values()) / tokens,
            "kernels": {kernel: us / tokens for kernel, us in busy[label].kernels.items()},
            "floor_us": floor,
            "times_floor": us / floor,
            "difference": report.distance(results[label], reference),
        }
    return {"rows": rows, "layers": options.layers, "tokens": tokens, "cases": cases}


def table(found: dict[str, Any]) -> str:
    header = ("contestant", "us a token", "busy us", "of floor", "floor us", "launches", "temporary MB", "difference")
    lines: list[tuple[str, ...]] = [header]
    for label, case in found["cases"].items():
        if "error" in case:
            continue
        launches = f"{case['launches']:.0f}" if case["launches"] else ""
        lines.append((label, f"{case['us']:.0f}", f"{case['busy_us']:.0f}", f"{case['times_floor']:.2f}",
                      f"{case['floor_us']:.0f}", launches, f"{case['temp_bytes'] / 1e6:.1f}",
                      f"{case['difference']:.1e}"))  # fmt: skip
    return report.markdown(lines)


def _stored_weights(options: argparse.Namespace) -> dict[tuple[str, bool], Any]:
    """By contestant and whether layers are stacked; contestants with the same format share their arrays."""
    sizes = SMALL if options.quick else LLAMA_8B
    scans = (False, True) if options.scan is None else (options.scan,)
    formats: dict[Any, list[Layer]] = {}
    stacks: dict[Any, Any] = {}
    found: dict[tuple[str, bool], Any] = {}
    for name, scan in itertools.product(options.only, scans):
        contestant = CONTESTANTS[name]
        stored = contestant.format
        if stored not in formats:
            layers = weights(sizes, options.layers, contestant.convert)
            formats[stored] = [_joined(layer) for layer in layers] if contestant.joined else layers
        stack = _stacked_behind_attention if contestant.chained else _stacked
        if scan and (stored, stack) not in stacks:
            stacks[stored, stack] = stack(formats[stored])
        if scan or not contestant.scan_only:
            found[name, scan] = stacks[stored, stack] if scan else formats[stored]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description="A decode step, token by token.")
    parser.add_argument("--layers", type=int, help="layers of the model (default 32; with --quick 2)")
    parser.add_argument("--rows", type=int, nargs="+", default=(1, 16), help="sequences that are decoded together")
    scan = "only layers under lax.scan, or only unrolled layers; both by default"
    parser.add_argument("--scan", action=argparse.BooleanOptionalAction, help=scan)
    names = tuple(CONTESTANTS)
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="contestants")
    report.add_quick_and_json(parser, "a small model, fewer layers, tokens and rounds")
    options = parser.parse_args(argv)
    options.layers = options.layers or (2 if options.quick else 32)
    if options.layers < 1 or min(options.rows) < 1:
        parser.error(f"--layers {options.layers}, --rows {min(options.rows)}; accepted: at least 1")
    stored = _stored_weights(options)
    found = []
    for rows in options.rows:
        found.append(measured(options, rows, stored))
        say(f"{rows} rows, {options.layers} layers, {found[-1]['tokens']} tokens a program")
        say(table(found[-1]))
        if options.json:
            sizes = dataclasses.asdict(SMALL if options.quick else LLAMA_8B)
            report.write(options.json, {"benchmark": "decode", "environment": report.environment(), **sizes,
                                        "group": GROUP, "results": found})  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
