"""The pixels of a dense forward pass whose input is dilated.

Along an axis, output pixels with the same residue modulo the dilation use the same taps. One residue for each axis
makes a phase. Without dilation there is one phase.
"""

import dataclasses
import functools
import itertools
import math

from jax_splitk.kernels.base.geometry import folded
from jax_splitk.kernels.contraction.joined import joined
from jax_splitk.problems.conv_wgrad import ConvProblem


@dataclasses.dataclass(frozen=True)
class Residue:
    """Output pixels of an axis that use the same taps: `place`, `place + up` and so on.

    Attributes:
      first, taps: the first tap, and how many there are.
      origin: the input pixel that the first tap of pixel `place` reads.
    """

    place: int
    first: int
    taps: int
    origin: int


@dataclasses.dataclass(frozen=True)
class Axis:
    """A spatial dimension of a forward pass whose input is dilated by `up`.

    Attributes:
      tap_step, step: distance of a residue's neighbouring taps, in taps and in input pixels.
      residues: the residues, those with many taps first.
      pixels: number of pixels of the largest residue.
      lower, upper: corners of the box of window origins relative to the input; offsets are from `lower`.
      shared: how many neighbouring taps share their pixels; they count as one of the residue's `taps`. If several do,
        there is one residue, and each of these taps has windows of its own. The last of them end with the filter's row,
        and may include taps that the ones before have, too.
    """

    size: int
    out: int
    kernel: int
    down: int
    up: int
    pad: int
    dilation: int
    shared: int = 1

    @property
    def tap_step(self) -> int:
        return self.up // math.gcd(self.up, self.dilation)

    @property
    def step(self) -> int:
        return self.dilation // math.gcd(self.up, self.dilation)

    @functools.cached_property
    def residues(self) -> list[Residue]:
        found = []
        for place in range(min(self.up, self.out)):
            at = {tap: place - self.pad + tap * self.dilation for tap in range(min(self.tap_step, self.kernel))}
            first = next((tap for tap in at if at[tap] % self.up == 0), None)
            if first is None:
                found.append(Residue(place, 0, 0, 0))
            else:
                taps = -(-(self.kernel - first) // (self.tap_step * self.shared))
                found.append(Residue(place, first, taps, at[first] // self.up))
        return sorted(found, key=lambda residue: -residue.taps)

    @property
    def pixels(self) -> int:
        return -(-self.out // self.up) + self.reach

    @property
    def reach(self) -> int:
        """Distance from the first of the shared taps to the last."""
        return (self.shared - 1) * self.dilation

    @property
    def lower(self) -> int:
        return min((residue.origin for residue in self.residues if residue.taps), default=0)

    @property
    def upper(self) -> int:
        return self.lower + (self.pixels - 1) * self.down + 1 - self.size

    def offset(self, residue: Residue) -> int:
        """The offset of the residue's first tap."""
        return residue.origin - self.lower if residue.taps else 0

    @property
    def farthest(self) -> int:
        """The largest offset of a tap."""
        last = {r: min(r.taps * self.shared, self.kernel) - self.shared for r in self.residues}
        return max(self.offset(r) + max(0, tap) * self.step for r, tap in last.items())


@functools.lru_cache(maxsize=4096)
def axes(problem: ConvProblem, shared: int = 1) -> tuple[Axis, ...]:
    """The axes of the forward pass with the fewest possible spatial dimensions; `shared` taps of the last axis share
    their pixels."""
    p = folded(joined(problem), 1)
    sizes = (p.input_spatial, p.output_spatial, p.kernel_spatial, p.window_strides, p.lhs_dilation)
    lows = tuple(low for low, _ in p.padding)
    *others, last = (Axis(*of) for of in zip(*sizes, lows, p.rhs_dilation, strict=True))
    return (*others, dataclasses.replace(last, shared=shared))


@functools.lru_cache(maxsize=4096)
def tap_counts(problem: ConvProblem, shared: int = 1) -> tuple[tuple[int, ...], ...]:
    """The number of taps of each phase along each axis."""
    return tuple(itertools.product(*([residue.taps for residue in axis.residues] for axis in axes(problem, shared))))


def pixels(problem: ConvProblem, shared: int = 1) -> int:
    """The pixels of a phase in all images."""
    return folded(joined(problem), 1).batch * math.prod(axis.pixels for axis in axes(problem, shared))


def phases(problem: ConvProblem) -> int:
    return math.prod(len(axis.residues) for axis in axes(problem))
