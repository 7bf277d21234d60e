"""Kernel family: dense forward passes and input gradients on Hopper by TMA im2col and WGMMA (device code:
contraction/im2col.cu).

Implicit GEMM ("Implicit GEMM Convolution" in CUTLASS's documentation) of [pixels, taps * channels] by [taps * channels,
output channels], whose reduction may be split: see `SplitFamily`.

An input gradient is a forward pass of g with the mirrored weight. If it has strides, the pixels of each residue modulo
the stride use taps of their own. They form a phase: a dense pass with unit strides over these taps. So no product has a
zero from the dilation, and one launch computes all phases. The dilation of a forward pass's lhs is treated in the same
way. With narrow tiles loads are the limit. So few channels get narrower rows of shared memory, with fewer zeros, and
the taps of a filter row may share the pixels that they read: see `row_bytes` and `Config`.

A forward pass's weight is contiguous along its output channels. If the main kernel cannot read it so, or would be much
slower, another kernel first transposes it in the workspace: see `transposes`.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

from jax import numpy as jnp

from jax_splitk.kernels.base import refusals
from jax_splitk.kernels.base.family import field_macros, field_refusal, varied
from jax_splitk.kernels.base.geometry import folded, is_matrix_product
from jax_splitk.kernels.base.passes import forward, of_both_passes
from jax_splitk.kernels.base.work import Work
from jax_splitk.kernels.contraction.im2col_config import (
    BARRIER_BYTES,
    STEPS_OF_STAGE,
    Config,
    block_k,
    can_persist,
    chains,
    channel_blocks,
    column_count,
    im2col_limits,
    is_mn_major,
    is_padded,
    is_stationary,
    last_steps,
    row_bytes,
    shared_bytes,
    shared_taps,
    stationary_bytes,
    stationary_stages,
    tile_count,
    tile_counts,
    transposes,
    weight_bytes,
    weight_row,
    weight_shape,
)
from jax_splitk.kernels.contraction.joined import joined
from jax_splitk.kernels.contraction.phases import axes, phases, pixels
from jax_splitk.kernels.contraction.tile_family import TileFamily
from jax_splitk.kernels.device.epilogue import conv_finishes, conv_macros, conv_params
from jax_splitk.kernels.device.split_tile import (
    MAX_ELEMENTS,
    SWIZZLES,
    is_whole,
    map_dtype,
    operand_map,
)
from jax_splitk.kernels.device.structs import Divisor, Field, Struct
from jax_splitk.kernels.device.wgmma_tile import (
    BOX,
    MAX_STAGES,
    MIN_STAGES,
    RESERVED_BYTES,
    ROW_BYTES,
    SHARED_BYTES,
    TILES,
    fitted_tiles,
    lines_of_row,
    rows_of,
    tile_refusal,
)
from jax_splitk.problems.conv_epilogue import ConvEpilogueProblem
from jax_splitk.problems.conv_passes import ConvFpropProblem
from jax_splitk.problems.conv_wgrad import ConvProblem
from jax_splitk.runtime import plan
from jax_splitk.runtime.target import Target

_MAX_DOWN, _MAX_UP = 8, 16  # TMA's element strides; residues that the kernel's arguments have room for
_NARROW = (16, 32)  # columns of tiles, where a group has no more
# Where candidates have several taps in a stage: at most so many times the output's pixels, and the filter row's taps.
_MAX_BEYOND, _MAX_ROW = 1.3, 1.1
_FEW_TAPS = 5  # of which three stages of wide tiles fit into shared memory
_FEW_PIXELS = 8192  # of a matrix product whose tiles leave multiprocessors idle
_PERSISTENT = 5  # candidates
_OWN_STEPS = 36  # of a tile at most, in the mean of its phases: measured with 18, 32 and 36, and with 45, 72 and 108
_MIN_GROUP = 24  # channels: of fewer the tensor cores' tiles, and TMA's rows, are mostly empty
_LEAST_CHANNELS = 16  # of groups that are not padded
_WEIGHT_SIDE, _WEIGHT_THREADS = 32, 256  # see contraction/weight.cuh
_FEW_COLUMNS = 16  # see `_unmeasured`


def _residues(problem: ConvProblem, config: Config) -> dict[str, Field]:
    """on_d, on_h, on_w of the device code: the residues of each axis, with taps counted in the original weight. All
    axes have equally many, so that device code is the same for many strides."""
    mirrored, found, pitch = not isinstance(problem, ConvFpropProblem), {}, 1
    of = axes(problem, config.taps)
    size = 1 << (max(len(axis.residues) for axis in of) - 1).bit_length()
    for name, axis in zip("whd", reversed(of), strict=False):
        rows = [
            Struct(
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
    """Distances of a residue's neighbouring taps in the original weight."""
    sign, of = 1 if isinstance(problem, ConvFpropProblem) else -1, axes(problem)
    pitches = [math.prod(other.kernel for other in of[i + 1 :]) for i in range(len(of))]
    return tuple(sign * axis.tap_step * pitch for axis, pitch in zip(of, pitches, strict=True))


