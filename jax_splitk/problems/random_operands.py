"""Random operands made on the host: each is a stretch of numbers that are drawn once.

XLA would take half a second on an H200 to compile a generator for each shape, and delay what is measured meanwhile.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np
from jax import numpy as jnp

from jax_splitk.problems.problem import ArrayTypes

_COUNT = 2**24 - 3  # a prime: the rows of an operand lie at other places of the numbers each
_STEP = 2654435761  # from one seed's place to the next one's


class Stretches:
    """Takes one stretch after the other from a ring of numbers, from a place that the seed gives."""

    def __init__(self, seed: int):
        self._begin = seed * _STEP % _COUNT

    def normals(self, shape: Sequence[int], dtype: str) -> np.ndarray:
        """Normally distributed."""
        return self._next(_normals(dtype), shape)

    def words(self, shape: Sequence[int]) -> np.ndarray:
        """All of uint32."""
        return self._next(_words(), shape)

    def _next(self, numbers: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        size = math.prod(shape)
        if self._begin + size <= _COUNT:
            begin, self._begin = self._begin, (self._begin + size) % _COUNT
            return numbers[begin : begin + size].reshape(shape)
        found = np.empty(size, numbers.dtype)
        filled = 0
        while filled < found.size:
            count = min(found.size - filled, _COUNT - self._begin)
            found[filled : filled + count] = numbers[self._begin : self._begin + count]
            filled += count
            self._begin = (self._begin + count) % _COUNT
        return found.reshape(shape)


def normals(types: ArrayTypes, seed: int) -> tuple[np.ndarray, ...]:
    """Normally distributed arrays of these shapes and dtypes; other ones for another seed."""
    stretches = Stretches(seed)
    return tuple(stretches.normals(*array) for array in types)


@functools.cache
def _normals(dtype: str) -> np.ndarray:
    return _frozen(np.random.default_rng(0).standard_normal(_COUNT, np.float32).astype(jnp.dtype(dtype)))


@functools.cache
def _words() -> np.ndarray:
    return _frozen(np.random.default_rng(1).integers(2**32, size=_COUNT, dtype=np.uint32))


def _frozen(numbers: np.ndarray) -> np.ndarray:
    """The numbers as a read-only array, since stretches are views of it."""
    numbers.setflags(write=False)
    return numbers
