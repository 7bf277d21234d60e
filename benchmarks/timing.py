"""Time of compiled functions: device time from JAX's profiler on a GPU, wall-clock time elsewhere.

The functions are timed in turns (A B A B ...), so that a drifting clock affects all of them, over several sets of
random inputs that together do not fit in the last-level cache.
"""

import collections
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax import numpy as jnp
from jax.typing import DTypeLike

from benchmarks import profile

Function = Callable[..., Any]
InputSets = Sequence[tuple[jax.Array, ...]]

MAX_INPUT_SETS = 16
MIN_INPUT_BYTES = 256 * 2**20  # an H200's L2 holds 50 MiB
TARGET_ROUND_SECONDS = 0.02
LONG_SECONDS = 1.0  # a longer call needs no repetition within a turn


@dataclasses.dataclass(frozen=True)
class Round:
    """Time of one call of a function, in microseconds.

    Attributes:
      us: from the profiler the time in which at least one kernel of the call ran: kernels that overlap (programmatic
        dependent launch) are not counted twice, gaps between kernels are not counted.
      summed_us: the sum of the kernels' durations; equal to `us` if kernels do not overlap.
      kernels: the part of each kernel in the sum, by name.
      launches: how often a call launches each kernel (memsets and copies too), by name; empty by the wall clock.
    """

    us: float
    summed_us: float
    kernels: dict[str, float]
    launches: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Timing(Round):
    """Medians over rounds.

    Attributes:
      low_us, high_us: the fastest and the slowest round.
      source: "device" (profiler) or "wall".
      rounds, calls: how often it was measured, and the number of calls in a round.
    """

    low_us: float
    high_us: float
    source: str
    rounds: int
    calls: int


@dataclasses.dataclass(frozen=True)
class _Turn:
    """The work of a function in its turn."""

    name: str
    function: Function
    input_sets: InputSets
    calls: int


def random_input_sets(
    shapes: Sequence[tuple[int, ...]],
    dtype: DTypeLike,
    *,
    seed: int = 0,
    minimum_bytes: int = MIN_INPUT_BYTES,
    maximum_sets: int = MAX_INPUT_SETS,
) -> list[tuple[jax.Array, ...]]:
    """Sets of normally distributed arrays: at least 2, and for `minimum_bytes` up to `maximum_sets`."""
    size = sum(math.prod(shape) for shape in shapes) * jnp.dtype(dtype).itemsize
    count = min(maximum_sets, max(2, math.ceil(minimum_bytes / max(size, 1))))
    draw = jax.jit(lambda key: tuple(_normals(key, shapes, dtype)))
    sets = [draw(key) for key in jax.random.split(jax.random.key(seed), count)]
    return jax.block_until_ready(sets)


def _normals(key: jax.Array, shapes: Sequence[tuple[int, ...]], dtype: DTypeLike) -> Iterable[jax.Array]:
    for shape, subkey in zip(shapes, jax.random.split(key, len(shapes)), strict=True):
        yield jax.random.normal(subkey, shape, dtype)


def compare(
    functions: Mapping[str, Function],
    input_sets: InputSets,
    rounds: int = 5,
    calls: int | None = None,
    *,
    wall: bool = False,
) -> dict[str, Timing]:
    """Times compiled functions of the same inputs against each other.

    Args:
      functions: by name, functions compiled ahead of time (`jax.jit(f).lower(...).compile()`).
      input_sets: argument tuples, used in rotation.
      rounds: how often every function gets its turn; at least 1. One turn if a call takes over a second.
      calls: calls in a turn; None for about 20 ms of them, for each function: 10 to 200 on a GPU, 3 to 200 elsewhere, 1
        if a call takes over a second.
      wall: whether to use the wall clock on a GPU, too: the time of queued calls, gaps between kernels included.

    Returns:
      A `Timing` for each function. If the profiler shows no kernels, all of them are timed by the wall clock.

    Raises:
      ValueError: no functions, no input sets, or counts below 1.
    """
    if not functions or not input_sets or rounds < 1 or (calls is not None and calls < 1):
        got = f"{len(functions)} functions, {len(input_sets)} input sets, rounds={rounds}, calls={calls}"
        raise ValueError(f"{got}; accepted: at least 1 of each")
    on_gpu = jax.default_backend() == "gpu"
    seconds = {name: _warm_up(function, input_sets) for name, function in functions.items()}
    if max(seconds.values()) > LONG_SECONDS:
        rounds = 1
    turns = [
        _Turn(name, function, input_sets, calls or _calls_in_a_turn(seconds[name], 10 if on_gpu else 3))
        for name, function in functions.items()
    ]
    if on_gpu and not wall:
        timings = _take_turns(turns, rounds, _device_round, "device")
        if timings is not None:
            return timings
    timings = _take_turns(turns, rounds, _queued_round if on_gpu else _blocking_round, "wall")
    if timings is None:
        raise RuntimeError("the wall clock measured nothing")
    return timings


