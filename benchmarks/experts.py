"""A mixture-of-experts block in training: unchanged code of `jax.lax.ragged_dot`, alone and inside `intercept()`.

python -m benchmarks.experts [--json benchmarks/results/experts_h100.json] [--tiny]
python -m benchmarks.experts --devices 2 [--json benchmarks/results/experts_h100x2.json] [--tiny]

The block is 4096 wide, with 64 experts of 1536 hidden units (SwiGLU), of which each token goes through 8. Weights are
float32, arithmetic is bfloat16. It trains on 16,384 tokens, for which lax needs more memory than a GPU has, and on
1,024 tokens, for which it does not, so that losses can be compared. With `--devices N` it trains once more with the
experts divided among N devices, inside `shard_map`: each device multiplies the rows of its experts.
"""

import argparse
import dataclasses
import functools
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jax_splitk
from benchmarks import report
from benchmarks.models.layers import squared_error

Weights = dict[str, jax.Array]

# The mesh axis over which experts are divided, and the weights' shardings.
AXIS = "expert"
SPECS = {"router": PartitionSpec()} | dict.fromkeys(("gate", "up", "down"), PartitionSpec(AXIS))


@dataclasses.dataclass(frozen=True)
class Block:
    """The sizes of a block; each token goes through `chosen` experts."""

    tokens: int
    width: int = 4096
    hidden: int = 1536
    experts: int = 64
    chosen: int = 8
    rate: float = 1e-2

    def weights(self, key: jax.Array) -> Weights:
        shapes = {
            "router": (self.width, self.experts),
            "gate": (self.experts, self.width, self.hidden),
            "up": (self.experts, self.width, self.hidden),
            "down": (self.experts, self.hidden, self.width),
        }
        keys = jax.random.split(key, len(shapes))
        normal = zip(shapes.items(), keys, strict=True)
        return {name: jax.random.normal(k, shape) * shape[-2] ** -0.5 for (name, shape), k in normal}

    def __call__(self, weights: Weights, x: jax.Array, first: jax.Array | None = None) -> jax.Array:
        """The block's result, or the part of it by neighbouring experts, of which `first` [1] is the first one."""
        scores, experts = lax.top_k(jax.nn.softmax(x @ weights["router"]), self.chosen)
        order = jnp.argsort(experts.reshape(-1), stable=True)
        sizes = jnp.bincount(experts.reshape(-1), length=self.experts)
        gate, up, down = (weights[name].astype(jnp.bfloat16) for name in ("gate", "up", "down"))
        rows = x.astype(jnp.bfloat16)[order // self.chosen]
        product = functools.partial(lax.ragged_dot, group_sizes=sizes, group_offset=first)
        hidden = jax.nn.silu(product(rows, gate)) * product(rows, up)
        results = product(hidden, down)[jnp.argsort(order)]
        return jnp.einsum("tc,tcw->tw", scores, results.reshape(-1, self.chosen, self.width).astype(jnp.float32))

    def divided(self, mesh: Mesh) -> Callable[[Weights, jax.Array], jax.Array]:
        """The block with its experts divided among the devices of a mesh. Each has all tokens."""

        def part(weights: Weights, x: jax.Array) -> jax.Array:
            # The devices' cotangents are added here: once, and in float32.
            x = lax.pcast(x, AXIS, to="varying")
            first = lax.axis_index(AXIS) * weights["gate"].shape[0]
            return lax.psum(self(weights, x, first[None]), AXIS)

        return jax.shard_map(part, mesh=mesh, in_specs=(SPECS, PartitionSpec()), out_specs=PartitionSpec())

    def step(
        self, weights: Weights, x: jax.Array, target: jax.Array, *, mesh: Mesh | None = None
    ) -> tuple[Weights, jax.Array]:
        """One step of SGD: (weights, loss)."""
        block = self if mesh is None else self.divided(mesh)
        loss, gradients = jax.value_and_grad(lambda w: squared_error(x + block(w, x), target))(weights)
        return jax.tree.map(lambda w, d: w - self.rate * self.width * d, weights, gradients), loss


def mesh_of(devices: int) -> Mesh:
    """A mesh of the first devices."""
    return jax.make_mesh((devices,), (AXIS,), devices=jax.devices()[:devices], axis_types=(AxisType.Auto,))


def memory_bytes() -> float:
    """The memory of the device; infinity if it does not say."""
    return float((jax.devices()[0].memory_stats() or {}).get("bytes_limit", np.inf))


def trained(block: Block, intercepted: bool, steps: int, devices: int = 1) -> dict[str, Any]:
    """Losses, milliseconds of a step and bytes of a device; without losses if the program needs more memory than there
    is. The experts are divided among the devices."""
    mesh = mesh_of(devices)
    placed = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    initial = jax.jit(block.weights, out_shardings=placed)
    shapes = jax.eval_shape(block.weights, jax.random.key(0))
    weights = {name: jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=placed[name]) for name, w in shapes.items()}
    tokens = jax.random.normal(jax.random.key(1), (2, block.tokens, block.width))
    x, target = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec()))
    start = time.perf_counter()
    step = functools.partial(block.step, mesh=mesh if devices > 1 else None)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(placed, None))
    if intercepted:
        with jax_splitk.intercept():
            lowered = jitted.lower(weights, x, target)
    else:
        lowered = jitted.lower(weights, x, target)
    by = f"intercept, {devices} devices" if devices > 1 else "intercept" if intercepted else "lax"
    found: dict[str, Any] = {"tokens": block.tokens, "by": by}
    try:
        program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        return found | {"error": str(error).splitlines()[0]}
    found["first_seconds"] = time.perf_counter() - start
    analysis: Any = program.memory_analysis()
    held = analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    found |= {"temp_bytes": int(analysis.temp_size_in_bytes), "peak_bytes": int(held + analysis.temp_size_in_bytes)}
    if found["peak_bytes"] > memory_bytes():
        return found | {"error": f"out of memory: {memory_bytes() * 1e-9:.0f} GB are there"}
    state, losses, times = initial(jax.random.key(0)), [], []
    for _ in range(steps):
        start = time.perf_counter()
        state, loss = program(state, x, target)
        losses.append(float(loss))
        times.append(time.perf_counter() - start)
    return found | {"losses": losses, "ms": statistics.median(times) * 1e3}


