"""Kernel family: grouped products whose rows are ragged (device code: ragged/ragged_m.cu).

`lax.ragged_dot`, and its gradient of lhs: each group's rows times the group's own matrix. Tiles begin where a group
begins. Group sizes stay on the device.
"""

import itertools
from collections.abc import Iterator, Sequence

from jax_splitk.kernels.base.work import Work
from jax_splitk.kernels.device.split_tile import MAX_FLOAT32_CHAIN, is_whole, operand_map
from jax_splitk.kernels.ragged import tiles
from jax_splitk.kernels.ragged.maps import group_map
from jax_splitk.kernels.ragged.tiles import BLOCK, Config, RaggedFamily
from jax_splitk.problems.ragged_dot import RaggedDotProblem
from jax_splitk.runtime import plan
from jax_splitk.runtime.target import Target

# (columns of the matrices, rows of lhs) of a tile under `swap`.
_SWAPPED = tuple(itertools.product((64, 128, 256), (8, 16, 32, 64)))
_LEAST = 8  # stages of a piece of a tile that is cut, at least
_CUT = ((128, 256), (256, 128), (128, 192), (128, 128))  # tiles of candidates
# The last round is cut in candidates for fewer rounds of tiles and a k at least as long: with more rounds or a shorter
# k it gained nothing, or 0.4% (H200).
_FEW_ROUNDS, _LONG_K = 12, 4096


def _k_blocks(problem: RaggedDotProblem) -> int:
    return -(-problem.k // BLOCK)


def _slots(config: Config) -> int:
    """Slots for the sums of pieces."""
    return 2 * config.workers if config.cut else 0


# Estimates are for groups of about the same size that end anywhere in a tile.


def _groups(problem: RaggedDotProblem) -> int:
    """Groups that have rows."""
    return max(1, min(problem.groups, problem.rows))


def _tiles_of_group(problem: RaggedDotProblem, rows: int) -> float:
    """Tiles of so many rows for the rows of a group."""
    each = problem.rows / _groups(problem)
    return max(1.0, each / rows + 0.5) if each > 1 else 1.0


def _tiles(problem: RaggedDotProblem, rows: int, columns: int) -> float:
    """Tiles of so many rows and columns."""
    return _groups(problem) * _tiles_of_group(problem, rows) * -(-problem.n // columns)


class RaggedM(RaggedFamily):
    """Preferred for every forward product of 16-bit operands."""

    name = "ragged_m"
    ABI = 1
    file = "ragged/ragged_m.cu"
    mode = "forward"
    TILES = ((128, 256), (256, 128), (128, 192), (128, 128), (64, 256), (64, 128))
    swaps = (False, True)
    cuts = (False, True)

    def tiles(self, config: Config) -> Sequence[tuple[int, int]]:
        return _SWAPPED if config.swap else self.TILES

    def problem_refusal(self, problem: RaggedDotProblem) -> str | None:
        if (reason := super().problem_refusal(problem)) is not None:
            return reason
        if problem.out_dtype == "float32" and _k_blocks(problem) > MAX_FLOAT32_CHAIN:
            return f"k={problem.k} with a float32 result; accepted: at most {MAX_FLOAT32_CHAIN * BLOCK}"
        return None

    def config_refusal(self, problem: RaggedDotProblem, config: Config) -> str | None:
        if (reason := super().config_refusal(problem, config)) is not None:
            return reason
        if config.cut and (config.swap or _k_blocks(problem) < 2 * _LEAST):
            return f"cut with k={problem.k}; accepted: from {(2 * _LEAST - 1) * BLOCK + 1} on, without swap"
        return None

    # ---- search ----------------------------------------------------------------------------------------------------

    def shapes(self, problem: RaggedDotProblem, target: Target) -> Iterator[Config]:
        yield from super().shapes(problem, target)
        for m, n in _CUT if problem.k >= _LONG_K else ():
            if _tiles(problem, m, n) < _FEW_ROUNDS * target.cores:
                yield Config(m, n, 1, target.cores, cut=True)
        yield from (Config(m, n, 1, target.cores, swap=True) for m, n in _SWAPPED)

    def work(self, problem: RaggedDotProblem, config: Config, target: Target) -> Work:
        p = problem
        rows, tall = p.rows / _groups(p), _tiles_of_group(p, config.tile_rows)
        count = _tiles(p, config.tile_rows, config.tile_columns)
        workers = min(config.workers, target.cores)
        if config.cut:
            turns = max(_LEAST / _k_blocks(p), count / workers)
        else:
            turns = max(1.0, count / workers + (0.5 if count > workers else 0.0))
        stages = int(turns * _k_blocks(p))
        # The loader goes on to the next tile: three stages are as good as four (26 products on an H200).
        work = config.stage_work(stages, max(config.stages, stages), 1) | {"waits": 0.0}
        if not config.swap and config.consumers > 1:
            # The consumer that has none of a group's last 64 rows does not multiply.
            idle = config.tile_m / 2 if rows <= BLOCK else BLOCK / 2
            work["tensor_clocks"] *= 1 - idle / (tall * config.tile_m)
        return Work(
            **work,
            rows=stages * config.stage_bytes / 128,
            memory_bytes=p.bytes_moved,
            memory_share=min(1.0, count / target.cores),
            waves=1,
            # While one consumer leaves its sums, another one multiplies.
            stored_bytes=config.tile_m * config.tile_n * turns / config.consumers,
            partial_bytes=2 * self.workspace_bytes(p, config),  # written and read again
            launches=1 + config.cut,
        )

    # ---- plan ------------------------------------------------------------------------------------------------------

    def workspace_bytes(self, problem: RaggedDotProblem, config: Config) -> int:
        return _slots(config) * config.tile_m * config.tile_n * 4

    def sizes(self, problem: RaggedDotProblem, config: Config) -> dict[str, int]:
        p, columns = problem, -(-problem.n // config.tile_columns)
        return {"m": p.m, "n": p.n, "k_blocks": _k_blocks(p), "columns": columns, "workers": config.workers}

    def macros(self, problem: RaggedDotProblem, config: Config) -> dict[str, int]:
        is_mn = problem.rhs_order == "gkn"
        layout = {"B_MN": int(is_mn), "B_WHOLE": int(is_whole(problem.n))}
        cut = {"CUT": int(config.cut), "SLOTS": _slots(config), "PIECE_STAGES": _LEAST}
        return {**super().macros(problem, config), **layout, **cut}

    def maps(self, problem: RaggedDotProblem, config: Config) -> tuple[plan.TiledMap, ...]:
        p = problem
        lhs = operand_map(0, p.dtype, (1, p.m, p.k), "bmk", config.tile_rows)
        order = {"gkn": "bkn", "gnk": "bnk"}[p.rhs_order]
        rhs = operand_map(1, p.dtype, p.rhs_shape, order, config.tile_columns)
        rows = min(BLOCK, config.tile_rows)
        return lhs, rhs, group_map(self.out_buffer(p), p.out_dtype, p.n, rows)

    def cut_tiles(self, problem: RaggedDotProblem, config: Config) -> int:
        return config.workers if config.cut else 0  # a tile that is cut has two slots or more


FAMILY = RaggedM(tiles.Config)
