"""Measures a model's training step by lax and by jax_splitk in one run: times, passes, memory, losses, compilation."""

import dataclasses
import functools
import statistics
import time
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

import jax_splitk
from benchmarks import report
from benchmarks.models import passes
from benchmarks.models.layers import OURS, STOCK, Data, Layers, Model, Params
from jax_splitk.tuning import watch

TRACED_STEPS = 3


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a measurement: how many steps' losses are compared, rounds, steps of a round, and whether to tune
    first.
    """

    losses: int = 50
    rounds: int = 5
    steps: int = 10
    tune: bool = True


def train_step(model: Model, layers: Layers, params: Params, *data: Any) -> tuple[Params, jax.Array]:
    """One of SGD, in the model's dtype: (weights, loss)."""
    layers = dataclasses.replace(layers, dtype=model.dtype)
    value, gradients = jax.value_and_grad(lambda params: model.loss(layers, params, *data))(params)
    return jax.tree.map(lambda w, d: w - model.rate * d, params, gradients), value


@dataclasses.dataclass
class Variant:
    """A compiled step, its state (weights and the like), and its figures."""

    step: Any
    state: Any
    figures: dict[str, Any]
    rounds: list[float] = dataclasses.field(default_factory=list)

    def run(self, data: Data, steps: int) -> tuple[float, list[float]]:
        """(seconds of a step, losses), all steps being queued at once."""
        start, values = time.perf_counter(), []
        for _ in range(steps):
            self.state, value = self.step(self.state, *data)
            values.append(value)
        jax.block_until_ready((self.state, values))
        return (time.perf_counter() - start) / steps, [float(value) for value in values]


def compiled(model: Model, layers: Layers, params: Params, data: Data, tune: bool) -> Variant:
    """The step. Compiles a step, after tuning it if `tune`."""
    step = functools.partial(train_step, model, layers)
    with watch.state.watching() as watched:
        start = time.perf_counter()
        if layers.ours and tune:
            jax_splitk.tune(step, params, *data)
        tuned = time.perf_counter()
        lowered = jax.jit(step, donate_argnums=0).lower(params, *data)
        end = time.perf_counter()
    program: Any = lowered.compile()
    figures = {
        "tuning_seconds": tuned - start if layers.ours and tune else None,
        "tuned_problems": len(watched.measured),
        "lowering_seconds": end - tuned,
        "compile_seconds": time.perf_counter() - end,
        "operations": [
            {"problem": str(choice.problem), "choice": str(choice.candidate), "count": count, "why": choice.why}
            for choice, count in watched.choices.items()
        ],
        **memory(program),
    }
    return Variant(program, jax.tree.map(jnp.copy, params), figures)


def memory(program: Any) -> dict[str, int]:
    """The bytes that XLA allocates for the program: temporary memory, and the sum with arguments and results."""
    analysis = program.memory_analysis()
    held = analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    temporary = int(analysis.temp_size_in_bytes)
    return {"temp_bytes": temporary, "peak_bytes": int(held) + temporary}


def measure(model: Model, settings: Settings) -> dict[str, Any]:
    """The figures of a report; times in milliseconds."""
    data = jax.device_put(model.data(np.random.default_rng(1)))
    params = jax.device_put(model.initial())
    found: dict[str, Variant] = {}
    losses: dict[str, list[float]] = {}
    for name, layers in (("stock", STOCK), ("ours", OURS)):
        found[name] = compiled(model, layers, params, data, settings.tune)
        report.say(f" > {model.name}, {name}: {compile_line(found[name].figures)}")
        losses[name] = found[name].run(data, settings.losses)[1]
        if not np.isfinite(losses[name]).all():
            raise RuntimeError(f"{model.name}, {name}: losses of {losses[name]}; accepted: finite ones")
    for _ in range(settings.rounds):
        for variant in found.values():
            variant.rounds.append(variant.run(data, settings.steps)[0])
    shares = {name: by_pass(variant, data) for name, variant in found.items()}
    variants = {
        name: {
            "ms": 1e3 * statistics.median(variant.rounds),
            "low_ms": 1e3 * min(variant.rounds),
            "high_ms": 1e3 * max(variant.rounds),
            "passes_ms": shares[name],
            "losses": losses[name],
            **variant.figures,
        }
        for name, variant in found.items()
    }
    return {
        "name": model.name,
        "title": model.title,
        "paper": model.paper,
        "date": report.environment()["date"],
        "settings": dataclasses.asdict(settings),
        **variants,
        "ratio": variants["stock"]["ms"] / variants["ours"]["ms"],
        "peak_ratio": variants["ours"]["peak_bytes"] / variants["stock"]["peak_bytes"],
        "loss_difference": difference(losses["ours"], losses["stock"]),
    }


def difference(ours: list[float], stock: list[float]) -> float:
    """The largest difference of two losses of a step, relative to stock's first loss."""
    return max(abs(a - b) for a, b in zip(ours, stock, strict=True)) / abs(stock[0])


def by_pass(variant: Variant, data: Data) -> dict[str, float] | None:
    """Milliseconds of a step on a GPU, by pass; None if the profiler shows no kernels."""
    if not report.on_gpu():
        return None
    launches = passes.launches_of(functools.partial(variant.run, data, TRACED_STEPS))
    return passes.milliseconds(launches, variant.step.as_text(), TRACED_STEPS) if launches else None


def compile_line(figures: dict[str, Any]) -> str:
    said = [f"{figures['lowering_seconds']:.1f} s of lowering, {figures['compile_seconds']:.1f} s of compilation"]
    if (tuning := figures["tuning_seconds"]) is not None:
        said.insert(0, f"{tuning:.1f} s of tuning ({figures['tuned_problems']} problems)")
    return ", ".join(said)
