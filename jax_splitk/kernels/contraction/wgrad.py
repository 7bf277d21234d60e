"""Kernel family: convolution weight gradients on Hopper by TMA im2col and WGMMA (device code: contraction/wgrad.cu).

The output [taps * C, K] of a feature group is cut into tiles and the reduction over N*P*Q pixels into splits: implicit
GEMM with parallel split-k, as in CUTLASS 2.x for SM80 ("Implicit GEMM Convolution" in CUTLASS's documentation), rebuilt
on the Hopper atoms of CuTe.

The kernel has two or three spatial dimensions. Plain dimensions (kernel 1, stride 1, no padding) are folded into the
dimension before them: see `folded`.

A box of 64 channels may reach beyond its group. The next group's channels are then rows or columns of their own, which
are not stored.
"""

import dataclasses
import math
from collections.abc import Iterator

from jax_splitk.kernels.base import refusals
from jax_splitk.kernels.base.family import box_map, field_macros, varied
from jax_splitk.kernels.base.geometry import bytes_touched, folded, geometry, is_matrix_product
from jax_splitk.kernels.base.split import SplitFamily, nearby, one_block_apart, whole_fours
from jax_splitk.kernels.base.work import Work
from jax_splitk.kernels.contraction.im2col_config import IM2COL_LIMITS
from jax_splitk.kernels.device import split_k, wgmma_tile
from jax_splitk.kernels.device.structs import Divisor, Struct
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime import plan
from jax_splitk.runtime.target import Target

BLOCK_K = 64
SLOT = 64  # channels of a TMA box
LOADED = 8  # channels at whose multiples TMA's boxes begin
LEAST = 40  # channels of a group: of fewer the boxes are mostly zeros or other groups
# Blocks of pixels that the tensor cores add of a float32 result. The error is 2.8e-5 relative over 380 of them
# (measured).
MAX_FLOAT32_CHAIN = 128
MAX_GRID_Z = 65535
MAX_TAIL_SPLITS = 8
TAIL_CHUNKS = 4  # float4 of a thread of `reduce_tail`

LINE_FLOATS = 32  # of an L2 line
DISCARD_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True)
class Config(wgmma_tile.WgmmaTile):
    """How a weight gradient is computed.

    Attributes:
      tile_m, tile_n, stages: see `WgmmaTile`.
      swap: False puts (filter tap, input channel) on the tile's M side and output channels on N; True the reverse.
      splits: parts of the reduction over N*P*Q; none may be empty.
      whole_tiles: how many of the first tiles are not split. They fill whole waves, and the splits of the other tiles
        fill the last wave.
    """

    swap: bool
    splits: int
    whole_tiles: int = 0