class Im2colConv(TileFamily[ConvProblem, Config]):
    """Serves convolutions in which all channels of a group are connected."""

    ABI = 3
    file = "contraction/im2col.cu"

    # ---- refusals --------------------------------------------------------------------------------------------------

    def problem_refusal(self, problem: ConvProblem) -> str | None:
        p = problem
        return (
            refusals.dtypes(p, (*refusals.HALVES, "float32"))
            or refusals.batch_groups(p)
            or refusals.empty_dimensions(p)
            or refusals.tf32(p)
            or self._channels_refusal(p)
            or self._axes_refusal(p)
            or self._size_refusal(p)
        )

    def _channels_refusal(self, p: ConvProblem) -> str | None:
        """Contiguous channels are loaded in units of 16 bytes."""
        loaded = 16 // jnp.dtype(p.dtype).itemsize
        if joined(p).in_channels % loaded:
            which = "input" if isinstance(p, ConvFpropProblem) else "output"
            return f"{forward(p).in_channels} {which} channels; accepted: multiples of {loaded}"
        channels, columns = joined(p).group_channels
        least = loaded if is_padded(p) else _LEAST_CHANNELS
        if p.feature_group_count > 1 and (channels < _MIN_GROUP or channels % least):
            given = f"feature_group_count {p.feature_group_count} of {channels} channels to {columns} each"
            return f"{given}; accepted: multiples of {least} from {_MIN_GROUP} on, or 1"
        return None

    def _axes_refusal(self, p: ConvProblem) -> str | None:
        """Limits of TMA's im2col mode (CUDA driver API, cuTensorMapEncodeIm2col), and of the phases' table."""
        found = axes(p)
        for axis in found:
            if min(axis.down, axis.up) > 1 or axis.down > _MAX_DOWN or axis.up > _MAX_UP:
                given = f"window stride {axis.down} of an input dilated by {axis.up}"
                return f"{given}; accepted: one of them 1, up to {_MAX_DOWN} and {_MAX_UP}"
        if not all(axis.residues[0].taps for axis in found):
            return "no filter tap reads the input; accepted: at least one that does"
        if is_matrix_product(joined(p)):
            return None
        lowest, highest, farthest = im2col_limits(p)
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

    def config_refusal(self, problem: ConvProblem, config: Config) -> str | None:
        if (reason := field_refusal(config, taps=shared_taps(problem))) is not None:
            return reason
        tiles = self._wide_tiles(problem) if config.workers else self.tiles(problem)
        if (reason := tile_refusal(config, tiles)) is not None:
            return reason
        stages = self._stages(problem, config)
        if config.taps > 1 and not stages:
            tile = f"tile {config.tile_m}x{config.tile_n} of {config.taps} taps in a stage"
            return f"{tile}; accepted: {MIN_STAGES} stages that fit into {SHARED_BYTES} bytes of shared memory"
        if not config.workers:
            return field_refusal(config, swap=(False,)) or super().config_refusal(problem, config)
        if not can_persist(problem):
            p = problem
            given = f"{p.dtype} to {p.out_dtype} and {joined(p).group_channels[1]} channels of the result"
            rest = "16 bits, multiples of 8 channels, no pixels of the result without taps"
            return f"workers {config.workers} with {given}; accepted: {rest}"
        return field_refusal(
            config,
            stages=stages,
            splits=(1,),
            reduction=("none",),
            swap=_swaps(config.tile_n),
            workers=range(1, tile_count(problem, config) + 1),
        )

    def _stages(self, problem: ConvProblem, config: Config) -> range:
        """Numbers of stages that a config of these tiles and workers may have."""
        stages = self.stage_counts(config)
        if not config.workers or config.workers % column_count(problem, config):
            return stages
        return range(MIN_STAGES, max(stages.stop, stationary_stages(problem, config) + 1))

    def finishes(self, problem: ConvProblem, config: Config) -> bool:
        """Persistent thread blocks load a residual of 16 bits to where their results will be."""
        if not conv_finishes(problem):
            return False
        return not config.workers or problem.residual_dtype in ("none", *refusals.HALVES)

    # ---- search ----------------------------------------------------------------------------------------------------

    def candidates(self, problem: ConvProblem, target: Target) -> list[Config]:
        return [*super().candidates(problem, target), *self._persistent(problem, target)]

    def _persistent(self, problem: ConvProblem, target: Target) -> list[Config]:
        """A persistent thread block on each multiprocessor, with the best few tiles by the model."""
        if not can_persist(problem):
            return []
        found = []
        tiles = self._wide_tiles(problem)
        for (tile_m, tile_n), swap, taps in itertools.product(tiles, (False, True), self._shared(problem)):
            if swap not in _swaps(tile_n) or (swap and tile_m == tile_n and taps == 1):
                continue  # not legal, or as fast
            config = Config(tile_m, tile_n, MIN_STAGES, taps=taps, swap=swap, workers=1)
            workers = min(target.cores, tile_count(problem, config))
            found.append(dataclasses.replace(config, stages=config.most_stages, workers=workers))
            columns = column_count(problem, config)
            beside, workers = stationary_stages(problem, config), workers // columns * columns
            found.append(dataclasses.replace(config, stages=beside, workers=workers))
        found = [config for config in dict.fromkeys(found) if config.stages >= MIN_STAGES and config.workers]
        return self.by_estimate(problem, found, target)[:_PERSISTENT]

    def _stores_itself(self, problem: ConvProblem, config: Config) -> bool:
        """Whether a team of a persistent thread block stores its own tiles: if products take less time than other warps
        need to store. Storing disturbs the products of longer reductions."""
        steps = sum(self.chains(problem, config)) * config.taps * STEPS_OF_STAGE
        by_threads = _is_stored_by_threads(problem, config)
        return config.teams > 1 and by_threads and steps <= _OWN_STEPS * phases(problem)

    def _shared(self, problem: ConvProblem) -> list[int]:
        """Numbers of a filter row's taps that a stage of a candidate may have: 1, and the best of few and of many."""
        gaining = _gaining_taps(problem)
        few, many = ([taps for taps in gaining if (taps <= _FEW_TAPS) == is_few] for is_few in (True, False))
        return [1, *(min(of, key=lambda taps: (gaining[taps], -taps)) for of in (few, many) if of)]

    def neighbours(self, problem: ConvProblem, config: Config, target: Target) -> list[Config]:
        """Includes a tile as wide as the columns, or for such a tile the next wider one. If a stage has several taps,
        also the next smaller and the next larger number of taps, with all stages that fit."""
        if config.workers:
            found = varied(config, stages=[config.stages - 1], swap=[not config.swap])
        else:
            found = super().neighbours(problem, config, target)
        fitted = {tile_n for _, tile_n in fitted_tiles(joined(problem).group_channels[1])} if not config.swap else set()
        widths = {rows_of(config.tile_n)} if config.tile_n in fitted else fitted
        found += varied(config, tile_n=sorted(widths))
        gaining = _gaining_taps(problem) if config.taps > 1 else {}
        fewer, more = ([t for t in gaining if t < config.taps], [t for t in gaining if t > config.taps])
        depths = ((other, self.stage_counts(other)) for other in varied(config, taps=fewer[-1:] + more[:1]))
        return found + [dataclasses.replace(other, stages=of[-1]) for other, of in depths if of]

    def work(self, problem: ConvProblem, config: Config, target: Target) -> Work:
        if not config.workers:
            return super().work(problem, config, target)
        each = -(-tile_count(problem, config) // config.workers)  # with all its phases
        chain, by_tma = sum(self.chains(problem, config)), _is_stored_by_tma(problem, config)
        stationary = is_stationary(problem, config)
        stages = config.stage_work(each * chain, each * chain, 1, self.filled(problem, config))
        if stationary:
            streamed = each * chain * config.taps * config.channel_rows * ROW_BYTES
            stages["l2_bytes"] += stationary_bytes(problem, config) - streamed
            stages["shared_bytes"] += stationary_bytes(problem, config) - streamed
        # Other warps store a tile while the next one is multiplied, a row or a part of one at a time.
        rows = each * phases(problem) * config.result_rows
        hidden = by_tma or self._stores_itself(problem, config)
        sums = config.tile_m * config.tile_n * 4
        return Work(
            **stages,
            rows=each * tma_lines(problem, config, chain, loads_weight=not stationary, stores=by_tma),
            turns=0 if hidden else rows / 16,
            memory_bytes=problem.bytes_moved,
            memory_share=min(1.0, config.workers / target.cores),
            stored_bytes=sums * (1 if config.teams > 1 else 1 + each * phases(problem) / 4),  # the last results
        )

    def filled(self, problem: ConvProblem, config: Config) -> float:
        return 1 - (1 - last_steps(problem) / STEPS_OF_STAGE) / channel_blocks(problem)

    def rows(self, problem: ConvProblem, config: Config) -> float:
        return tma_lines(problem, config, 1, loads_weight=True, stores=False)

    def why_xla_untuned(self, problem: ConvProblem) -> str | None:
        """XLA's matrix products are as fast if tiles fill the machine without splits; it has none for groups. Most
        weights that are transposed were not measured."""
        p = problem
        if (reason := _unmeasured(p)) is not None:
            return reason
        whole = joined(p)
        if is_matrix_product(whole) and whole.feature_group_count == 1 and pixels(p) > _FEW_PIXELS:
            return (
                f"a product of {pixels(p)} pixels was not measured, and XLA's is as fast as ours for most of its size"
            )
        return None

    def reduction_work(self, problem: ConvProblem, config: Config) -> dict[str, Any]:
        found = super().reduction_work(problem, config)
        return {**found, "launches": found["launches"] + transposes(problem)}

    # ---- plan ------------------------------------------------------------------------------------------------------

    def tiles(self, problem: ConvProblem) -> Sequence[tuple[int, int]]:
        """The possible tiles, among them some as wide as the columns. For few columns they are only the narrowest ones
        that hold them."""
        columns = joined(problem).group_channels[1]
        narrow = next((tile_n for tile_n in _NARROW if columns <= tile_n), None)
        if narrow is None:
            return self._wide_tiles(problem)
        return [(tile_m, narrow) for tile_m in (64, 128, 192, 256)]

    def _wide_tiles(self, problem: ConvProblem) -> Sequence[tuple[int, int]]:
        """Tiles that are not narrow. Persistent thread blocks have no others, since these were not measured."""
        return [*TILES, *fitted_tiles(joined(problem).group_channels[1])]

    def variants(self, problem: ConvProblem, target: Target) -> Iterator[Config]:
        yield from super().variants(problem, target)
        for taps, (tile_m, tile_n) in itertools.product(self._shared(problem)[1:], self.tiles(problem)):
            config = Config(tile_m, tile_n, 0, taps=taps)
            counts = [self.stage_counts(config), self.stage_counts(config, blocks_per_sm=2)]
            # In one order in every process: of equal estimates the first decides.
            depths = sorted({of[-1] for of in counts if of})
            yield from (dataclasses.replace(config, stages=stages) for stages in depths)

    def stage_counts(self, config: Config, blocks_per_sm: int = 1) -> range:
        if config.workers:
            return range(MIN_STAGES, config.most_stages + 1)
        beside = RESERVED_BYTES + BARRIER_BYTES + 4 * config.tile_m  # where the tile's rows go
        room = (SHARED_BYTES // blocks_per_sm - beside) // config.stage_bytes
        least = -(-config.tile_m * (config.tile_n + 8) * 4 // config.stage_bytes)  # to hold the tile's sums
        return range(max(MIN_STAGES, least), min(MAX_STAGES, room) + 1)

    def chains(self, problem: ConvProblem, config: Config) -> list[int]:
        return sorted(chains(problem, config), reverse=True)

    def shared_bytes(self, problem: ConvProblem, config: Config) -> int:
        return shared_bytes(problem, config)

    def tile_counts(self, problem: ConvProblem, config: Config) -> tuple[int, ...]:
        return (config.workers,) if config.workers else (tile_count(problem, config), phases(problem))

    def grid(self, problem: ConvProblem, config: Config) -> tuple[int, int, int]:
        return self.thread_blocks(problem, config), 1, config.splits

    def args(self, problem: ConvProblem, config: Config) -> Struct:
        """Sizes of the product of a phase and group, divisors of a thread block's number, and the geometry by axes.
        `a_once` and `b_once`: whether a single tile reads each element of the operand, which then need not stay in the
        L2. `beyond`: a block of channels that no group has."""
        of, (rows, columns), p = axes(problem, config.taps), tile_counts(problem, config), joined(problem)
        return Struct(
            "Args",
            {
                **(self._persistent_args(problem, config) if config.workers else {}),
                "m": pixels(problem, config.taps),
                "n": p.group_channels[1],
                "columns": Divisor.of(column_count(problem, config)),
                "phases": Divisor.of(phases(problem)),
                "splits": Divisor.of(config.splits),
                "blocks": Divisor.of(channel_blocks(problem)),
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
                **({"row_taps": of[-1].kernel} if _has_row_parts(problem, config) else {}),
                **_residues(problem, config),
                "beyond": -(-p.in_channels // block_k(problem)),
                "k": p.group_channels[0],
                "pitch": p.out_channels,
                "group_columns": Divisor.of(columns),
            },
        )

    def _persistent_args(self, problem: ConvProblem, config: Config) -> dict[str, Field]:
        """Arguments of persistent thread blocks. `tiles`: the tiles of a phase."""
        return {"tiles": tile_count(problem, config), "stationary_bytes": stationary_bytes(problem, config)}

    def macros(self, problem: ConvProblem, config: Config) -> dict[str, int]:
        of, is_mn = axes(problem, config.taps), is_mn_major(problem)
        return {
            **super().macros(problem, config),
            "AXES": 0 if is_matrix_product(joined(problem)) else len(of),
            "PHASED": int(_rows_lie_apart(problem, config)),
            "TAPS": config.taps,
            "TAP_ROWS": of[-1].dilation if config.taps > 1 else 0,
            "ROW_PARTS": int(_has_row_parts(problem, config)),
            "GROUPED": int(problem.feature_group_count > 1),
            "PADDED": int(is_padded(problem)),
            "EMPTY": int(min(chains(problem, config)) < config.splits),
            "TRANSPOSED": int(transposes(problem)),
            "ODD": int(joined(problem).group_channels[1] % 4 > 0),
            "ROW_BYTES": row_bytes(problem),
            "WEIGHT_ROW": weight_row(problem, config),
            "LAST_STEPS": last_steps(problem),
            "MIXED": int(last_steps(problem) < STEPS_OF_STAGE and channel_blocks(problem) > 1),
            **field_macros(config, "swap"),
            "PERSISTENT": int(config.workers > 0),
            "STATIONARY": int(is_stationary(problem, config)),
            "TEAMS": config.teams,
            "THREAD_STORES": int(_is_stored_by_threads(problem, config)),
            "RESULT_BOX": _result_box(problem, config),
            "OWN_STORES": int(self._stores_itself(problem, config)),
            "B_MN": int(is_mn),
            "B_WHOLE": int(is_mn and _is_whole(problem, config)),
            **conv_macros(problem),
        }

    def maps(self, problem: ConvProblem, config: Config) -> tuple[plan.TiledMap | plan.Im2colMap, ...]:
        p = problem
        buffer = len(self.buffers(p, config)) - 1 if transposes(p) else 1
        row = weight_row(p, config)
        if is_mn_major(p):
            shape, whole = (p.taps, p.group_channels[0], p.out_channels), _is_whole(p, config)
            of_weight = operand_map(buffer, p.dtype, shape, "bkn", config.channels, row, whole)
        else:
            of_weight = operand_map(buffer, p.dtype, weight_shape(p), "bnk", config.channels, row)
            of_weight = _by_groups(of_weight, p) if is_padded(p) else of_weight
        operands = _lhs_map(p, config), of_weight
        if not _is_stored_by_tma(p, config):
            return operands
        last = len(p.operand_types)
        residual = (_result_map(p, config, last - 1, p.residual_dtype),) if _adds_by_tma(p, config) else ()
        return *operands, _result_map(p, config, last, p.out_dtype), *residual

    def partials_offset(self, problem: ConvProblem) -> int:
        return weight_bytes(problem)

    def workspace_bytes(self, problem: ConvProblem, config: Config) -> int:
        return weight_bytes(problem) + super().workspace_bytes(problem, config)

    def launches(self, problem: ConvProblem, config: Config) -> tuple[plan.Launch, ...]:
        main, *rest = super().launches(problem, config)
        if not transposes(problem):
            return main, *rest
        # The main kernel waits for the weight itself.
        return self._transposition(problem, config), dataclasses.replace(main, programmatic=True), *rest

    def _transposition(self, problem: ConvProblem, config: Config) -> plan.Launch:
        """The launch of the kernel that transposes the weight."""
        taps, columns, channels = weight_shape(problem)
        groups = problem.feature_group_count
        tiles_n, tiles_k = -(-columns // _WEIGHT_SIDE), -(-channels // groups // _WEIGHT_SIDE)
        fields = {
            "k": channels // groups,
            "n": columns,
            "groups": Divisor.of(groups),
            "tiles_k": Divisor.of(tiles_k),
            "tiles_n": Divisor.of(tiles_n),
        }
        to = plan.Pointer(len(self.buffers(problem, config)) - 1)
        grid, params = (taps * groups * tiles_k * tiles_n, 1, 1), (plan.Pointer(1), to, Struct("WeightArgs", fields))
        return plan.Launch(self.kernel_name(problem, "_transpose"), grid, (_WEIGHT_THREADS, 1, 1), params)

    def result(self, problem: ConvProblem, config: Config) -> plan.Param:
        return plan.MapParam(2) if _is_stored_by_tma(problem, config) else super().result(problem, config)

    def epilogue_params(self, problem: ConvProblem, config: Config) -> tuple[plan.Param, ...]:
        return *conv_params(problem), *((plan.MapParam(3),) if _adds_by_tma(problem, config) else ())


def _swaps(tile_n: int) -> tuple[bool, ...]:
    """The possible values of `swap` for a tile of so many columns: swapped, its columns are pixels, which TMA loads in
    whole boxes."""
    return (False,) if tile_n % BOX else (False, True)


def tma_lines(problem: ConvProblem, config: Config, stages: int, *, loads_weight: bool, stores: bool) -> float:
    """Lines that TMA's rows touch for a tile of `stages` stages, with all its phases: loads and stores. Rows begin at
    the first channels of groups."""
    (channels, columns), blocks = joined(problem).group_channels, stages * ROW_BYTES // row_bytes(problem)
    step, of_tap, last = channels * jnp.dtype(problem.dtype).itemsize, channel_blocks(problem), last_steps(problem)
    each = lines_of_row(step)
    if last < STEPS_OF_STAGE:
        each += (lines_of_row(step, last * ROW_BYTES // STEPS_OF_STAGE) - each) / of_tap
    lines = blocks * config.pixels * each
    if loads_weight:
        boxes = -(-config.channels // BOX)
        lines += blocks * config.taps * (block_k(problem) * boxes if is_mn_major(problem) else config.channels)
    if stores:
        lines += config.result_rows * lines_of_row(columns * jnp.dtype(problem.out_dtype).itemsize)
    return lines


def _unmeasured(p: ConvProblem) -> str | None:
    """Why XLA is preferred for a pass of a kind of which no times are known; None for other kinds."""
    columns = forward(p).group_channels[1]
    if transposes(p) and is_matrix_product(p):
        return "products whose weight is transposed first were not measured"
    if columns % 4 and columns > _FEW_COLUMNS:
        return f"{columns} channels of the result, no multiple of 4 and more than {_FEW_COLUMNS}, were not measured"
    return None


def _rows_lie_apart(problem: ConvProblem, config: Config) -> bool:
    """Whether neighbouring rows of a tile may not be neighbours in the output: rows of a phase, or rows with others
    between them that are not stored."""
    return config.taps > 1 or any(axis.up > 1 for axis in axes(problem))


def _gaining_taps(problem: ConvProblem) -> dict[int, int]:
    """For each number of a filter row's taps that may gain something in a stage: how many taps are then multiplied for
    a row."""
    row, most = axes(problem)[-1].kernel, _MAX_BEYOND * pixels(problem)
    multiplied = {taps: -(-row // taps) * taps for taps in shared_taps(problem)[1:]}
    return {taps: of for taps, of in multiplied.items() if of <= _MAX_ROW * row and pixels(problem, taps) <= most}


def _has_row_parts(problem: ConvProblem, config: Config) -> bool:
    """Whether a stage has several taps of a filter row, but not all."""
    return 1 < config.taps < axes(problem)[-1].kernel


def _result_box(problem: ConvProblem, config: Config) -> int:
    """Rows of a box of results that TMA stores; 0 if threads store them. Rows of a phase lie apart. Where taps share
    pixels, a tile has at least as many stored rows."""
    if config.taps == 1:
        return 0 if _rows_lie_apart(problem, config) else BOX
    last = axes(problem, config.taps)[-1]
    lines, rest = divmod(config.pixels, last.pixels)
    stored = config.pixels - lines * last.reach - min(rest, last.reach)
    return next((rows for rows in (BOX, BOX // 2) if rows <= stored), 0)


def _is_stored_by_threads(problem: ConvProblem, config: Config) -> bool:
    return config.workers > 0 and not _result_box(problem, config)


def _is_stored_by_tma(problem: ConvProblem, config: Config) -> bool:
    return config.workers > 0 and _result_box(problem, config) > 0


def _is_whole(problem: ConvProblem, config: Config) -> bool:
    """Whether tiles begin and end at the boxes of a forward pass's weight."""
    return config.channels >= BOX and is_whole(problem.group_channels[1])


def _adds_by_tma(problem: ConvProblem, config: Config) -> TypeGuard[ConvEpilogueProblem]:
    """Whether TMA loads a residual."""
    has_residual = isinstance(problem, ConvEpilogueProblem) and problem.residual_dtype != "none"
    return has_residual and _is_stored_by_tma(problem, config)


def _result_map(problem: ConvProblem, config: Config, buffer: int, dtype: str) -> plan.TiledMap:
    """The map of the output or the residual, with its channels by groups: columns of a tile beyond its group are not
    stored."""
    columns, groups, item = joined(problem).group_channels[1], problem.feature_group_count, 2
    dims = columns, groups, pixels(problem)
    box = BOX, 1, _result_box(problem, config)
    return plan.TiledMap(buffer, dtype, dims, plan.tensor_map_strides(dims, item), box)


def _by_groups(weight: plan.TiledMap, problem: ConvProblem) -> plan.TiledMap:
    """The map of an input gradient's weight with its k by groups: (k of a group, columns, groups, taps)."""
    each, groups = joined(problem).group_channels[0], problem.feature_group_count
    (_, columns, taps), (column, tap) = weight.dims, weight.strides
    of_group = each * jnp.dtype(problem.dtype).itemsize
    box = (*weight.box[:2], 1, 1)
    return dataclasses.replace(weight, dims=(each, columns, groups, taps), strides=(column, of_group, tap), box=box)


def _lhs_map(problem: ConvProblem, config: Config) -> plan.TiledMap | plan.Im2colMap:
    p, of, padded = folded(joined(problem), 1), axes(problem, config.taps)[::-1], is_padded(problem)
    if is_matrix_product(p):
        shape, order = (1, pixels(problem), p.in_channels), "bmk"
        if padded:
            shape, order = (pixels(problem), p.feature_group_count, p.group_channels[0]), "mbk"
        return operand_map(0, p.dtype, shape, order, config.pixels, row_bytes(problem))
    dims, item = p.lhs_shape[::-1], jnp.dtype(p.dtype).itemsize
    strides, images = plan.tensor_map_strides(dims, item), ()
    if padded:  # the images are a spatial dimension that windows do not leave, and the groups stand in their place
        dims = (p.group_channels[0], *dims[1:], p.feature_group_count)
        strides, images = (*strides, p.group_channels[0] * item), (0,)
    return plan.Im2colMap(
        buffer=0,
        dtype=map_dtype(p.dtype),
        dims=dims,
        strides=strides,
        element_strides=(1, *(axis.down for axis in of), *(1 for _ in images), 1),
        lower=(*(axis.lower for axis in of), *images),
        upper=(*(axis.upper for axis in of), *images),
        channels=block_k(problem),
        pixels=config.pixels + of[0].reach,
        swizzle=SWIZZLES[row_bytes(problem)],
    )


FPROP, DGRAD = of_both_passes(Im2colConv, "im2col", Config)
