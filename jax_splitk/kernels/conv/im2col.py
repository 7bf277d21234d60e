"""Kernel family: dense forward passes and input gradients on Hopper by TMA im2col and WGMMA (device code:
conv/im2col.cu).

Implicit GEMM ("Implicit GEMM Convolution" in CUTLASS's documentation) of [pixels, taps * channels] by [taps * channels,
output channels], whose reduction may be split: see `SplitTileFamily`.

An input gradient is a forward pass of g with the mirrored weight. Where it has strides, each residue of its pixels
modulo the stride meets taps of its own: a phase, which is a dense pass with unit strides over these. Nothing is
multiplied by zeros in between, and all phases are one launch. Dilation of a forward pass's lhs is the same.

Where tiles are narrow, loads are the limit. Few channels have narrower rows of shared memory, so that little of it is
zeros, and the taps of a filter row may share what they read: see `row_bytes` and `Config`.

The constants of its cost model are fitted to the times of one tap in a stage.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

from jax import numpy as jnp

from jax_splitk.kernels.conv.passes import forward
from jax_splitk.kernels.conv.phases import axes, phases, pixels, tap_counts
from jax_splitk.kernels.device.split_k import OUT_CODES
from jax_splitk.kernels.device.split_tile import (
    BOX,
    MAX_ELEMENTS,
    SWIZZLES,
    Costs,
    SplitTile,
    SplitTileFamily,
    is_whole,
    map_dtype,
    operand_map,
)
from jax_splitk.kernels.device.structs import Divisor, Field, Values
from jax_splitk.kernels.device.wgmma_tile import (
    MAX_STAGES,
    MIN_STAGES,
    RESERVED_BYTES,
    ROW_BYTES,
    SHARED_BYTES,
    TILES,
    max_stages,
)
from jax_splitk.kernels.family import conv_buffers, field_refusal
from jax_splitk.kernels.wgrad import refusals
from jax_splitk.kernels.wgrad.geometry import folded, is_matrix_product
from jax_splitk.problems.conv_passes import ConvFpropProblem
from jax_splitk.problems.conv_wgrad import ConvProblem
from jax_splitk.runtime import plan

_MAX_DOWN, _MAX_UP = 8, 16  # TMA's element strides; residues that the kernel's arguments have room for
# TMA's im2col mode by spatial dimensions: corners of the box of window origins, and the largest filter offset.
_IM2COL_LIMITS = {1: (-(2**15), 2**15 - 1, 2**16 - 1), 2: (-128, 127, 255), 3: (-16, 15, 31)}


# Tiles of two consumers whose sums fit into half of the registers.
_TWO_CONSUMERS = ((128, 64), (128, 32), (256, 32), (128, 16), (256, 16))
_NARROW = (16, 32)  # columns of tiles, where a group has no more
_MAX_REACH = 8  # rows of a stage beyond the tile's, for the taps of a filter row
_MAX_BEYOND = 1.3  # times the output's pixels: where a candidate has these taps in a stage
_MIN_GROUP = 32  # channels: of fewer the tensor cores' tiles, and TMA's rows, are mostly empty


@dataclasses.dataclass(frozen=True)
class Config(SplitTile):
    """How a pass is computed: see `SplitTile`. A row of a tile is a pixel.

    Attributes:
      taps: of a filter row that a stage has: 1, or all. All read the same pixels, each from a row of its own on, so
        that these are loaded once; tiles then have pixels between the images' lines, too, which are not stored.
    """

    taps: int = 1

    @property
    def depth(self) -> int:
        return self.taps

    @property
    def stage_bytes(self) -> int:
        rows = self.tile_m + (_MAX_REACH if self.taps > 1 else 0)
        return (rows + self.taps * self.tile_n) * ROW_BYTES

    @property
    def blocks_per_sm(self) -> int:
        """2 also of a tile with two consumers: reductions are short, and the products of one thread block hide what the
        other begins and ends with."""
        fits = 2 * self.shared_bytes <= SHARED_BYTES
        return 2 if (self.tile_m, self.tile_n) in _TWO_CONSUMERS and fits else super().blocks_per_sm


@functools.lru_cache(maxsize=4096)
def row_bytes(problem: ConvProblem) -> int:
    """Of a block of channels, at one tap: a row of shared memory, or a half or a quarter of one, so that a stage has
    several taps instead of zeros. Those of a group end with a block, since others' follow."""
    size = forward(problem).group_channels[0] * jnp.dtype(problem.dtype).itemsize
    if problem.feature_group_count > 1:
        return math.gcd(size, ROW_BYTES)
    several = max(map(math.prod, tap_counts(problem))) > 1
    return next((row for row in SWIZZLES if size <= row), ROW_BYTES) if several else ROW_BYTES


