"""Kernel family: matrix products on Hopper, whose operands TMA loads for WGMMA without conversion (device code:
contraction/products.cu).

The output is cut into tiles and the reduction over k into splits: see `SplitFamily`. The code that adds the splits also
computes the epilogue (device/epilogue.cuh).
"""

import dataclasses
import math

from jax import numpy as jnp

from jax_splitk.kernels.contraction.tile_family import TileFamily
from jax_splitk.kernels.device import split_k
from jax_splitk.kernels.device.epilogue import epilogue_macros, epilogue_params, epilogue_refusal
from jax_splitk.kernels.device.split_tile import (
    MAX_ELEMENTS,
    MAX_FLOAT32_CHAIN,
    MAX_GRID_YZ,
    SplitTile,
    is_whole,
    operand_map,
)
from jax_splitk.kernels.device.structs import Divisor, Struct
from jax_splitk.kernels.device.wgmma_tile import MAX_CHAINED_SUMS, ROW_BYTES, TILES
from jax_splitk.problems.dot_general import E4M3, DotProblem
from jax_splitk.runtime import plan

# Where our kernels were measured to be faster than XLA's library: up to 64 tiles of 128 x 128 and some 10 us.
_LIBRARY_FLOPS, _LIBRARY_BYTES = 790e12, 4.3e12
_FEW_TILES = 64
# With so many there is nothing to split: of 18 such products none of ours was faster (0.48 to 1.00 times XLA's speed).
_MANY_TILES = 132
# Nor is there much to win where the machine's rates allow no less: of eleven such products none of ours was more than
# 1% faster (0.95 to 1.01 times XLA's speed). But where there is about one tile for each multiprocessor, none is idle
# without splits: 1024x2048x50304 294.5 us, XLA's two kernels 299.6.
_LONG_SECONDS = 36e-6
_WHOLE_WAVE = range(126, _MANY_TILES + 1)
# Nor by small products with a short reduction: of six with 16 rows ours took 0.3 to 1 us longer, of one 0.6 less.
_SLIGHT_SECONDS, _SHORT_K = 1e-6, 1280
_SHORT_SECONDS = 10e-6
ELEMENT_CODES = {**split_k.OUT_CODES, E4M3: 3}  # macro ELEMENT
# XLA's xla_gpu_gemm_rewrite_size_threshold: products with a smaller (m + n) * k are loops.
_LEAST_ELEMENTS = 100
# Stages that the tensor cores add of a float32 result whose split is longer than they may: half of those.
FLOAT32_CHAIN = MAX_FLOAT32_CHAIN // 2


@dataclasses.dataclass(frozen=True)
class Config(SplitTile):
    """How a matrix product is computed: see `SplitTile`."""


