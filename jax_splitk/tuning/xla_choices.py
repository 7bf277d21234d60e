"""XLA's choices of kernels, which begin while cost models still rank what a new program may measure.

Each search times XLA, which first times cuDNN's kernels: a third of a first run's seconds. The device is idle until the
first search begins.
"""

import contextlib
import math
import threading
from collections.abc import Iterator, Mapping, Sequence

import jax

from jax_splitk.kernels.base import xla
from jax_splitk.problems.problem import Problem
from jax_splitk.tuning import buckets, device
from jax_splitk.tuning.key import Key
from jax_splitk.tuning.measure import WITHOUT_GRAPHS, usual_settings
from jax_splitk.tuning.worth import Operation

# The problems for which XLA chooses early take this share of a program's least possible time.
_SHARE = 0.8
# And XLA's estimated time is at most `_SLOWEST` times the least possible one, or more if `_DEVIATIONS` standard
# deviations of the estimate allow it. Otherwise the choice takes long, and most often no measurement is needed. Of 39
# such problems in two networks 31 were measured, as were 4 others for which XLA was timed.
_SLOWEST, _DEVIATIONS = 1.15, 1.4


def likely(operations: Mapping[Key, Operation]) -> list[tuple[Key, int]]:
    """The keys, with their workspace limits, that will most probably be measured for some operations, in their
    order."""
    estimates = {key: known for key in operations if (known := xla.estimate(key.problem, key.target)) is not None}
    floors = {key: xla.features(key.problem, key.target).floor for key in estimates}
    spent = {key: operations[key].times * floor for key, floor in floors.items()}
    heavy, remaining = set(), _SHARE * sum(spent.values())
    for key in sorted(spent, key=lambda key: -spent[key]):
        if remaining <= 0:
            break
        heavy.add(key)
        remaining -= spent[key]

    def may_be_fast(key: Key) -> bool:
        of_xla = estimates[key]
        return of_xla.seconds <= _SLOWEST * math.exp(_DEVIATIONS * of_xla.uncertainty) * floors[key]

    chosen = [key for key in estimates if key in heavy and may_be_fast(key)]
    first = [(next(iter(buckets.representatives(key)), key), operations[key].options) for key in chosen]
    return list(dict.fromkeys((key, options.workspace_limit) for key, options in first))


@contextlib.contextmanager
def begun(problems: Sequence[Problem]) -> Iterator[None]:
    """In the block, XLA chooses kernels for the problems, in a thread. What it has not begun when the block ends is
    left to the searches."""
    ended = threading.Event()

    def choose() -> None:
        state = device.state
        with usual_settings(), jax.default_device(jax.local_devices()[0]):
            while not ended.is_set() and (new := [p for p in problems if p not in state.xla_chose]):
                with state.lock:
                    state.let_xla_choose(new[0], new[1:], WITHOUT_GRAPHS)

    thread = threading.Thread(target=choose, name="jax_splitk-xla", daemon=True)
    device.state.choosing = [*(each for each in device.state.choosing if each.is_alive()), thread]
    thread.start()
    try:
        yield
    finally:
        ended.set()
