"""How `lax.dot_general`'s operands become those of a `DotProblem`: which of their dimensions are merged into one, and
in which order the merged dimensions lie in memory.
"""

import dataclasses
import math
from collections.abc import Sequence

# ((lhs contracting, rhs contracting), (lhs batch, rhs batch)).
DimensionNumbers = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]


@dataclasses.dataclass(frozen=True)
class Operand:
    """How an operand becomes the three-dimensional one of a `DotProblem`: by a reshape where `transpose` is None.

    Attributes:
      transpose: permutation of the operand's dimensions before the reshape.
      order: the letters b, k and m or n.
      shape: sizes in that order.
    """

    transpose: tuple[int, ...] | None
    order: str
    shape: tuple[int, ...]

    def size(self, letter: str) -> int:
        return self.shape[self.order.index(letter)]


def free_dimensions(rank: int, contracting: Sequence[int], batch: Sequence[int]) -> tuple[int, ...]:
    return tuple(i for i in range(rank) if i not in contracting and i not in batch)


def operands(
    lhs_shape: Sequence[int], rhs_shape: Sequence[int], dimensions: DimensionNumbers
) -> tuple[Operand, Operand]:
    """The operands of the product; batch dimensions in the order in which the result has them."""
    (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = dimensions
    # The order of the reduction is free: that in which they lie in lhs.
    pairs = sorted(zip(lhs_contracting, rhs_contracting, strict=True))
    lhs = _operand(lhs_shape, [i for i, _ in pairs], lhs_batch, "m")
    rhs = _operand(rhs_shape, [j for _, j in pairs], rhs_batch, "n")
    return lhs, rhs


def _operand(shape: Sequence[int], contracting: Sequence[int], batch: Sequence[int], free_letter: str) -> Operand:
    free = free_dimensions(len(shape), contracting, batch)
    dims = {"b": tuple(batch), "k": tuple(contracting), free_letter: free}
    sizes = {letter: math.prod(shape[i] for i in of) for letter, of in dims.items()}
    of = {i: (letter, place) for letter, those in dims.items() for place, i in enumerate(those) if shape[i] != 1}
    order = ""
    expected = ("", -1)
    for i in sorted(of):
        letter, place = of[i]
        if expected[0] != letter or any(shape[j] != 1 for j in dims[letter][expected[1] : place]):
            order += letter
        expected = (letter, place + 1)
    in_place = len(set(order)) == len(order) and order[-1:] != "b" and all(_ascends(dims[x], shape) for x in order)
    if not in_place:
        canonical = f"b{free_letter}k" if free_letter == "m" else "bkn"
        return Operand(
            (*batch, *(free + dims["k"] if free_letter == "m" else dims["k"] + free)),
            canonical,
            tuple(sizes[letter] for letter in canonical),
        )
    for letter in (free_letter, "k", "b"):  # those of size 1 are put where they change nothing
        if letter not in order:
            order = letter + order
    return Operand(None, order, tuple(sizes[letter] for letter in order))


def _ascends(dims: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether dimensions that are to be merged are in ascending order, apart from those of size 1."""
    those = [i for i in dims if shape[i] != 1]
    return those == sorted(those)