def k_blocks(problem: DotProblem) -> int:
    """Blocks of the reduction."""
    return -(-problem.k * jnp.dtype(problem.dtype).itemsize // ROW_BYTES)


def tile_counts(problem: DotProblem, config: Config) -> tuple[int, int]:
    """(tiles along m, tiles along n) of a product of the batch."""
    return -(-problem.m // config.tile_m), -(-problem.n // config.tile_n)


def chained_stages(problem: DotProblem, config: Config) -> int:
    """Stages that the tensor cores add before fp32 additions continue (macro CHAIN); 0 for all stages of a split. For
    e4m3, whose sums have 13 bits, it is one stage."""
    if problem.dtype == E4M3:
        return 1
    blocks = -(-k_blocks(problem) // config.splits)
    is_long = problem.out_dtype == "float32" and blocks > MAX_FLOAT32_CHAIN
    return FLOAT32_CHAIN if is_long and config.may_chain else 0


def _tf32_refusal(problem: DotProblem) -> str | None:
    """Why a float32 product does not use tf32; None if it does. XLA computes vectors, outer products and the smallest
    products as loops in float32."""
    p = problem
    if p.dtype != "float32":
        return None
    for name in "mnk":
        if getattr(p, name) == 1:
            return f"float32 with {name}=1, which XLA computes without tf32; accepted: at least 2"
    if (elements := (p.m + p.n) * p.k) < _LEAST_ELEMENTS:
        rule = f"XLA computes it without tf32; accepted: at least {_LEAST_ELEMENTS}"
        return f"float32 with (m + n) * k = {elements}: {rule}"
    return None


def _large_tiles(problem: DotProblem) -> int:
    """Number of tiles of 128 x 128."""
    return -(-problem.m // 128) * -(-problem.n // 128) * problem.batch


def _floor_seconds(problem: DotProblem) -> float:
    """Seconds at the GPU's rates."""
    return max(problem.flops / _LIBRARY_FLOPS, problem.bytes_moved / _LIBRARY_BYTES)


def _is_slight(problem: DotProblem) -> bool:
    return _floor_seconds(problem) < _SLIGHT_SECONDS and problem.k <= _SHORT_K


def result_refusal(problem: DotProblem) -> str | None:
    """Why kernels cannot compute a result and an epilogue of these dtypes; None if they can."""
    p = problem
    # The tensor cores keep too little of e4m3 products for float32.
    outs = [dtype for dtype in split_k.OUT_CODES if dtype != "float32" or p.dtype != E4M3]
    if p.out_dtype not in outs:
        return f"preferred_element_type {p.out_dtype}; accepted: {', '.join(outs)}"
    return epilogue_refusal(p)


def alignment_refusal(problem: DotProblem) -> str | None:
    """Why TMA cannot load the operands: the rows of one are no multiple of 16 bytes. None if it can."""
    p = problem
    multiple = 16 // jnp.dtype(p.dtype).itemsize
    sizes = {"m": p.m, "n": p.n, "k": p.k}
    for major in (p.lhs_order[-1], p.rhs_order[-1]):
        if sizes[major] % multiple:
            return f"{major}={sizes[major]}, which is contiguous; accepted: multiples of {multiple}"
    return None


def size_refusal(problem: DotProblem) -> str | None:
    """Why sizes are not served; None if they are."""
    p = problem
    if max(math.prod(p.lhs_shape), math.prod(p.rhs_shape), math.prod(p.out_shape)) > MAX_ELEMENTS:
        return f"operands or a result of more than {MAX_ELEMENTS} elements"
    if p.batch > MAX_GRID_YZ:
        return f"batch {p.batch}; accepted: at most {MAX_GRID_YZ}"
    return None


class Tma(TileFamily[DotProblem, Config]):
    """Preferred whenever it is legal and predicted to be the fastest."""

    name = "dot_tma"
    ABI = 1
    file = "contraction/products.cu"

    # ---- refusals --------------------------------------------------------------------------------------------------

    def problem_refusal(self, problem: DotProblem) -> str | None:
        p = problem
        if p.dtype not in ELEMENT_CODES:
            return f"dtype {p.dtype}; accepted: {', '.join(ELEMENT_CODES)}"
        if (reason := result_refusal(p)) is not None:
            return reason
        majors = (p.lhs_order[-1], p.rhs_order[-1])
        if p.precision == "highest" and p.dtype == "float32":
            return "precision 'highest'; accepted: 'default', 'high'"
        if p.dtype in ("float32", E4M3) and majors != ("k", "k"):
            return f"{p.dtype} with {majors[0]} and {majors[1]} contiguous; accepted: k in both"
        if (reason := alignment_refusal(p)) is not None:
            return reason
        if p.n % 4:
            return f"n={p.n}; accepted: multiples of 4"
        if (reason := _tf32_refusal(p)) is not None:
            return reason
        return size_refusal(p)

    def tiles(self, problem: DotProblem) -> list[tuple[int, int]]:
        return [tile for tile in TILES if tile[0] < 256]  # on no problem were taller ones the fastest

    def config_refusal(self, problem: DotProblem, config: Config) -> str | None:
        if (reason := super().config_refusal(problem, config)) is not None:
            return reason
        if problem.dtype == E4M3 and not config.may_chain:
            tile = f"tile {config.tile_m}x{config.tile_n} of {config.stages} stages"
            most = MAX_CHAINED_SUMS[config.blocks_per_sm]
            return f"{tile}, {config.thread_sums} sums a thread, with {E4M3}; accepted: at most {most}"
        return None

    def why_xla_untuned(self, problem: DotProblem) -> str | None:
        """XLA's library is as fast if tiles fill the machine without splits, and on long products. Problems that were
        never measured on a GPU are left to XLA, too, unless the caller asks for the kernel."""
        if problem.dtype == E4M3 or problem.epilogue:
            what = "an epilogue" if problem.epilogue else "e4m3 operands"
            return f"a kernel with {what} needs an explicit config or implementation, or a measurement"
        is_few = _large_tiles(problem) <= _FEW_TILES and _floor_seconds(problem) < _SHORT_SECONDS
        if is_few and not _is_slight(problem):
            return None
        return f"{problem} was not measured, and XLA's product is as fast as ours for most of its size"

    def why_not_tuned(self, problem: DotProblem) -> str | None:
        if problem.epilogue or problem.dtype not in ("bfloat16", "float16"):
            return None
        if (tiles := _large_tiles(problem)) > _MANY_TILES:
            return f"its {tiles} tiles of 128x128 fill the GPU, where XLA's library is as fast"
        if (seconds := _floor_seconds(problem)) > _LONG_SECONDS and tiles not in _WHOLE_WAVE:
            return f"it takes {seconds * 1e6:.0f} us at the GPU's rates, where XLA's library is as fast"
        if _is_slight(problem):
            return f"its reduction of {problem.k} is short, where XLA's library is as fast"
        return None

    # ---- search ----------------------------------------------------------------------------------------------------

    def least_splits(self, problem: DotProblem, config: Config) -> int:
        return 1 if config.may_chain else super().least_splits(problem, config)

    # ---- plan ------------------------------------------------------------------------------------------------------

    def chains(self, problem: DotProblem, config: Config) -> tuple[int]:
        return (k_blocks(problem),)

    def tile_counts(self, problem: DotProblem, config: Config) -> tuple[int, ...]:
        return *tile_counts(problem, config), problem.batch

    def grid(self, problem: DotProblem, config: Config) -> tuple[int, int, int]:
        return *tile_counts(problem, config), config.splits * problem.batch

    def args(self, problem: DotProblem, config: Config) -> Struct:
        """Tiles along m and n, and blocks of the reduction of a split; the first `longer` splits have one more.
        `a_once` and `b_once`: whether a single tile reads each element of the operand, which then need not stay in the
        L2."""
        rows, columns = tile_counts(problem, config)
        blocks, longer = divmod(k_blocks(problem), config.splits)
        return Struct(
            "Args",
            {
                "m": problem.m,
                "n": problem.n,
                "rows": Divisor.of(rows),
                "columns": Divisor.of(columns),
                "splits": Divisor.of(config.splits),
                "k_blocks": blocks,
                "longer": longer,
                "a_once": int(columns == 1),
                "b_once": int(rows == 1),
            },
        )

    def macros(self, problem: DotProblem, config: Config) -> dict[str, int]:
        return {
            **super().macros(problem, config),
            "ELEMENT": ELEMENT_CODES[problem.dtype],
            "A_MN": int(problem.lhs_order[-1] == "m"),
            "B_MN": int(problem.rhs_order[-1] == "n"),
            "A_WHOLE": int(is_whole(problem.m)),
            "B_WHOLE": int(is_whole(problem.n)),
            "CHAIN": chained_stages(problem, config),
            **epilogue_macros(problem),
        }

    def maps(self, problem: DotProblem, config: Config) -> tuple[plan.TiledMap | plan.Im2colMap, ...]:
        p = problem
        lhs = operand_map(0, p.dtype, p.lhs_shape, p.lhs_order, config.tile_m)
        return lhs, operand_map(1, p.dtype, p.rhs_shape, p.rhs_order, config.tile_n)

    def epilogue_params(self, problem: DotProblem, config: Config) -> tuple[plan.Param, ...]:
        return epilogue_params(problem)


FAMILY = Tma(Config)
