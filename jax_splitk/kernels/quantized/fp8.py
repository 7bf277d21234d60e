"""Kernel family: products of e4m3 activations with packed quantized weights, on Hopper's fp8 tensor cores (device code:
quantized/fp8.cu).

Weights are decoded into the A registers of WGMMA; TMA loads the activation unchanged. 4-bit and e4m3 weights are exact
in e4m3. The tensor cores add e4m3 products with few bits. So their sums of 32, 64 or 128 k are multiplied by the
group's scale and added to fp32 accumulators (as in DeepSeek-V3, arXiv:2412.19437, section 3.3.2). The sums of one part
of the tile are added up while the products of the next one, or another warpgroup's, run.

With the compute_dtype float8_e4m3fn weights are rounded to e4m3 with their scales, over a power of two of each feature,
and the tensor cores add up all k of a range. That takes any format, and zero points. A kernel of its own rounds x of 16
bits, each row over a power of two, which multiplies the row's sums.

The k blocks of the output's tiles can be cut into ranges, as in quantized_tiled, whose sums meet in the workspace or in
a cluster; clusters of two thread blocks with a tile each share the activation by multicast. The result is
deterministic.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

from jax_splitk.kernels.base.family import field_refusal
from jax_splitk.kernels.device.structs import Struct
from jax_splitk.kernels.quantized import dequantize, tiles
from jax_splitk.kernels.quantized.dequantize import E4M3_FORMATS, SHORTEST_GROUP, has_zero, per_channel
from jax_splitk.kernels.quantized.tiles import BLOCK_K, aligned, whole_tiles
from jax_splitk.problems.quantized_matmul import X_DTYPES, QuantizedMatmulProblem
from jax_splitk.quantized.formats import BYTE_SCALES
from jax_splitk.runtime import plan
from jax_splitk.runtime.target import Target

E4M3 = "float8_e4m3fn"
ROW_THREADS = 256  # of a thread block of the kernel that rounds x
K_MULTIPLE = 16  # TMA's rows are multiples of 16 bytes
TILES_M = (128, 256)
TILES_N = (32, 64, 96, 128, 192, 256)
MULTICASTS = (1, 2)
MAX_REGISTERS = 232
# Rounding x of 16 bits: a launch, and what an element takes (H200, 512 to 1,024 rows).
PREPARE_SECONDS, PREPARE_SECONDS_EACH = 3e-6, 0.72e-12
ROUNDING_SLOTS = 180  # issue slots of a warp that decodes, scales and rounds 64 values of each of 64 rows
WIDEST_OF_256 = 64  # with four warpgroups a thread has few registers


@dataclasses.dataclass(frozen=True)
class Config(tiles.Config):
    """How the tiles are computed: see `tiles.Config`.

    Attributes:
      multicast: thread blocks of a cluster that need the same rows of x and load them together. Tiles and ranges then
        belong to the cluster.
    """

    multicast: int = 1

    @property
    def worker_blocks(self) -> int:
        return self.multicast


def rounded(problem: QuantizedMatmulProblem) -> bool:
    """Whether weights are rounded to e4m3 with their scales (ROUNDED in the device code). A scale for all k multiplies
    the sums instead, if e4m3 holds the weight's values."""
    exact = per_channel(problem) and problem.qtype in E4M3_FORMATS and not has_zero(problem)
    return problem.compute_dtype == E4M3 and not exact


def is_prepared(problem: QuantizedMatmulProblem) -> bool:
    """Whether a kernel rounds x first (PREPARED in the device code)."""
    return problem.x_dtype != E4M3


def _with_e4m3(problem: QuantizedMatmulProblem) -> QuantizedMatmulProblem:
    """The problem of the x that the main kernel multiplies."""
    return dataclasses.replace(problem, x_dtype=E4M3)


def _row_factors(problem: QuantizedMatmulProblem) -> tuple[int, int]:
    """Where the factors of rows begin in the workspace, behind x in e4m3, and their bytes. A tile reads as many as it
    has columns."""
    if not is_prepared(problem):
        return 0, 0
    return aligned(problem.rows * problem.k), aligned(4 * (problem.rows + TILES_N[-1]))


def period(problem: QuantizedMatmulProblem, config: Config) -> int:
    """k of a sum of the tensor cores (PERIOD in the device code). It is 128 if one scale serves all of these k: half as
    many sums to promote, as in DeepSeek-V3. Float16 results would show the lost bits, and in narrow tiles promotion is
    a small part of the work; these use a smaller period.
    """
    group = BLOCK_K if per_channel(problem) else problem.group_size
    long = config.tile_m == TILES_M[0] and config.tile_n >= 128 and problem.out_dtype == "bfloat16"
    return min(128 if long else 64, group)


