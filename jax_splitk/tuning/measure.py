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
from jax import numpy as jnp

from jax_splitk.problems.operations import OPERATIONS
from jax_splitk.problems.problem import Problem
from jax_splitk.runtime import compiler, execute
from jax_splitk.runtime.plan import DevicePlan
from jax_splitk.tuning import device, profile, searches, watch
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
DEVICE_ROUND_SECONDS = 1.5e-3  # of a round by the profiler
DEVICE_ROUNDS = 3
PROFILES = (
    2  # attempts in the finals: a pause of the host can spoil a profile, and the clock says little of short kernels
)
MAX_TRACED_CALLS = 24  # in a round: the host takes longer to start short kernels than they run
KIND_ROUNDS = 4
LOCK_SECONDS = 0.2
# Compiler options of what runs while another search may hold the device: no CUDA graphs. A thread that launches a graph
# while another's profile begins can end CUDA's context ("unspecified launch failure"; jaxlib 0.11.2, driver 580).
WITHOUT_GRAPHS: dict[str, Any] = {"xla_gpu_graph_min_graph_size": 2**30}
# Accepted relative error against XLA's result: rounding to the output's dtype, and float32 accumulation.
TOLERANCE = {"float32": 1e-3, "float16": 2e-3, "bfloat16": 1e-2}
MOST_OF_XLAS = 10  # times the tolerance: a result of XLA's that is further off excuses no candidate


