"""Times candidates of random problems. The cost model is fitted to these times. See README.md of benchmarks.

python -m benchmarks.cost_model.sweep OUT.jsonl [--earlier FILE ...] [--seed 1] [--seconds 540] [--explore]

OUT gets a line after each problem, so that a run that is cut off loses at most one problem. Problems in OUT or in an
earlier file are skipped. While the device runs one problem's candidates, those of the next problems compile on all
cores.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import json
import pathlib
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TextIO

import jax
import numpy as np
from jax import numpy as jnp

from benchmarks import report
from benchmarks.cost_model import problems, records
from benchmarks.cost_model.problems import Drawn
from benchmarks.cost_model.records import Record, Timed
from benchmarks.profiled_bench import ProfiledBench
from jax_splitk import kernels
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime import compiler
from jax_splitk.runtime.plan import DevicePlan
from jax_splitk.runtime.target import Target, local_platform, target_for
from jax_splitk.tuning.choice import XLA, Candidate
from jax_splitk.tuning.key import key_for
from jax_splitk.tuning.measure import DEVICE_ROUNDS, usual_settings
from jax_splitk.tuning.options import DEFAULT_WORKSPACE_LIMIT
from jax_splitk.tuning.search import ranked

SEED = 1  # what the shipped constants are fitted to; benchmarks.cost_model.evaluate has others
AHEAD = 6  # problems whose candidates compile while the device is busy
PREPARING = 3  # of them at a time: the last kernels of one leave cores idle
BEST, RANDOM = 5, 4
# With --explore: how many of the model's best candidates, how many configs that it does not propose, and how many steps
# the latter are away from proposed ones.
EXPLORED_BEST, EXPLORED, STEPS = 2, 8, 4
FAR = 4.0  # candidates whose estimate is more than so many times the best one are not timed
CPU_FLOPS = 2e8


def chosen(problem: Problem, target: Target, rng: np.random.Generator) -> list[Candidate]:
    """The candidates to measure: the model's best few, each family's best, and random ones of all families. Half of the
    random ones are a step away from candidates that the model considers."""
    ranking = ranked(key_for(problem, target))
    families = list(dict.fromkeys(candidate.family for candidate in ranking))
    found = [*ranking[:BEST], *(next(c for c in ranking if c.family is family) for family in families)]
    for _ in range(RANDOM if families else 0):
        family = families[int(rng.integers(len(families)))]
        of_family = [c for c in ranking if c.family is family]
        candidate = of_family[int(rng.integers(len(of_family)))]
        steps = list(family.neighbours(problem, candidate.config, target)) if family and rng.random() < 0.5 else []
        step = Candidate(family, steps[int(rng.integers(len(steps)))]) if steps else candidate
        found.append(step if _is_legal(step, problem, target) else candidate)
    return list(dict.fromkeys(found))


def explored(problem: Problem, target: Target, rng: np.random.Generator) -> list[Candidate]:
    """The candidates to measure with --explore: the model's best few, and configs that it does not propose. Each of the
    latter is some random steps away from a proposed one, and all families are equally likely. Only such times show
    whether the model's estimates of other configs are right."""
    ranking = ranked(key_for(problem, target))
    families = list(dict.fromkeys(candidate.family for candidate in ranking))
    proposed, found = set(ranking), list[Candidate]()
    for _ in range(8 * EXPLORED if families else 0):
        family = families[int(rng.integers(len(families)))]
        assert family is not None
        of_family = [c.config for c in ranking if c.family is family]
        config = of_family[int(rng.integers(len(of_family)))]
        for _ in range(int(rng.integers(1, STEPS + 1))):
            steps = family.neighbours(problem, config, target)
            steps = [c for c in steps if _is_legal(Candidate(family, c), problem, target)]
            config = steps[int(rng.integers(len(steps)))] if steps else config
        if (candidate := Candidate(family, config)) not in proposed:
            found.append(candidate)
    best = [_seconds(candidate, problem, target) for candidate in ranking[:1]]
    new = [c for c in dict.fromkeys(found) if _seconds(c, problem, target) < FAR * best[0]]
    return [*ranking[:EXPLORED_BEST], *new[:EXPLORED]]


def _seconds(candidate: Candidate, problem: Problem, target: Target) -> float:
    """The predicted seconds of a candidate."""
    assert candidate.family is not None
    return candidate.family.estimate(problem, candidate.config, target)


def _is_legal(candidate: Candidate, problem: Problem, target: Target) -> bool:
    legal = candidate.refusal(problem, target) is None
    return legal and candidate.workspace_bytes(problem) <= DEFAULT_WORKSPACE_LIMIT


