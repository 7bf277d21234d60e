"""Grouped products of mixtures of experts: jax_splitk against PyTorch's `_grouped_mm` and `lax.ragged_dot`.

python -m benchmarks.ragged [--cases NAME ...] [--configs N] [--float32 PRECISION] [--json FILE]

See README.md beside this file.
"""

import argparse
import dataclasses
import functools
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

import jax_splitk
from benchmarks import ceilings, ragged_cases, report, timing
from benchmarks.cases import find
from benchmarks.measured import Measured
from benchmarks.quantized import torch_version
from benchmarks.quantized_products import Launched, torch_or_none
from benchmarks.ragged_cases import CASES, PASSES, SIZES, Case
from benchmarks.report import on_gpu, percent, rate, say
from jax_splitk import kernels
from jax_splitk.ops.routing import served
from jax_splitk.problems.ragged_reference import lax_ragged_dot_general
from jax_splitk.runtime.target import local_platform, target_for

ROTATED_BYTES = 300 * 2**20  # an H200's L2 holds 50 MiB
MAX_SETS = 16
LAX_LIMIT_GIB = 30.0
SAMPLES = 16  # rows and columns of the result that are computed in float64

_CONTRACTED = {"forward": ((1,), (1,)), "lhs_gradient": ((1,), (2,)), "rhs_gradient": ((0,), (0,))}


@dataclasses.dataclass(frozen=True)
class Result(Measured):
    """One case's figures. Times in microseconds.

    Attributes:
      ours: with sizes of the first kind that was measured.
      times: by kind of sizes, "ours" and whom it is compared with.
      temp_bytes: scratch memory that XLA plans, ours and lax's.
      error: ours, relative, against float64.
      left_out: why a contestant did not take part.
    """

    times: dict[str, dict[str, timing.Timing]]
    temp_bytes: dict[str, int]
    error: float
    left_out: dict[str, str]

    FIGURES = (*Measured.FIGURES, "ratios", "slowdowns")

    @property
    def ratios(self) -> dict[str, float]:
        """The contestants' times over ours: above 1 where we are faster."""
        first = next(iter(self.times.values()))
        return {name: found.us / first["ours"].us for name, found in first.items() if name != "ours"}

    @property
    def slowdowns(self) -> dict[str, float]:
        """Our time with each other kind of sizes, over that with the first kind."""
        return {kind: found["ours"].us / self.ours.us for kind, found in list(self.times.items())[1:]}


def numbers(case: Case) -> lax.RaggedDotDimensionNumbers:
    experts = [] if case.which == "rhs_gradient" else [0]
    return lax.RaggedDotDimensionNumbers((_CONTRACTED[case.which], ((), ())), [0], experts)


def ours(case: Case, config: Any = None) -> Callable[..., jax.Array]:
    """Our function of (lhs, rhs, sizes)."""
    given = (numbers(case), case.precision, jnp.dtype(case.out_dtype))
    return lambda lhs, rhs, sizes: jax_splitk.ragged_dot_general(lhs, rhs, sizes, *given, config=config)


def of_lax(case: Case) -> Callable[..., jax.Array]:
    given = (numbers(case), case.precision, jnp.dtype(case.out_dtype))
    return lambda lhs, rhs, sizes: lax_ragged_dot_general(lhs, rhs, sizes, *given)


