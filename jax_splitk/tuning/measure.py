"""Timing candidates on the local device: ahead-of-time compiled calls over rotated inputs, candidates in turns."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from jax_splitk.problems.operations import OPERATIONS
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime import compiler, execute
from jax_splitk.runtime.plan import DevicePlan
from jax_splitk.tuning import profile
from jax_splitk.tuning.choice import XLA, Candidate
from jax_splitk.tuning.entry import Measurement

_logger = logging.getLogger("jax_splitk")

# An H200's L2 holds 50 MiB; inputs that together are several times larger come from memory, as in training.
ROTATED_BYTES = {"cuda": 300 * 2**20, "cpu": 0}
# Enough calls in one executable that the host, which takes about 0.1 ms to start it, keeps ahead of small kernels.
MAX_INPUT_SETS = 24
# XLA's own calls are fewer: it prepares each convolution by itself, cuDNN's plan included, for up to 0.2 s.
XLA_INPUT_SETS = 4
WARM_UP_CALLS = 3  # XLA records its command buffers in the first ones
ROUND_SECONDS = 3e-3
DEVICE_ROUNDS = 3
MAX_TRACED_CALLS = 480  # reading a trace takes longer than what it shows
SCREENING_CALLS = 48
PAUSE_SECONDS = 0.01  # twice as long as any within a contestant's calls, on a busy host too
# Relative norm of the difference from XLA's float32 result: rounding to the output's dtype, and fp32 accumulation.
TOLERANCE = {"float32": 1e-3, "float16": 2e-3, "bfloat16": 1e-2}


@dataclasses.dataclass
class Contestant:
    """A candidate that compiled: `run()` executes it once on every input set, without waiting."""

    candidate: Candidate
    run: Callable[[], Any]
    times: list[float] = dataclasses.field(default_factory=list)  # microseconds a call
    device_times: list[float] = dataclasses.field(default_factory=list)  # the same, by the profiler
    error: str | None = None  # why it failed while it was timed

    @property
    def us(self) -> float:
        """Device time where there is one, else the fastest round: what disturbs a wall clock only ever adds to it."""
        if self.error is not None:
            return math.inf
        return float(np.median(self.device_times)) if self.device_times else min(self.times, default=math.inf)

    @property
    def spread(self) -> float:
        """How far apart the rounds are, relative."""
        if self.device_times:
            return (max(self.device_times) - min(self.device_times)) / self.us
        return sorted(self.times)[1] / self.us - 1 if len(self.times) > 1 else 0.0


class GivenUp(BaseException):
    """Nobody waits for the measurement any more. No failure of a candidate, which would be recorded."""


def plans_of(problem: Problem, candidates: Iterable[Candidate]) -> dict[Candidate, Any]:
    """The plans of our candidates, or why there is none."""
    return {c: _attempt(lambda c=c: c.plan(problem)) for c in candidates if c != XLA}


def compile_together(
    problem: Problem, candidates: Sequence[Candidate], given_up: threading.Event
) -> dict[Candidate, Any]:
    """`plans_of`, after their device code is compiled in parallel processes."""
    plans = plans_of(problem, candidates)
    # An error comes again, and is recorded, for the candidate that it belongs to.
    with contextlib.suppress(Exception):
        compiler.compile_sources({plan.source for plan in plans.values() if isinstance(plan, DevicePlan)}, given_up)
    return plans


@contextlib.contextmanager
def usual_settings() -> Iterator[None]:
    """Measurements run jitted functions and copy their operands, whatever the program's configuration allows it to do;
    for this thread."""
    with jax.disable_jit(False), jax.transfer_guard("allow"):
        yield


class Bench:
    """Everything that timing one problem's candidates shares: inputs, reference result, compiled candidates.

    Attributes:
      running: what the device runs at present and since when (`time.monotonic`), for a thread that watches.
      given_up: set by that thread: nothing more is run.
    """

    running: tuple[Candidate, float] | None = None

    def __init__(self, problem: Problem, platform: str, given_up: threading.Event):
        self.problem = problem
        self.given_up = given_up
        self.operation = OPERATIONS[problem.op]
        self.platform = platform
        wanted = ROTATED_BYTES.get(platform, 0) / max(problem.bytes_moved, 1)
        self.sets = _whole_groups(min(MAX_INPUT_SETS, max(2, math.ceil(wanted))))
        draw = functools.partial(self.operation.random_operands, problem)
        keys = jax.random.split(jax.random.key(0, impl="rbg"), self.sets)
        # XLA takes seconds for it, as for its contestant: it compiles beside that.
        beside = concurrent.futures.ThreadPoolExecutor(1)
        self._compiled_reference = beside.submit(self._compile_reference, jax.eval_shape(draw, keys[0]))
        beside.shutdown(wait=False)
        self._inputs = [draw(key) for key in keys]

    @usual_settings()
    def _compile_reference(self, operands: Sequence[jax.ShapeDtypeStruct]) -> Callable[..., jax.Array]:
        """XLA's float32 result, by whichever of its kernels: none of them is timed, which would disturb what is."""
        full = dataclasses.replace(self.problem, out_dtype="float32")
        options: dict[str, Any] = {"xla_gpu_autotune_level": 0} if self.platform == "cuda" else {}
        with jax.default_device(jax.local_devices()[0]):
            lowered = jax.jit(lambda *operands: self.operation.reference(full, *operands)).lower(*operands)
            return lowered.compile(compiler_options=options)

    @functools.cached_property
    def _reference(self) -> jax.Array:
        return self._compiled_reference.result()(*self._inputs[0])

    def prepare(self, candidates: Sequence[Candidate]) -> tuple[list[Contestant], list[Measurement]]:
        """Compiles in parallel and checks the results; candidates that fail or are wrong come back as measurements
        with an error."""
        plans = compile_together(self.problem, candidates, self.given_up)
        failures = []
        with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            outcomes = list(pool.map(lambda c: _attempt(lambda: self._compile(c, plans.get(c))), candidates))
        contestants = []
        for candidate, outcome in zip(candidates, outcomes, strict=True):
            if isinstance(outcome, str):
                failures.append(Measurement(candidate, None, outcome))
                continue
            wrong = _attempt(lambda c=candidate, run=outcome: self._on_device(c, lambda: self._check(run)))
            if wrong is None:
                contestants.append(Contestant(candidate, outcome))
            else:
                failures.append(Measurement(candidate, None, wrong))
        return contestants, failures

    @usual_settings()  # it runs in the threads of a pool
    def _compile(self, candidate: Candidate, plan: Any) -> Callable[[], Any]:
        self._check_given_up()
        problem = self.problem
        if isinstance(plan, str):
            raise RuntimeError(plan)
        if candidate == XLA:
            one = lambda *operands: self.operation.reference(problem, *operands)  # noqa: E731
        else:
            custom_call = plan.custom_call()
            one = lambda *operands: execute.call(custom_call, problem, *operands)  # noqa: E731

        def every_set(inputs: Sequence[tuple[jax.Array, ...]]) -> list[jax.Array]:
            return [one(*operands) for operands in inputs]

        together = XLA_INPUT_SETS if candidate == XLA else self.sets
        groups = [self._inputs[i : i + together] for i in range(0, self.sets, together)]
        compiled = jax.jit(every_set).lower(groups[0]).compile()
        return lambda: [result for group in groups for result in compiled(group)]

    def _check(self, run: Callable[[], Any]) -> str | None:
        for _ in range(WARM_UP_CALLS - 1):
            run()
        error = float(_relative_error(run()[0], self._reference))
        if error <= TOLERANCE[self.problem.out_dtype]:
            return None
        return f"differs from XLA's: relative error {error:.1e}, accepted: {TOLERANCE[self.problem.out_dtype]:.0e}"

    def time(self, contestants: Sequence[Contestant], rounds: int, deadline: float) -> None:
        """Adds up to `rounds` timings to each contestant, in turns; at least one, then until the deadline."""
        for _ in range(rounds):
            for contestant in contestants:
                if contestant.times and time.monotonic() > deadline:
                    return
                if contestant.error is None:
                    timed = _attempt(lambda c=contestant: self._on_device(c.candidate, lambda: self._round(c)))
                    if isinstance(timed, str):
                        contestant.error = timed
                    else:
                        contestant.times.append(timed)

    def time_again(self, contestants: Sequence[Contestant], rounds: int, deadline: float) -> None:
        """The same, in place of the earlier timings, with as many for each; where there is no time for two rounds of
        all, the earlier ones stay with them."""
        again = [dataclasses.replace(contestant, times=[]) for contestant in contestants]
        self.time(again, rounds, deadline)
        whole = min((len(new.times) for new in again if new.error is None), default=0)
        for contestant, new in zip(contestants, again, strict=True):
            contestant.times = new.times[:whole] if whole > 1 else contestant.times + new.times[:whole]
            contestant.error = new.error

    def time_on_device(self, contestants: Sequence[Contestant], rounds: int = DEVICE_ROUNDS) -> bool:
        """Device times of the contestants, in turns, by the profiler: free of the host's part, which at these sizes
        is as large as the differences. A single round is of a few calls. False, and nothing changed, where there are
        none (on the CPU, or while the user takes a profile)."""
        if self.platform != "cuda" or not contestants:
            return False
        counts = [self._calls(contestant, rounds) for contestant in contestants]
        try:
            found = self._device_times(contestants, counts, rounds)
        except Exception as error:
            _logger.info("%s: no device times (%s: %s)", self.problem, type(error).__name__, error)
            return False
        for contestant, times in zip(contestants, zip(*found, strict=True), strict=True):
            contestant.device_times = list(times)
        return True

    def _calls(self, contestant: Contestant, rounds: int) -> int:
        """How often to run it while a profile is taken."""
        if rounds == 1:
            return max(1, SCREENING_CALLS // self.sets)
        wanted = math.ceil(ROUND_SECONDS / (contestant.us * 1e-6 * self.sets))
        return max(2, min(wanted, MAX_TRACED_CALLS // self.sets))

    def _device_times(
        self, contestants: Sequence[Contestant], counts: Sequence[int], rounds: int
    ) -> Sequence[Sequence[float]]:
        """Of each round microseconds a call of each contestant, all from one profile, in which pauses tell them apart:
        to start and read a profile takes longer than what it shows."""

        def work() -> None:
            for contestant, count in [*zip(contestants, counts, strict=True)] * rounds:
                time.sleep(PAUSE_SECONDS)
                self._on_device(contestant.candidate, functools.partial(_run, contestant, count))

        parts = profile.bursts(profile.trace(work), PAUSE_SECONDS * 0.5e9)
        each = len(contestants)
        if len(parts) != each * rounds:
            raise RuntimeError(f"{len(parts)} bursts of {each} candidates in {rounds} rounds")
        busy = [profile.busy_time((start, end) for _, start, end in part) for part in parts]
        times = [ns * 1e-3 / count / self.sets for ns, count in zip(busy, [*counts] * rounds, strict=True)]
        return [times[begin : begin + each] for begin in range(0, len(times), each)]

    def _on_device(self, candidate: Candidate, work: Callable[[], Any]) -> Any:
        """The result of `work`, which runs the candidate and waits for it."""
        self._check_given_up()
        self.running = (candidate, time.monotonic())
        try:
            return work()
        finally:
            self.running = None

    def _check_given_up(self) -> None:
        if self.given_up.is_set():
            raise GivenUp

    def _round(self, contestant: Contestant) -> float:
        start = time.perf_counter()
        _run(contestant, 1)
        repeats = max(1, min(64, math.ceil(ROUND_SECONDS / (time.perf_counter() - start))))
        start = time.perf_counter()
        _run(contestant, repeats)
        return (time.perf_counter() - start) / repeats / self.sets * 1e6


def _run(contestant: Contestant, repeats: int) -> None:
    """Runs it so often, and waits for the last."""
    result = None
    for _ in range(repeats):
        result = contestant.run()
    jax.block_until_ready(result)


def _whole_groups(sets: int) -> int:
    """At least so many sets that XLA's calls share them evenly."""
    return sets if sets <= XLA_INPUT_SETS else -(-sets // XLA_INPUT_SETS) * XLA_INPUT_SETS


def _attempt(what: Callable[[], Any]) -> Any:
    """The result of `what`, or the message of its exception as a string: one candidate must not end the search."""
    try:
        return what()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:500] or type(error).__name__


@jax.jit
def _relative_error(out: jax.Array, exact: jax.Array) -> jax.Array:
    """Norm of the difference over that of `exact`; the greatest number where that is zero. On the device, for an
    output may have hundreds of megabytes."""
    out = out.astype(jnp.float32)
    scale = jnp.linalg.norm(exact)
    return jnp.where(scale > 0, jnp.linalg.norm(out - exact) / scale, jnp.max(jnp.abs(out), initial=0))