@dataclasses.dataclass
class Contestant:
    """A candidate that compiled. `run()` starts an execution of it, on the next sets of inputs, and does not wait."""

    candidate: Candidate
    run: Callable[[], Any]
    times: list[float] = dataclasses.field(default_factory=list)  # microseconds of a call, by the wall clock
    device_times: list[float] = dataclasses.field(default_factory=list)  # microseconds of a call, by the profiler
    error: str | None = None  # why it failed while it was timed
    module: str = ""  # its name in profiles
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
    """In the block, and in this thread, functions are jitted and operands are copied, whatever the program's
    configuration forbids."""
    with jax.disable_jit(False), jax.transfer_guard("allow"), watch.state.tracing_only():
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
    _xlas: Sequence[jax.Array] = ()  # results of XLA's contestant for operands of each kind, once that has run

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

    @property
    def _called_together(self) -> int:
        """The number of calls in one execution."""
        return min(self.sets, CALLED_TOGETHER)

    @property
    def _alike(self) -> int:
        """How many executions together have equally many operands of each kind."""
        return 1 if self.sets <= CALLED_TOGETHER else math.lcm(CALLED_TOGETHER, self.operation.kinds) // CALLED_TOGETHER

    @functools.cached_property
    def _references(self) -> list[jax.Array]:
        """XLA's results in float32 for operands of each kind. XLA does not time its own kernels for them, which would
        disturb measurements. They take seconds to compile, and up to one second to run."""
        full = dataclasses.replace(self.problem, out_dtype="float32")
        options = {**WITHOUT_GRAPHS, "xla_gpu_autotune_level": 0}
        function = self.operation.check or self.operation.reference
        reference = jax.jit(lambda *operands: function(full, *operands), compiler_options=options)
        return [reference(*operands) for operands in self._inputs[: self.operation.kinds]]

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
            wrong = _attempt(lambda made=outcome: self._check(made))
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
        # A profile of several candidates tells them apart by these names.
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
        with self._device():
            started = time.monotonic()
            try:
                following = [key.problem for key, _ in (*list(searches.state.running), *list(searches.state.queue))]
                return device.state.let_xla_choose(self.problem, following, WITHOUT_GRAPHS)
            finally:
                self.waited += time.monotonic() - started

    def _check(self, contestant: Contestant) -> str | None:
        """Runs a contestant for the first time. Returns why its results are wrong; None if they are not."""
        results, us = self._on_device(contestant.candidate, lambda: self._first_calls(contestant))
        if self.platform == "cuda" and us > SLOW_US:
            self._time_slow(contestant)
        if not contestant.is_slow:
            self._on_device(contestant.candidate, lambda: self._warm(contestant))
        if contestant.candidate == XLA:
            self._xlas = results
            return None
        return self._on_device(contestant.candidate, lambda: self._first_wrong(results))

    def _first_calls(self, contestant: Contestant) -> tuple[list[jax.Array], float]:
        """(results for operands of each kind, microseconds of a call by the clock)."""
        kinds = range(self.operation.kinds)
        started = time.perf_counter()
        results = [jax.block_until_ready(contestant.of_kind(kind))[0] for kind in kinds]
        return results, (time.perf_counter() - started) / (len(kinds) * self._called_together) * 1e6

    def _warm(self, contestant: Contestant) -> None:
        """Runs a contestant until it is no longer delayed by code that is loaded, and times an execution."""
        _run(contestant, WARM_UP - 1)
        started = time.perf_counter()
        _run(contestant, 1)
        contestant.warm_us = (time.perf_counter() - started) / self._called_together * 1e6

    def _time_slow(self, contestant: Contestant) -> None:
        """Gives a contestant its time if a call takes longer than `SLOW_US`. The first calls load code, and what other
        searches run may have delayed them: a profile tells."""
        kinds = itertools.cycle(range(self.operation.kinds))
        few = dataclasses.replace(contestant, run=lambda: contestant.of_kind(next(kinds)))
        try:
            us = self._device_times([few], [self.operation.kinds], 1)[0][0]
        except Exception as error:
            self._tell_no_profile(error)
            with self._device():
                us = self._on_device(contestant.candidate, lambda: self._first_calls(contestant))[1]
        if us > SLOW_US:
            contestant.is_slow, contestant.warm_us, contestant.device_times = True, us, [us] * DEVICE_ROUNDS

    def _first_wrong(self, results: Sequence[jax.Array]) -> str | None:
        wrong = (self._wrong(kind, result) for kind, result in enumerate(results))
        return next(filter(None, wrong), None)

    def _wrong(self, kind: int, result: jax.Array) -> str | None:
        """Why a result for operands of a kind is wrong; None if it is not. Most results are near XLA's own. The error
        of others is compared with XLA's error: XLA's kernels differ among themselves by more than ours do where sums
        are long."""
        accepted = TOLERANCE[self.problem.out_dtype] + self.operation.operand_error(self.problem)
        if self._xlas and float(_relative_error(result, self._xlas[kind])) <= accepted:
            return None
        error = float(_relative_error(result, self._references[kind]))
        if error > accepted and self._xlas:
            xlas = float(_relative_error(self._xlas[kind], self._references[kind]))
            if xlas <= MOST_OF_XLAS * accepted:
                accepted = max(accepted, 2 * xlas)
        if error <= accepted:
            return None
        return f"differs from XLA's: relative error {error:.1e}, accepted: {accepted:.0e}"

    def time(self, contestants: Sequence[Contestant], rounds: int, deadline: float) -> None:
        """Adds up to `rounds` wall-clock timings to each contestant, in turns: at least one, the others until the
        deadline. Slow ones have theirs."""
        contestants = _quick(contestants)
        for _ in range(rounds):
            for contestant in contestants:
                if contestant.times and time.monotonic() > deadline:
                    return
                if contestant.error is None:
                    timed = _attempt(lambda c=contestant: self._alone(c))
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

    def time_on_device(self, contestants: Sequence[Contestant], rounds: int = DEVICE_ROUNDS, profiles: int = 1) -> bool:
        """Sets the contestants' device times, by the profiler and in turns. They leave out the host's part, which at
        these sizes is as large as the differences.

        A single round runs each contestant a few times; a single contestant gets one round. Slow ones have their times.
        Returns False, and changes nothing, if none of `profiles` profiles succeeds (on the CPU, or while the user takes
        one).
        """
        if self.platform != "cuda" or not contestants:
            return False
        contestants = _quick(contestants)
        if not contestants:
            return True
        counts = [self._executions(contestant) for contestant in contestants]
        for _ in range(profiles):
            try:
                found = self._device_times(contestants, counts, rounds)
            except Exception as error:
                self._tell_no_profile(error)
                continue
            for contestant, times in zip(contestants, zip(*found, strict=True), strict=True):
                contestant.device_times = list(times)
            return True
        return False

    def _tell_no_profile(self, error: Exception) -> None:
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

        with self._device():
            kinds = range(self.operation.kinds)
            return self._on_device(contestant.candidate, lambda: [fastest(kind) for kind in kinds])

    def _alone(self, contestant: Contestant) -> float:
        """One timing by the wall clock, while no other search holds the device."""
        with self._device():
            return self._on_device(contestant.candidate, lambda: self._round(contestant))

    def _executions(self, contestant: Contestant) -> int:
        """How often to run a contestant in one round of a profile."""
        us = contestant.us if math.isfinite(contestant.us) else contestant.warm_us
        wanted = math.ceil(DEVICE_ROUND_SECONDS / max(us * 1e-6 * self._called_together, 1e-9))
        few = max(1, min(wanted, MAX_TRACED_CALLS // self._called_together))
        return math.ceil(few / self._alike) * self._alike

    def _device_times(
        self, contestants: Sequence[Contestant], counts: Sequence[int], rounds: int
    ) -> Sequence[Sequence[float]]:
        """For each round, the microseconds of a call of each contestant, which runs `counts` times. One profile has all
        rounds, since it takes longer to start and read a profile than to run what it shows."""
        together = [*zip(contestants, counts, strict=True)] * (rounds if len(contestants) > 1 else 1)
        asked = time.monotonic()

        def work() -> None:
            self.waited += time.monotonic() - asked
            for contestant, count in together:
                self._on_device(contestant.candidate, functools.partial(_run, contestant, count))

        events = device.state.profile.events(work, self._held, self._check_given_up)
        turns = profile.turns(events, {contestant.module for contestant in contestants})
        if [module for module, _ in turns] != [contestant.module for contestant, _ in together]:
            raise RuntimeError(f"{len(turns)} turns of {len(contestants)} candidates in {rounds} rounds")
        times = []
        for (_, turn), (_, count) in zip(turns, together, strict=True):
            ns = profile.part_time(((start, end) for _, start, end in turn), count // self._alike)
            times.append(ns * 1e-3 / (self._alike * self._called_together))
        each = len(contestants)
        return [times[begin : begin + each] for begin in range(0, len(times), each)]

    @contextlib.contextmanager
    def _device(self) -> Iterator[None]:
        """In the block no other search times or draws anything, and XLA times nothing for another search."""
        asked = time.monotonic()
        with self._held():
            self.waited += time.monotonic() - asked
            yield

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """As `_device`, where the caller counts the time that it waits."""
        lock = device.state.lock
        while not lock.acquire(timeout=LOCK_SECONDS):
            self._check_given_up()
        try:
            yield
        finally:
            lock.release()

    def _on_device(self, candidate: Candidate, work: Callable[[], Any]) -> Any:
        """The result of `work`, which runs the candidate and waits for it."""
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
        _run(contestant, everything)
        repeats = max(1, min(64, math.ceil(ROUND_SECONDS / (time.perf_counter() - start))))
        start = time.perf_counter()
        _run(contestant, repeats * everything)
        return (time.perf_counter() - start) / repeats / self.sets * 1e6


def _quick(contestants: Sequence[Contestant]) -> list[Contestant]:
    return [contestant for contestant in contestants if not contestant.is_slow]


def _run(contestant: Contestant, repeats: int) -> None:
    """Runs a contestant `repeats` times, and waits for the last result."""
    result = None
    for _ in range(repeats):
        result = contestant.run()
    jax.block_until_ready(result)


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


@functools.partial(jax.jit, compiler_options=WITHOUT_GRAPHS)
def _relative_error(out: jax.Array, exact: jax.Array) -> jax.Array:
    """The norm of the difference over the norm of `exact`; where that is zero, the greatest number of the output.
    Computed on the device, since an output may have hundreds of megabytes."""
    out, exact = out.astype(jnp.float32), exact.astype(jnp.float32)
    scale = jnp.linalg.norm(exact)
    return jnp.where(scale > 0, jnp.linalg.norm(out - exact) / scale, jnp.max(jnp.abs(out), initial=0))