def operand_sets(case: Case) -> list[tuple[jax.Array, ...]]:
    """Sets of operands that together do not fit in the L2; a single one if it is large."""
    each = sum(math.prod(shape) for shape in case.shapes) * jnp.dtype(case.dtype).itemsize
    count = min(MAX_SETS, math.ceil(ROTATED_BYTES / each)) if on_gpu() else 1
    x, y = case.shapes

    @jax.jit
    def draw(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        first, second = jax.random.split(key)
        return jax.random.normal(first, x, case.dtype), jax.random.normal(second, y, case.dtype)

    return jax.block_until_ready([draw(key) for key in jax.random.split(jax.random.key(0), count)])


def run(case: Case, options: argparse.Namespace, torch: Any) -> Result:
    """Compiles, times and checks one case."""
    sizes = jax.ShapeDtypeStruct((case.experts,), jnp.int32)
    given = [*(jax.ShapeDtypeStruct(shape, case.dtype) for shape in case.shapes), sizes]

    def compiled(function: Callable[..., jax.Array]) -> Any:
        return jax.jit(function).lower(*given).compile()

    sets, rounds, left_out = operand_sets(case), 3 if options.quick else 7, {}

    def with_sizes(kind: str) -> list[tuple[jax.Array, ...]]:
        return [(*each, jnp.asarray(ragged_cases.sizes_of(case, kind, seed))) for seed, each in enumerate(sets)]

    config = fastest_config(case, compiled, with_sizes(SIZES[0]), options.configs)
    mine = compiled(ours(case, config))
    (decision,) = jax_splitk.explain(ours(case, config), *given).decisions
    functions, temp_bytes = {"ours": mine}, {"ours": report.temp_bytes(mine)}
    if "torch" in options.against:
        if torch is None or "float32" in (case.out_dtype, case.dtype):
            left_out["torch"] = "no PyTorch with a GPU" if torch is None else "no float32"
        else:
            functions["torch"] = of_torch(torch, case, len(sets))
    if "lax" in options.against:
        try:
            theirs = compiled(of_lax(case))
            temp_bytes["lax"] = report.temp_bytes(theirs)
        except jax.errors.JaxRuntimeError as failure:  # XLA tries kernels while it compiles
            theirs, left_out["lax"] = None, f"XLA cannot compile it: {str(failure).splitlines()[0][:100]}"
        if temp_bytes.get("lax", 0) > options.lax_limit_gib * 2**30:
            left_out["lax"] = f"{temp_bytes['lax'] / 2**30:.1f} GiB of temporary memory"
        elif theirs is not None:
            functions["lax"] = theirs
    times = {}
    for kind in SIZES:
        contestants = functions if kind == SIZES[0] else {"ours": mine}
        times[kind] = timing.compare(contestants, with_sizes(kind), rounds=rounds)
    first = with_sizes(SIZES[0])[0]
    found = error(case, np.asarray(mine(*first)), *first)
    entry = report.tuning_entry(decision.problem)
    return Result(case, decision, entry, times[SIZES[0]]["ours"], times, temp_bytes, found, left_out)


def fastest_config(case: Case, compiled: Callable[..., Any], sets: Sequence[tuple[jax.Array, ...]], count: int) -> Any:
    """The fastest of the `count` most promising configs; None for a count of 0, so that selection chooses."""
    target = target_for(local_platform())
    problem, _ = served(case.problem(), target.platform)
    family = next(f for f in kernels.families(problem.op, target.platform) if f.refusal(problem) is None)
    tried = {str(config): config for config in family.candidates(problem, target)[:count]}
    if not tried:
        return None
    functions = {name: compiled(ours(case, config)) for name, config in tried.items()}
    times = timing.compare(functions, sets, rounds=3)
    best = min(times, key=lambda name: times[name].us)
    say("\n".join(f"   {found.us:8.1f} us: {name}" for name, found in times.items()))
    return tried[best]


def of_torch(torch: Any, case: Case, count: int) -> Callable[..., Launched]:
    """PyTorch's grouped product on `count` sets of operands of its own, in turns."""

    def draw(shape: tuple[int, ...]) -> Any:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    ends = [np.cumsum(ragged_cases.sizes_of(case, SIZES[0], seed)) for seed in range(count)]
    sets = [
        (*(draw(shape) for shape in case.shapes), torch.tensor(end, dtype=torch.int32, device="cuda")) for end in ends
    ]
    turns = itertools.cycle(sets)

    def call(*_: jax.Array) -> Launched:
        x, y, offs = next(turns)
        if case.which == "lhs_gradient":
            y = y.transpose(1, 2)
        torch._grouped_mm(x.t() if case.which == "rhs_gradient" else x, y, offs=offs)
        return Launched(torch)

    return call


def error(case: Case, out: np.ndarray, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> float:
    """||out - reference|| / ||reference|| in float64, of random rows and columns."""
    rng, counts = np.random.default_rng(0), np.asarray(sizes)
    ends = np.cumsum(counts)

    def some(size: int) -> np.ndarray:
        return np.sort(rng.permutation(size)[:SAMPLES])

    columns = some(out.shape[-1])
    if case.which == "rhs_gradient":
        group, features = int(counts.argmax()), some(out.shape[1])
        rows = slice(ends[group] - counts[group], ends[group])
        left, right = (np.asarray(x[rows][:, at], np.float64) for x, at in ((lhs, features), (rhs, columns)))
        reference, found = left.T @ right, out[group][np.ix_(features, columns)]
    else:
        rows = some(case.m)
        experts = np.searchsorted(ends, rows, side="right")
        left = np.asarray(lhs[rows], np.float64)
        weights = rhs[:, columns].transpose(0, 2, 1) if case.which == "lhs_gradient" else rhs[:, :, columns]
        right = np.asarray(weights[experts], np.float64)
        reference, found = np.einsum("rk,rkn->rn", left, right), out[np.ix_(rows, columns)]
    return report.distance(found.astype(np.float64), reference)


# ---- reports ---------------------------------------------------------------------------------------------------------


def table(results: Sequence[Result]) -> str:
    """In Markdown."""

    def us(result: Result, name: str) -> str:
        found = next(iter(result.times.values())).get(name)
        return f"{found.us:.1f}" if found else "too large" if name == "lax" and name in result.left_out else ""

    def of_torch_or_lax(result: Result, name: str) -> str:
        return f"{result.ratios[name]:.2f}" if name in result.ratios else ""

    columns: Mapping[str, Callable[[Result], str]] = {
        "tokens x k x n x experts, pass": lambda r: r.name.replace("-", " "),
        "implementation": lambda r: r.decision.implementation,
        "ours us": lambda r: us(r, "ours"),
        "TFLOP/s": lambda r: rate(r.tflops),
        "of floor": lambda r: percent(r.share_of_floor),
        "torch us": lambda r: us(r, "torch"),
        "torch/ours": lambda r: of_torch_or_lax(r, "torch"),
        "lax us": lambda r: us(r, "lax"),
        "lax/ours": lambda r: of_torch_or_lax(r, "lax"),
        **{kind: functools.partial(lambda kind, r: f"{r.slowdowns[kind]:.2f}", kind) for kind in SIZES[1:]},
        "temp MiB": lambda r: f"{r.temp_bytes['ours'] / 2**20:.1f}",
        "lax temp MiB": lambda r: f"{r.temp_bytes['lax'] / 2**20:.0f}" if "lax" in r.temp_bytes else "",
        "error": lambda r: f"{r.error:.1e}",
        "config": lambda r: r.config,
    }
    return report.markdown([[*columns], *([cell(r) for cell in columns.values()] for r in results)])


def summary(results: Sequence[Result]) -> dict[str, dict[str, float]]:
    """Geometric means over the training layers, by pass: TFLOP/s, and the contestants' times over ours."""
    found: dict[str, dict[str, float]] = {}
    for which, out in (*((which, "bfloat16") for which in PASSES), ("rhs_gradient", "float32")):
        some = [r for r in results if (r.case.which, r.case.out_dtype) == (which, out) and r.case.kind == "training"]
        figures = {"TFLOP/s": [r.tflops for r in some]}
        figures |= {f"{name}/ours": [r.ratios[name] for r in some if name in r.ratios] for name in ("torch", "lax")}
        means = {name: statistics.geometric_mean(values) for name, values in figures.items() if values}
        if means:
            found[f"{which} {out}"] = means
    return found


def line(result: Result) -> str:
    """A line to print while the benchmark runs."""
    ratios = [f"{name} {ratio:.2f}x" for name, ratio in result.ratios.items()]
    ratios += [f"{name} left out: {why}" for name, why in result.left_out.items()]
    ratios += [f"{kind} {slower:.2f}" for kind, slower in result.slowdowns.items()]
    return " | ".join([result.line(), *ratios])


def whole_report(options: argparse.Namespace, results: Sequence[Result], failures: Mapping[str, str]) -> dict[str, Any]:
    return {
        "benchmark": "ragged",
        "environment": report.environment() | {"torch": torch_version()},
        "ceilings": None if (measured := ceilings.measured()) is None else dataclasses.asdict(measured),
        "quick": options.quick,
        "abi": {family.name: family.ABI for family in kernels.families("ragged_dot")},
        "geometric_means": summary(results),
        "results": [result.as_json() for result in results],
        "failures": failures,
    }


# ---- command line ----------------------------------------------------------------------------------------------------


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ragged", description="Grouped products: jax_splitk, PyTorch and lax."
    )
    parser.add_argument("--cases", nargs="*", default=[], help="names or groups (also separated by commas); all")
    parser.add_argument("--list", action="store_true", help="print the cases and their groups, and end")
    parser.add_argument("--against", nargs="*", choices=("torch", "lax"), default=("torch", "lax"), help="both")
    about = "try so many of our configs and take the fastest; 0: take what is tuned or predicted"
    parser.add_argument("--configs", type=int, default=0, help=about)
    about = f"leave lax out where it needs more temporary memory; {LAX_LIMIT_GIB:.0f}"
    parser.add_argument("--lax-limit-gib", type=float, default=LAX_LIMIT_GIB, help=about)
    about = "layers in training with float32 operands and results, at this precision"
    parser.add_argument("--float32", choices=("default", "highest"), metavar="PRECISION", help=about)
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
    if options.float32:
        selected = ragged_cases.with_float32(selected, options.float32)
    if options.list:
        print("\n".join(f"{case.name}: {', '.join(case.groups)}" for case in selected))
        return 0
    if options.quick and not on_gpu():
        selected = [case.shrunk() for case in selected]
    torch = torch_or_none() if "torch" in options.against else None

    def save(results: Sequence[Result], failures: Mapping[str, str]) -> None:
        if options.json:
            report.write(options.json, whole_report(options, results, failures))

    results, failures = report.run_all(selected, lambda case: run(case, options, torch), line, save)
    if results:
        say("\n" + table(results) + "\n")
    for which, means in summary(results).items():
        said = ", ".join(f"{name} {rate(mean)}" for name, mean in means.items())
        say(f"geometric means, training, {which}: {said}")
    say(report.regret_line(results))
    return report.say_failures(failures)


if __name__ == "__main__":
    sys.exit(main())
