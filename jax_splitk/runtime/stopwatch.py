"""Times what runs on a GPU, by CUDA events that two custom calls record (ffi/stopwatch.h).

XLA enqueues programs on one stream, in the order of the calls. The first custom call holds the stream until the second
one is enqueued. So the GPU runs the work between them without waiting for the host, and its time has no pauses but
those between kernels, as in a whole program.

CUDA's profiling library takes no part. JAX's profiler starts and ends that library for each profile, which takes some
50 ms, and processes that took many profiles have crashed (benchmarks/notes/conv.md).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jax_splitk import _ffi

START_TARGET = "jax_splitk_stopwatch_start_v1"
STOP_TARGET = "jax_splitk_stopwatch_stop_v1"
ATTEMPTS = 3  # to enqueue the work while the stream is held


@dataclasses.dataclass
class _State:
    """Attributes:
    attempts: of the next measurement. After work that was never held it is one: allocations or launches that wait for
      the GPU make all work so.
    """

    attempts: int = ATTEMPTS


_state = _State()


def microseconds(work: Callable[[], object]) -> float:
    """The time that the default GPU takes for what `work` enqueues. Nothing else may be enqueued meanwhile.

    The stream is not held for ever: work that itself waits for the GPU is run up to three times, and its time has its
    pauses.

    Args:
      work: enqueues at most some 20 executions: JAX lets 32 be under way.

    Raises:
      RuntimeError: the GPU's driver cannot time it.
      Exception: what `work` raises.
    """
    start, stop = _program(START_TARGET), _program(STOP_TARGET)
    us, held = 0.0, False
    for _ in range(_state.attempts):
        start()
        work()
        jax.block_until_ready(stop())
        us, held = _ffi.stopwatch_lap()
        if held:
            break
    _state.attempts = ATTEMPTS if held else 1
    return us


@functools.cache
def _program(target: str) -> Callable[[], Any]:
    """A program that makes one custom call. Its result means nothing."""
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((1,), np.uint8), has_side_effect=True)
    return jax.jit(call).lower().compile()
