"""Runs searches in threads, and watches them: `tune`.

While the caller waits for one search, the next ones are under way: they compile while another holds the device, which
one search has at a time.

A candidate that raises, or computes something else than XLA, is recorded and passed over. Two failures end the search,
because they take the device from the whole process: a kernel that does not come back, behind which all other work
waits, and an error that ends CUDA's context, such as an illegal address, after which every call fails. Then the choice
is made from what is known, usually XLA, and is stored with the candidate's failure, so that the program works when it
is started again.
"""

import atexit
import contextlib
import dataclasses
import itertools
import logging
import os
import signal
import threading
from collections.abc import Iterable, Iterator

from jax_splitk.problems.problem import Problem
from jax_splitk.runtime import compiler, settings, toolchain
from jax_splitk.runtime.cores import usable_cores as cores
from jax_splitk.runtime.outcome import Outcome, join
from jax_splitk.tuning import agreement, buckets, device, searches, siblings, store
from jax_splitk.tuning.choice import Candidate
from jax_splitk.tuning.entry import Entry
from jax_splitk.tuning.key import Key, key_for
from jax_splitk.tuning.measure import ROTATED_BYTES, compile_ahead, usual_settings
from jax_splitk.tuning.options import DEFAULT_WORKSPACE_LIMIT
from jax_splitk.tuning.search import Search

_logger = logging.getLogger("jax_splitk")

_WATCH_SECONDS = 0.2
_MEASUREMENTS_CORES = 2  # cores that compilations leave to a measurement, unless it waits for them
_AT_ONCE = 6  # most searches under way, of which one holds the device: a UNet takes 41.5 s, with 4 searches 44.8
_CORES_EACH = 2.5  # fewest cores for each search, beside one core: with fewer, searches take them from each other
_OPERANDS_BYTES = 4 * 2**30  # most bytes of operands of searches under way, roughly, unless there is only one
_LEAVE_SECONDS = 2.0  # time for a search that was given up to release the device


@dataclasses.dataclass
class Running:
    """A search in its thread.

    Attributes:
      result: the entry, once there is one.
      awaited: whether somebody waits for it.
    """

    search: Search
    limit: int
    thread: threading.Thread
    result: Outcome[Entry]
    awaited: bool = False


@dataclasses.dataclass
class Queued:
    """A key that may be measured next.

    Attributes:
      seconds: the budget; None for the default.
      compiling: whether its first candidates are compiling.
    """

    seconds: float | None = None
    compiling: bool = False


def budget_seconds() -> float:
    """`JAX_SPLITK_TUNE_BUDGET_S`, the seconds for one problem; 10 by default. Raises ValueError unless positive."""
    return settings.seconds("JAX_SPLITK_TUNE_BUDGET_S")


def earlier(key: Key) -> Entry | None:
    """An entry whose best candidates a search tries first: the key's own, else a sibling GPU's. It decides nothing."""
    found = itertools.chain.from_iterable(map(store.found, (key, *siblings.keys(key))))
    return next((entry for entry, _ in found), None)


