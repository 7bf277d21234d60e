"""Kernel family: products of e4m3 activations with packed quantized weights, on Hopper's fp8 tensor cores (device code:
quantized/fp8.cu).

Weights of 4 bits, and e4m3 ones, are exact in e4m3 and are decoded into the A registers of WGMMA; the activation comes
by TMA as it lies in memory. The tensor cores add e4m3 products with few bits, so their sums of 32, 64 or 128 k go,
times the group's scale, onto fp32 accumulators (as in DeepSeek-V3, arXiv:2412.19437, section 3.3.2). The sums of one
part of the tile are added up while the products of the next one, or another warpgroup's, run. The k blocks of the
output's tiles can be cut into ranges, as in quantized_tiled, whose sums meet in the workspace or in a cluster; clusters
of two thread blocks with a tile each share the activation by multicast. The result is deterministic.
"""

import dataclasses
import itertools
from collections.abc import Iterator

from jax_splitk.kernels.quantized import dequantize, tiles
from jax_splitk.kernels.quantized.dequantize import E4M3_FORMATS, per_channel
from jax_splitk.kernels.quantized.tiles import BLOCK_K, tile_bytes, whole_tiles
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.runtime import plan
from jax_splitk.runtime.target import Target

K_MULTIPLE = 16  # TMA's rows are multiples of 16 bytes
QTYPES = E4M3_FORMATS
TILES_M = (128, 256)
TILES_N = (32, 64, 96, 128, 192, 256)
CHUNKS = (32, 64, 128)
MULTICASTS = (1, 2)
MAX_REGISTERS = 232
WIDEST_OF_256 = 64  # with four warpgroups a thread has few registers


@dataclasses.dataclass(frozen=True)
class Config(tiles.Config):
    """How a product of an e4m3 activation is computed; see `tiles.Config`, `TILES_M`, `TILES_N`.

    Attributes:
      chunk: columns of the tile that are multiplied, and added up, at a time; see `CHUNKS`. 32 is legal for all tiles.
    """

    chunk: int = CHUNKS[0]


def period(problem: QuantizedMatmulProblem, config: Config) -> int:
    """k of a sum of the tensor cores (PERIOD in the device code).

    128 where there is one scale for them: half as many sums to promote, as in DeepSeek-V3. Not for float16 results,
    which would show the bits that are lost, nor in narrow tiles, where promotion is a smaller part of the work.
    """
    group = BLOCK_K if per_channel(problem) else problem.group_size
    long = config.tile_m == TILES_M[0] and config.tile_n >= 128 and problem.out_dtype == "bfloat16"
    return min(128 if long else 64, group)


def _registers(problem: QuantizedMatmulProblem, config: Config, sets: int) -> int:
    """Of a thread: sums, `sets` of partial sums, fragments and words."""
    steps = period(problem, config) // 32
    words = 8 * (min(steps, 2) if problem.bits == 8 else 1)
    return (config.tile_n + sets * config.chunk) // 2 + 8 * steps + words


def sums(problem: QuantizedMatmulProblem, config: Config) -> int:
    """Sets of partial sums that a thread's registers hold (SUMS in the device code)."""
    return 2 if _registers(problem, config, 2) <= (224 if config.warpgroups == 2 else 80) else 1


def _fits(problem: QuantizedMatmulProblem, config: Config) -> bool:
    """Whether one set of partial sums fits in registers, with the scales of what is decoded."""
    return _registers(problem, config, 1) + (problem.scale_dtype == "float32") <= MAX_REGISTERS


@dataclasses.dataclass(frozen=True)
class Costs(tiles.Costs):
    """The cost model's constants.

    Attributes:
      mma_per_column: clocks of a warpgroup's 64 features and 128 k, for each of the tile's columns.
      issue: instructions of a warp for 128 k by format, but for what depends on the tile: decoding and the loop.
      promotion: of a partial sum; half of its instructions read a register less.
      mma_part, issue_part: neither hides much of the other: both need the registers' ports.
      block_clocks: of a block of 128 k, besides.
      in_parts: times a block's clocks with two k_warpgroups, of which more warps hide more.
      piece_seconds: of a piece of work: its last sums are waited for, and stored.
      split_piece_seconds: the same where a tile's ranges are a cluster.
      issue_per_chunk: of each period, by sets of partial sums: waits, too.
    """

    mma_per_column: float
    issue: dict[str, float]
    promotion: float
    mma_part: float
    issue_part: float
    block_clocks: float
    in_parts: float
    piece_seconds: float
    split_piece_seconds: float
    issue_per_chunk: dict[int, float]


