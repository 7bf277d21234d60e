"""Timing of candidates on the local device, in turns, with inputs that rotate past the caches."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jax_splitk.problems.operations import OPERATIONS
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime import compiler, execute, stopwatch
from jax_splitk.runtime.plan import DevicePlan
from jax_splitk.tuning import certainty, device, searches, watch
from jax_splitk.tuning.check import Check
from jax_splitk.tuning.choice import XLA, Candidate
from jax_splitk.tuning.entry import Measurement

_logger = logging.getLogger("jax_splitk")

# Bytes of inputs to rotate: an H200's L2 holds 50 MiB, so that inputs come from memory, as in training.
ROTATED_BYTES = {"cuda": 300 * 2**20, "cpu": 0}
MAX_INPUT_SETS = 24
# Sets in one executable: XLA prepares each convolution in it by itself, with cuDNN's plan, for up to 0.2 s.
CALLED_TOGETHER = 4
WARM_UP = 2  # executions before one that is timed: the first ones load code
# A call on a GPU that takes longer is not run in rounds: there would be some 40 calls.
SLOW_US = 5e4
ROUND_SECONDS = 3e-3  # of a round by the wall clock
DEVICE_ROUND_SECONDS = 1.5e-3  # of a round by the stopwatch
DEVICE_ROUNDS = 3
MAX_QUEUED_CALLS = 24  # in a round by the stopwatch: the host takes longer to start short kernels than they run
KIND_ROUNDS = 4
LOCK_SECONDS = 0.2
# Compiler options of what tuning runs: no CUDA graphs. A thread that launches a graph while another thread begins a
# profile, perhaps the user's, can end CUDA's context ("unspecified launch failure"; jaxlib 0.11.2, driver 580).
WITHOUT_GRAPHS: dict[str, Any] = {"xla_gpu_graph_min_graph_size": 2**30}


@dataclasses.dataclass
class Contestant:
    """A candidate that compiled. `run()` starts an execution of it, on the next sets of inputs, and does not wait."""

    candidate: Candidate
    run: Callable[[], Any]
    times: list[float] = dataclasses.field(default_factory=list)  # microseconds of a call, by the wall clock
    device_times: list[float] = dataclasses.field(default_factory=list)  # microseconds of a call, by the stopwatch
    error: str | None = None  # why it failed while it was timed
    module: str = ""  # its program's name, also in profiles
    warm_us: float = 0.0  # microseconds of a call in the last warm-up; the host may have delayed it
    of_kind: Callable[[int], Any] = lambda _: None  # starts an execution on operands of one kind alone
    is_slow: bool = False  # whether its time is that of a few calls, and stays so (`SLOW_US`)

    @property
    def us(self) -> float:
        """Device time where there is one, else the fastest round: what disturbs a wall clock only ever adds to it."""
        if self.error is not None:
            return math.inf
        return float(np.median(self.device_times)) if self.device_times else min(self.times, default=math.inf)

    @property
    def is_timed(self) -> bool:
        return bool(self.times or self.device_times)

    @property
    def spread(self) -> float:
        """How far apart the rounds are, relative."""
        if self.device_times:
            return (max(self.device_times) - min(self.device_times)) / self.us
        return sorted(self.times)[1] / self.us - 1 if len(self.times) > 1 else 0.0


class GivenUp(BaseException):
    """Nobody waits for the measurement any more. It is not recorded as a failure of a candidate."""


def plans_of(problem: Problem, candidates: Iterable[Candidate]) -> dict[Candidate, Any]:
    """The plans of our candidates; for a candidate without one, the reason as a string."""
    return {c: _attempt(lambda c=c: c.plan(problem)) for c in candidates if c != XLA}


def compile_together(
    problem: Problem, candidates: Sequence[Candidate], given_up: threading.Event
) -> dict[Candidate, Any]:
    """As `plans_of`, after their device code was compiled in parallel processes."""
    plans = plans_of(problem, candidates)
    # A candidate's error is raised again, and recorded, when the candidate itself is compiled.
    with contextlib.suppress(Exception):
        compiler.compile_sources({plan.source for plan in plans.values() if isinstance(plan, DevicePlan)}, given_up)
    return plans


def compile_ahead(problem: Problem, candidates: Iterable[Candidate]) -> None:
    """Begins to compile the candidates' device code, and returns at once. An error is raised again, and recorded, when
    the candidate is compiled."""
    plans = plans_of(problem, candidates).values()
    with contextlib.suppress(Exception):
        compiler.compile_ahead(plan.source for plan in plans if isinstance(plan, DevicePlan))


@contextlib.contextmanager
def usual_settings() -> Iterator[None]:
    """In the block, and in this thread, functions are jitted, operands are copied and results are not searched for NaN,
    for which each call would be waited for, whatever the program's configuration says."""
    with (
        jax.disable_jit(False),
        jax.transfer_guard("allow"),
        jax.debug_nans(False),
        jax.debug_infs(False),
        watch.state.tracing_only(),
    ):
        yield