def tune(
    key: Key, workspace_limit: int = DEFAULT_WORKSPACE_LIMIT, old: Entry | None = None, seconds: float | None = None
) -> Entry:
    """Decides by measurement on the local device, and waits for it. The caller holds the `turn` of `searches.Searches`.

    The search has a thread of its own. So it is free of the trace, mesh and other JAX contexts of the caller, and the
    process can go on (and end) if a kernel does not come back.

    Args:
      key: the key to decide, for the local device.
      workspace_limit: bytes that a candidate's workspace may have.
      old: an earlier entry (`earlier`), whose best candidates take part again.
      seconds: time budget; None for `budget_seconds()`. Compilation of the first candidates may exceed it.

    Raises:
      RuntimeError: XLA itself fails on the problem (out of memory, for instance), or an earlier measurement of this
        process has not come back.
      CompilerUnavailable: there is no compiler for our candidates. A search would choose XLA, and store that.
      KeyboardInterrupt: what was measured until then is stored, and the next tuning of the problem goes on from there.
    """
    missing = toolchain.unavailable() if key.target.platform == "cuda" else None
    if missing is not None:
        raise toolchain.CompilerUnavailable(missing)
    if _wait_for_abandoned() is not None:
        raise RuntimeError("an earlier measurement has not come back; the process must be started again")
    under_way = searches.state.running
    searches.state.queue.pop((key, workspace_limit), None)
    try:
        running = under_way.get((key, workspace_limit)) or _begin(key, workspace_limit, old, seconds)
        running.awaited = True
        while not running.result.done():
            _look_ahead()
            running.result.wait(_WATCH_SECONDS)
            searches.state.progress.tick(key)
            if (found := _stuck()) is not None:
                return _without(*found, awaited=running)
        join(running.thread)  # it releases executables, in native code: see `_leave`
        del under_way[key, workspace_limit]
        return running.result.result()
    except (KeyboardInterrupt, RuntimeError) as error:
        # Where Ctrl-C comes while a lock is taken, Python raises a RuntimeError.
        if isinstance(error, RuntimeError) and not isinstance(error.__context__, KeyboardInterrupt):
            raise
        _clear_queue()
        for each in list(under_way.values()):
            _give_up(each)
        if isinstance(error, RuntimeError):
            raise KeyboardInterrupt from error
        raise


def _begin(key: Key, workspace_limit: int, old: Entry | None, seconds: float | None) -> Running:
    search = Search(key, workspace_limit, old, budget_seconds() if seconds is None else seconds)
    result: Outcome[Entry] = Outcome()

    def work() -> None:
        try:
            with usual_settings(), compiler.pool.sparing(_MEASUREMENTS_CORES):
                entry = search.run()
                with contextlib.suppress(Exception):  # an error is raised again when the other problem is lowered
                    _prepare_represented(entry, workspace_limit)
                result.set_result(entry)
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=work, name="jax_splitk-tuner", daemon=True)
    running = searches.state.running[key, workspace_limit] = Running(search, workspace_limit, thread, result)
    thread.start()
    if key.target.platform == "cuda":
        with contextlib.suppress(Exception):  # an error is raised again in the search that it belongs to
            search.compile_first()
    return running


def _look_ahead() -> None:
    """Begins the searches of the next problems; then begins to compile first candidates of more of them, until every
    core has enough to do."""
    queue = searches.state.queue
    with contextlib.suppress(Exception):  # an error is raised again in the search that it belongs to
        while queue and _has_room(key_and_limit := next(iter(queue))):
            seconds = queue.pop(key_and_limit).seconds
            if key_and_limit not in searches.state.running:
                _begin(*key_and_limit, earlier(key_and_limit[0]), seconds)
        for (key, limit), next_one in list(queue.items()):
            if compiler.pool.queued >= 2 * cores():
                break
            if not next_one.compiling:
                next_one.compiling = True
                compile_first([(key, limit)])


def compile_first(keys: Iterable[tuple[Key, int]]) -> None:
    """Begins to compile the first candidates of keys that will probably be measured."""
    for key, limit in keys:
        with contextlib.suppress(Exception):  # an error is raised again in the search that it belongs to
            Search(key, limit, None, 0.0).compile_first()


def _has_room(key_and_limit: tuple[Key, int]) -> bool:
    """Whether another search may begin beside those under way."""
    under_way = [key for (key, _), running in searches.state.running.items() if not running.result.done()]
    held = sum(map(_operands_bytes, (*under_way, key_and_limit[0])))
    return len(under_way) < min(_AT_ONCE, int((cores() - 1) / _CORES_EACH)) and held <= _OPERANDS_BYTES


def _operands_bytes(key: Key) -> int:
    """The approximate size of a search's operands and results."""
    return 2 * max(ROTATED_BYTES[key.target.platform], 2 * key.problem.bytes_moved)


@contextlib.contextmanager
def queued(keys: Iterable[tuple[Key, int]], seconds: float | None = None) -> Iterator[None]:
    """The block will ask for these keys and limits, in this order, with a budget of `seconds` for each. While one is
    waited for, the next ones are searched and their kernels compiled."""
    here = not agreement.needed()  # in a job nothing must disturb process 0
    searches.state.queue = {k: Queued(seconds) for k in keys if here and k[0].target.platform == "cuda"}
    try:
        yield
    finally:
        _clear_queue()


