"""Grouped products with packed weights: `jax_splitk.ragged_dot` of int4 and MXFP4 experts against bfloat16 experts.

python -m benchmarks.quantized_experts [--cases NAME ...] [--configs N] [--json FILE]

See README.md beside this file.
"""

import argparse
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

import jax_splitk
from benchmarks import ceilings, report, timing
from benchmarks.cases import find
from benchmarks.measured import Measured
from benchmarks.ragged import MAX_SETS, ROTATED_BYTES
from benchmarks.report import on_gpu, percent, rate, say
from jax_splitk import kernels
from jax_splitk.problems.epilogue import parted
from jax_splitk.problems.quantized_ragged import QuantizedRaggedDotProblem
from jax_splitk.quantized import PackedWeight
from jax_splitk.runtime.target import local_platform, target_for


@dataclasses.dataclass(frozen=True)
class Case:
    """One product of a layer: `tokens` tokens, of which each goes through `chosen` of the experts' [k, n] weights.

    Attributes:
      balanced: every expert has the same number of rows; otherwise each token's experts are random.
      bias, activation: what follows the product in the layer: a bias of each expert, a gated activation.
    """

    layer: str
    tokens: int
    chosen: int
    experts: int
    k: int
    n: int
    qtype: str
    group_size: int
    scale_dtype: str = "bfloat16"
    balanced: bool = False
    bias: bool = False
    activation: Any = None

    @property
    def name(self) -> str:
        return f"{self.layer}-{self.k}x{self.n}-{self.tokens}"

    @property
    def groups(self) -> Iterable[str]:
        """The words that select the case."""
        return self.layer, self.qtype, str(self.tokens)

    @property
    def m(self) -> int:
        return self.tokens * self.chosen

    def problem(self) -> QuantizedRaggedDotProblem:
        return QuantizedRaggedDotProblem(
            groups=self.experts,
            m=self.m,
            k=self.k,
            n=self.n,
            dtype="bfloat16",
            out_dtype="bfloat16",
            qtype=self.qtype,
            group_size=self.group_size,
            scale_dtype=self.scale_dtype,
        )

    def shrunk(self) -> "Case":
        """The case in a size for a CPU."""
        return dataclasses.replace(
            self, experts=max(self.chosen, self.experts // 4), k=self.k // 8 // 64 * 64, n=self.n // 256 * 16
        )

    def sizes(self, seed: int) -> np.ndarray:
        """int32 [experts], whose sum is m."""
        if self.balanced:
            return np.full(self.experts, self.m // self.experts, np.int32)
        rng = np.random.default_rng(seed)
        chosen = [rng.permutation(self.experts)[: self.chosen] for _ in range(self.tokens)]
        return np.bincount(np.concatenate(chosen), minlength=self.experts).astype(np.int32)


# Eight experts of 16 rows; both products of a layer of gpt-oss-20b, in decoding and with many tokens.
CASES = (
    Case("int4", 128, 1, 8, 4096, 7168, "int4", 128, balanced=True, activation="swiglu"),
    *(
        Case("gpt-oss-20b", tokens, 4, 32, 2880, n, "float4_e2m1fn", 32, "float8_e8m0fnu", bias=True, activation=after)
        for tokens in (1, 16, 1024)
        for n, after in ((5760, "swigluoai"), (2880, None))
    ),
)


@dataclasses.dataclass(frozen=True)
class Result(Measured):
    """One case's figures. Times in microseconds.

    Attributes:
      active: experts that have rows, in the mean over the timed sizes.
      active_bytes: bytes of these experts' packed weights.
      times: "ours", "bfloat16" (`ragged_dot` of bfloat16 experts) and "dequantized" (by XLA, in the same function).
      epilogue: "fused" (the product with its bias and activation in the kernel) and "separate" (in XLA's operations).
      copy_share: the time of a copy of so many bytes at the measured rate, over ours; None without a measured rate.
      error: ours, relative, against the dequantized product in float32.
      epilogue_error: of "fused", relative, against the same with its bias and activation in float32.
    """

    active: float
    active_bytes: float
    times: dict[str, timing.Timing]
    epilogue: dict[str, timing.Timing]
    copy_share: float | None
    error: float
    epilogue_error: float

    FIGURES = (*Measured.FIGURES, "ratios")

    @property
    def ratios(self) -> dict[str, float]:
        """The contestants' times over ours: above 1 where we are faster."""
        return {name: found.us / self.ours.us for name, found in self.times.items() if name != "ours"}


def operand_sets(case: Case) -> list[tuple[jax.Array, PackedWeight, jax.Array]]:
    """Sets of tokens, packed weights and sizes that together do not fit in the L2."""
    each = case.problem().bytes_moved
    count = max(2, min(MAX_SETS, math.ceil(ROTATED_BYTES / each))) if on_gpu() else 1

    @jax.jit
    def draw(key: jax.Array) -> tuple[jax.Array, PackedWeight]:
        first, second = jax.random.split(key)
        values = jax.random.normal(second, (case.experts, case.k, case.n), jnp.bfloat16)
        options: Any = {"dtype": case.qtype, "group_size": case.group_size, "axis": 1, "scale_dtype": case.scale_dtype}
        weight = jax_splitk.prepack(jax_splitk.quantize(values, **options), stack=1)
        return jax.random.normal(first, (case.m, case.k), jnp.bfloat16), weight

    drawn = [draw(key) for key in jax.random.split(jax.random.key(0), count)]
    return jax.block_until_ready([(*each, jnp.asarray(case.sizes(i))) for i, each in enumerate(drawn)])


def dequantized(w: PackedWeight) -> jax.Array:
    return jax_splitk.dequantize(jax_splitk.unpack(w)).astype(jnp.bfloat16)


def run(case: Case, options: argparse.Namespace) -> Result:
    """Compiles, times and checks one case."""
    sets, rounds = operand_sets(case), 3 if options.quick else 7

    def compiled(function: Callable[..., jax.Array], given: Sequence[Any] = sets[0]) -> Any:
        return jax.jit(function).lower(*given).compile()

    config = fastest_config(case, compiled, sets, options.configs)

    def product(x: jax.Array, w: Any, sizes: jax.Array) -> jax.Array:
        return jax_splitk.ragged_dot(x, w, sizes, config=config)

    mine = compiled(product)
    (decision,) = jax_splitk.explain(product, *sets[0]).decisions
    by_xla = compiled(lambda x, w, sizes: jax_splitk.ragged_dot(x, dequantized(w), sizes))
    times = timing.compare({"ours": mine, "dequantized": by_xla}, sets, rounds=rounds)
    dense = [(x, jax.block_until_ready(jax.jit(dequantized)(w)), sizes) for x, w, sizes in sets[:2]]
    of_bfloat16 = compiled(jax_splitk.ragged_dot, dense[0])
    times |= timing.compare({"bfloat16": of_bfloat16}, dense, rounds=rounds)
    active = float(np.mean([np.count_nonzero(sizes) for _, _, sizes in sets]))
    active_bytes = active * sets[0][1].nbytes / case.experts
    measured = ceilings.measured()
    share = None if measured is None else active_bytes / measured.bytes / times["ours"].us * 1e6
    of_layer = [(x, w, sizes, *after_product(case, sizes)) for x, w, sizes in sets]
    functions = {"fused": functools.partial(fused, case, config), "separate": functools.partial(separate, case, config)}
    programs = {name: compiled(function, of_layer[0]) for name, function in functions.items()}
    epilogue = timing.compare(programs, of_layer, rounds=rounds)
    x, w, sizes = dense[0]
    exact = jax_splitk.ragged_dot(x.astype(jnp.float32), w.astype(jnp.float32), sizes, "highest")
    error = report.distance(np.asarray(mine(*sets[0]), np.float64), np.asarray(exact, np.float64))
    exact, found = activated(case, exact, *of_layer[0][3:]), programs["fused"](*of_layer[0])
    epilogue_error = report.distance(np.asarray(found, np.float64), np.asarray(exact, np.float64))
    entry = report.tuning_entry(decision.problem)
    figures = (active, active_bytes, times, epilogue, share, error, epilogue_error)
    return Result(case, decision, entry, times["ours"], *figures)


# ---- what follows a product in its layer -----------------------------------------------------------------------------


def after_product(case: Case, sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A bias of each expert, and the expert of each row."""
    shape = (2, case.n // 2) if case.activation else (case.n,)
    bias = jax.random.normal(jax.random.key(7), (case.experts, *shape), jnp.bfloat16) * case.bias
    return bias, jnp.repeat(jnp.arange(case.experts), sizes, total_repeat_length=case.m)


def fused(case: Case, config: Any, x: jax.Array, w: Any, sizes: jax.Array, bias: jax.Array, _: jax.Array) -> jax.Array:
    weight = jax_splitk.JoinedWeight(w) if case.activation else w
    given = {"bias": bias if case.bias else None, "activation": case.activation, "config": config}
    return jax_splitk.ragged_dot(x, weight, sizes, **given)


def separate(
    case: Case, config: Any, x: jax.Array, w: Any, sizes: jax.Array, bias: jax.Array, expert: jax.Array
) -> jax.Array:
    return activated(case, jax_splitk.ragged_dot(x, w, sizes, config=config), bias, expert)


def activated(case: Case, product: jax.Array, bias: jax.Array, expert: jax.Array) -> jax.Array:
    """The bias and the activation of a product whose columns are 8 of gate and 8 of up in turn, in its dtype."""
    if not case.activation:
        return product + bias[expert].astype(product.dtype)
    gate, up = parted(product)
    if case.bias:
        of_row = bias[expert].astype(product.dtype)
        gate, up = gate + of_row[:, 0], up + of_row[:, 1]
    if case.activation == "swiglu":
        return jax.nn.silu(gate) * up
    gate, up = jnp.minimum(gate, 7), jnp.clip(up, -7, 7)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


def fastest_config(case: Case, compiled: Callable[..., Any], sets: Sequence[Any], count: int) -> Any:
    """The fastest of the `count` most promising configs; None for a count of 0, so that selection chooses."""
    target = target_for(local_platform())
    family = next(f for f in kernels.families("quantized_ragged_dot", target.platform))
    tried = {str(config): config for config in family.candidates(case.problem(), target)[:count]}
    if not tried:
        return None
    functions = {
        name: compiled(lambda *given, config=config: jax_splitk.ragged_dot(*given, config=config))
        for name, config in tried.items()
    }
    times = timing.compare(functions, sets, rounds=3)
    say("\n".join(f"   {found.us:8.1f} us: {name}" for name, found in times.items()))
    return tried[min(times, key=lambda name: times[name].us)]


# ---- reports ---------------------------------------------------------------------------------------------------------


def table(results: Sequence[Result]) -> str:
    """In Markdown."""
    columns: Mapping[str, Callable[[Result], str]] = {
        "layer, k x n, tokens": lambda r: r.name.replace("-", " "),
        "implementation": lambda r: r.decision.implementation,
        "active experts": lambda r: f"{r.active:.1f}",
        "ours us": lambda r: f"{r.ours.us:.1f}",
        "GB/s of active weights": lambda r: rate(r.active_bytes / r.ours.us * 1e-3),
        "of a copy": lambda r: percent(r.copy_share),
        "bfloat16/ours": lambda r: f"{r.ratios['bfloat16']:.2f}",
        "dequantized/ours": lambda r: f"{r.ratios['dequantized']:.2f}",
        "error": lambda r: f"{r.error:.1e}",
        "fused us": lambda r: f"{r.epilogue['fused'].us:.1f}",
        "separate us": lambda r: f"{r.epilogue['separate'].us:.1f}",
        "separate/fused": lambda r: f"{r.epilogue['separate'].us / r.epilogue['fused'].us:.2f}",
        "fused error": lambda r: f"{r.epilogue_error:.1e}",
        "config": lambda r: r.config,
    }
    return report.markdown([[*columns], *([cell(r) for cell in columns.values()] for r in results)])


def whole_report(options: argparse.Namespace, results: Sequence[Result], failures: Mapping[str, str]) -> dict[str, Any]:
    return {
        "benchmark": "quantized_experts",
        "environment": report.environment(),
        "ceilings": None if (measured := ceilings.measured()) is None else dataclasses.asdict(measured),
        "quick": options.quick,
        "abi": {family.name: family.ABI for family in kernels.families("quantized_ragged_dot")},
        "results": [result.as_json() for result in results],
        "failures": failures,
    }


# ---- command line ----------------------------------------------------------------------------------------------------


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quantized_experts", description="Grouped products with packed weights."
    )
    parser.add_argument("--cases", nargs="*", default=[], help="names or groups (also separated by commas); all")
    parser.add_argument("--list", action="store_true", help="print the cases and their groups, and end")
    about = "try so many of our configs and take the fastest; 0: take what is tuned or predicted"
    parser.add_argument("--configs", type=int, default=0, help=about)
    report.add_quick_and_json(parser, "fewer rounds, and on the CPU smaller layers")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    options = arguments(argv)
    try:
        selected = find(options.cases, CASES, lambda case: case.groups)
    except ValueError as problem:
        print(problem, file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(f"{case.name}: {', '.join(case.groups)}" for case in selected))
        return 0
    if options.quick and not on_gpu():
        selected = [case.shrunk() for case in selected]

    def save(results: Sequence[Result], failures: Mapping[str, str]) -> None:
        if options.json:
            report.write(options.json, whole_report(options, results, failures))

    results, failures = report.run_all(selected, lambda case: run(case, options), Result.line, save)
    if results:
        say("\n" + table(results) + "\n")
    return report.say_failures(failures)


if __name__ == "__main__":
    sys.exit(main())
