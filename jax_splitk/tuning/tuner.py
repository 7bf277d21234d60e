"""A search in a thread that is watched: `tune`.

A candidate that raises, or computes something else than XLA, is recorded and passed over. Two failures end the search,
because they take the device from the whole process: a kernel that does not come back, which nobody can stop and behind
which all other work waits, and an error that ends CUDA's context, such as an illegal address, after which every call
fails. Then the choice is made of what is known, usually XLA, and kept with the candidate's failure, so that the
program works when it is started again.
"""

import atexit
import collections
import concurrent.futures
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterable, Iterator

from jax_splitk.runtime import compiler, settings, toolchain
from jax_splitk.runtime.cores import usable_cores as cores
from jax_splitk.tuning import agreement, store
from jax_splitk.tuning.choice import Candidate
from jax_splitk.tuning.entry import Entry
from jax_splitk.tuning.key import Key
from jax_splitk.tuning.measure import usual_settings
from jax_splitk.tuning.options import DEFAULT_WORKSPACE_LIMIT
from jax_splitk.tuning.search import Search
from jax_splitk.tuning.session import session

_logger = logging.getLogger("jax_splitk")

_WATCH_SECONDS = 0.2
_MEASUREMENTS_CORES = 2  # that no compilation takes from it, unless it waits for that


def budget_seconds() -> float:
    """`JAX_SPLITK_TUNE_BUDGET_S`, seconds for one problem; 10 by default. Raises ValueError unless positive."""
    return settings.seconds("JAX_SPLITK_TUNE_BUDGET_S")


def tune(
    key: Key, workspace_limit: int = DEFAULT_WORKSPACE_LIMIT, old: Entry | None = None, seconds: float | None = None
) -> Entry:
    """Decides by measurement on the local device; blocks until done. One at a time: `Session.turn`.

    The search has a thread of its own: it is free of the trace, mesh and other JAX contexts that the caller may be
    inside of, and the process can do without it (and end) where a kernel does not come back.

    Args:
      key: what to decide, for the local device.
      workspace_limit: bytes that a candidate's workspace may have.
      old: an earlier entry for the key; its best candidates take part again.
      seconds: time budget; None for `budget_seconds()`. Compilation of the first candidates may exceed it.

    Raises:
      RuntimeError: XLA itself fails on the problem (out of memory, for instance), or an earlier measurement of this
        process has not come back.
      CompilerUnavailable: there is no compiler for our candidates: XLA would win, and stay in the cache.
      KeyboardInterrupt: what was measured until then is stored, and the next lowering goes on.
    """
    missing = toolchain.unavailable() if key.target.platform == "cuda" else None
    if missing is not None:
        raise toolchain.CompilerUnavailable(missing)
    if _wait_for_the_last() is not None:
        raise RuntimeError("an earlier measurement has not come back; the process must be started again")
    search = Search(key, workspace_limit, old, budget_seconds() if seconds is None else seconds)
    result: concurrent.futures.Future[Entry] = concurrent.futures.Future()

    def work() -> None:
        try:
            with usual_settings(), compiler.pool.sparing(_MEASUREMENTS_CORES):
                result.set_result(search.run())
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=work, name="jax_splitk-tuner", daemon=True)
    session().search = (search, thread)
    try:
        thread.start()
        _compile_ahead(search, workspace_limit)
        while not result.done():
            concurrent.futures.wait([result], _WATCH_SECONDS)
            session().progress.tick(key)
            if (stuck := search.stuck()) is not None and not result.done():
                return _without(search, stuck)
        thread.join()  # it lets go of executables, in native code: see `_leave`
        session().search = None
        return result.result()
    except (KeyboardInterrupt, RuntimeError) as error:
        # Python's locks raise a RuntimeError where Ctrl-C comes while they are taken.
        if isinstance(error, RuntimeError) and not isinstance(error.__context__, KeyboardInterrupt):
            raise
        search.given_up.set()
        _forget_coming()
        if not result.done() and (entry := search.unfinished()) is not None:
            store.save(entry)
        if isinstance(error, RuntimeError):
            raise KeyboardInterrupt from error
        raise


def _compile_ahead(search: Search, workspace_limit: int) -> None:
    """Begins to compile what this search will ask for, and the first candidates of the next problem, and of more until
    there is enough to do for every core while this one is measured. It is done now, while the search waits for XLA:
    later Python that runs beside it would disturb the measurement."""
    if search.key.target.platform != "cuda":
        return
    coming = session().coming
    coming.pop((search.key, workspace_limit), None)
    with contextlib.suppress(Exception):  # errors come again, in the search that they belong to
        search.compile_first()
        enough = False
        while coming and not enough:
            (key, limit), _ = coming.popitem(last=False)
            Search(key, limit, None, 0.0).compile_first()
            enough = compiler.pool.queued >= 2 * cores()


@contextlib.contextmanager
def coming(keys: Iterable[tuple[Key, int]]) -> Iterator[None]:
    """While the block runs, keys and limits that it asks for, in this order: the next ones' kernels are compiled while
    one is measured."""
    here = not agreement.needed()  # in a job the others must not disturb process 0
    session().coming = collections.OrderedDict.fromkeys(k for k in keys if here and k[0].target.platform == "cuda")
    try:
        yield
    finally:
        _forget_coming()


def _forget_coming() -> None:
    session().coming.clear()
    compiler.pool.drop_ahead()


def _without(search: Search, stuck: Candidate) -> Entry:
    """The entry where a candidate does not come back."""
    search.given_up.set()
    entry = search.entry_without(stuck)
    _logger.warning(
        "%s: %s: %s; the search ends and %s is chosen. What this process runs on the device from now on will wait for "
        "it: start the process again",
        *(search.key.problem, stuck, search.failures[-1].error, entry.choice),
    )
    return entry


def _wait_for_the_last() -> Candidate | None:
    """Waits until the latest search has ended, if that was given up; what does not come back, if it never will."""
    search, thread = session().search or (None, None)
    while search is not None and thread is not None and thread.is_alive():
        if (stuck := search.stuck()) is not None:
            return stuck
        thread.join(_WATCH_SECONDS)
    session().search = None
    return None


@atexit.register
def _leave() -> None:
    """Waits for a search that was given up: a thread that comes back from native code while the interpreter ends aborts
    the process."""
    try:
        if (left := session().search) is not None:
            left[0].given_up.set()
            _wait_for_the_last()
    except KeyboardInterrupt:
        os._exit(128 + signal.SIGINT)
