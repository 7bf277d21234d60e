"""Configs of dense passes (`im2col`): tiles, pipelines and workers.

There is either a thread block for each tile, or persistent thread blocks (`workers`; see CUTLASS's documentation). A
persistent thread block computes one tile after the other: it stores the results of a tile while it multiplies the next
one and loads the one after that. If its tiles have one column, and the column's weight fits beside the stages, it loads
the weight once. That is known as a weight-stationary schedule.
"""

import dataclasses
import functools
import math

from jax import numpy as jnp

from jax_splitk.kernels.base import refusals
from jax_splitk.kernels.base.geometry import is_matrix_product
from jax_splitk.kernels.contraction.joined import joined
from jax_splitk.kernels.contraction.phases import axes, phases, pixels, tap_counts
from jax_splitk.kernels.device.split_tile import SWIZZLES, SplitTile
from jax_splitk.kernels.device.wgmma_tile import (
    BOX,
    MAX_COLUMNS,
    MAX_STAGES,
    RESERVED_BYTES,
    ROW_BYTES,
    SHARED_BYTES,
    rows_of,
)
from jax_splitk.problems.conv_passes import ConvFpropProblem
from jax_splitk.problems.conv_wgrad import ConvProblem

# TMA's im2col mode by spatial dimensions: corners of the box of window origins, and the largest filter offset.
IM2COL_LIMITS = {1: (-(2**15), 2**15 - 1, 2**16 - 1), 2: (-128, 127, 255), 3: (-16, 15, 31)}
BARRIER_BYTES = 256  # most bytes of shared memory besides those that a launch asks for
_LEAST_ROW = 32  # bytes of an instruction's k
STEPS_OF_STAGE = 4  # instructions' k of a stage with one tap: 128 bytes
_ALIGNMENT = 1024  # of stages
_TRANSPOSED_FLOPS = 16e9  # of a pass whose weight is transposed to save rows: about 25 us
MAX_REACH = 8  # rows of a stage beyond the tile's, for the taps that share its pixels
_FEW_SUMS = 48  # most sums of a thread of two consumers, for two thread blocks to share the registers