class Fp8(tiles.TileFamily[Config]):
    name = "quantized_fp8"
    ABI = 2
    file = "quantized/fp8.cu"

    x_dtypes = ("float8_e4m3fn",)
    out_dtypes = ("bfloat16", "float16")  # the tensor cores' sums of e4m3 products are not good enough for float32
    tiles_m, tiles_n, multicasts = TILES_M, TILES_N, MULTICASTS
    x_item = 1
    most_stages = (8, 8)
    widest_split = 128  # with more rows there are tiles enough
    k_warpgroups_tiles_m = (128,)
    counted_tile = (128, 256)
    queues = False

    def loop_problem_refusal(self, problem: QuantizedMatmulProblem) -> str | None:
        if problem.qtype not in QTYPES:
            return f"a weight of {problem.qtype}, whose values e4m3 does not hold; accepted: {', '.join(QTYPES)}"
        if problem.zero_dtype != "none":
            return f"zero points of dtype {problem.zero_dtype}; accepted: none"
        if problem.k % K_MULTIPLE:
            return f"k={problem.k}; accepted: multiples of {K_MULTIPLE}"
        return None

    def loop_refusal(self, problem: QuantizedMatmulProblem, config: Config) -> str | None:
        if config.chunk not in CHUNKS:
            return f"chunk {config.chunk}; accepted: {', '.join(map(str, CHUNKS))}"
        given = f"chunk {config.chunk} of tile_n {config.tile_n}"
        if config.tile_n % config.chunk:
            return f"{given}; accepted: a divisor"
        if not _fits(problem, config):
            return f"{given}; accepted with this weight: at most {config.chunk // 2}"
        if config.tile_m > TILES_M[0] and config.tile_n > WIDEST_OF_256:
            return f"tile_n {config.tile_n} with tile_m {config.tile_m}; accepted: at most {WIDEST_OF_256}"
        return None

    def _tile(
        self, problem: QuantizedMatmulProblem, tile_m: int, tile_n: int, chunk: int, multicast: int, k_warpgroups: int
    ) -> Config:
        """With the deepest pipeline."""
        config = Config(tile_m, tile_n, 0, 0, 1, 1, multicast, k_warpgroups, chunk)
        return dataclasses.replace(config, stages=self.max_stages(problem, config))

    def candidate_tiles(self, problem: QuantizedMatmulProblem) -> Iterator[Config]:
        # The narrowest tile that holds all rows, and for more rows narrower ones that are not much slower.
        widths = [n for n in TILES_N if n >= problem.rows][:1]
        widths += [n for n in TILES_N if min(128, problem.rows / 2) <= n < problem.rows]
        for tile_n, tile_m in itertools.product(widths, TILES_M):
            if tile_m > TILES_M[0] and (tile_n > WIDEST_OF_256 or problem.features <= TILES_M[0]):
                continue
            # Narrow chunks cost waits; they are for tiles that wider ones do not divide.
            chunks = [64 if tile_n % 64 == 0 else 32]
            if tile_n % 128 == 0:
                chunks.append(128)
            # Wide tiles read so much of x that two blocks had better share it.
            multicasts = MULTICASTS if tile_n >= 128 and problem.features > tile_m else MULTICASTS[:1]
            for chunk, multicast, k_warpgroups in itertools.product(chunks, multicasts, (1, 2)):
                tile = self._tile(problem, tile_m, tile_n, chunk, multicast, k_warpgroups)
                if _fits(problem, tile):
                    yield whole_tiles(problem, tile)

    def near_tiles(self, problem: QuantizedMatmulProblem, config: Config) -> Iterator[tuple[Config, bool]]:
        """The other chunks, multicast and k_warpgroups, and the next tiles."""
        width = TILES_N.index(config.tile_n)
        own = (config.tile_m, config.tile_n, config.chunk, config.multicast)
        tiles_n = TILES_N[max(0, width - 1) : width + 2]
        for *tile, k_warpgroups in itertools.product(TILES_M, tiles_n, CHUNKS, MULTICASTS, (1, 2)):
            tile_m, tile_n, chunk, multicast = tile
            if tile_n % chunk == 0:
                yield self._tile(problem, tile_m, tile_n, chunk, multicast, k_warpgroups), tuple(tile) == own

    def schedules_kept(self, problem: QuantizedMatmulProblem) -> int:
        return 4 if problem.rows <= 64 else 3

    def block_seconds(self, problem: QuantizedMatmulProblem, config: Config, target: Target) -> tuple[float, float]:
        """The time of tensor cores and instruction issue together, or that of L2."""
        costs: Costs = self.costs(target)
        periods = BLOCK_K // period(problem, config)
        mma = config.m_warpgroups * costs.mma_per_column * config.tile_n
        per_chunk = costs.issue_per_chunk[2 if config.warpgroups > 2 else sums(problem, config)]  # others hide it
        promotion = config.tile_n / 2 * costs.promotion + per_chunk * config.tile_n / config.chunk
        issue = config.m_warpgroups * (costs.issue[problem.qtype] + periods * promotion)
        busy = costs.mma_part * mma + costs.issue_part * issue + costs.block_clocks
        busy *= costs.in_parts if config.k_warpgroups > 1 else 1
        load = BLOCK_K * config.tile_n / config.multicast + dequantize.weight_bytes(problem, config.tile_m, BLOCK_K)
        return max(busy, load / costs.l2_bytes_per_clock) / costs.clock, 0.0

    def piece_seconds(self, config: Config, target: Target) -> float:
        costs: Costs = self.costs(target)
        if config.splits == 1:
            return costs.piece_seconds
        return costs.split_piece_seconds + tile_bytes(config) // config.splits / costs.store_bytes_per_sm

    def loop_macros(self, problem: QuantizedMatmulProblem, config: Config) -> dict[str, int]:
        return {
            "E4M3_PRODUCTS": 1,
            "PERIOD": period(problem, config),
            "CHUNK": config.chunk,
            "SUMS": sums(problem, config),
        }

    def x_map(self, problem: QuantizedMatmulProblem, config: Config, workspace: int) -> plan.TiledMap:
        """Pairs of e4m3 as elements of 16 bits: the map only moves bytes."""
        del workspace
        dims, box = (problem.k // 2, problem.rows), (BLOCK_K // 2, config.tile_n // config.multicast)
        return plan.TiledMap(buffer=0, dtype="float16", dims=dims, strides=(problem.k,), box=box)


FAMILY = Fp8(Config, Costs)