def k_tiles(problem: ConvWgradProblem) -> int:
    """Blocks of pixels in the reduction."""
    return -(-problem.reduction_size // BLOCK_K)


def chained_stages(problem: ConvWgradProblem, config: Config) -> int:
    """Stages that the tensor cores add before fp32 additions continue (macro CHAIN); 0 for all stages of a split or
    tile."""
    blocks = -(-k_tiles(problem) // (1 if config.whole_tiles else config.splits))
    is_long = problem.out_dtype == "float32" and blocks > MAX_FLOAT32_CHAIN
    return MAX_FLOAT32_CHAIN if is_long and config.may_chain else 0


def takes_turns(problem: ConvWgradProblem, config: Config) -> bool:
    """Whether splits take turns at the blocks of pixels, so that all thread blocks read neighbouring memory at the same
    time.

    Splits of matrix products do, because memory limits them. Operands that only one tile reads then get the hint that
    the L2 need not keep them.
    """
    return is_matrix_product(problem) and config.splits > 1 and not config.whole_tiles


def discards(problem: ConvWgradProblem, config: Config) -> bool:
    """Whether the reduction drops the partial sums' lines from the L2 (macro DISCARD).

    It does so only for whole lines, many enough to be worth the instructions, and if memory is the limit: this gains 2%
    on 1x1 convolutions, and costs 1% on others.
    """
    stride = whole_fours(math.prod(problem.out_shape))
    many = config.splits * stride * 4 >= DISCARD_BYTES
    return takes_turns(problem, config) and stride % LINE_FLOATS == 0 and many


def _group_refusal(p: ConvWgradProblem) -> str | None:
    if p.feature_group_count > MAX_GRID_Z:
        return f"feature_group_count {p.feature_group_count}; accepted: 1 to {MAX_GRID_Z}"
    channels, out_channels = p.group_channels
    if p.feature_group_count > 1 and (channels % LOADED or out_channels % LOADED or min(p.group_channels) < LEAST):
        each = f"{channels} input and {out_channels} output channels each"
        accepted = f"multiples of {LOADED} channels from {LEAST} on, or 1"
        return f"feature_group_count {p.feature_group_count} with {each}; accepted: {accepted}"
    return None


def _tma_refusal(p: ConvWgradProblem) -> str | None:
    """The limits of TMA's im2col mode (CUDA driver API, cuTensorMapEncodeIm2col)."""
    if is_matrix_product(p):
        return None
    lowest, highest, farthest = IM2COL_LIMITS[folded(p).rank]
    for axis in range(p.rank):  # a dimension that was folded away is within every limit
        where = f"in spatial dimension {axis}"
        stride, (low, high) = p.window_strides[axis], p.padding[axis]
        reach = (p.kernel_spatial[axis] - 1) * p.rhs_dilation[axis]
        if stride > 8:
            return f"window stride {stride} {where}; accepted: at most 8"
        if not lowest <= -low <= highest:
            return f"padding {low} {where}; accepted: {-highest} to {-lowest}"
        if not lowest <= high - reach <= highest:
            return f"padding {high} less the dilated window's reach {reach} {where}; accepted: {lowest} to {highest}"
        if reach > farthest:
            return f"dilated window's reach {reach} {where}; accepted: at most {farthest}"
    return refusals.padded_input(p, BLOCK_K)


# Every config that the tuner may try, apart from splits. All of them must compile.
VARIANTS = [
    Config(*tile, stages, swap, 1)
    for tile in wgmma_tile.TILES
    for stages in wgmma_tile.depths(*tile)
    for swap in (False, True)
]


def _x_map(problem: ConvWgradProblem) -> plan.TiledMap | plan.Im2colMap:
    if is_matrix_product(problem):
        return _matrix_map(problem, 0, problem.in_channels)
    p = folded(problem)
    dims, reach = p.lhs_shape[::-1], geometry(p, p.rank).reach
    return plan.Im2colMap(
        buffer=0,
        dtype=p.dtype,
        dims=dims,
        strides=plan.tensor_map_strides(dims, 2),
        element_strides=(1, *p.window_strides[::-1], 1),
        lower=tuple(-low for low, _ in p.padding[::-1]),
        upper=tuple(p.padding[axis][1] - reach[axis] for axis in range(p.rank))[::-1],
        channels=SLOT,
        pixels=BLOCK_K,
    )


def _matrix_map(p: ConvWgradProblem, buffer: int, channels: int) -> plan.TiledMap:
    return box_map(p, buffer, (p.reduction_size, channels), (SLOT, BLOCK_K))


class Im2col(SplitFamily[ConvWgradProblem, Config]):
    """Preferred whenever it is legal: no shape is known on which XLA is faster by more than tuning recovers."""

    name = "wgrad_im2col"
    ABI = 2
    file = "contraction/wgrad.cu"

    def problem_refusal(self, problem: ConvWgradProblem) -> str | None:
        return (
            refusals.batch_groups(problem)
            or refusals.operands(problem, (1, 2, 3), _group_refusal)
            or refusals.input_pixels(problem)
            or refusals.output_pixels(problem, refusals.INT32_MAX - BLOCK_K)
            or refusals.weights(problem)
            or _tma_refusal(problem)
        )

    def config_refusal(self, problem: ConvWgradProblem, config: Config) -> str | None:
        if (reason := wgmma_tile.tile_refusal(config)) is not None:
            return reason
        most = wgmma_tile.max_stages(config.tile_m, config.tile_n)
        if not wgmma_tile.MIN_STAGES <= config.stages <= most:
            return f"stages {config.stages}; accepted with this tile: {wgmma_tile.MIN_STAGES} to {most}"
        if not isinstance(config.swap, bool):
            return f"swap {config.swap!r}; accepted: True or False"
        if (reason := split_k.splits_refusal(config.splits, k_tiles(problem), "blocks of pixels")) is not None:
            return reason
        tiles = math.prod(self.tile_counts(problem, config))
        least, most = max(1, tiles - split_k.MAX_GRID_Y), tiles - 1
        if config.whole_tiles == 0:
            return None
        if config.splits == 1 or problem.feature_group_count != 1:
            return f"whole_tiles {config.whole_tiles}; accepted except with several splits of a single group: 0"
        if not least <= config.whole_tiles <= most:
            return f"whole_tiles {config.whole_tiles}; accepted for {tiles} tiles: 0, or {least} to {most}"
        return None

    def tile_counts(self, problem: ConvWgradProblem, config: Config) -> tuple[int, int]:
        """(tiles along M, tiles along N) of a feature group."""
        channels, n = problem.group_channels
        m = problem.taps * -(-channels // SLOT) * SLOT
        if config.swap:
            m, n = n, m
        return -(-m // config.tile_m), -(-n // config.tile_n)

    def rest_tiles(self, problem: ConvWgradProblem, config: Config) -> int:
        """Tiles of a feature group that are split."""
        return math.prod(self.tile_counts(problem, config)) - config.whole_tiles

    def block_counts(self, problem: ConvWgradProblem, config: Config) -> tuple[int]:
        return (k_tiles(problem),)

    def longest_chain(self, problem: ConvWgradProblem, config: Config) -> int:
        """All blocks, if a thread has enough registers to hold the sums of chains, too."""
        return k_tiles(problem) if config.may_chain else MAX_FLOAT32_CHAIN

    def grid_groups(self, problem: ConvWgradProblem) -> int:
        return problem.feature_group_count

    def blocks_per_sm(self, problem: ConvWgradProblem, config: Config) -> int:
        return config.blocks_per_sm

    def variants(self, problem: ConvWgradProblem, target: Target) -> list[Config]:
        return VARIANTS

    def in_waves(self, problem: ConvWgradProblem, config: Config, target: Target, most: int = 8) -> Iterator[Config]:
        """Configs that split all tiles, and configs that split only the tiles of the last wave."""
        yield from super().in_waves(problem, config, target, most)
        blocks, slots = self.thread_blocks(problem, config), self.slots(problem, config, target)
        if blocks > slots and self.least_splits(problem, config) == 1:
            tail = dataclasses.replace(config, whole_tiles=blocks // slots * slots)
            tails = dict.fromkeys(self.with_splits(problem, tail, s) for s in range(2, MAX_TAIL_SPLITS + 1))
            yield from (c for c in tails if self.config_refusal(problem, c) is None)

    def neighbours(self, problem: ConvWgradProblem, config: Config, target: Target) -> list[Config]:
        """The other orientation, a stage less, and other split counts: nearby, between waves, doubled and halved."""
        wanted = nearby(config.splits, self.wave(problem, config, target))
        wanted |= one_block_apart(config.splits, k_tiles(problem))
        fewer = [config.stages - 1] if config.stages > wgmma_tile.MIN_STAGES else []
        return self.other_splits(problem, config, wanted) + varied(config, swap=[not config.swap], stages=fewer)

    def work(self, problem: ConvWgradProblem, config: Config, target: Target) -> Work:
        """Also counts the padding of tiles beyond the problem."""
        # Thread blocks that share an SM share its rates, but hide each other's start and end.
        blocks = self.rest_tiles(problem, config) * problem.feature_group_count * config.splits
        resident = target.cores * config.blocks_per_sm
        chain = -(-k_tiles(problem) // config.splits)
        steps = -(-blocks // target.cores) * chain
        steps += -(-config.whole_tiles // target.cores) * k_tiles(problem)
        waves = -(-blocks // resident) + -(-config.whole_tiles // resident)
        together = min(config.blocks_per_sm, -(-blocks // target.cores))
        return Work(
            **config.stage_work(steps, chain, together),
            rows=steps * self._rows(problem, config),
            memory_bytes=bytes_touched(problem),
            waves=waves,
            stored_bytes=waves * config.tile_m * config.tile_n * 4,
            **self.reduction_work(problem, config),
        )

    def _rows(self, problem: ConvWgradProblem, config: Config) -> float:
        """Lines of 128 bytes that the rows of a stage touch. They begin at the first channels of groups."""
        of_x, of_dy = (config.tile_n, config.tile_m) if config.swap else (config.tile_m, config.tile_n)
        boxes = zip((of_x, of_dy), problem.group_channels, strict=True)
        return sum(tile // SLOT * BLOCK_K * wgmma_tile.lines_of_row(2 * channels) for tile, channels in boxes)

    def workspace_bytes(self, problem: ConvWgradProblem, config: Config) -> int:
        """If only the last tiles are split, bytes for these."""
        if config.whole_tiles:
            return self.rest_tiles(problem, config) * config.splits * config.tile_m * config.tile_n * 4
        return super().workspace_bytes(problem, config)

    def macros(self, problem: ConvWgradProblem, config: Config) -> dict[str, int]:
        """Macros, specialised to tile and rank, and hardly to sizes. Depth (d, o) counts under RANK3 only."""
        return {
            **super().macros(problem, config),
            **field_macros(config, "tile_m", "tile_n", "stages", "swap"),
            "X_TILED": int(is_matrix_product(problem)),
            "RANK3": int(folded(problem).rank == 3),
            "TAIL": int(config.whole_tiles > 0),
            "DISCARD": int(discards(problem, config)),
            "CHAIN": chained_stages(problem, config),
        }

    def maps(self, problem: ConvWgradProblem, config: Config) -> tuple[plan.TiledMap | plan.Im2colMap, ...]:
        return _x_map(problem), _matrix_map(problem, 1, problem.out_channels)

    def _args(self, problem: ConvWgradProblem, config: Config) -> Struct:
        g, (channels, out_channels) = geometry(folded(problem), 3), problem.group_channels
        turns = takes_turns(problem, config)
        # Distance of a split's neighbouring blocks of pixels, and the same as a mixed-radix number.
        step = BLOCK_K * (config.splits if turns else 1)
        rest, step_q = divmod(step, g.out[2])
        rest, step_p = divmod(rest, g.out[1])
        step_n, step_o = divmod(rest, g.out[0])
        blocks, (tiles_m, tiles_n) = k_tiles(problem), self.tile_counts(problem, config)
        x_tiles, dy_tiles = (tiles_n, tiles_m) if config.swap else (tiles_m, tiles_n)
        return Struct(
            "Args",
            {
                "channels": channels,
                "out_channels": out_channels,
                "taps": problem.taps,
                "pitch": problem.out_channels,
                "slots": Divisor.of(-(-channels // SLOT)),  # of a tap
                "kernel": tuple(map(Divisor.of, g.kernel[1:])),
                "out": tuple(map(Divisor.of, g.out)),
                "stride": g.stride,
                "pad": g.pad,
                "dilation": g.dilation,
                "columns": Divisor.of(tiles_n),
                "k_tiles": blocks,
                "k_tiles_per_split": blocks // config.splits if turns else -(-blocks // config.splits),
                **{"step": step, "step_n": step_n, "step_o": step_o, "step_p": step_p, "step_q": step_q},
                # Whether a single tile reads any of the operand.
                "x_once": int(turns and dy_tiles == 1),
                "dy_once": int(turns and x_tiles == 1),
            },
        )

    def main(self, problem: ConvWgradProblem, config: Config) -> plan.Launch:
        params = plan.MapParam(0), plan.MapParam(1), self._args(problem, config)
        return self.launch(problem, config, config.threads, config.shared_bytes, *params)

    def _tail_args(self, problem: ConvWgradProblem, config: Config) -> Struct:
        """Arguments of plans that split only the last tiles: the number of whole tiles, the number of other tiles, and
        the splits of each of these."""
        rest = self.rest_tiles(problem, config)
        return Struct("TailArgs", {"whole": config.whole_tiles, "rest": rest, "splits": config.splits})

    def structs(self, problem: ConvWgradProblem, config: Config) -> list[Struct]:
        return [self._tail_args(problem, config), *super().structs(problem, config)]

    def launches(self, problem: ConvWgradProblem, config: Config) -> tuple[plan.Launch, ...]:
        if not config.whole_tiles:
            return super().launches(problem, config)
        rest, tail, out = self.rest_tiles(problem, config), self._tail_args(problem, config), plan.Pointer(2)
        grid = (config.whole_tiles + rest * config.splits, 1, 1)
        reduce_grid = (config.tile_m * config.tile_n // 4 // (split_k.REDUCE_THREADS * TAIL_CHUNKS), rest, 1)
        main, partials = self.main(problem, config), plan.Pointer(3)
        params = (*main.params[:-1], tail, out, partials)
        main = dataclasses.replace(main, kernel=self.kernel_name(problem, "_tail"), grid=grid, params=params)
        args = self._args(problem, config)
        reduce_threads, name = (split_k.REDUCE_THREADS, 1, 1), self.kernel_name(problem, "_reduce_tail")
        return main, plan.Launch(name, reduce_grid, reduce_threads, (args, tail, partials, out), programmatic=True)


FAMILY = Im2col(Config)