def line(found: dict[str, Any]) -> Sequence[str]:
    """A row of the table."""
    ms, losses = found.get("ms"), found.get("losses")
    return [
        str(found["tokens"]),
        found["by"],
        found["error"] if ms is None else f"{ms:.1f}",
        f"{found['peak_bytes'] * 1e-9:.1f}" if "peak_bytes" in found else "",
        f"{found['temp_bytes'] * 1e-9:.1f}" if "temp_bytes" in found else "",
        f"{losses[0]:.5f} to {losses[-1]:.5f}" if losses else "",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.experts", description=__doc__)
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--steps", type=int, default=50, help="of training; 50")
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="also divide the experts among N devices")
    parser.add_argument("--tiny", action="store_true", help="a block that a CPU trains in a moment")
    options = parser.parse_args(argv)
    blocks = [Block(tokens) for tokens in (1024, 16384)]
    if options.tiny:
        blocks = [Block(64, width=32, hidden=48, experts=8, chosen=2)]
    most = min(len(jax.devices()), blocks[0].experts)
    if not 1 <= options.devices <= most or blocks[0].experts % options.devices:
        parser.error(f"--devices {options.devices}; accepted: a divisor of {blocks[0].experts}, at most {most}")
    ways = [(True, 1), (False, 1), *[(True, options.devices)] * (options.devices > 1)]
    results = [trained(block, by, options.steps, devices) for block in blocks for by, devices in ways]
    header = ["tokens", "ragged_dot by", "ms a step", "peak GB", "temporary GB", "loss"]
    report.say(report.markdown([header, *map(line, results)]))
    for first in range(0, len(results), len(ways)):
        ours, *others = results[first : first + len(ways)]
        for other in others:
            if "losses" in ours and "losses" in other:
                apart = max(abs(a - b) / b for a, b in zip(ours["losses"], other["losses"], strict=True))
                compared = f"losses {apart:.1e} apart at most, {other['by']} takes {other['ms'] / ours['ms']:.2f}"
                report.say(f"{ours['tokens']} tokens: {compared} times as long as intercept")
    if options.json:
        figures = {"benchmark": "experts", "environment": report.environment(), "results": results}
        report.write(pathlib.Path(options.json), figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
