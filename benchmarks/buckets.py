"""The cost of using a decision for more rows: a problem's own decision against its representative's, timed in turns.

python -m benchmarks.buckets [--cases FEATURESxK ...] [--n ROWS ...] [--seconds SECONDS] [--json FILE]

Tunes the problem of every number of rows, and its representatives. See README.md beside this file.
"""

import argparse
import dataclasses
import functools
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax_splitk
from benchmarks import quantized_products, report, timing
from benchmarks.quantized import at_least_one, compile_config, draw, draw_x, on_sets, set_count
from benchmarks.quantized_cases import QUICK_ROWS, Case, select
from benchmarks.report import on_gpu, percent, say
from jax_splitk.problems.quantized_matmul import X_DTYPES
from jax_splitk.quantized.formats import FORMATS
from jax_splitk.runtime.target import local_platform, target_for
from jax_splitk.tuning import buckets
from jax_splitk.tuning.choice import XLA, Candidate
from jax_splitk.tuning.entry import Entry, Found
from jax_splitk.tuning.key import Key, key_for
from jax_splitk.tuning.options import DEFAULT_WORKSPACE_LIMIT

# For each decision the fewest rows that it may serve, and a number in the middle.
ROWS = (1, 5, 9, 12, 17, 24, 33, 48, 65, 80, 97, 112, 129, 144, 161, 176, 193, 224, 257, 290, 321, 350, 385, 416, 449,
        480, 513, 560, 600, 641, 700, 769, 830, 897, 960, 1025, 1150, 1281, 1400)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Result:
    """The times for one number of rows, in microseconds. `of`: the rows of the representative whose decision serves, or
    None."""

    case: Case
    of: int | None
    tuned: str
    served: str
    times: dict[str, timing.Timing]

    @property
    def loss(self) -> float | None:
        """How much slower the representative's decision is than the problem's own; 0 if they are the same."""
        if self.of is None:
            return None
        return self.times["served"].us / self.times["tuned"].us - 1 if "served" in self.times else 0.0

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"name": self.case.name, "loss": self.loss}


def tuned(key: Key, seconds: float | None) -> Entry:
    """Tunes exactly this problem, and stores the decision in the cache."""
    return dict(jax_splitk.tune_problems([key.problem], seconds=seconds))[key]


def run(case: Case, options: argparse.Namespace) -> Result:
    """Tunes the missing decisions, and times both decisions if they differ."""
    key = key_for(case.problem(), target_for(local_platform()))
    own = tuned(key, options.seconds).choice
    others = (Found(tuned(other, options.seconds), "") for other in buckets.representatives(key))
    derived = (buckets.derived(key, other, DEFAULT_WORKSPACE_LIMIT) for other in others)
    found = next((each.entry for each in derived if each is not None), None)
    if found is None or found.choice == own:
        return Result(case, _rows(found), str(own), "" if found is None else str(own), {})
    functions = {"tuned": _function(case, own), "served": _function(case, found.choice)}
    product = quantized_products.products(case)["ours"]
    weights = draw(functools.partial(product.weight, case), set_count(product, case))
    xs = draw_x(product.x(case), len(weights))
    on_weights = {name: on_sets(function, xs, weights) for name, function in functions.items()}
    sets: list[Any] = [(i,) for i in range(len(weights))]
    times = timing.compare(on_weights, sets, options.rounds)
    return Result(case, _rows(found), str(own), str(found.choice), times)


def _rows(entry: Entry | None) -> int | None:
    """The rows of the tuned problem: 32 if the entry has "32 rows"."""
    return None if entry is None else int(entry.metadata[buckets.REPRESENTATIVE].split()[0])


def _function(case: Case, candidate: Candidate) -> Any:
    if candidate.family is not None:
        return compile_config(case, candidate.family, candidate.config)
    with jax_splitk.options(implementation="xla"):
        return quantized_products.products(case)["ours"].compile(case)


def table(results: Sequence[Result]) -> str:
    rows = [["case", "decision of", "tuned us", "served us", "loss", "tuned", "served"]]
    for r in results:
        times = [f"{r.times[name].us:.1f}" if name in r.times else "" for name in ("tuned", "served")]
        loss = "" if r.loss is None else percent(r.loss)
        rows.append([r.case.name, "itself" if r.of is None else f"{r.of} rows", *times, loss, r.tuned, r.served])
    return report.markdown(rows)


def summary(results: Sequence[Result]) -> Iterator[str]:
    losses = sorted((r.loss, r.case.name) for r in results if r.loss is not None)
    yield f"{len(losses)} of {len(results)} are served by the decisions of {len({r.of for r in results} - {None})}"
    if losses:
        mean = sum(loss for loss, _ in losses) / len(losses)
        over = sum(loss > buckets.MAX_LOSS for loss, _ in losses)
        yield f"loss: {mean:.1%} in the mean, {losses[-1][0]:.1%} at most ({losses[-1][1]}), {over} over 3%"
    xla = [r.case.name for r in results if (r.tuned == str(XLA)) != (r.served == str(XLA)) and r.of is not None]
    if xla:
        yield f"XLA instead of ours, or ours instead of XLA: {', '.join(xla)}"


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.buckets", description="Tuned against served decisions.")
    parser.add_argument("--cases", nargs="*", default=[], metavar="FEATURESxK", help="weights; three large ones")
    parser.add_argument("--n", nargs="*", type=at_least_one, default=ROWS, metavar="ROWS", help="numbers of rows of x")
    parser.add_argument("--x-dtype", choices=X_DTYPES, default="bfloat16", help="of the activation; bfloat16")
    parser.add_argument("--qtype", choices=tuple(FORMATS), default="int4", help="of the weight; int4")
    parser.add_argument("--seconds", type=float, help="budget for one problem")
    parser.add_argument("--rounds", type=at_least_one, default=5, help="turns of each decision; 5")
    quick = argparse.BooleanOptionalAction
    parser.add_argument("--quick", action=quick, default=not on_gpu(), help="small sides; the default on the CPU")
    parser.add_argument("--json", type=pathlib.Path, help="write all figures to this file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    cases = select(options.cases, options.n, x_dtype=options.x_dtype, qtype=options.qtype)
    if options.quick:
        cases = list(dict.fromkeys(case.shrunk() for case in cases if case.rows <= QUICK_ROWS))
    results: list[Result] = []
    for case in cases:
        results.append(run(case, options))
        loss = results[-1].loss
        say(f" > {case.name}: decision of {results[-1].of} rows, loss {'-' if loss is None else f'{loss:.1%}'}")
        if options.json:  # after every case, so that a run that is cut short loses nothing
            given = {name: value for name, value in vars(options).items() if name != "json"}
            found = {"environment": report.environment(), "options": given, "summary": list(summary(results))}
            report.write(options.json, found | {"results": [result.as_json() for result in results]})
    say("\n" + table(results) + "\n")
    for line in summary(results):
        say(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