def _block_k(problem: ConvProblem) -> int:
    return row_bytes(problem) // jnp.dtype(problem.dtype).itemsize


def _channel_blocks(problem: ConvProblem) -> int:
    return -(-forward(problem).group_channels[0] // _block_k(problem))


def tile_counts(problem: ConvProblem, config: Config) -> tuple[int, int]:
    """(tiles along pixels, tiles along channels) of a phase and group."""
    return -(-pixels(problem, config.taps) // config.tile_m), -(-forward(problem).group_channels[1] // config.tile_n)


@functools.lru_cache(maxsize=4096)
def shared_taps(problem: ConvProblem) -> int:
    """Taps of a filter row that a stage may have."""
    if is_matrix_product(forward(problem)) or any(axis.up > 1 for axis in axes(problem)):
        return 1
    last = dataclasses.replace(axes(problem)[-1], shared=axes(problem)[-1].kernel)
    fits = last.down == 1 and last.reach <= _MAX_REACH and last.upper <= _IM2COL_LIMITS[len(axes(problem))][1]
    return last.shared if fits else 1


def _residues(problem: ConvProblem, config: Config) -> dict[str, Field]:
    """on_d, on_h, on_w of the device code: of each axis its residues, whose taps are those of the weight as it is; as
    many of each axis, so that device code is the same for many strides."""
    mirrored, found, pitch = not isinstance(problem, ConvFpropProblem), {}, 1
    of = axes(problem, config.taps)
    size = 1 << (max(len(axis.residues) for axis in of) - 1).bit_length()
    for name, axis in zip("whd", reversed(of), strict=False):
        rows = [
            Values(
                "Residue",
                {
                    "taps": Divisor.of(residue.taps),
                    "place": residue.place,
                    "offset": axis.offset(residue),
                    "tap": pitch * (axis.kernel - 1 - residue.first if mirrored else residue.first),
                },
            )
            for residue in axis.residues
        ]
        found[f"on_{name}"] = rows + rows[-1:] * (size - len(rows))
        pitch *= axis.kernel
    return found


def _tap_steps(problem: ConvProblem) -> tuple[int, ...]:
    """From a tap of a residue to its next, in the weight as it is."""
    sign, of = 1 if isinstance(problem, ConvFpropProblem) else -1, axes(problem)
    pitches = [math.prod(other.kernel for other in of[i + 1 :]) for i in range(len(of))]
    return tuple(sign * axis.tap_step * pitch for axis, pitch in zip(of, pitches, strict=True))


class Im2colConv(SplitTileFamily[ConvProblem, Config]):
    """All channels of a group with all."""

    ABI = 2
    file = "conv/im2col.cu"
    kernel = "conv"
    dtypes = refusals.HALVES
    reductions = ("none", "workspace", "cluster")

    # ---- refusals --------------------------------------------------------------------------------------------------

    def problem_refusal(self, problem: ConvProblem) -> str | None:
        p = problem
        return (
            refusals.dtypes(p, self.dtypes)
            or refusals.batch_groups(p)
            or refusals.empty_dimensions(p)
            or self._precision_refusal(p)
            or self._channels_refusal(p)
            or self._axes_refusal(p)
            or self._size_refusal(p)
        )

    def _precision_refusal(self, p: ConvProblem) -> str | None:
        if p.dtype == "float32" and "highest" in p.precision:
            return f"precision {p.precision!r}; accepted: 'default', 'high'"
        return None

    def _channels_refusal(self, p: ConvProblem) -> str | None:
        """Contiguous ones are loaded by 16 bytes, the result's are stored by fours."""
        loaded = 16 // jnp.dtype(p.dtype).itemsize
        of_lhs, of_g = (loaded, loaded) if isinstance(p, ConvFpropProblem) else (4, loaded)
        if p.in_channels % of_lhs or p.out_channels % of_g:
            given = f"{p.in_channels} input and {p.out_channels} output channels"
            return f"{given}; accepted: multiples of {of_lhs} and {of_g}"
        channels, columns = forward(p).group_channels
        if p.feature_group_count > 1 and (channels % _MIN_GROUP or columns % 4):
            given = f"feature_group_count {p.feature_group_count} of {channels} channels to {columns} each"
            return f"{given}; accepted: multiples of {_MIN_GROUP} and 4, or 1"
        return None

    def _axes_refusal(self, p: ConvProblem) -> str | None:
        """Limits of TMA's im2col mode (CUDA driver API, cuTensorMapEncodeIm2col), and of the phases' table."""
        found = axes(p)
        for axis in found:
            if min(axis.down, axis.up) > 1 or axis.down > _MAX_DOWN or axis.up > _MAX_UP:
                given = f"window stride {axis.down} of an input dilated by {axis.up}"
                return f"{given}; accepted: one of them 1, up to {_MAX_DOWN} and {_MAX_UP}"
        if not all(axis.residues[0].taps for axis in found):
            return "an output that no tap meets; accepted: one with products"
        if is_matrix_product(forward(p)):
            return None
        lowest, highest, farthest = _IM2COL_LIMITS[len(found)]
        rank = f"of {len(found)} spatial dimensions"
        for axis in found:
            if not (lowest <= axis.lower <= highest and lowest <= axis.upper <= highest):
                corners = f"windows that begin {axis.lower} and {axis.upper} pixels from the input's first and last"
                return f"{corners} {rank}; accepted: {lowest} to {highest}"
            if axis.farthest > farthest:
                return f"dilated window's reach {axis.farthest} {rank}; accepted: at most {farthest}"
        return None

    def _size_refusal(self, p: ConvProblem) -> str | None:
        most = max(math.prod(shape) for shape in (*p.operand_shapes, p.out_shape))
        if max(most, pixels(p)) > MAX_ELEMENTS:
            return f"operands or a result of more than {MAX_ELEMENTS} elements"
        return None

    def depths(self, tile_m: int, tile_n: int) -> list[int]:
        more = [max_stages(tile_m, tile_n, blocks_per_sm=2)] if (tile_m, tile_n) in _TWO_CONSUMERS else []
        return sorted({*super().depths(tile_m, tile_n), *more})

    def config_refusal(self, problem: ConvProblem, config: Config) -> str | None:
        if (reason := field_refusal(config, taps=sorted({1, shared_taps(problem)}))) is not None:
            return reason
        if config.taps > 1 and not self.stage_counts(config):
            tile = f"tile {config.tile_m}x{config.tile_n} of {config.taps} taps in a stage"
            return f"{tile}; accepted: {MIN_STAGES} stages that fit into {SHARED_BYTES} bytes of shared memory"
        return super().config_refusal(problem, config)

    # ---- plan ------------------------------------------------------------------------------------------------------

    def tiles(self, problem: ConvProblem) -> Sequence[tuple[int, int]]:
        """Of few columns only the narrowest that have them."""
        columns = forward(problem).group_channels[1]
        narrow = next((tile_n for tile_n in _NARROW if columns <= tile_n), None)
        return TILES if narrow is None else [(tile_m, narrow) for tile_m in (64, 128, 192, 256)]

    def whole(self, problem: ConvProblem) -> Iterator[Config]:
        yield from super().whole(problem)
        taps = shared_taps(problem)
        if taps == 1 or pixels(problem, taps) > _MAX_BEYOND * pixels(problem):
            return
        for tile_m, tile_n in self.tiles(problem):
            config = Config(tile_m, tile_n, 0, taps=taps)
            depths = {self.stage_counts(config)[-1:], self.stage_counts(config, blocks_per_sm=2)[-1:]}
            yield from (dataclasses.replace(config, stages=of[0]) for of in depths if of)

    def stage_counts(self, config: Config, blocks_per_sm: int = 1) -> range:
        room = (SHARED_BYTES // blocks_per_sm - RESERVED_BYTES) // config.stage_bytes
        least = -(-config.tile_m * (config.tile_n + 8) * 4 // config.stage_bytes)  # to hold the tile's sums
        return range(max(MIN_STAGES, least), min(MAX_STAGES, room) + 1)

    def _chains(self, problem: ConvProblem, config: Config) -> list[int]:
        """Stages of the reduction of each phase."""
        blocks = _channel_blocks(problem) * row_bytes(problem)
        return [-(-math.prod(of) * blocks // ROW_BYTES) for of in tap_counts(problem, config.taps)]

    def chains(self, problem: ConvProblem, config: Config) -> list[int]:
        return sorted(self._chains(problem, config), reverse=True)

    def thread_blocks(self, problem: ConvProblem, config: Config) -> int:
        """Of one split."""
        return math.prod(tile_counts(problem, config)) * phases(problem) * problem.feature_group_count

    def grid(self, problem: ConvProblem, config: Config) -> tuple[int, int, int]:
        return self.thread_blocks(problem, config), 1, config.splits

    def args(self, problem: ConvProblem, config: Config) -> Values:
        """Sizes of the product of a phase and group, what divides a thread block's number, and the geometry by axes;
        whether a single tile reads any of the operand, so that it need not stay in the L2. `beyond`: a block of
        channels that no group has."""
        of, (rows, columns), p = axes(problem, config.taps), tile_counts(problem, config), forward(problem)
        return Values(
            "Args",
            {
                "m": pixels(problem, config.taps),
                "n": p.group_channels[1],
                "columns": Divisor.of(columns * p.feature_group_count),
                "phases": Divisor.of(phases(problem)),
                "splits": Divisor.of(config.splits),
                "blocks": Divisor.of(_channel_blocks(problem)),
                "a_once": int(columns == 1),
                "b_once": int(rows == 1),
                "residues": tuple(Divisor.of(len(axis.residues)) for axis in of),
                "pixels": tuple(Divisor.of(axis.pixels) for axis in of),
                "out": tuple(axis.out for axis in of),
                "up": tuple(axis.up for axis in of),
                "down": tuple(axis.down for axis in of),
                "lower": tuple(axis.lower for axis in of),
                "step": tuple(axis.step for axis in of),
                "tap_step": _tap_steps(problem),
                **_residues(problem, config),
                "beyond": -(-p.in_channels // _block_k(problem)),
                "k": p.group_channels[0],
                "pitch": p.out_channels,
                "group_columns": Divisor.of(columns),
            },
        )

    def macros(self, problem: ConvProblem, config: Config) -> dict[str, int]:
        of, is_forward = axes(problem, config.taps), isinstance(problem, ConvFpropProblem)
        return {
            "ELEMENT": OUT_CODES[problem.dtype],
            **super().macros(problem, config),
            "AXES": 0 if is_matrix_product(forward(problem)) else len(of),
            "PHASED": int(config.taps > 1 or any(axis.up > 1 for axis in of)),
            "TAPS": config.taps,
            "TAP_ROWS": of[-1].dilation if config.taps > 1 else 0,
            "GROUPED": int(problem.feature_group_count > 1),
            "EMPTY": int(min(self._chains(problem, config)) < config.splits),
            "ROW_BYTES": row_bytes(problem),
            "B_MN": int(is_forward),
            "B_WHOLE": int(is_forward and _is_whole(problem, config)),
        }

    def buffers(self, problem: ConvProblem, config: Config) -> tuple[plan.Buffer, ...]:
        """The operands, the result, the workspace."""
        return conv_buffers(problem, self.workspace_bytes(problem, config))

    def maps(self, problem: ConvProblem, config: Config) -> tuple[plan.TiledMap | plan.Im2colMap, plan.TiledMap]:
        p, order = problem, "bkn" if isinstance(problem, ConvFpropProblem) else "bnk"
        weight = (p.taps, p.group_channels[0], p.out_channels)
        whole = _is_whole(p, config)
        return _lhs_map(p, config), operand_map(1, p.dtype, weight, order, config.tile_n, row_bytes(p), whole)


def _is_whole(problem: ConvProblem, config: Config) -> bool:
    """Whether tiles begin and end with boxes of a forward pass's weight."""
    return config.tile_n >= BOX and is_whole(problem.group_channels[1])


def _lhs_map(problem: ConvProblem, config: Config) -> plan.TiledMap | plan.Im2colMap:
    p, of = folded(forward(problem), 1), axes(problem, config.taps)[::-1]
    if is_matrix_product(p):
        matrix = (1, pixels(problem), p.in_channels)
        return operand_map(0, p.dtype, matrix, "bmk", config.tile_m, row_bytes(problem))
    dims = p.lhs_shape[::-1]
    return plan.Im2colMap(
        buffer=0,
        dtype=map_dtype(p.dtype),
        dims=dims,
        strides=plan.tensor_map_strides(dims, jnp.dtype(p.dtype).itemsize),
        element_strides=(1, *(axis.down for axis in of), 1),
        lower=tuple(axis.lower for axis in of),
        upper=tuple(axis.upper for axis in of),
        channels=_block_k(problem),
        pixels=config.tile_m + of[0].reach,
        swizzle=SWIZZLES[row_bytes(problem)],
    )


class FpropIm2col(Im2colConv):
    name = "fprop_im2col"


class DgradIm2col(Im2colConv):
    """Its weight is K-major, as WGMMA wants it of float32."""

    name = "dgrad_im2col"
    dtypes = (*refusals.HALVES, "float32")


FPROP = FpropIm2col(Config, Costs)
DGRAD = DgradIm2col(Config, Costs)
