"""Times on a GPU by the stopwatch."""

import itertools
import threading
import time
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from jax_splitk.runtime import stopwatch

pytestmark = pytest.mark.gpu

SIZE = 4096
FASTEST_US = 2 * SIZE**3 / 1e15 * 1e6  # of a product in bfloat16: no Hopper GPU computes 1,000 TFLOP/s
SLOWEST_US = 20 * FASTEST_US


@pytest.fixture(scope="module")
def product() -> Any:
    x = jnp.ones((SIZE, SIZE), jnp.bfloat16)
    program = jax.jit(lambda x: x @ x).lower(x).compile()
    jax.block_until_ready([program(x) for _ in range(3)])
    return lambda: program(x)


def queue(work: Any, times: int) -> Any:
    return [work() for _ in range(times)][-1]


def test_the_time_is_the_gpus(product: Any) -> None:
    """It grows with the work, and has no part of the host's: neither the calls nor a pause among them."""
    one = min(stopwatch.microseconds(product) for _ in range(3))
    assert FASTEST_US < one < SLOWEST_US
    ten = min(stopwatch.microseconds(lambda: queue(product, 10)) for _ in range(3))
    assert 8 * one < ten < 11 * one

    def paused() -> None:
        product()
        time.sleep(0.01)
        product()

    assert min(stopwatch.microseconds(paused) for _ in range(3)) < 3 * one


def test_short_kernels_follow_each_other() -> None:
    """Twenty programs of one small kernel take some 2 microseconds each, although the host needs tens for a call."""
    x = jnp.ones(16)
    program = jax.jit(lambda x: x + 1).lower(x).compile()
    queue(lambda: program(x), 3)
    us = min(stopwatch.microseconds(lambda: queue(lambda: program(x), 20)) for _ in range(5))
    assert us < 20 * 10


def test_a_program_that_waits_for_the_gpu_is_timed() -> None:
    """XLA's host reads the condition of a loop from the device, which is held."""
    x = jnp.ones(16)
    loop = jax.jit(lambda x: jax.lax.while_loop(lambda x: x.sum() < 1e9, lambda x: 2 * x, x)).lower(x).compile()
    jax.block_until_ready(loop(x))
    assert 0 < stopwatch.microseconds(lambda: loop(x)) < 1e6


def test_a_held_gpu_does_not_stop_other_threads(product: Any) -> None:
    """They load code and copy arrays, for which the driver may wait until the GPU is idle."""
    ended = threading.Event()

    def beside() -> None:
        for number in itertools.count():
            if ended.is_set():
                return
            compiled = jax.jit(lambda x, number=number: x * number).lower(jnp.ones(16)).compile()
            jax.block_until_ready(compiled(jax.device_put(np.ones(16, np.float32))))

    threads = [threading.Thread(target=beside) for _ in range(4)]
    for thread in threads:
        thread.start()
    started = time.monotonic()
    try:
        times = [stopwatch.microseconds(lambda: queue(product, 5)) / 5 for _ in range(40)]
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert time.monotonic() - started < 40
    assert FASTEST_US < sorted(times)[20] < SLOWEST_US


def test_the_stream_works_after_an_error(product: Any) -> None:
    def fails() -> None:
        product()
        raise ZeroDivisionError

    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            stopwatch.microseconds(fails)
    jax.block_until_ready(product())
    assert FASTEST_US < stopwatch.microseconds(product) < SLOWEST_US
