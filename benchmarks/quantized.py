"""Products with a quantized weight: jax_splitk against XLA's int4, 16-bit and fp8 products and PyTorch's cuBLASLt.

python -m benchmarks.quantized [--cases FEATURESxK ...] [--n ROWS ...] [--json FILE] [--configs FAMILY ...]

See README.md beside this file.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib.metadata
import itertools
import pathlib
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

import jax_splitk
from benchmarks import quantized_products as contestants
from benchmarks import report, timing
from benchmarks.measured import Measured
from benchmarks.quantized_cases import QUICK_ROWS, Case, crossover, select
from benchmarks.quantized_products import Arrays, Product
from benchmarks.report import copy_rate, on_gpu, percent, rate, say
from jax_splitk import kernels
from jax_splitk.ops.decision import Decision
from jax_splitk.problems.quantized_matmul import COMPUTE_DTYPES, X_DTYPES
from jax_splitk.quantized.formats import FORMATS, SCALE_DTYPES
from jax_splitk.runtime import compiler, execute
from jax_splitk.runtime.plan import DevicePlan
from jax_splitk.runtime.target import local_platform, target_for

ROTATED_BYTES = 300 * 2**20  # an H200's L2 holds 50 MiB
MAX_SETS = 24
SHOWN_CONFIGS = 8
TITLES = {
    "xla_quantized": "XLA int4",
    "xla_16bit": "XLA bf16",
    "xla_fp8": "XLA fp8",
    "torch_bf16": "torch bf16",
    "torch_fp8": "torch fp8",
}


@dataclasses.dataclass(frozen=True)
class ConfigResult:
    """One configuration of a family, in a run with --configs. Times in microseconds."""

    family: str
    config: str
    estimate_us: float
    us: float
    error: float
    kernels: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Result(Measured):
    """One case's figures. Times in microseconds.

    The figures of a case. `times` has "ours" and the contestants; `error` is our relative error against float64;
    `fp8_product` says whether XLA's fp8 contestant is cuBLASLt's fp8 product (None: it did not take part).
    """

    times: dict[str, timing.Timing]
    error: float
    fp8_product: bool | None
    configs: list[ConfigResult]

    FIGURES = (*Measured.FIGURES, "weight", "ratios", "share_of_bandwidth")

    @property
    def weight(self) -> str:
        return self.case.weight

    @property
    def ratios(self) -> dict[str, float]:
        """The contestants' times over ours: above 1 where we are faster."""
        return {name: found.us / self.ours.us for name, found in self.times.items() if name != "ours"}

    @property
    def share_of_bandwidth(self) -> float | None:
        copied = copy_rate(jax.devices()[0].device_kind)
        return None if copied is None else self.gbytes * 1e9 / copied


@dataclasses.dataclass
class Bench:
    """Shared by the cases of one weight: its random sets, and XLA's compiled products."""

    products: dict[str, Product]
    weights: dict[str, list[Arrays]]
    compiled: dict[tuple[str, Case], Any]
    torch: Any
    torch_weights: dict[str, list[Any]]
    failures: dict[str, str]

    @contextlib.contextmanager
    def noting_failure(self, case: Case, name: str) -> Iterator[None]:
        """Records a contestant's failure, so that the others go on."""
        try:
            yield
        except Exception:
            self.failures[f"{case.name} {name}"] = traceback.format_exc()


def prepare(cases: Sequence[Case], options: argparse.Namespace) -> Bench:
    """Compiles the contestants for the cases of one weight in parallel, except our product, and draws the weights."""
    chosen = contestants.products(cases[0])
    chosen = {name: product for name, product in chosen.items() if name == "ours" or name in options.against}
    bench = Bench(chosen, {}, {}, None, {}, {})

    def compile_one(job: tuple[Product, Case]) -> None:
        product, case = job
        with bench.noting_failure(case, product.name):
            bench.compiled[product.name, case] = product.compile(case)

    compile_device_code(cases, options.configs)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        theirs = [product for name, product in chosen.items() if name != "ours"]
        list(pool.map(compile_one, itertools.product(theirs, cases)))
    sets = {name: set_count(product, cases[0]) for name, product in contestants.products(cases[0]).items()}
    for name, product in chosen.items():
        bench.weights[name] = draw(functools.partial(product.weight, cases[0]), sets[name])
    if any(name.startswith("torch") for name in options.against):
        with bench.noting_failure(cases[0], "torch"):
            bench.torch = contestants.torch_or_none()
            if bench.torch is not None:
                bench.torch_weights = contestants.torch_weights(bench.torch, cases[0], sets)
    return bench