def _calls_in_a_turn(seconds: float, least: int) -> int:
    if seconds > LONG_SECONDS:
        return 1
    return min(200, max(least, math.ceil(TARGET_ROUND_SECONDS / max(seconds, 1e-9))))


def _take_turns(
    turns: Sequence[_Turn], rounds: int, measure: Callable[[_Turn], Round | None], source: str
) -> dict[str, Timing] | None:
    """Runs every turn in every round; None if a turn could not be measured this way."""
    found: dict[str, list[Round]] = {turn.name: [] for turn in turns}
    for _ in range(rounds):
        for turn in turns:
            result = measure(turn)
            if result is None:
                return None
            found[turn.name].append(result)
    return {turn.name: _timing(found[turn.name], source, turn.calls) for turn in turns}


def _timing(rounds: Sequence[Round], source: str, calls: int) -> Timing:
    times = [r.us for r in rounds]
    names = dict.fromkeys(name for r in rounds for name in r.kernels)
    kernels = {name: statistics.median(r.kernels.get(name, 0.0) for r in rounds) for name in names}
    return Timing(
        us=statistics.median(times),
        low_us=min(times),
        high_us=max(times),
        summed_us=statistics.median(r.summed_us for r in rounds),
        launches={name: statistics.median(r.launches.get(name, 0.0) for r in rounds) for name in names},
        kernels=dict(sorted(kernels.items(), key=lambda item: -item[1])),
        source=source,
        rounds=len(rounds),
        calls=calls,
    )


def _warm_up(function: Function, input_sets: InputSets) -> float:
    """Runs every set once (XLA captures its command buffers on the way); the seconds of one more call."""
    for arguments in input_sets:
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        seconds = time.perf_counter() - start
        if seconds > LONG_SECONDS:
            return seconds
    start = time.perf_counter()
    jax.block_until_ready(function(*input_sets[0]))
    return time.perf_counter() - start


def _queue(turn: _Turn, calls: int) -> None:
    """Runs back to back and waits for the end; on one GPU the last call ends last."""
    result = None
    for i in range(calls):
        result = turn.function(*turn.input_sets[i % len(turn.input_sets)])
    jax.block_until_ready(result)


def _queued_round(turn: _Turn) -> Round:
    start = time.perf_counter()
    _queue(turn, turn.calls)
    us = (time.perf_counter() - start) / turn.calls * 1e6
    return Round(us, us, {}, {})


def _blocking_round(turn: _Turn) -> Round:
    times = []
    for i in range(turn.calls):
        start = time.perf_counter()
        jax.block_until_ready(turn.function(*turn.input_sets[i % len(turn.input_sets)]))
        times.append(time.perf_counter() - start)
    us = statistics.median(times) * 1e6
    return Round(us, us, {}, {})


# ---- the profiler ------------------------------------------------------------------------------------------


def _device_round(turn: _Turn) -> Round | None:
    """Traces the turn's calls and nothing else; None if no kernels were recorded."""
    _queue(turn, min(turn.calls, len(turn.input_sets)))  # the clocks may have dropped between turns
    events = profile.stream_events(profile.recorded(lambda: _queue(turn, turn.calls)))
    kernels = [(event.name, event.start_ns, event.end_ns) for event in events]
    if not kernels:
        return None
    totals: dict[str, float] = collections.defaultdict(float)
    for name, start, end in kernels:
        totals[name] += end - start
    busy = profile.busy_time((start, end) for _, start, end in kernels)
    scale = 1e-3 / turn.calls  # total nanoseconds to microseconds a call
    breakdown = {name: ns * scale for name, ns in totals.items()}
    counts = collections.Counter(name for name, _, _ in kernels)
    launches = {name: count / turn.calls for name, count in counts.items()}
    return Round(busy * scale, sum(breakdown.values()), breakdown, launches)