def _sets(problem: QuantizedMatmulProblem, config: Config, columns: int) -> int:
    """Sets of partial sums of `columns` columns that a thread's registers hold, besides accumulators, fragments and
    words."""
    steps = period(problem, config) // 32
    words = 8 * (min(steps, 2) if problem.bits == 8 else 1)
    one = (config.tile_n + columns) // 2 + 8 * steps + words
    if one + columns // 2 <= (224 if config.warpgroups == 2 else 80):
        return 2
    # Pairs of float32 scales need one more register, and so does decoding bytes beside the address of channel scales.
    wide = problem.scale_dtype == "float32"
    wide |= problem.scale_dtype in BYTE_SCALES and dequantize.has_channel_scale(problem)
    return 1 if one + wide <= MAX_REGISTERS else 0


def chunk(problem: QuantizedMatmulProblem, config: Config) -> int:
    """Columns of the tile that are multiplied, and then added up, at a time (CHUNK in the device code): narrow chunks
    cost waits, wide ones registers."""
    if rounded(problem):
        return config.tile_n
    if config.tile_n % 128 == 0 and _sets(problem, config, 128) >= _sets(problem, config, 64):
        return 128
    return 64 if config.tile_n % 64 == 0 else 32


def sums(problem: QuantizedMatmulProblem, config: Config) -> int:
    """Sets of partial sums (SUMS in the device code)."""
    if rounded(problem):
        return 1
    return _sets(problem, config, chunk(problem, config))