def compile_device_code(cases: Sequence[Case], families: Sequence[str]) -> None:
    """Compiles our kernels for all cases in parallel: the chosen ones, and all configs of `families`. Cases that no
    cache has are tuned later, with sources of their own.
    """
    target = target_for(local_platform())
    plans = [family.plan(case.problem(), config) for case in cases for family, config in configs(case, families, None)]
    for case in cases:
        decision = decide(case)
        for family in kernels.families("quantized_matmul", target.platform):
            if isinstance(decision.config, family.Config):
                plans.append(family.plan(case.problem(), decision.config))
    # The case's own run raises the error again, and records it.
    with contextlib.suppress(Exception):
        compiler.compile_sources({plan.source for plan in plans if isinstance(plan, DevicePlan)})


def configs(case: Case, families: Sequence[str], most: int | None) -> list[tuple[kernels.Family, Any]]:
    """The candidates of the named families, those that are predicted to be the fastest first."""
    target, problem = target_for(local_platform()), case.problem()
    found = [
        (family.estimate(problem, config, target), family, config)
        for family in kernels.families("quantized_matmul", target.platform)
        if family.name in families and family.refusal(problem, None, target) is None
        for config in family.candidates(problem, target)
    ]
    return [(family, config) for _, family, config in sorted(found, key=lambda item: item[0])[:most]]


def decide(case: Case) -> Decision:
    product = contestants.products(case)["ours"]
    function = functools.partial(product.multiply, case)
    (decision,) = jax_splitk.explain(function, *product.arguments(case)).decisions
    return decision


