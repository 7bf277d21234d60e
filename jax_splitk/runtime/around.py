"""XLA's operations around a custom call: they make its operands from those of the problem, and the problem's result
from its own. Lowering emits them, and the tuner times them with the call."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import jax
from jax import lax
from jax import numpy as jnp


class Change(Protocol):
    """An operation of XLA's on one array."""

    def __call__(self, array: jax.Array) -> jax.Array: ...


@dataclasses.dataclass(frozen=True)
class Cast:
    """Converts an array to a dtype."""

    dtype: str

    def __call__(self, array: jax.Array) -> jax.Array:
        return array.astype(self.dtype)


@dataclasses.dataclass(frozen=True)
class Pad:
    """Appends zeros to dimensions of an array.

    Attributes:
      view: the array's shape, in which a dimension may be two (groups and their channels).
      padded: `view` with the zeros.
      shape: the shape of the result.
    """

    view: tuple[int, ...]
    padded: tuple[int, ...]
    shape: tuple[int, ...]

    def __call__(self, array: jax.Array) -> jax.Array:
        zeros = [(0, after - before, 0) for before, after in zip(self.view, self.padded, strict=True)]
        return lax.pad(array.reshape(self.view), jnp.zeros((), array.dtype), zeros).reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class Crop:
    """Removes the ends of dimensions of an array: the inverse of `Pad`.

    Attributes:
      view: the array's shape, in which a dimension may be two.
      cropped: `view` without the ends.
      shape: the shape of the result.
    """

    view: tuple[int, ...]
    cropped: tuple[int, ...]
    shape: tuple[int, ...]

    def __call__(self, array: jax.Array) -> jax.Array:
        return lax.slice(array.reshape(self.view), [0] * len(self.view), self.cropped).reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class Diagonal:
    """Takes the elements whose places in two dimensions of an array are equal. They stay in the second of these.

    Attributes:
      view: the array's shape, in which dimensions may be divided.
      first, second: the two dimensions of `view`, of the same size.
      shape: the shape of the result.
    """

    view: tuple[int, ...]
    first: int
    second: int
    shape: tuple[int, ...]

    def __call__(self, array: jax.Array) -> jax.Array:
        found = jnp.diagonal(array.reshape(self.view), axis1=self.first, axis2=self.second)
        return jnp.moveaxis(found, -1, self.second - 1).reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class Around:
    """What XLA computes around a custom call.

    Attributes:
      operands: a change of each operand; None leaves it as it is.
      result: the change of the result.
      returned: (shape, dtype) of the custom call's own result.
    """

    operands: tuple[Change | None, ...]
    result: Change | None
    returned: tuple[tuple[int, ...], str]

    def before(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """The custom call's operands."""
        pairs = zip(self.operands, operands, strict=True)
        return [operand if change is None else change(operand) for change, operand in pairs]

    def after(self, result: jax.Array) -> jax.Array:
        """The problem's result."""
        return result if self.result is None else self.result(result)
