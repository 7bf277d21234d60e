"""Kernel family: grouped products whose reduction is ragged (device code: ragged/ragged_k.cu).

The gradient of `lax.ragged_dot` by rhs: for each group the product of its rows of two matrices. ragged/schedule_k.cuh
divides the tiles among the thread blocks.
"""

import math

from jax import numpy as jnp

from jax_splitk.kernels.base.work import Work
from jax_splitk.kernels.device.split_tile import MAX_FLOAT32_CHAIN
from jax_splitk.kernels.ragged import tiles
from jax_splitk.kernels.ragged.maps import group_map
from jax_splitk.kernels.ragged.tiles import BLOCK, Config, RaggedFamily
from jax_splitk.problems.ragged_dot import RaggedDotProblem
from jax_splitk.runtime import plan
from jax_splitk.runtime.target import Target

# Macros of schedule_k.cuh: units of time for a tile's results, by the bytes of an element; tiles of a worker, of which
# a group with fewer is cut; and stages of a piece, at least.
_STORE = {4: 4, 2: 2}
_FEW, _LEAST = 3, 8
_MAX_UNITS = 2**30
_MAX_TILES = 2**15, 2**16  # rows and columns of tiles of a matrix, which share an int in device code
# Stages that the tensor cores add in a row at precision "highest", whose rows are parts of float32 numbers
# (`ragged_parts`): the error is then at most 1.9 times that of a sum in float32, also of 64 rows of one sign.
_EXACT_CHAIN = 3


def tile_counts(problem: RaggedDotProblem, config: Config) -> tuple[int, int]:
    """(rows, columns) of tiles of a matrix."""
    return -(-problem.k // config.tile_m), -(-problem.n // config.tile_n)


def units(problem: RaggedDotProblem, config: Config) -> int:
    """The largest number of units of time of all tiles, for any group sizes."""
    rows, columns = tile_counts(problem, config)
    return (problem.m // BLOCK + problem.groups * (1 + _STORE[4])) * rows * columns


def may_cut(problem: RaggedDotProblem, config: Config) -> bool:
    """Whether some sizes make tiles that are cut. Then a second kernel adds the pieces."""
    count = math.prod(tile_counts(problem, config))
    # One group has at most all of the stages, and a worker has its share of the group's own tiles at least.
    return count % config.workers != 0 and count < _FEW * config.workers and problem.m > (2 * _LEAST - 1) * BLOCK


def chain_stages(problem: RaggedDotProblem) -> int | None:
    """The most stages that the tensor cores add in a row; None for any number. They truncate their sums."""
    if problem.precision == "highest":
        return _EXACT_CHAIN
    return MAX_FLOAT32_CHAIN if problem.out_dtype == "float32" else None


def _slots(problem: RaggedDotProblem, config: Config) -> int:
    """Slots for pieces."""
    return 2 * config.workers if may_cut(problem, config) else 0


class RaggedK(RaggedFamily):
    """Preferred for every gradient of rhs with 16-bit operands."""

    name = "ragged_k"
    ABI = 1
    file = "ragged/ragged_k.cu"
    mode = "rhs_gradient"
    TILES = ((128, 256), (256, 128), (128, 192), (128, 128), (64, 256), (64, 128))
    stores_plainly = True

    def problem_refusal(self, problem: RaggedDotProblem) -> str | None:
        if (reason := super().problem_refusal(problem)) is not None:
            return reason
        reasons = [self._tiles_refusal(problem, Config(m, n, 1, 1)) for m, n in self.TILES]
        return None if None in reasons else reasons[0]

    def config_refusal(self, problem: RaggedDotProblem, config: Config) -> str | None:
        return super().config_refusal(problem, config) or self._tiles_refusal(problem, config)

    def _tiles_refusal(self, problem: RaggedDotProblem, config: Config) -> str | None:
        """Why the tiles are too many to be counted."""
        for name, count, most in zip("kn", tile_counts(problem, config), _MAX_TILES, strict=True):
            if count > most:
                return f"{name}={getattr(problem, name)} in {count} tiles; accepted: at most {most}"
        if (needed := units(problem, config)) > _MAX_UNITS:
            return f"{needed} stages of all tiles; accepted: at most {_MAX_UNITS}"
        return None

    def work(self, problem: RaggedDotProblem, config: Config, target: Target) -> Work:
        """The work for groups of about the same size that end anywhere in a stage."""
        p = problem
        rows, columns = tile_counts(p, config)
        total = (p.rows / BLOCK + 0.5 * p.groups) * rows * columns
        stages = int(total / config.workers) + 1
        turns = max(1.0, rows * columns * p.groups / config.workers)
        is_cut = turns < _FEW and rows * columns % config.workers != 0
        tile_bytes = config.tile_m * config.tile_n * 4
        slots = _slots(p, config) * tile_bytes
        work = config.stage_work(stages, max(config.stages, stages), 1)
        if p.precision == "highest":  # the sums of each chain go to memory and back
            work["l2_bytes"] += stages / _EXACT_CHAIN * 2 * tile_bytes
        return Work(
            **work,
            rows=stages * config.stage_bytes / 128,
            memory_bytes=p.bytes_moved,
            waves=1,
            # While one consumer leaves its sums, another one multiplies.
            stored_bytes=config.tile_m * config.tile_n * turns / config.consumers,
            partial_bytes=2 * slots if is_cut else 0,  # written and read again
            launches=1 + may_cut(p, config),
        )

    # ---- plan ------------------------------------------------------------------------------------------------------

    def workspace_bytes(self, problem: RaggedDotProblem, config: Config) -> int:
        """Bytes of the slots for fp32 sums of a tile: see ragged_k.cu."""
        chain = chain_stages(problem)
        is_long = chain is not None and problem.m > chain * BLOCK
        slots = _slots(problem, config) + (config.workers if is_long else 0)
        return slots * config.tile_m * config.tile_n * 4

    def sizes(self, problem: RaggedDotProblem, config: Config) -> dict[str, int]:
        rows, columns = tile_counts(problem, config)
        return {"m": problem.m, "rows_of_matrix": problem.k, "n": problem.n, "rows": rows, "columns": columns}

    def macros(self, problem: RaggedDotProblem, config: Config) -> dict[str, int]:
        store = _STORE[jnp.dtype(problem.out_dtype).itemsize]
        schedule = {
            "STORE_UNITS": store,
            "WORKER_TILES": _FEW,
            "PIECE_STAGES": _LEAST,
            "SLOTS": _slots(problem, config),
        }
        chain = {"CHAIN_STAGES": chain_stages(problem) or 2**30}
        return {**super().macros(problem, config), "WORKERS": config.workers, **schedule, **chain}

    def maps(self, problem: RaggedDotProblem, config: Config) -> tuple[plan.TiledMap, ...]:
        p = problem
        item = jnp.dtype(p.out_dtype).itemsize
        strides = (p.n * item, p.k * p.n * item)
        box = (128 // item, BLOCK, 1)
        out = plan.TiledMap(self.out_buffer(p), p.out_dtype, (p.n, p.k, p.groups), strides, box)
        return group_map(0, p.dtype, p.k, BLOCK), group_map(1, p.dtype, p.n, BLOCK), out

    def cut_tiles(self, problem: RaggedDotProblem, config: Config) -> int:
        return config.workers if may_cut(problem, config) else 0  # a tile that is cut has two slots or more


FAMILY = RaggedK(tiles.Config)