def enqueue(key: Key, workspace_limit: int, problem: Problem) -> None:
    """Queues the search of a key that a lowering may ask for. Its decision may serve `problem`, too, where that is
    another problem than the key's."""
    searches.state.queue.setdefault((key, workspace_limit), Queued())
    if problem != key.problem:
        searches.state.awaiting.setdefault((key, workspace_limit), []).append(problem)


def _prepare_represented(entry: Entry, workspace_limit: int) -> None:
    """Begins to compile what the lowering of other problems will need because of a search's decision. Notes the next
    key for those problems for which it does not hold."""
    for problem in searches.state.awaiting.pop((entry.key, workspace_limit), ()):
        key = key_for(problem, entry.key.target)
        candidate = buckets.choice_for(key, entry, workspace_limit)
        if candidate is None:
            keys = buckets.to_tune(key, workspace_limit)
            enqueue(keys[keys.index(entry.key) + 1], workspace_limit, problem)
        else:
            compile_ahead(candidate.computed(problem), [candidate])


def _clear_queue() -> None:
    searches.state.queue, searches.state.awaiting = {}, {}
    give_up_ahead()
    compiler.pool.drop_ahead()


def give_up_ahead() -> None:
    """Ends the searches that nobody waits for, and waits a moment for them to release the device."""
    ahead = [running for running in list(searches.state.running.values()) if not running.awaited]
    for running in ahead:
        _give_up(running)
    for running in ahead:
        join(running.thread, _LEAVE_SECONDS)


def _abandon(running: Running) -> None:
    """Ends a search. Its thread may go on for a while."""
    running.search.given_up.set()
    searches.state.running.pop((running.search.key, running.limit), None)
    searches.state.abandoned.append(running)


def _give_up(running: Running) -> None:
    """Ends a search for which nobody waits, or no longer, and stores what it has measured."""
    _abandon(running)
    if running.result.done():
        entry = None if running.result.exception() else running.result.result()
    else:
        entry = running.search.unfinished()
    if entry is not None:
        store.save(entry)


def _stuck() -> tuple[Running, Candidate] | None:
    """A search with a candidate that does not come back, so that everything else waits for the device."""
    for running in list(searches.state.running.values()):
        if (stuck := running.search.stuck()) is not None and not running.result.done():
            return running, stuck
    return None


def _without(running: Running, stuck: Candidate, awaited: Running) -> Entry:
    """The awaited search's entry without the candidate that does not come back. If the candidate is another search's,
    that entry is stored, and RuntimeError raised."""
    search = running.search
    for each in list(searches.state.running.values()):
        _abandon(each)
    entry = search.entry_without(stuck)
    _logger.warning(
        "%s: %s: %s; the search ends and %s is chosen. What this process runs on the device from now on will wait for "
        "it: start the process again",
        *(search.key.problem, stuck, search.failures[-1].error, entry.choice),
    )
    if running is not awaited:
        store.save(entry)
        raise RuntimeError("a measurement beside it does not come back; the process must be started again")
    return entry


def _wait_for_abandoned() -> Candidate | None:
    """Waits until the searches that were given up have ended. Returns a candidate that never will."""
    abandoned = searches.state.abandoned
    while abandoned:
        if not abandoned[0].thread.is_alive():
            abandoned.pop(0)
        elif (stuck := next((s for one in abandoned if (s := one.search.stuck()) is not None), None)) is not None:
            return stuck
        else:
            join(abandoned[0].thread, _WATCH_SECONDS)
    return None


@atexit.register
def _leave() -> None:
    """Waits for searches that were given up, and for XLA's choices. A thread that comes back from native code while the
    interpreter ends would abort the process."""
    try:
        for running in list(searches.state.running.values()):
            _abandon(running)
        _wait_for_abandoned()
        for thread in device.state.choosing:
            join(thread)
    except KeyboardInterrupt:
        os._exit(128 + signal.SIGINT)
