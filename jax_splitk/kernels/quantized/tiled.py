"""Kernel family: products with packed quantized weights on Hopper by WGMMA (device code: quantized/tiled.cu).

Weights are dequantized into the A registers of WGMMA while the tensor cores multiply the previous ones; TMA loads the
activation. The scale of a group multiplies either the weight, which is then rounded to the activation's dtype, or the
fp32 sum of the group. Zero points are subtracted from the weight, or as multiples of sums of the activation. The k
blocks of the output's tiles can be cut into ranges of equal length, one for each thread block, wherever tiles begin or
end ("stream-k", Osama et al., arXiv:2301.03598); a second kernel, launched with programmatic dependent launch, adds the
sums of tiles that were cut. Or each tile is cut into the same number of ranges. The thread blocks of its ranges form a
cluster and add their sums through distributed shared memory. In such clusters two warpgroups can share features and
take turns with the k blocks. All additions have a fixed order, so the result is deterministic, bit for bit.

Mixed-input products with the weight in registers: FRPC and Marlin (Frantar et al., arXiv:2408.11743) for SM80, and
CUTLASS's mixed-input collective for SM90.
"""

import dataclasses
import itertools
from collections.abc import Iterator

from jax_splitk.kernels.device.structs import Struct
from jax_splitk.kernels.quantized import dequantize, tiles
from jax_splitk.kernels.quantized.dequantize import ISSUE_SLOTS, has_zero, per_channel
from jax_splitk.kernels.quantized.tiles import BLOCK_K, WARPGROUP_M, Config, aligned, k_blocks, whole_tiles
from jax_splitk.problems.problem import nbytes
from jax_splitk.problems.quantized_matmul import OUT_DTYPES, X_DTYPES, QuantizedMatmulProblem
from jax_splitk.quantized.formats import BYTE_SCALES, FORMATS
from jax_splitk.runtime import plan

PREPARE_WARPS = 4
SUM_PERIOD = 128  # k of a partial sum where there is one scale for all k

SCALINGS = ("weight", "sum", "channel")  # SCALING in the device code
NARROW = 64  # the widest tile_n with few rows: sums are scaled, where weights would take more instructions than that
TILES_M = (64, 128, 256)
TILES_N = (16, 32, 64, 96, 128, 192, 256)
# The widest tile_n whose accumulators leave room for the rest, by consumer warpgroups: one set of them, or two ("sum").
MAX_TILE_N = {1: 256, 2: 256, 4: 64}
MAX_TILE_N_SUM = {1: 128, 2: 128, 4: 16}
MAX_TILE_N_SUM_SHORT = 64  # several sums of 16 or 32 k of a tile in a loop need more registers


def period(problem: QuantizedMatmulProblem) -> int:
    """k of an fp32 partial sum with the scaling "sum" (PERIOD in the device code)."""
    return SUM_PERIOD if per_channel(problem) else problem.group_size


def scaling(p: QuantizedMatmulProblem, tile_n: int) -> str:
    """Where scales are applied: to the "weight" (which is rounded to the activation's dtype), to the fp32 "sum" of a
    group, or to the sum of all k ("channel"). The fastest of these with the promised accuracy; the product with the
    transposed weight has sums over features, to which no scale belongs."""
    if p.transposed:
        return "weight"
    if per_channel(p) and not has_zero(p):  # WGMMA truncates its sums: long chains only where rounding hides it
        return "sum" if p.out_dtype == "float32" else "channel"
    # The range of float16 does not hold every weight; and only there, and in float32, would rounding the weight be an
    # error beyond that of rounding the result.
    if per_channel(p) or {p.x_dtype, p.out_dtype} != {"bfloat16"}:
        return "sum"
    # Zero points and longer scales cost more instructions, which are worth it for many rows.
    return "weight" if tile_n > NARROW or (_short_scale(p) and not has_zero(p)) else "sum"


def _short_scale(p: QuantizedMatmulProblem) -> bool:
    """Whether bfloat16 holds the scale."""
    return p.scale_dtype in ("bfloat16", *BYTE_SCALES)


def in_parts(p: QuantizedMatmulProblem, tile_n: int) -> bool:
    """Whether weights are computed from parts of their scales and zero points (IN_PARTS in the device code)."""
    return scaling(p, tile_n) == "weight" and not p.transposed and (has_zero(p) or not _short_scale(p))


def max_tile_n(p: QuantizedMatmulProblem, tile_n: int, warpgroups: int) -> int:
    """The widest tile whose accumulators fit in registers, with the scaling that tiles of `tile_n` have."""
    if scaling(p, tile_n) != "sum":
        return MAX_TILE_N[warpgroups]
    widest = MAX_TILE_N_SUM[warpgroups]
    return min(widest, MAX_TILE_N_SUM_SHORT) if period(p) < 64 else widest


def needs_copy(problem: QuantizedMatmulProblem) -> bool:
    """Whether x must be copied, because TMA cannot load it for WGMMA: that needs rows in multiples of 16 bytes, and
    elements of 16 bits."""
    return problem.contracted % 8 != 0 or problem.x_dtype == "float8_e4m3fn"


