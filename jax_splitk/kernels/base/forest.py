"""Boosted regression trees as arrays, which NumPy evaluates for many rows at once.

Results are the same on every platform: thresholds are float32 numbers, leaves are whole numbers, and a table turns a
sum of leaves into a factor.
"""

import dataclasses
import functools
import pathlib
from typing import Any

import numpy as np

UNITS = 2048  # of a leaf, in a power of e
_LIMIT = 8 * UNITS  # of a sum, either way: XLA may take 2,000 times the roofline


def _factors() -> np.ndarray:
    """e to the power of each possible sum, by products in a fixed order."""
    up = np.cumprod(np.full(_LIMIT, 1 + 1 / UNITS + 0.5 / UNITS**2))
    return np.concatenate([1 / up[::-1], [1.0], up])


_FACTORS = _factors()


@dataclasses.dataclass(frozen=True)
class Forest:
    """Trees whose nodes lie one after another.

    Attributes:
      roots: each tree's first node.
      feature, threshold: a node's test: whether the row's feature is at most the threshold.
      yes, no: the next node; a leaf's own number.
      leaf: a leaf's value, in `UNITS`; 0 of other nodes.
      depth: depth of the deepest tree.
    """

    roots: np.ndarray
    feature: np.ndarray
    threshold: np.ndarray
    yes: np.ndarray
    no: np.ndarray
    leaf: np.ndarray
    depth: int

    @functools.cached_property
    def _next(self) -> np.ndarray:
        """Each node's `no` and `yes`, one after another."""
        return np.stack([self.no, self.yes], axis=1).ravel()

    def factors(self, rows: np.ndarray) -> np.ndarray:
        """The factor by which each row's value is multiplied.

        Args:
          rows: float32 features, [rows, features].
        """
        at = np.tile(self.roots, len(rows))
        begin = np.repeat(np.arange(len(rows)) * rows.shape[1], len(self.roots))
        values, next_nodes = rows.ravel(), self._next
        for _ in range(self.depth):
            low = values.take(begin + self.feature.take(at)) <= self.threshold.take(at)
            at = next_nodes.take(2 * at + low)
        sums = self.leaf.take(at).reshape(len(rows), len(self.roots)).sum(axis=1)
        return _FACTORS[np.clip(sums, -_LIMIT, _LIMIT) + _LIMIT]

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays of the file, in few bits."""
        types = {"feature": np.uint8, "leaf": np.int16, "threshold": np.float32}
        names = [field.name for field in dataclasses.fields(self)]
        return {name: np.asarray(getattr(self, name), types.get(name, np.int32)) for name in names}


def read(path: pathlib.Path) -> tuple[Forest, dict[str, Any]]:
    """(the trees in an .npz file, its other arrays).

    Raises:
      ValueError: the package's file is damaged.
    """
    try:
        with np.load(path, allow_pickle=False) as data:
            arrays = {name: data[name] for name in data.files}
        taken = {field.name: arrays.pop(field.name) for field in dataclasses.fields(Forest)}
        # NumPy indexes with its own type of integers.
        wide = {name: each if name == "threshold" else each.astype(np.intp) for name, each in taken.items()}
        forest = Forest(**{**wide, "depth": int(taken["depth"])})
        _check(forest)
    except (OSError, ValueError, LookupError, TypeError, EOFError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}); install jax_splitk again") from None
    return forest, arrays


def _check(forest: Forest) -> None:
    """Raises ValueError if a node's successor does not exist."""
    nodes = len(forest.feature)
    for name in ("threshold", "yes", "no", "leaf"):
        if getattr(forest, name).shape != (nodes,):
            raise ValueError(f"{name} of {getattr(forest, name).shape}; accepted: {(nodes,)}")
    for name in ("roots", "yes", "no"):
        values = getattr(forest, name)
        if len(values) and not 0 <= values.min() <= values.max() < nodes:
            raise ValueError(f"{name} are not nodes")
