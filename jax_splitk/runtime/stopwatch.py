"""Times what runs on a GPU, by CUDA events that two custom calls record (ffi/stopwatch.h).

XLA enqueues programs on one stream, in the order of the calls. The first custom call holds the stream until the second
one is enqueued. So the GPU runs the work between them without waiting for the host, and its time has no pauses but
those between kernels, as in a whole program.

CUDA's profiling library takes no part. JAX's profiler starts and ends that library for each profile, which takes some
50 ms, and processes that took many profiles have crashed (benchmarks/notes/conv.md).
"""

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jax_splitk import _ffi

_logger = logging.getLogger("jax_splitk")

START_TARGET = "jax_splitk_stopwatch_start_v1"
STOP_TARGET = "jax_splitk_stopwatch_stop_v1"
ATTEMPTS = 3  # to enqueue the work while the stream is held
_PAUSES = (
    "The GPU waits for the host between kernels, so tuning measures pauses, and may choose slow kernels. "
    "CUDA_LAUNCH_BLOCKING=1 and XLA_PYTHON_CLIENT_ALLOCATOR=platform do this: tune without them."
)


@dataclasses.dataclass
class _State:
    """What earlier measurements say about the next one.

    Attributes:
      attempts: of the next measurement: one after work that was never held. Allocations or launches that wait for the
        GPU make all work so.
      has_warned: whether the user knows that.
    """

    attempts: int = ATTEMPTS
    has_warned: bool = False


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
    if not held and _state.attempts == 1 and not _state.has_warned:
        _state.has_warned = True
        _logger.warning(_PAUSES)
    _state.attempts = ATTEMPTS if held else 1
    return us


@functools.cache
def _program(target: str) -> Callable[[], Any]:
    """A program that makes one custom call. Its result means nothing."""
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((1,), np.uint8), has_side_effect=True)
    return jax.jit(call).lower().compile()