def set_count(product: Product, case: Case) -> int:
    """The least number of weights that together do not fit in the L2."""
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in product.arguments(case)[1:])
    if case.qtype != "nf4" and FORMATS[case.qtype].bits == 4 and product.name == "xla_quantized":
        size //= 2  # an int4's itemsize is 1
    return min(MAX_SETS, max(2, -(-(ROTATED_BYTES if on_gpu() else 0) // max(size, 1))))


def draw(function: Callable[[jax.Array], Any], count: int) -> list[Any]:
    compiled = jax.jit(function)
    return jax.block_until_ready([compiled(key) for key in jax.random.split(jax.random.key(0, impl="rbg"), count)])


def run(case: Case, bench: Bench, options: argparse.Namespace) -> Result:
    """Compiles ours, then times and checks one case."""
    ours = bench.products["ours"]
    compiled = {name: bench.compiled[name, case] for name in bench.products if (name, case) in bench.compiled}
    compiled = {"ours": ours.compile(case)} | compiled  # tunes the problem if no cache has it and tuning is on
    decision = decide(case)
    most = max(map(len, bench.weights.values()))
    xs = {shape: draw_x(shape, most) for shape in {product.x(case) for product in bench.products.values()}}
    functions = {
        name: on_sets(function, xs[bench.products[name].x(case)], bench.weights[name])
        for name, function in compiled.items()
    }
    tried: dict[str, tuple[kernels.Family, Any]] = {}
    for family, config in configs(case, options.configs, options.most):
        name = f"{family.name} {config}"
        with bench.noting_failure(case, name):
            function = compile_config(case, family, config)
            functions[name] = on_sets(function, xs[ours.x(case)], bench.weights["ours"])
            tried[name] = family, config
    sets: list[Any] = [(i,) for i in range(most)]
    times = timing.compare(functions, sets, options.rounds)
    if bench.torch_weights:
        with bench.noting_failure(case, "torch"):
            theirs = contestants.torch_products(bench.torch, case, bench.torch_weights)
            theirs = {name: function for name, function in theirs.items() if name in options.against}
            times |= timing.compare(theirs, sets, options.rounds)
    target = target_for(local_platform())
    return Result(
        case=case,
        decision=decision,
        entry=report.tuning_entry(case.problem()),
        ours=times["ours"],
        times={name: found for name, found in times.items() if name not in tried},
        error=error(case, functions["ours"], xs[ours.x(case)], bench),
        fp8_product=contestants.is_fp8_product(compiled["xla_fp8"]) if "xla_fp8" in compiled else None,
        configs=[
            ConfigResult(
                family=family.name,
                config=str(config),
                estimate_us=family.estimate(case.problem(), config, target) * 1e6,
                us=times[name].us,
                error=error(case, functions[name], xs[ours.x(case)], bench),
                kernels=times[name].kernels,
            )
            for name, (family, config) in tried.items()
        ],
    )


def compile_config(case: Case, family: kernels.Family, config: Any) -> Any:
    problem = case.problem()
    call = family.plan(problem, config).custom_call()
    function = jax.jit(lambda *operands: execute.call(call, problem, *operands))
    return function.lower(*contestants.products(case)["ours"].arguments(case)).compile()


def draw_x(shape: jax.ShapeDtypeStruct, count: int) -> list[jax.Array]:
    return draw(lambda key: jax.random.normal(key, shape.shape).astype(shape.dtype), count)


def on_sets(function: Callable[..., Any], xs: Sequence[jax.Array], weights: Sequence[Arrays]) -> Callable[[int], Any]:
    """The function on set i. Each contestant has so many weights that they do not fit in the L2."""
    return lambda i: function(xs[i % len(xs)], *weights[i % len(weights)])


def error(case: Case, function: Callable[[int], Any], xs: Sequence[jax.Array], bench: Bench) -> float:
    return contestants.relative_error(case, xs[0], bench.weights["ours"][0], function(0))


# ---- reports ---------------------------------------------------------------------------------------------------------


def perf_line(result: Result) -> str:
    ratios = ", ".join(f"{TITLES[name]} {ratio:.2f}x" for name, ratio in result.ratios.items())
    lines = [f"{result.line()} | {ratios}"]
    best = sorted(result.configs, key=lambda found: found.us)
    for found in best[:SHOWN_CONFIGS]:
        lines.append(
            f"   {found.us:8.1f} us, estimate {found.estimate_us:8.1f}, error {found.error:.1e}: "
            f"{found.family} {found.config}"
        )
    return "\n".join(lines)


def table(results: Sequence[Result]) -> str:
    """The results in Markdown, columns aligned."""
    others = [name for name in TITLES if any(name in result.times for result in results)]
    header = ["case", "implementation", "ours us", *(f"{TITLES[name]} us" for name in others)]
    header += [f"{TITLES[name]}/ours" for name in others]
    header += ["TFLOP/s", "GB/s", "of a copy", "of floor", "workspace MiB", "error", "config"]
    rows = [header]
    for r in results:
        rows.append(
            [
                *(r.case.name, r.decision.implementation, f"{r.ours.us:.1f}"),
                *(f"{r.times[name].us:.1f}" if name in r.times else "" for name in others),
                *(f"{r.ratios[name]:.2f}" if name in r.times else "" for name in others),
                *(rate(r.tflops), rate(r.gbytes)),
                *map(percent, (r.share_of_bandwidth, r.share_of_floor)),
                *(f"{r.decision.workspace_bytes / 2**20:.1f}", f"{r.error:.1e}", r.config),
            ]
        )
    return report.markdown(rows)


def crossovers(results: Sequence[Result]) -> dict[str, dict[str, float | None]]:
    """For each weight and contestant, the number of rows from which on we are slower; None if we never are."""
    found: dict[str, dict[str, float | None]] = {}
    for weight in dict.fromkeys(result.case.weight for result in results):
        rows = [result for result in results if result.case.weight == weight]
        names = dict.fromkeys(name for result in rows for name in result.ratios)
        found[weight] = {
            name: crossover((r.case.rows, r.ours.us, r.times[name].us) for r in rows if name in r.times)
            for name in names
        }
    return found


def notes(results: Sequence[Result]) -> Iterable[str]:
    for weight, found in crossovers(results).items():
        said = ", ".join(f"{TITLES[name]} {'never' if n is None else f'{n:.0f}'}" for name, n in found.items())
        if said:
            yield f"{weight}: rows from which on we are slower: {said}"
    if on_gpu() and (other := [result.case.name for result in results if result.fp8_product is False]):
        yield f"XLA did not take cuBLASLt's fp8 product: {', '.join(other)}"
    if any(found.source != "device" for result in results for found in result.times.values()) and on_gpu():
        yield "some times are wall-clock times: see `source` in the JSON file"


def write_report(path: pathlib.Path, options: Mapping[str, Any], results: Sequence[Result], failures: Any) -> None:
    families = kernels.families("quantized_matmul")
    found = {
        "environment": report.environment() | {"torch": torch_version()},
        "abi": {family.name: family.ABI for family in families},
        "options": {name: value for name, value in options.items() if name != "json"},
        "crossovers": crossovers(results),
        "results": [result.as_json() for result in results],
        "failures": failures,
    }
    report.write(path, found)


def torch_version() -> str | None:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


# ---- command line ----------------------------------------------------------------------------------------------------


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quantized",
        description="Products with a quantized weight: jax_splitk against XLA and PyTorch.",
    )
    families, platform = kernels.families("quantized_matmul"), local_platform()
    names = [family.name for family in families if family.platform == platform]
    parser.add_argument("--cases", nargs="*", default=[], metavar="FEATURESxK", help="weights; three large ones")
    parser.add_argument("--n", nargs="*", type=at_least_one, default=[], metavar="ROWS", help="numbers of rows of x")
    parser.add_argument("--x-dtype", choices=X_DTYPES, default="bfloat16", help="of our activation; bfloat16")
    parser.add_argument("--qtype", choices=tuple(FORMATS), default="int4", help="of the weight; int4")
    parser.add_argument(
        "--group-size", type=int, choices=(0, 16, 32, 64, 128), default=64, help="elements a scale, 0 per channel; 64"
    )
    parser.add_argument("--scale-dtype", choices=SCALE_DTYPES, default="bfloat16", help="of the scales; bfloat16")
    parser.add_argument("--zero-points", action="store_true", help="for each scale, as AWQ has them")
    parser.add_argument("--compute-dtype", choices=COMPUTE_DTYPES, help="of our product; none")
    parser.add_argument(
        "--against", nargs="*", choices=tuple(TITLES), default=tuple(TITLES), help="whom to compare with; all"
    )
    parser.add_argument(
        "--configs",
        nargs="*",
        choices=[family.name for family in families],
        default=[],
        metavar="FAMILY",
        help=f"time all candidates of these, here {', '.join(names)}",
    )
    parser.add_argument("--most", type=at_least_one, help="with --configs: at most so many a case, the most promising")
    parser.add_argument("--rounds", type=at_least_one, default=3, help="turns of each contestant; 3")
    report.add_quick_and_json(parser, f"16 times smaller sides and at most {QUICK_ROWS} rows")
    options = parser.parse_args(argv)
    if elsewhere := [name for name in options.configs if name not in names]:
        parser.error(f"--configs {' '.join(elsewhere)}; accepted on {platform}: {', '.join(names)}")
    return options


def at_least_one(text: str) -> int:
    """The argparse type of a count."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; accepted: an integer of at least 1")
    return value


def selected(options: argparse.Namespace) -> list[Case]:
    found = select(
        options.cases,
        options.n,
        x_dtype=options.x_dtype,
        qtype=options.qtype,
        group_size=options.group_size or None,
        scale_dtype=options.scale_dtype,
        zero_points=options.zero_points,
        compute_dtype=options.compute_dtype,
    )
    if not options.quick:
        return found
    return list(dict.fromkeys(case.shrunk() for case in found if case.rows <= QUICK_ROWS))


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    try:
        cases = selected(options)
    except ValueError as problem:
        print(problem, file=sys.stderr)
        return 2
    results: list[Result] = []
    failures: dict[str, str] = {}
    for _, group in itertools.groupby(cases, key=lambda case: case.weight):
        of_weight = list(group)
        bench = prepare(of_weight, options)
        for case in of_weight:
            try:
                results.append(run(case, bench, options))
                say(perf_line(results[-1]))
            except Exception as problem:  # continue with the other cases
                failures[case.name] = traceback.format_exc()
                say(report.failed_line(case.name, problem))
            if options.json:  # after every case, so that a run that is cut short loses nothing
                write_report(options.json, vars(options), results, failures | bench.failures)
        failures |= bench.failures
    if results:
        say("\n" + table(results) + "\n")
    for note in notes(results):
        say(note)
    if failures:
        say(f"failed: {', '.join(failures)}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
