"""Data-parallel training steps of a ResNet-50 on several devices: plain `jit`, shard_map, and stock lax.

The network is that of benchmarks/models/resnet.py: float32 master weights, bfloat16 arithmetic, batch normalization
over the whole batch, and SGD with momentum, on synthetic images. Its variants differ in their convolutions and in who
partitions the batch:

  jit        jax_splitk's convolutions, batch-sharded arrays, automatic partitioning
  shard_map  jax_splitk's convolutions, partitioned by hand
  lax        lax's convolutions, batch-sharded arrays, automatic partitioning

All start from the same weights, and their losses must agree. They are timed in turns.
"""

import argparse
import collections
import dataclasses
import functools
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_splitk
from benchmarks import report
from benchmarks.models.layers import OURS, STOCK, Params, cross_entropy
from benchmarks.models.measure import Variant
from benchmarks.models.resnet import TINY, Conv, Net, initial, logits
from jax_splitk.runtime.plan import TARGETS
from jax_splitk.tuning import watch

AXIS = "data"


# ---- a training step -------------------------------------------------------------------------------------------------


def train_step(conv: Conv, net: Net, over: str | None, state: Any, x: Any, labels: Any) -> Any:
    """(state, loss) after one step; `over` is the mesh axis of a shard_map, or None outside of one."""
    whole = (lambda value: value) if over is None else functools.partial(lax.pmean, axis_name=over)

    def loss(params: Params) -> jax.Array:
        return whole(cross_entropy(logits(conv, lambda y: whole(y.mean((0, 1, 2))), net, params, x), labels))

    params, momentum = state
    value, gradients = jax.value_and_grad(loss)(params)
    momentum = jax.tree.map(lambda m, d: 0.9 * m + d, momentum, gradients)
    params = jax.tree.map(lambda w, m: w - 0.1 * m, params, momentum)
    return (params, momentum), value


def variants(net: Net, mesh: jax.sharding.Mesh) -> dict[str, Callable[..., Any]]:
    by_hand = jax.shard_map(
        functools.partial(train_step, OURS.conv, net, AXIS),
        mesh=mesh,
        in_specs=(P(), P(AXIS), P(AXIS)),
        out_specs=(P(), P()),
    )
    return {
        "jit": functools.partial(train_step, OURS.conv, net, None),
        "shard_map": by_hand,
        "lax": functools.partial(train_step, STOCK.conv, net, None),
    }


# ---- the measurement -------------------------------------------------------------------------------------------------


def compiled(fn: Callable[..., Any], state: Any, batch: Any) -> Variant:
    """Compiles the step, and lists its kernels from the log of the lowering, from its code, and from explain."""
    explained = jax_splitk.explain(fn, state, *batch)
    start = time.perf_counter()
    with watch.state.watching() as watched:
        step: Any = jax.jit(fn, donate_argnums=0).lower(state, *batch).compile()
    seconds = time.perf_counter() - start
    text: str = step.as_text()
    lowered = [(choice.implementation, str(choice.problem), str(choice.candidate)) for choice in watched.choices]
    shown = {(d.implementation, str(d.problem)) for d in explained.decisions}
    figures = {
        "compile_seconds": seconds,
        "our_custom_calls": sum(text.count(f'"{target}"') for target in TARGETS),
        "operations": sum(d.count for d in explained.decisions),
        "explained_as_lowered": shown == {(implementation, problem) for implementation, problem, _ in lowered},
        "collectives": {name: text.count(f" {name}(") + text.count(f" {name}-start(") for name in COLLECTIVES},
        "temporary_bytes": step.memory_analysis().temp_size_in_bytes,
        "implementations": dict(collections.Counter(implementation for implementation, _, _ in lowered)),
        "kernels": [{"problem": problem, "choice": choice} for _, problem, choice in lowered],
    }
    return Variant(step, jax.tree.map(jnp.copy, state), figures)


COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")


def measure(net: Net, options: argparse.Namespace) -> dict[str, Any]:
    mesh = jax.make_mesh(
        (options.devices,), (AXIS,), devices=jax.devices()[: options.devices], axis_types=(jax.sharding.AxisType.Auto,)
    )
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P(AXIS))
    count, rng = options.batch * options.devices, np.random.default_rng(1)
    images = rng.standard_normal((count, net.image, net.image, 3), np.float32).astype(jnp.bfloat16)
    batch = jax.device_put((images, rng.integers(0, net.classes, count, np.int32)), split)
    params = jax.device_put(initial(net), whole)
    state = (params, jax.tree.map(jnp.zeros_like, params))
    chosen = {name: fn for name, fn in variants(net, mesh).items() if name in options.variants}
    found: dict[str, Variant] = {}
    losses: dict[str, list[float]] = {}
    for name, fn in chosen.items():
        found[name] = compiled(fn, state, batch)
        losses[name] = found[name].run(batch, options.warmup)[1]
        report.say(f" > {name}: compiled in {found[name].figures['compile_seconds']:.1f} s")
    for _ in range(options.rounds):
        for name, variant in found.items():
            seconds, values = variant.run(batch, options.steps)
            variant.rounds.append(seconds)
            losses[name] += values
    return {name: summary(variant, count) | {"losses": losses[name]} for name, variant in found.items()}


def summary(variant: Variant, images: int) -> dict[str, Any]:
    seconds = statistics.median(variant.rounds)
    return {
        "ms_per_step": 1e3 * seconds,
        "low_ms": 1e3 * min(variant.rounds),
        "high_ms": 1e3 * max(variant.rounds),
        "images_per_second": images / seconds,
        **variant.figures,
    }


def table(results: dict[str, Any]) -> str:
    rows = [["variant", "ms/step", "images/s", "first loss", "last loss", "our calls", "all-reduce", "all-gather"]]
    for name, r in results.items():
        times = [f"{r['ms_per_step']:.2f}", f"{r['images_per_second']:.0f}"]
        losses = [f"{r['losses'][0]:.5f}", f"{r['losses'][-1]:.5f}"]
        counts = [str(r["our_custom_calls"]), *(str(r["collectives"][c]) for c in ("all-reduce", "all-gather"))]
        rows.append([name, *times, *losses, *counts])
    return report.markdown(rows)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.partitioned", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = ("jit", "shard_map", "lax")
    parser.add_argument("--variants", nargs="*", choices=names, default=names, help="of the three above; all")
    parser.add_argument("--devices", type=int, default=jax.device_count(), help="how many; all")
    parser.add_argument("--batch", type=int, help="images on each device; 256, with --tiny 4")
    parser.add_argument("--steps", type=int, help="in a round; 10, with --tiny 2")
    parser.add_argument("--rounds", type=int, help="turns of each variant; 5, with --tiny 2")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the first round; 2")
    parser.add_argument("--tiny", action="store_true", help="a small net and small images, to try it on a CPU")
    parser.add_argument("--json", type=pathlib.Path, help="write all figures to this file")
    options = parser.parse_args(argv)
    for name, (usual, tiny) in {"batch": (256, 4), "steps": (10, 2), "rounds": (5, 2)}.items():
        if getattr(options, name) is None:
            setattr(options, name, tiny if options.tiny else usual)
    return options


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(argv)
    net = TINY if options.tiny else Net()
    results = measure(net, options)
    print(table(results))
    if options.json is not None:
        settings = {name: getattr(options, name) for name in ("devices", "batch", "steps", "rounds", "warmup")}
        whole = {"environment": report.environment(), "net": dataclasses.asdict(net), "settings": settings}
        report.write(options.json, whole | {"variants": results})


if __name__ == "__main__":
    main()