class Bench:
    """What the measurements of one problem's candidates share: inputs, a reference result, compiled candidates.

    Attributes:
      running: the candidate that the device runs now, and since when (`time.monotonic`), for the thread that watches.
      waited: seconds in which other searches had the device, or XLA chose kernels for them. The budget does not count
        them.
      given_up: set by the thread that watches: nothing more is run.
    """

    running: tuple[Candidate, float] | None = None
    waited = 0.0

    def __init__(self, problem: Problem, platform: str, given_up: threading.Event):
        self.problem = problem
        self.given_up = given_up
        self._compiled: dict[Candidate, Contestant | str] = {}
        self.operation = OPERATIONS[problem.op]
        self.platform = platform
        wanted = ROTATED_BYTES.get(platform, 0) / max(problem.bytes_moved, 1)
        self.sets = _whole_groups(min(MAX_INPUT_SETS, max(2, math.ceil(wanted))), self.operation.kinds)
        # A GPU copies one set: to send it all of them takes as long as to time a candidate. Sets of kinds differ.
        sent = 1 if platform == "cuda" and self.operation.kinds == 1 else self.sets
        drawn = [self.operation.random_operands(problem, i) for i in range(sent)]
        with self._device():
            first, *others = jax.device_put(drawn)
            copies = [jax.device_put(first, first[0].sharding, may_alias=False) for _ in range(self.sets - sent)]
            self._inputs = jax.block_until_ready([first, *others, *copies])
        self._check = Check(problem, self._inputs[: self.operation.kinds], WITHOUT_GRAPHS)

    @property
    def _called_together(self) -> int:
        """The number of calls in one execution."""
        return min(self.sets, CALLED_TOGETHER)

    @property
    def _alike(self) -> int:
        """How many executions together have equally many operands of each kind."""
        return 1 if self.sets <= CALLED_TOGETHER else math.lcm(CALLED_TOGETHER, self.operation.kinds) // CALLED_TOGETHER

    def compile(self, candidates: Sequence[Candidate]) -> None:
        """Compiles candidates in parallel, for `prepare`. It runs nothing on the device, except that XLA times its own
        kernels."""
        plans = compile_together(self.problem, candidates, self.given_up)
        with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            outcomes = pool.map(lambda c: _attempt(lambda: self._compile(c, plans.get(c))), candidates)
            self._compiled.update(zip(candidates, outcomes, strict=True))

    def prepare(self, candidates: Sequence[Candidate]) -> tuple[list[Contestant], list[Measurement]]:
        """Compiles candidates, unless that is done, and checks their results. Returns those that work, and a
        measurement with an error for each of the others."""
        self.compile([candidate for candidate in candidates if candidate not in self._compiled])
        failures, contestants = [], []
        for candidate in candidates:
            outcome = self._compiled.pop(candidate)
            if isinstance(outcome, str):
                failures.append(Measurement(candidate, None, outcome))
                continue
            wrong = _attempt(lambda made=outcome: self._try(made))
            if wrong is None:
                contestants.append(outcome)
            else:
                failures.append(Measurement(candidate, None, wrong))
        return contestants, failures

    @usual_settings()  # it runs in threads of a pool, which have settings of their own
    def _compile(self, candidate: Candidate, plan: Any) -> Contestant:
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

        groups = [self._inputs[i : i + CALLED_TOGETHER] for i in range(0, self.sets, CALLED_TOGETHER)]
        # Profiles tell candidates apart by these names.
        every_set.__name__ = f"jax_splitk_{zlib.crc32(f'{problem} {candidate}'.encode()):08x}"
        lowered = jax.jit(every_set).lower(groups[0])
        times = candidate == XLA and not self._has_chosen()  # XLA times cuDNN's kernels
        with self._device() if times else contextlib.nullcontext():
            compiled = lowered.compile(compiler_options=WITHOUT_GRAPHS)
        turn = itertools.cycle(groups)
        run = lambda: compiled(next(turn))  # noqa: E731
        of_kind = lambda kind: compiled([self._inputs[kind]] * len(groups[0]))  # noqa: E731
        return Contestant(candidate, run, module=f"jit_{every_set.__name__}", of_kind=of_kind)

    def _has_chosen(self) -> bool:
        """Whether XLA has chosen its kernels for the problem. If not, it chooses now, for the next problems as well."""
        if self.platform != "cuda":
            return False
        keys = [key for key, _ in (*list(searches.state.running), *list(searches.state.queue))]
        following = [key.problem for key in keys if certainty.may_be_near_xla(key.problem, key.target)]
        with self._device():
            started = time.monotonic()
            try:
                return device.state.let_xla_choose(self.problem, following, WITHOUT_GRAPHS)
            finally:
                self.waited += time.monotonic() - started

    def _try(self, contestant: Contestant) -> str | None:
        """Runs a contestant for the first time. Returns why its results are wrong; None if they are not."""
        results, us = self._on_device(contestant.candidate, lambda: self._first_calls(contestant))
        if self.platform == "cuda" and us > SLOW_US:
            self._time_slow(contestant)
        if not contestant.is_slow:
            self._on_device(contestant.candidate, lambda: self._warm(contestant))
        if contestant.candidate == XLA:
            self._check.xlas = results
            return None
        return self._check.why_wrong(results, lambda work: self._on_device(contestant.candidate, work))

    def _first_calls(self, contestant: Contestant) -> tuple[list[jax.Array], float]:
        """(results for operands of each kind, microseconds of a call by the clock)."""
        kinds = range(self.operation.kinds)
        started = time.perf_counter()
        results = [jax.block_until_ready(contestant.of_kind(kind))[0] for kind in kinds]
        return results, (time.perf_counter() - started) / (len(kinds) * self._called_together) * 1e6

    def _warm(self, contestant: Contestant) -> None:
        """Runs a contestant until it is no longer delayed by code that is loaded, and times an execution."""
        run(contestant, WARM_UP - 1)
        started = time.perf_counter()
        run(contestant, 1)
        contestant.warm_us = (time.perf_counter() - started) / self._called_together * 1e6

    def _time_slow(self, contestant: Contestant) -> None:
        """Gives a contestant its time if a call takes longer than `SLOW_US`. The first calls load code, so they are
        timed again."""
        kinds = itertools.cycle(range(self.operation.kinds))
        few = dataclasses.replace(contestant, run=lambda: contestant.of_kind(next(kinds)))
        try:
            us = self._device_times([few], [self.operation.kinds], 1)[0][0]
        except Exception as error:
            self._tell_no_times(error)
            us = self._on_device(contestant.candidate, lambda: self._first_calls(contestant))[1]
        if us > SLOW_US:
            contestant.is_slow, contestant.warm_us, contestant.device_times = True, us, [us] * DEVICE_ROUNDS

    def time(self, contestants: Sequence[Contestant], rounds: int, deadline: float) -> None:
        """Adds up to `rounds` wall-clock timings to each contestant, in turns: at least one, the others until the
        deadline. Slow ones have theirs."""
        contestants = _quick(contestants)
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
        """As `time`, but the timings replace the earlier ones, and each contestant gets equally many. If the time does
        not suffice for two rounds of all, the earlier timings stay as well."""
        contestants = _quick(contestants)
        again = [dataclasses.replace(contestant, times=[]) for contestant in contestants]
        self.time(again, rounds, deadline)
        whole = min((len(new.times) for new in again if new.error is None), default=0)
        for contestant, new in zip(contestants, again, strict=True):
            contestant.times = new.times[:whole] if whole > 1 else contestant.times + new.times[:whole]
            contestant.error = new.error

    def time_on_device(self, contestants: Sequence[Contestant], rounds: int = DEVICE_ROUNDS) -> bool:
        """Sets the contestants' device times, by the stopwatch and in turns. They leave out the host's part, which at
        these sizes is as large as the differences.

        A single round runs each contestant a few times; a single contestant gets one round. Slow ones have their times.
        Returns False, and changes nothing, if the device gives no times (on the CPU).
        """
        if self.platform != "cuda" or not contestants:
            return False
        contestants = _quick(contestants)
        counts = [self._executions(contestant) for contestant in contestants]
        try:
            found = self._device_times(contestants, counts, rounds if len(contestants) > 1 else 1)
        except Exception as error:
            self._tell_no_times(error)
            return False
        for contestant, times in zip(contestants, found, strict=True):
            contestant.device_times = times
        return True

    def _tell_no_times(self, error: Exception) -> None:
        _logger.info("%s: no device times (%s: %s)", self.problem, type(error).__name__, error)

    def times_of_kinds(self, contestant: Contestant) -> list[float]:
        """Microseconds of a call on operands of each kind alone, by the wall clock."""

        def fastest(kind: int) -> float:
            seconds = []
            for _ in range(KIND_ROUNDS):
                start = time.perf_counter()
                jax.block_until_ready(contestant.of_kind(kind))
                seconds.append(time.perf_counter() - start)
            return min(seconds) / self._called_together * 1e6

        return self._on_device(contestant.candidate, lambda: [fastest(kind) for kind in range(self.operation.kinds)])

    def _executions(self, contestant: Contestant) -> int:
        """How often to run a contestant in one round by the stopwatch."""
        us = contestant.us if math.isfinite(contestant.us) else contestant.warm_us
        wanted = math.ceil(DEVICE_ROUND_SECONDS / max(us * 1e-6 * self._called_together, 1e-9))
        few = max(1, min(wanted, MAX_QUEUED_CALLS // self._called_together))
        return math.ceil(few / self._alike) * self._alike

    def _device_times(self, contestants: Sequence[Contestant], counts: Sequence[int], rounds: int) -> list[list[float]]:
        """For each contestant, the microseconds of a call in each round. All take turns; each runs `counts` times in a
        round."""
        times: list[list[float]] = [[] for _ in contestants]
        for _ in range(rounds):
            for contestant, count, own in zip(contestants, counts, times, strict=True):
                queue = functools.partial(_queue, contestant, count)
                us = self._on_device(contestant.candidate, lambda work=queue: stopwatch.microseconds(work))
                own.append(us / (count * self._called_together))
        return times

    @contextlib.contextmanager
    def _device(self) -> Iterator[None]:
        """In the block no other search uses the device, and XLA times nothing for another search."""
        asked, lock = time.monotonic(), device.state.lock
        while not lock.acquire(timeout=LOCK_SECONDS):
            self._check_given_up()
        self.waited += time.monotonic() - asked
        try:
            yield
        finally:
            lock.release()

    def _on_device(self, candidate: Candidate, work: Callable[[], Any]) -> Any:
        """The result of `work`, which runs the candidate and waits for it, while no other search uses the device."""
        with self._device():
            self._check_given_up()
            self.running = (candidate, time.monotonic())
            try:
                return work()
            except Exception:
                device.state.poisoned_by = device.state.poisoned_by or self.problem
                raise
            finally:
                self.running = None

    def _check_given_up(self) -> None:
        if self.given_up.is_set():
            raise GivenUp

    def _round(self, contestant: Contestant) -> float:
        everything = math.ceil(self.sets / CALLED_TOGETHER)  # executions on every set
        start = time.perf_counter()
        run(contestant, everything)
        repeats = max(1, min(64, math.ceil(ROUND_SECONDS / (time.perf_counter() - start))))
        start = time.perf_counter()
        run(contestant, repeats * everything)
        return (time.perf_counter() - start) / repeats / self.sets * 1e6


def _quick(contestants: Sequence[Contestant]) -> list[Contestant]:
    return [contestant for contestant in contestants if not contestant.is_slow]


def _queue(contestant: Contestant, repeats: int) -> Any:
    """Starts a contestant `repeats` times. Returns the last result, which may not be there yet."""
    result = None
    for _ in range(repeats):
        result = contestant.run()
    return result


def run(contestant: Contestant, repeats: int) -> None:
    """Runs a contestant `repeats` times, and waits for the last result."""
    jax.block_until_ready(_queue(contestant, repeats))


def _whole_groups(sets: int, kinds: int = 1) -> int:
    """The least number of sets, at least `sets`, that calls share evenly and that has equally many sets of each
    kind."""
    if sets <= CALLED_TOGETHER:
        few = -(-sets // kinds) * kinds
        if few <= CALLED_TOGETHER:
            return few
    each = math.lcm(CALLED_TOGETHER, kinds)
    return -(-sets // each) * each


def _attempt(what: Callable[[], Any]) -> Any:
    """The result of `what`, or its exception's message as a string: one candidate must not end the search."""
    try:
        return what()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:500] or type(error).__name__