def needs_sums(problem: QuantizedMatmulProblem, tile_n: int) -> bool:
    """Whether zero points take part as multiples of sums of x."""
    return has_zero(problem) and scaling(problem, tile_n) == "sum"


def _prepared(problem: QuantizedMatmulProblem, tile_n: int) -> bool:
    """Whether another kernel prepares x first."""
    return needs_copy(problem) or needs_sums(problem, tile_n)


def _operand_dtype(problem: QuantizedMatmulProblem) -> str:
    """The dtype of x that WGMMA reads: float16 holds every e4m3."""
    return "float16" if problem.x_dtype == "float8_e4m3fn" else problem.x_dtype


# ---- workspace: a copy of x, sums of x, slots of partial sums --------------------------------------------------------


def copy_bytes(problem: QuantizedMatmulProblem) -> int:
    """Bytes of the copy of x at the begin of the workspace."""
    return aligned(problem.rows * row_pitch(problem) * 2) if needs_copy(problem) else 0


def row_pitch(problem: QuantizedMatmulProblem) -> int:
    """Elements from a row of the copy to the next."""
    return -(-problem.contracted // 8) * 8


def _padded_rows(problem: QuantizedMatmulProblem, config: Config) -> int:
    return tiles.tile_counts(problem, config)[1] * config.tile_n


def _sums_bytes(problem: QuantizedMatmulProblem, config: Config) -> int:
    if not needs_sums(problem, config.tile_n):
        return 0
    return aligned(k_blocks(problem) * (BLOCK_K // period(problem)) * _padded_rows(problem, config) * 4)


def prepare_args(problem: QuantizedMatmulProblem, padded_rows: int) -> Struct:
    """Arguments of the kernel that prepares x; `pitch` is the elements of a row of the copy, 0 for no copy.

    `padded_rows`: how many rows have sums; those beyond x have zeros.
    """
    sizes = {"rows": problem.rows, "k": problem.contracted, "padded_rows": padded_rows}
    pitch = row_pitch(problem) if needs_copy(problem) else 0
    return Struct("PrepareArgs", {**sizes, "k_blocks": k_blocks(problem), "pitch": pitch})


def prepare_launch(
    kernel: str, problem: QuantizedMatmulProblem, padded_rows: int, copy: plan.Pointer, sums: plan.Pointer
) -> plan.Launch:
    """The launch of the kernel that prepares x."""
    return plan.Launch(
        kernel=kernel,
        grid=(-(-padded_rows * k_blocks(problem) // PREPARE_WARPS), 1, 1),
        block=(32 * PREPARE_WARPS, 1, 1),
        params=(prepare_args(problem, padded_rows), plan.Pointer(0), copy, sums),
    )


class Tiled(tiles.TileFamily[Config]):
    name = "quantized_tiled"
    ABI = 5
    file = "quantized/tiled.cu"

    x_dtypes, out_dtypes = X_DTYPES, OUT_DTYPES
    tiles_m, tiles_n = TILES_M, TILES_N
    x_item = 2
    most_stages = (8, 10)  # two k_warpgroups hold two stages each
    k_warpgroups_tiles_m = (64, 128)
    counted_tile = (128, 128)  # the smallest one of the most general scaling
    queues = True

    def x_sums_bytes(self, problem: QuantizedMatmulProblem, tile_n: int) -> int:
        return BLOCK_K // period(problem) * tile_n * 4 if needs_sums(problem, tile_n) else 0

    def blocks_per_sm(self, problem: QuantizedMatmulProblem, config: Config) -> int:
        """2 if shared memory and the registers allow it (CTAS_PER_SM in the device code)."""
        crowded = scaling(problem, config.tile_n) == "sum" and (problem.bits == 8 or period(problem) == 128)
        widest = 16 if crowded else 32
        small = config.warpgroups <= 2 and config.tile_n <= (64 if config.warpgroups == 1 else widest)
        return 2 if small and config.stages <= self.max_stages(problem, config, 2) else 1

    def prepared_bytes(self, problem: QuantizedMatmulProblem, config: Config) -> int:
        """Bytes of the copy of x, and of sums of x for zero points."""
        return copy_bytes(problem) + _sums_bytes(problem, config)

    def loop_problem_refusal(self, problem: QuantizedMatmulProblem) -> str | None:
        units = (problem.rows + 256) * k_blocks(problem)
        if _prepared(problem, NARROW) and units > tiles.INT32_MAX:
            length = f"{'features' if problem.transposed else 'k'}={problem.contracted}"
            copied = f"dtype {problem.x_dtype}" if problem.contracted % 8 == 0 else f"{length} (no multiple of 8)"
            what = "zero points" if needs_sums(problem, NARROW) else copied
            return f"{units} blocks of 128 k of x with {what}; accepted: at most {tiles.INT32_MAX}"
        return None

    def loop_refusal(self, problem: QuantizedMatmulProblem, config: Config) -> str | None:
        widest = max_tile_n(problem, config.tile_n, config.warpgroups)
        if config.tile_n <= widest:
            return None
        shared = "" if config.k_warpgroups == 1 else f", {config.k_warpgroups} k_warpgroups"
        given = f"tile_n {config.tile_n} with tile_m {config.tile_m}{shared}"
        return f"{given} and scaling {scaling(problem, config.tile_n)!r}; at most {widest}"

    def candidate_tiles(self, problem: QuantizedMatmulProblem) -> Iterator[Config]:
        # The narrowest tile that holds all rows, and for more rows the widest ones.
        widths = [n for n in TILES_N if n >= problem.rows][:1]
        widths += [n for n in (64, 96, 128, 192, 256) if n < problem.rows]
        for tile_m, tile_n in itertools.product(TILES_M, widths):
            if tile_m // 2 >= problem.m and tile_m > WARPGROUP_M:
                continue  # half of it is padding
            if tile_m == WARPGROUP_M and problem.m > WARPGROUP_M and problem.rows > 64:
                continue
            if tile_n > max_tile_n(problem, tile_n, tile_m // WARPGROUP_M):
                continue
            for k_warpgroups, together in itertools.product((1, 2), (2, 1)):
                tile = self.Config(tile_m, tile_n, 0, 0, k_warpgroups=k_warpgroups)
                config = self.deepest(problem, tile, together)
                enough = config.stages >= tiles.MIN_STAGES[k_warpgroups]
                if enough and self.blocks_per_sm(problem, config) == together:
                    yield whole_tiles(problem, config)

    def near_tiles(self, problem: QuantizedMatmulProblem, config: Config) -> Iterator[tuple[Config, bool]]:
        yield config, True
        width, height = TILES_N.index(config.tile_n), TILES_M.index(config.tile_m)
        others = [(config.tile_m, n) for n in TILES_N[max(0, width - 1) : width + 2]]
        others += [(m, config.tile_n) for m in TILES_M[max(0, height - 1) : height + 2]]
        for tile_m, tile_n in others:
            if (tile_m, tile_n) != (config.tile_m, config.tile_n):
                yield self.deepest(problem, dataclasses.replace(config, tile_m=tile_m, tile_n=tile_n)), False

    def block_work(self, problem: QuantizedMatmulProblem, config: Config) -> tuple[float, float, float]:
        """A product counts at least 16 columns."""
        where, sums = scaling(problem, config.tile_n), needs_sums(problem, config.tile_n)
        columns = config.tile_n / 2 * (2 if sums else 1)
        issued = 4 * 2 * ISSUE_SLOTS[problem.qtype]
        if where == "weight" and not FORMATS[problem.qtype].integer:
            issued *= 1.4
        if in_parts(problem, config.tile_n):
            issued += 4 * 2 * 4 * 8  # two more multiplications of each register
        if where == "sum":
            issued += 4 * 2 * columns * 64 / period(problem)
        turns = BLOCK_K / period(problem) if where == "sum" else 1
        return 4 * config.m_warpgroups * max(config.tile_n, 32), config.m_warpgroups * issued, turns

    def prepared(self, problem: QuantizedMatmulProblem, config: Config) -> bool:
        return _prepared(problem, config.tile_n)

    def operand_bytes(self, problem: QuantizedMatmulProblem) -> int:
        copied = nbytes(problem.x_shape, problem.x_dtype) if needs_copy(problem) else 0
        return super().operand_bytes(problem) - copied + copy_bytes(problem)

    def loop_macros(self, problem: QuantizedMatmulProblem, config: Config) -> dict[str, int]:
        return {
            "E4M3_PRODUCTS": 0,
            "HALF": int(_operand_dtype(problem) == "float16"),
            "X_E4M3": int(problem.x_dtype == "float8_e4m3fn"),
            "SCALING": SCALINGS.index(scaling(problem, config.tile_n)),
            "PERIOD": period(problem),
            "CTAS_PER_SM": self.blocks_per_sm(problem, config),
            "PREPARED": int(self.prepared(problem, config)),
        }

    def structs(self, problem: QuantizedMatmulProblem, config: Config) -> list[Struct]:
        """Includes the struct of the kernel that prepares x, which the source always has."""
        return [*super().structs(problem, config), prepare_args(problem, _padded_rows(problem, config))]

    def x_map(self, problem: QuantizedMatmulProblem, config: Config, workspace: int) -> plan.TiledMap:
        buffer = workspace if needs_copy(problem) else 0
        # The pitch is that of x itself where rows are not copied.
        dims, strides = (problem.contracted, problem.rows), (row_pitch(problem) * 2,)
        return plan.TiledMap(buffer, _operand_dtype(problem), dims, strides, box=(64, config.tile_n))

    def prepare(self, problem: QuantizedMatmulProblem, config: Config, workspace: int) -> tiles.Prepared:
        """Two parameters of the main kernel, zero points and sums of x; and the launch that prepares x and its sums, or
        none."""
        sums = plan.Pointer(workspace, copy_bytes(problem))
        operands = (dequantize.zero_pointer(problem), sums)
        if not _prepared(problem, config.tile_n):
            return operands, ()
        name, rows = self.kernel_name(problem, "_prepare"), _padded_rows(problem, config)
        return operands, (prepare_launch(name, problem, rows, plan.Pointer(workspace), sums),)


FAMILY = Tiled(Config)
