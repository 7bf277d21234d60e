"""Kernel families: convolutions whose channels or groups another family refuses, or computes slowly, computed by its
kernels as an equivalent convolution. XLA pads the operands before, and takes the result out of the kernels' result: see
`Around`.

No sum changes, whatever the operands hold. Padding adds products of two zeros only, so an infinity or a NaN reaches
what it reaches in the original convolution. Merged groups add elements to a weight gradient, which are left out of the
result. The groups of other passes are not merged: the zeros of a block-diagonal filter would meet the infinities and
NaNs of other groups.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, TypeVar

from jax import numpy as jnp

from jax_splitk.kernels.base import cost_model
from jax_splitk.kernels.base.family import Family, Translated
from jax_splitk.problems.conv_passes import ConvDgradProblem
from jax_splitk.problems.conv_wgrad import ConvProblem, ConvWgradProblem
from jax_splitk.problems.problem import nbytes
from jax_splitk.runtime.around import Around, Change, Crop, Diagonal, Pad
from jax_splitk.runtime.plan import CustomCall, DevicePlan
from jax_splitk.runtime.target import Target

_Config = TypeVar("_Config")

_UNIT_BYTES = 16  # what TMA loads, in units
# Rows of an operand that begin at such multiples are read faster, but take more bytes: with one tap, with several.
_ROW_BYTES, _SHARED_ROW_BYTES = 32, 64
_FEW_CHANNELS = 16  # the family gather is as fast for them
_MOST_PADDING = 2  # times the channels of a group
_VECTOR, _FEW_COLUMNS = 4, 16  # channels of the result that the kernels store well: multiples, and few ones
_MOST_MERGED, _FEW_MERGED = 256, 64  # channels of all groups: at most, and where memory is the limit
# XLA's rate relative to the memory's: six pads and slices of 41 to 71 MB took 0.88 to 1.04 of the estimate (H200).
_COPY_SHARE = 0.75


class Adapted(Translated[ConvProblem, _Config]):
    """A family that uses another one's kernels on an equivalent problem, with operations of XLA's around them."""

    def __init__(self, inner: Family[Any, _Config], name: str, where_refused: bool = False) -> None:
        """`where_refused`: serves only problems that `inner` refuses. It then is no faster than `inner` for others."""
        super().__init__(inner, name)
        self._where_refused = where_refused

    @abc.abstractmethod
    def reshaping_refusal(self, problem: ConvProblem) -> str | None:
        """Why a problem has no equivalent."""

    @abc.abstractmethod
    def translated(self, problem: ConvProblem) -> ConvProblem:
        """The equivalent problem."""

    @abc.abstractmethod
    def around(self, problem: ConvProblem) -> Around:
        """XLA's operations."""

    def problem_refusal(self, problem: ConvProblem) -> str | None:
        if (reason := self.reshaping_refusal(problem)) is not None:
            return reason
        if self._where_refused and self.inner.problem_refusal(problem) is None:
            return f"a problem of {self.inner.name}; accepted: problems that it refuses"
        reason = super().problem_refusal(problem)
        return reason and f"as {self.translated(problem).brief}: {reason}"

    def _copied(self, problem: ConvProblem) -> list[tuple[int, int]]:
        """Bytes of each array that XLA changes, before and after."""
        around, other = self.around(problem), self.translated(problem)
        arrays = zip(
            (*around.operands, around.result),
            (*problem.operand_types, (problem.out_shape, problem.out_dtype)),
            (*other.operand_types, (other.out_shape, other.out_dtype)),
            strict=True,
        )
        return [(nbytes(*own), nbytes(*changed)) for change, own, changed in arrays if change is not None]

    def workspace_bytes(self, problem: ConvProblem, config: _Config) -> int:
        """Includes the arrays that XLA makes for the kernels."""
        return super().workspace_bytes(problem, config) + sum(changed for _, changed in self._copied(problem))

    def copy_seconds(self, problem: Any, target: Target) -> float:
        """The time in which the device moves the bytes of the changes."""
        rates, copied = cost_model.rates(target.platform, target.device_kind), self._copied(problem)
        return sum(map(sum, copied)) / (_COPY_SHARE * rates.memory_bytes) + len(copied) * rates.reduce_seconds

    def estimates(self, problem: Any, configs: Sequence[_Config], target: Target) -> list[float]:
        """The other family's estimates, and the time of the copies."""
        copies = self.copy_seconds(problem, target)
        return [own + copies for own in self.inner.estimates(self.translated(problem), configs, target)]

    def uncertainty(self, problem: Any, target: Target) -> float:
        """That of the other family: with XLA's copies 276 estimates were 4 to 11% off (H200)."""
        return self.inner.uncertainty(problem, target)

    def why_xla_untuned(self, problem: ConvProblem) -> str | None:
        return self.inner.why_xla_untuned(self.translated(problem))

    def plan(self, problem: ConvProblem, config: _Config) -> DevicePlan | CustomCall:
        return dataclasses.replace(super().plan(problem, config), around=self.around(problem))


# ---- padded channels -------------------------------------------------------------------------------------------------