@dataclasses.dataclass(frozen=True)
class Config(SplitTile):
    """How a pass is computed: see `SplitTile`.

    Attributes:
      taps: number of a filter row's neighbouring taps in a stage. They read the same pixels, each starting at another
        row of the stage, so the pixels are loaded once for all of them. With several taps, tiles also have pixels
        between the lines of images, which are not stored. If the number does not divide the row's length, the last
        stage of a row multiplies some taps with zeros.
      swap: False puts pixels on the tile's M side and output channels on N; True the reverse.
      workers: persistent thread blocks, which share the tiles; 0: as many thread blocks as tiles.
    """

    taps: int = 1
    swap: bool = False
    workers: int = 0

    @property
    def pixels(self) -> int:
        """The pixels of a tile."""
        return self.tile_n if self.swap else self.tile_m

    @property
    def channels(self) -> int:
        """Output channels of a tile."""
        return self.tile_m if self.swap else self.tile_n

    @property
    def channel_rows(self) -> int:
        """Rows of a stage for the output channels at one tap."""
        return rows_of(self.channels)

    @property
    def depth(self) -> int:
        return self.taps

    @property
    def pixel_bytes(self) -> int:
        """Bytes of a stage for the pixels."""
        return (self.pixels + (MAX_REACH if self.taps > 1 else 0)) * ROW_BYTES

    @property
    def stage_bytes(self) -> int:
        return self.pixel_bytes + self.taps * self.channel_rows * ROW_BYTES

    @property
    def teams(self) -> int:
        """Teams of consumers, which take turns at the tiles."""
        return 2 if self.workers and self.consumers == 1 else 1

    @property
    def threads(self) -> int:
        return 128 * (self.consumers * self.teams + 1)

    @property
    def shared_bytes(self) -> int:
        return super().shared_bytes + self.result_bytes

    @property
    def result_bytes(self) -> int:
        """Shared memory besides the stages, for the results of a tile that are stored while the next tile is
        multiplied."""
        return self.teams * self.pixels * self.channel_rows * 2 if self.workers else 0

    @property
    def blocks_per_sm(self) -> int:
        """2 also for a tile with two consumers: reductions are short, and the products of one thread block hide the
        beginning and the end of the other's tile."""
        if self.workers:
            return 1
        fits = 2 * self.shared_bytes <= SHARED_BYTES
        return 2 if self.consumers == 2 and self.thread_sums <= _FEW_SUMS and fits else super().blocks_per_sm

    @property
    def room(self) -> int:
        """Bytes of shared memory for the stages of a persistent thread block."""
        return SHARED_BYTES - RESERVED_BYTES - BARRIER_BYTES - self.result_bytes

    @property
    def most_stages(self) -> int:
        """The largest number of stages of a persistent thread block."""
        return min(MAX_STAGES, self.room // self.stage_bytes)

    @property
    def result_rows(self) -> int:
        """Rows of 128 bytes for a tile's results."""
        return self.pixels * -(-self.channels * 2 // ROW_BYTES)


@functools.lru_cache(maxsize=4096)
def is_padded(problem: ConvProblem) -> bool:
    """Whether groups are padded to whole blocks of channels with the zeros that TMA puts beyond the end of a dimension.
    The tensor maps then have a dimension for the groups, so that the next group's channels are beyond this end."""
    size, groups = _channel_bytes(problem), problem.feature_group_count
    return groups > 1 and size % (ROW_BYTES // 2) > 0 and len(axes(problem)) < 3


def transposes(problem: ConvProblem) -> bool:
    """Whether a kernel first transposes the weight in the workspace: a forward pass's, whose columns are contiguous, if
    they are float32, which WGMMA reads only K-major, or if a group's are no whole 16 bytes, which TMA cannot load. Also
    if the last box of a group's columns is mostly empty, and the pass is so large that this costs more than to
    transpose: TMA's time is that of whole boxes."""
    if not isinstance(problem, ConvFpropProblem):
        return False
    columns = problem.group_channels[1]
    if problem.dtype == "float32" or columns * jnp.dtype(problem.dtype).itemsize % 16:
        return True
    is_large = problem.taps > 1 and problem.flops >= _TRANSPOSED_FLOPS
    return is_large and BOX < columns < MAX_COLUMNS and 0 < columns % BOX <= BOX // 2


def weight_shape(problem: ConvProblem) -> tuple[int, int, int]:
    """(taps, columns, k) of a weight that is contiguous along k: a transposed one, or an input gradient's."""
    p = joined(problem)
    return p.taps, p.group_channels[1], p.in_channels


def weight_bytes(problem: ConvProblem) -> int:
    """Bytes at the start of the workspace for the transposed weight."""
    size = math.prod(weight_shape(problem)) * jnp.dtype(problem.dtype).itemsize
    return -(-size // ROW_BYTES) * ROW_BYTES if transposes(problem) else 0


def is_mn_major(problem: ConvProblem) -> bool:
    """Whether the weight is read as a forward pass has it, contiguous along its columns."""
    return isinstance(problem, ConvFpropProblem) and not transposes(problem)


def im2col_limits(problem: ConvProblem) -> tuple[int, int, int]:
    """`IM2COL_LIMITS` by the dimensions of the tensor map of lhs, of which the groups may be one."""
    return IM2COL_LIMITS[len(axes(problem)) + is_padded(problem)]


def _channel_bytes(problem: ConvProblem) -> int:
    """Bytes of a group's channels."""
    return joined(problem).group_channels[0] * jnp.dtype(problem.dtype).itemsize


@functools.lru_cache(maxsize=4096)
def row_bytes(problem: ConvProblem) -> int:
    """Bytes of a block of channels at one tap: a row of shared memory, or a half or a quarter of a row, so that a stage
    has several taps instead of zeros. With groups that are not padded it divides the channels of a group, since the
    next group's channels follow."""
    size = _channel_bytes(problem)
    if problem.feature_group_count > 1 and not is_padded(problem):
        return math.gcd(size, ROW_BYTES)
    several = max(map(math.prod, tap_counts(problem))) > 1
    return next((row for row in SWIZZLES if size <= row), ROW_BYTES) if several else ROW_BYTES


def last_steps(problem: ConvProblem) -> int:
    """Instructions of the last block of a tap's channels, if it is a whole row: those with a channel. Others would
    multiply zeros."""
    rest = _channel_bytes(problem) % ROW_BYTES if row_bytes(problem) == ROW_BYTES else 0
    return -(-(rest or ROW_BYTES) // _LEAST_ROW)


def channel_blocks(problem: ConvProblem) -> int:
    """Blocks of a group's channels."""
    return -(-_channel_bytes(problem) // row_bytes(problem))


def block_k(problem: ConvProblem) -> int:
    return row_bytes(problem) // jnp.dtype(problem.dtype).itemsize


def tile_counts(problem: ConvProblem, config: Config) -> tuple[int, int]:
    """(tiles along pixels, tiles along channels) of a phase and group."""
    rows, columns = pixels(problem, config.taps), joined(problem).group_channels[1]
    return -(-rows // config.pixels), -(-columns // config.channels)


@functools.lru_cache(maxsize=4096)
def shared_taps(problem: ConvProblem) -> tuple[int, ...]:
    """The numbers of a filter row's taps that a stage may have, in increasing order: 1, and those whose reach is at
    most `MAX_REACH`."""
    last = axes(problem)[-1]
    if is_matrix_product(joined(problem)) or last.down > 1 or any(axis.up > 1 for axis in axes(problem)):
        return (1,)
    counts = range(2, min(last.kernel, MAX_REACH // last.dilation + 1) + 1)
    shared = (dataclasses.replace(last, shared=count) for count in counts)
    return (1, *(axis.shared for axis in shared if axis.upper <= im2col_limits(problem)[1]))


def tile_count(problem: ConvProblem, config: Config) -> int:
    """Tiles of a phase, in all groups."""
    return math.prod(tile_counts(problem, config)) * problem.feature_group_count


def column_count(problem: ConvProblem, config: Config) -> int:
    """Columns of tiles, in all groups."""
    return tile_counts(problem, config)[1] * problem.feature_group_count


def chains(problem: ConvProblem, config: Config) -> list[int]:
    """Stages of the reduction of each phase."""
    blocks = channel_blocks(problem) * row_bytes(problem)
    return [-(-math.prod(of) * blocks // ROW_BYTES) for of in tap_counts(problem, config.taps)]


@functools.lru_cache(maxsize=4096)
def stationary_bytes(problem: ConvProblem, config: Config) -> int:
    """Bytes of shared memory for the whole weight of a column of tiles, which has no zeros in place of instructions
    that the kernel has not."""
    stages, rows = chains(problem, config)[0], config.channel_rows if is_mn_major(problem) else config.channels
    cut = stages // channel_blocks(problem) * (ROW_BYTES - last_steps(problem) * _LEAST_ROW)
    return -(-(stages * ROW_BYTES - cut) * config.taps * rows // _ALIGNMENT) * _ALIGNMENT


def stationary_stages(problem: ConvProblem, config: Config) -> int:
    """The largest number of stages beside a stationary weight, 0 if phases have different weights."""
    if phases(problem) > 1:
        return 0
    return min(MAX_STAGES, max(0, config.room - stationary_bytes(problem, config)) // config.pixel_bytes)


def is_stationary(problem: ConvProblem, config: Config) -> bool:
    """Whether a persistent thread block loads its weight once, and keeps it beside the stages: if it has one column of
    tiles, and the stages leave room."""
    one_column = config.workers > 0 and config.workers % column_count(problem, config) == 0
    return one_column and config.stages <= stationary_stages(problem, config)


def weight_row(problem: ConvProblem, config: Config) -> int:
    """Bytes along k of a part of the weight that is loaded at once: a block. All blocks of a stationary weight are
    whole parts."""
    if row_bytes(problem) < ROW_BYTES or not is_stationary(problem, config):
        return row_bytes(problem)
    return math.gcd(last_steps(problem), STEPS_OF_STAGE) * _LEAST_ROW


def shared_bytes(problem: ConvProblem, config: Config) -> int:
    """Bytes of shared memory that a launch asks for."""
    if not is_stationary(problem, config):
        return config.shared_bytes
    beside = stationary_bytes(problem, config) + config.result_bytes + RESERVED_BYTES
    return beside + config.stages * config.pixel_bytes


def can_persist(problem: ConvProblem) -> bool:
    """Whether a persistent thread block can hand over its results: they have 16 bits and are stored in units of 16
    bytes. Each phase must have taps, since phases of zeros are no faster this way."""
    halves = {problem.dtype, problem.out_dtype} <= set(refusals.HALVES)
    return halves and joined(problem).group_channels[1] % 8 == 0 and all(map(math.prod, tap_counts(problem)))