@usual_settings()
def measured(
    problem: Problem,
    target: Target,
    candidates: Sequence[Candidate],
    given_up: threading.Event,
    rounds: int = DEVICE_ROUNDS,
) -> tuple[Timed, ...]:
    """XLA's time and the candidates', all in turns; on a GPU from the profiler, in `rounds` rounds.

    Raises:
      RuntimeError: XLA cannot compute the problem.
    """
    bench = ProfiledBench(problem, target.platform, given_up)
    contestants, failures = bench.prepare([XLA, *candidates])
    if not contestants or contestants[0].candidate != XLA:
        raise RuntimeError(f"XLA cannot compute it: {failures[0].error}")
    bench.time(contestants, 1 if target.platform == "cuda" else 3, time.monotonic() + 20)
    working = [c for c in contestants if c.error is None]
    if target.platform == "cuda" and not bench.time_on_device(working, rounds):
        raise RuntimeError("the profiler gave no device times")
    timed = [Timed(c.candidate, round(float(c.us), 3), c.spread) for c in working]
    timed += [Timed(c.candidate, None, error=c.error) for c in contestants if c.error is not None]
    return tuple(timed + [Timed(f.candidate, None, error=f.error) for f in failures])


class Sweep:
    """A run over a seed's problems. It leaves out those that an earlier run measured, or began when it was cut off."""

    def __init__(self, options: argparse.Namespace, target: Target) -> None:
        self.options = options
        self.target = target
        self.given_up = threading.Event()
        self.deadline = time.monotonic() + options.seconds
        known = [line for path in (*options.earlier, options.out) for line in records.lines(path)]
        # A problem that was begun but not finished may have ended the process.
        self.passed_over = {(line.get("seed"), line.get("index")) for line in known}

    def problems(self) -> Iterator[tuple[int, Drawn]]:
        options = self.options
        for index, drawn in problems.stream(options.seed, self.target, options.ops, options.max_flops):
            if (options.seed, index) not in self.passed_over:
                yield index, drawn

    def prepared(self, index: int, problem: Problem) -> list[Candidate]:
        """The candidates of a problem, after their code has been compiled."""
        draw = explored if self.options.explore else chosen
        candidates = draw(problem, self.target, np.random.default_rng([self.options.seed, index, 1]))
        # An error comes again where the candidate is measured.
        with contextlib.suppress(Exception):
            plans = [candidate.plan(problem) for candidate in candidates]
            compiler.compile_sources({plan.source for plan in plans if isinstance(plan, DevicePlan)}, self.given_up)
        return candidates

    def run(self) -> int:
        """The number of problems that were measured."""
        waiting: collections.deque[tuple[int, Drawn, concurrent.futures.Future[list[Candidate]]]] = collections.deque()
        coming, count = self.problems(), 0
        self.options.out.parent.mkdir(parents=True, exist_ok=True)
        pool = concurrent.futures.ThreadPoolExecutor(PREPARING)
        with pool, self.options.out.open("a") as out:
            try:
                while count < self.options.problems:
                    while len(waiting) < AHEAD:
                        index, drawn = next(coming)
                        waiting.append((index, drawn, pool.submit(self.prepared, index, drawn.problem)))
                    index, drawn, candidates = waiting.popleft()
                    concurrent.futures.wait([candidates], max(0.0, self.deadline - time.monotonic()))
                    if time.monotonic() > self.deadline:
                        break
                    self._add(out, index, drawn, candidates.result())
                    count += 1
            finally:
                self.given_up.set()
                pool.shutdown(cancel_futures=True)
        return count

    def _add(self, out: TextIO, index: int, drawn: Drawn, candidates: list[Candidate]) -> None:
        """Measures a problem and writes its line, after another line that says that it has begun."""
        seed, started = self.options.seed, time.monotonic()
        print(json.dumps({"seed": seed, "index": index}), file=out, flush=True)
        try:
            timed = measured(drawn.problem, self.target, candidates, threading.Event())
        except Exception as error:  # continue with the other problems, unless the device is lost
            report.say(f"{drawn.problem}: {type(error).__name__}: {str(error)[:300]}")
            jnp.zeros(1).block_until_ready()
            return
        record = Record(drawn.problem, self.target, timed, index, drawn.kind)
        print(record.dumps(seed), file=out, flush=True)
        best = min(record.times().values(), default=float("nan"))
        spent = f"{time.monotonic() - started:.1f} s"
        report.say(f"{index}: {drawn.problem}: {best:.1f} us, XLA {record.xla_us} us, {len(timed)} candidates, {spent}")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cost_model.sweep", description=__doc__)
    parser.add_argument("out", type=pathlib.Path, metavar="OUT.jsonl")
    parser.add_argument("--earlier", type=pathlib.Path, nargs="+", default=[], metavar="FILE", help="of earlier runs")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--seconds", type=float, default=540, help="after which no problem is begun; 540")
    parser.add_argument("--problems", type=int, default=10**9, metavar="N", help="at most so many")
    parser.add_argument("--ops", nargs="+", choices=problems.OPERATIONS, default=problems.OPERATIONS)
    parser.add_argument("--explore", action="store_true", help="time configs that the model does not propose")
    default = problems.MAX_FLOPS if report.on_gpu() else CPU_FLOPS
    parser.add_argument("--max-flops", type=float, default=default, help="of a problem")
    options = parser.parse_args(argv)
    if not any(kernels.families(op, local_platform()) for op in options.ops):
        parser.error(f"--ops {' '.join(options.ops)}: no kernels for {jax.default_backend()}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    count = Sweep(options, target_for(local_platform())).run()
    report.say(f"{count} problems, {options.out}")
    return 0 if count else 1


if __name__ == "__main__":
    sys.exit(main())