def _above(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _unit(p: ConvProblem, unit_bytes: int = _UNIT_BYTES) -> int:
    return unit_bytes // jnp.dtype(p.dtype).itemsize


def _sides(p: ConvProblem) -> dict[str, int]:
    """The numbers of channels of a group in the operands, by their fields. The channels of a pass's result are left
    out; a weight gradient's operands have both."""
    sides: dict[str, int] = dict(zip(("in_channels", "out_channels"), p.group_channels, strict=True))
    if not isinstance(p, ConvWgradProblem):
        del sides["in_channels" if isinstance(p, ConvDgradProblem) else "out_channels"]
    return sides


@functools.lru_cache(maxsize=4096)
def padded(p: ConvProblem, long_rows: bool = False) -> ConvProblem:
    """The problem with the channels of each group padded to multiples of 16 bytes. The result keeps its channels if
    there is one group, and the kernels store several of them at a time, or only few. With 61 channels of the result the
    family im2col took 105 us, where 64 channels are estimated at 32, and XLA's slice takes 21 (H200).

    `long_rows`: channels that are padded become multiples of 32 bytes, of 64 where several taps read each row, unless
    that doubles them. 32 problems take 0.86 times as long in the mean, from 0.55 to 1.05 (H200).
    """
    unit, groups, found = _unit(p), p.feature_group_count, {}
    row = _unit(p, _SHARED_ROW_BYTES if math.prod(p.kernel_spatial) > 1 else _ROW_BYTES) if long_rows else unit
    for field, channels in zip(("in_channels", "out_channels"), p.group_channels, strict=True):
        stays = groups == 1 and (channels % _VECTOR == 0 or channels <= _FEW_COLUMNS)
        least, wide = _above(channels, unit), _above(channels, row)
        if channels == least or (field not in _sides(p) and stays):
            found[field] = channels * groups
        else:
            found[field] = (wide if wide < 2 * least else least) * groups
    return dataclasses.replace(p, **found)


def _view(p: ConvProblem, name: str) -> tuple[int, ...]:
    """The shape of an array with channels by groups."""
    groups, (channels, columns) = p.feature_group_count, p.group_channels
    if name == "rhs":
        return (*p.kernel_spatial, channels, groups, columns)
    shape: tuple[int, ...] = getattr(p, f"{name}_shape")
    return (*shape[:-1], groups, channels if name == "lhs" else columns)


class Padded(Adapted[_Config]):
    """Pads channels to the multiples that TMA loads."""

    def __init__(
        self, inner: Family[Any, _Config], name: str, where_refused: bool = False, long_rows: bool = False
    ) -> None:
        """`long_rows`: the kernels of `inner` read whole rows of channels: see `padded`."""
        super().__init__(inner, name, where_refused)
        self._long_rows = long_rows
        self.ABI += int(long_rows)  # decisions of the time before long rows do not hold

    def reshaping_refusal(self, problem: ConvProblem) -> str | None:
        p, unit = problem, _unit(problem)
        if p.batch_group_count > 1 or p.dtype == "float64":
            return f"batch_group_count {p.batch_group_count}, dtype {p.dtype}; accepted: 1, up to 32 bits"
        if padded(p) == p:
            of_groups = "" if p.feature_group_count == 1 else f" in {p.feature_group_count} groups"
            given = f"{p.in_channels} input and {p.out_channels} output channels{of_groups}"
            return f"{given}, which need no padding; accepted: no multiples of {unit}"
        if p.feature_group_count == 1:
            few = min(_sides(p).values())
            return f"{few} channels; accepted: more than {_FEW_CHANNELS}" if few <= _FEW_CHANNELS else None
        each = p.group_channels
        if all(_above(channels, unit) <= _MOST_PADDING * channels for channels in each):
            return None
        return f"groups of {each[0]} channels to {each[1]}; accepted: at least {_above(unit, 2) // 2} each"

    def translated(self, problem: ConvProblem) -> ConvProblem:
        return padded(problem, self._long_rows)

    def around(self, problem: ConvProblem) -> Around:
        p, q = problem, self.translated(problem)

        def pad(name: str) -> Change | None:
            before, after = _view(p, name), _view(q, name)
            return None if before == after else Pad(before, after, getattr(q, f"{name}_shape"))

        before, after = _view(q, p.result), _view(p, p.result)
        crop = None if before == after else Crop(before, after, p.out_shape)
        return Around(tuple(map(pad, p.operands)), crop, (q.out_shape, q.out_dtype))


# ---- merged groups ---------------------------------------------------------------------------------------------------


class Merged(Adapted[_Config]):
    """Computes the gradient of a grouped convolution's weight as that of one with a single group, whose diagonal blocks
    it is."""

    def __init__(self, inner: Family[Any, _Config], name: str, *others: Family[Any, Any]) -> None:
        """`others`: families that are as fast, so that their problems are refused, unless these have few channels."""
        super().__init__(inner, name)
        self._others = others

    def reshaping_refusal(self, problem: ConvProblem) -> str | None:
        p = problem
        if not isinstance(p, ConvWgradProblem) or p.batch_group_count > 1:
            return f"{p.op} with batch_group_count {p.batch_group_count}; accepted: weight gradients, 1"
        given = f"{p.in_channels} input and {p.out_channels} output channels in {p.feature_group_count} groups"
        most = max(p.in_channels, p.out_channels)
        if p.feature_group_count == 1 or min(p.group_channels) == 1 or most > _MOST_MERGED:
            return f"{given}; accepted: at least 2 groups of 2 channels, {_MOST_MERGED} channels in all"
        other = next((f.name for f in self._others if f.problem_refusal(p) is None), None)
        if other is None or most <= _FEW_MERGED:
            return None
        return f"{given}, a problem of {other}; accepted: {_FEW_MERGED} channels in all, or problems that it refuses"

    def translated(self, problem: ConvProblem) -> ConvProblem:
        return dataclasses.replace(problem, feature_group_count=1)

    def around(self, problem: ConvProblem) -> Around:
        p, q, groups = problem, self.translated(problem), problem.feature_group_count
        channels, columns = p.group_channels
        view = (*p.kernel_spatial, groups, channels, groups, columns)
        diagonal = Diagonal(view, p.rank, p.rank + 2, p.out_shape)
        return Around((None, None), diagonal, (q.out_shape, q.out_dtype))