class Fp8(tiles.TileFamily[Config]):
    name = "quantized_fp8"
    ABI = 3
    file = "quantized/fp8.cu"

    x_dtypes = X_DTYPES
    out_dtypes = ("bfloat16", "float16")  # the tensor cores' sums of e4m3 products are not good enough for float32
    tiles_m, tiles_n = TILES_M, TILES_N
    x_item = 1
    most_stages = (8, 8)
    k_warpgroups_tiles_m = (128,)
    counted_tile = (128, 256)
    queues = False

    def loop_problem_refusal(self, problem: QuantizedMatmulProblem) -> str | None:
        if is_prepared(problem) and problem.compute_dtype != E4M3:
            return f"x of dtype {problem.x_dtype}; accepted: {E4M3}, and with that as compute_dtype also others"
        if problem.k % K_MULTIPLE:
            return f"k={problem.k}; accepted: multiples of {K_MULTIPLE}"
        if rounded(problem):
            return None
        if problem.qtype not in E4M3_FORMATS:
            return f"a weight of {problem.qtype}, whose values e4m3 does not hold; accepted: {', '.join(E4M3_FORMATS)}"
        if problem.group_size < SHORTEST_GROUP:
            return f"groups of {problem.group_size}; accepted: at least {SHORTEST_GROUP}, the k of an instruction"
        if problem.zero_dtype != "none":
            return f"zero points of dtype {problem.zero_dtype}; accepted: none"
        return None

    def loop_refusal(self, problem: QuantizedMatmulProblem, config: Config) -> str | None:
        if (reason := field_refusal(config, multicast=MULTICASTS)) is not None:
            return reason
        if config.blocks % config.multicast:
            return f"blocks {config.blocks} with multicast {config.multicast}; accepted: multiples of it"
        if config.splits > 1 and config.multicast > 1:
            return f"splits {config.splits} with multicast {config.multicast}; accepted: 1"
        if config.tile_m > TILES_M[0] and config.tile_n > WIDEST_OF_256:
            return f"tile_n {config.tile_n} with tile_m {config.tile_m}; accepted: at most {WIDEST_OF_256}"
        return None

    def candidate_tiles(self, problem: QuantizedMatmulProblem) -> Iterator[Config]:
        # The narrowest tile that holds all rows, and for more rows narrower ones that are not much slower.
        widths = [n for n in TILES_N if n >= problem.rows][:1]
        widths += [n for n in TILES_N if min(128, problem.rows / 2) <= n < problem.rows]
        for tile_n, tile_m in itertools.product(widths, TILES_M):
            if tile_m > TILES_M[0] and (tile_n > WIDEST_OF_256 or problem.features <= TILES_M[0]):
                continue
            # Wide tiles read so much of x that two blocks had better share it.
            multicasts = MULTICASTS if tile_n >= 128 and problem.features > tile_m else MULTICASTS[:1]
            for multicast, k_warpgroups in itertools.product(multicasts, (1, 2)):
                tile = Config(tile_m, tile_n, 0, 0, multicast=multicast, k_warpgroups=k_warpgroups)
                yield whole_tiles(problem, self.deepest(problem, tile))

    def near_tiles(self, problem: QuantizedMatmulProblem, config: Config) -> Iterator[tuple[Config, bool]]:
        """The other multicast and k_warpgroups, and the next tiles."""
        width = TILES_N.index(config.tile_n)
        own = (config.tile_m, config.tile_n, config.multicast)
        tiles_n = TILES_N[max(0, width - 1) : width + 2]
        for *tile, k_warpgroups in itertools.product(TILES_M, tiles_n, MULTICASTS, (1, 2)):
            tile_m, tile_n, multicast = tile
            found = Config(tile_m, tile_n, 0, 0, multicast=multicast, k_warpgroups=k_warpgroups)
            yield self.deepest(problem, found), (tile_m, tile_n, multicast) == own

    def block_work(self, problem: QuantizedMatmulProblem, config: Config) -> tuple[float, float, float]:
        """Also counts the additions of a period's sums, by all threads of a warpgroup."""
        if rounded(problem):
            return 2 * config.m_warpgroups * config.tile_n, config.m_warpgroups * 4 * ROUNDING_SLOTS, 1
        periods = BLOCK_K // period(problem, config)
        promotion = 4 * config.tile_n / 2 * periods
        decode = 4 * dequantize.ISSUE_SLOTS[problem.qtype]
        chunks = periods * config.tile_n / chunk(problem, config) / sums(problem, config)
        return 2 * config.m_warpgroups * config.tile_n, config.m_warpgroups * (promotion + decode), 1 + chunks

    def estimates(self, problem: QuantizedMatmulProblem, configs: Sequence[Config], target: Target) -> list[float]:
        more = 0.0
        if is_prepared(problem):
            more = PREPARE_SECONDS + PREPARE_SECONDS_EACH * problem.rows * problem.k
        return [seconds + more for seconds in super().estimates(_with_e4m3(problem), configs, target)]

    def by_estimate(self, problem: QuantizedMatmulProblem, configs: Iterable[Config], target: Target) -> list[Config]:
        return super().by_estimate(_with_e4m3(problem), configs, target)

    def loop_macros(self, problem: QuantizedMatmulProblem, config: Config) -> dict[str, int]:
        return {
            "E4M3_PRODUCTS": 1,
            "ROUNDED": int(rounded(problem)),
            "PREPARED": int(is_prepared(problem)),
            "X_HALF": int(problem.x_dtype == "float16"),
            "HALF": 1,
            "PERIOD": period(problem, config),
            "CHUNK": chunk(problem, config),
            "SUMS": sums(problem, config),
        }

    def prepared_bytes(self, problem: QuantizedMatmulProblem, config: Config) -> int:
        """Bytes of x in e4m3, and of the factors of its rows."""
        del config
        return sum(_row_factors(problem))

    def structs(self, problem: QuantizedMatmulProblem, config: Config) -> list[Struct]:
        more = [_rows_args(problem)] if is_prepared(problem) else []
        return [*super().structs(problem, config), *more]

    def x_map(self, problem: QuantizedMatmulProblem, config: Config, workspace: int) -> plan.TiledMap:
        """Pairs of e4m3 as elements of 16 bits: the map only moves bytes."""
        dims, box = (problem.k // 2, problem.rows), (BLOCK_K // 2, config.tile_n // config.multicast)
        buffer = workspace if is_prepared(problem) else 0
        return plan.TiledMap(buffer=buffer, dtype="float16", dims=dims, strides=(problem.k,), box=box)

    def prepare(self, problem: QuantizedMatmulProblem, config: Config, workspace: int) -> tiles.Prepared:
        """The main kernel's parameters zero points and factors of rows, and the kernel that rounds x, if there is
        one."""
        del config
        factors = plan.Pointer(workspace, _row_factors(problem)[0])
        operands = (dequantize.zero_pointer(problem), factors)
        if not is_prepared(problem):
            return operands, ()
        rounds = plan.Launch(
            kernel=self.kernel_name(problem, "_prepare"),
            grid=(problem.rows, 1, 1),
            block=(ROW_THREADS, 1, 1),
            params=(_rows_args(problem), plan.Pointer(0), plan.Pointer(workspace), factors),
        )
        return operands, (rounds,)


def _rows_args(problem: QuantizedMatmulProblem) -> Struct:
    """The sizes for the kernel that rounds x: eights of a row."""
    return Struct("RowsArgs", {"eighths": problem.k // 8})


FAMILY = Fp8(Config)
