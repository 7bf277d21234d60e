"""The first run of a training step, from the call to the first finished step, with the seconds of each part.

`python -m benchmarks.lowering MODEL --first-run` measures it. The step is written with lax alone; jax_splitk runs it
inside `intercept()`.
"""

import collections
import contextlib
import functools
import itertools
import resource
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_splitk
from benchmarks import models
from benchmarks.models.layers import STOCK
from benchmarks.models.measure import train_step
from jax_splitk.runtime import compiler, stopwatch
from jax_splitk.runtime.plan import DevicePlan
from jax_splitk.runtime.source import Source
from jax_splitk.tuning import device, watch
from jax_splitk.tuning.choice import XLA
from jax_splitk.tuning.measure import Bench

# The most seconds that a first run should take: so many times stock JAX's, and some more.
GOAL = 1.5, 6.0
LATER_STEPS = 10  # whose median is reported


class Work:
    """What jax_splitk did in a process.

    Attributes:
      compiled: each kernel's source, whether a worker compiled it, begin and end.
      spent: the durations of other parts by name. They overlap, except those of "device": in these a search has the
        device for itself.
    """

    def __init__(self) -> None:
        self.compiled: list[tuple[Source, bool, float, float]] = []
        self.spent: dict[str, list[float]] = collections.defaultdict(list)
        self._used = _processor_seconds()

    def compiling(self, compile_source: Callable[..., Any]) -> Callable[..., Any]:
        def timed(source: Source, *, in_worker: bool) -> Any:
            began = time.perf_counter()
            try:
                return compile_source(source, in_worker=in_worker)
            finally:
                self.compiled.append((source, in_worker, began, time.perf_counter()))

        return timed

    def timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def timing(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return work(*args, **kwargs)
            finally:
                self.spent[name].append(time.perf_counter() - began)

        return timing

    def at_once(self) -> int:
        """How many kernels compiled at the same time, at most."""
        changes = sorted(change for *_, began, ended in self.compiled for change in ((began, 1), (ended, -1)))
        under_way = [sum(step for _, step in changes[: i + 1]) for i in range(len(changes))]
        return max(under_way, default=0)

    def figures(self) -> dict[str, Any]:
        workers = sum(in_worker for _, in_worker, *_ in self.compiled)
        return {
            "compiled_by_workers": workers,
            "compiled_here": len(self.compiled) - workers,
            "compiling_s": sum(ended - began for *_, began, ended in self.compiled),
            "at_once": self.at_once(),
            "processor_s": _processor_seconds() - self._used,
        }

    def unused(self, watched: watch.Watched) -> dict[str, list[float]]:
        """The seconds of the kernels that compiled and that nothing which was lowered has, by the source's file."""
        plans = [c.candidate.plan(c.problem) for c in watched.choices if c.candidate != XLA]
        used = {compiler.source_key(plan.source) for plan in plans if isinstance(plan, DevicePlan)}
        found: dict[str, list[float]] = collections.defaultdict(list)
        for source, _, began, ended in self.compiled:
            if compiler.source_key(source) not in used:
                found[source.file].append(ended - began)
        return found


class _TimedLock:
    """A lock that tells for how long it was held."""

    def __init__(self, spent: list[float]) -> None:
        self._lock, self._spent, self._began = threading.Lock(), spent, 0.0

    def acquire(self, timeout: float = -1) -> bool:
        taken = self._lock.acquire(timeout=timeout)
        if taken:
            self._began = time.perf_counter()
        return taken

    def release(self) -> None:
        self._spent.append(time.perf_counter() - self._began)
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def _processor_seconds() -> float:
    """The processor time of this process and of its processes that have ended, workers included."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in used)


@contextlib.contextmanager
def watched() -> Iterator[Work]:
    """Counts and times what jax_splitk does in the block."""
    work = Work()
    parts = [(Bench, "__init__", "operands"), (Bench, "_compile", "executables"), (Bench, "_try", "checks")]
    parts += [(device, "_compile", "xla_chooses"), (stopwatch, "microseconds", "stopwatch")]
    with contextlib.ExitStack() as patches:
        compiling = work.compiling(compiler._machine_code)
        patches.enter_context(mock.patch.object(compiler, "_machine_code", compiling))
        for owner, attribute, name in parts:
            timing = work.timed(name, getattr(owner, attribute))
            # A plain function is a method like the original.
            patches.enter_context(mock.patch.object(owner, attribute, timing))
        patches.enter_context(mock.patch.object(device.state, "lock", _TimedLock(work.spent["device"])))
        yield work


def measure(name: str, tiny: bool, ours: bool, devices: int) -> dict[str, Any]:
    """The first run in this process, whose cache is empty; the batch is divided among the devices.

    Raises:
      ValueError: there are not so many devices.
    """
    if not 1 <= devices <= jax.device_count():
        raise ValueError(f"--devices={devices}; accepted: 1 to {jax.device_count()}, the devices of this machine")
    (model,) = models.find([name], tiny)
    given = (model.data(np.random.default_rng(1)), model.initial())
    if devices == 1:
        data, params = jax.block_until_ready(jax.device_put(given))
    else:
        mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
        by_batch, everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
        data, params = jax.block_until_ready(jax.device_put(given, (by_batch, everywhere)))
    step = functools.partial(train_step, model, STOCK)
    if ours:
        step = jax_splitk.intercept()(step)
    with watched() as work, watch.state.watching() as seen:
        times = [time.perf_counter()]
        traced = jax.jit(step, donate_argnums=0).trace(params, *data)
        times.append(time.perf_counter())
        lowered = traced.lower()
        times.append(time.perf_counter())
        compiled = lowered.compile()
        times.append(time.perf_counter())
        params, loss = jax.block_until_ready(compiled(params, *data))
        times.append(time.perf_counter())
    parts = [after - before for before, after in itertools.pairwise(times)]
    found = dict(zip(("trace_s", "lower_s", "compile_s", "run_s"), parts, strict=True))
    steps = []
    for _ in range(LATER_STEPS):
        began = time.perf_counter()
        params, loss = jax.block_until_ready(compiled(params, *data))
        steps.append(time.perf_counter() - began)
    found |= {"first_run_s": sum(parts), "step_ms": 1e3 * statistics.median(steps), "loss": float(loss)}
    if ours:
        unused = work.unused(seen)
        entries = [seen.entries[key] for key in seen.measured]
        found |= {
            "measured": len(entries),
            "candidates": sum(entry.metadata["candidates"] for entry in entries if entry is not None),
            "operations": [
                {"problem": str(c.problem), "choice": str(c.candidate), "count": count, "why": c.why}
                for c, count in seen.choices.items()
            ],
            **work.figures(),
            "unused": {file: {"kernels": len(each), "s": sum(each)} for file, each in unused.items()},
            "parts": {name: {"count": len(each), "s": sum(each)} for name, each in work.spent.items()},
        }
    return found


def compared(stock: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """The first run's seconds against the goal, and the ratio of later steps."""
    factor, more = GOAL
    goal = factor * stock["first_run_s"] + more
    return {
        "goal_s": goal,
        "within_goal": ours["first_run_s"] <= goal,
        "ratio": stock["step_ms"] / ours["step_ms"],
    }
