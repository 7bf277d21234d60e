"""Shared by the two families of grouped products: persistent tiles, whose results TMA stores."""

import abc
import dataclasses
from collections.abc import Iterator, Sequence

from jax import numpy as jnp

from jax_splitk.kernels.base.family import ModelledFamily, field_macros, field_refusal
from jax_splitk.kernels.device import split_k
from jax_splitk.kernels.device.structs import Struct
from jax_splitk.kernels.device.wgmma_tile import RESERVED_BYTES, ROW_BYTES, SHARED_BYTES, WgmmaTile, tile_refusal
from jax_splitk.problems.ragged_dot import RaggedDotProblem
from jax_splitk.runtime import plan
from jax_splitk.runtime.target import Target

MIN_STAGES, MAX_STAGES = 2, 8
MAX_GROUPS = 4096  # whose ends are in shared memory
MAX_WORKERS = 256
MAX_SIZE = 2**30  # of m, k and n: coordinates of tensor maps, with what tiles have beyond
_ALIGNMENT = 1024  # of the stages
_MOST_CANDIDATES, _FEW_STAGES = 12, 3  # that are worth a try
_ADD_THREADS, _ADD_BLOCKS = 256, 8  # of the second kernel; blocks for each tile that is cut
BLOCK = 64  # rows of a block of shared memory, and elements of its rows; rows of a box of results


@dataclasses.dataclass(frozen=True)
class Config(WgmmaTile):
    """How a grouped product is computed.

    Attributes:
      tile_m, tile_n, stages: see `WgmmaTile`.
      workers: persistent thread blocks.
      parts: number of parts in which a tile's columns are stored; more parts leave room for another stage.
      swap: the matrices' columns are WGMMA's rows, and the rows of lhs its columns.
      cut: the tiles of the last round are cut along k, so that all workers have a piece (forward products).
    """

    workers: int
    parts: int = 1
    swap: bool = False
    cut: bool = False

    @property
    def blocks_per_sm(self) -> int:
        return 1

    @property
    def tile_rows(self) -> int:
        return self.tile_n if self.swap else self.tile_m

    @property
    def tile_columns(self) -> int:
        return self.tile_m if self.swap else self.tile_n


def result_bytes(problem: RaggedDotProblem, config: Config) -> int:
    """Shared memory for a part of a tile's results, in boxes of 64 rows of 128 bytes."""
    row = config.tile_columns // config.parts * jnp.dtype(problem.out_dtype).itemsize
    return -(-config.tile_rows // BLOCK) * BLOCK * -(-row // ROW_BYTES) * ROW_BYTES


def group_count(problem: RaggedDotProblem) -> int:
    """Groups for which the kernels have room (macro GROUPS), rounded up so that one kernel serves many problems."""
    return -(-problem.size_count // 64) * 64


def shared_bytes(problem: RaggedDotProblem, config: Config) -> int:
    """Bytes of a thread block: dynamic shared memory, and variables of the kernels."""
    declared = RESERVED_BYTES - _ALIGNMENT + 4 * group_count(problem)  # barriers, items, the ends of the groups
    return _dynamic_bytes(problem, config) + declared


def _dynamic_bytes(problem: RaggedDotProblem, config: Config) -> int:
    return config.stages * config.stage_bytes + result_bytes(problem, config) + _ALIGNMENT


class RaggedFamily(ModelledFamily[RaggedDotProblem, Config]):
    """Persistent kernels with three tensor maps."""

    mode: str
    TILES: Sequence[tuple[int, int]]

    # ---- refusals --------------------------------------------------------------------------------------------------

    def problem_refusal(self, problem: RaggedDotProblem) -> str | None:
        p = problem
        if p.mode != self.mode:
            return f"mode {p.mode!r}; accepted: {self.mode!r}"
        if p.dtype not in ("bfloat16", "float16"):
            return f"dtype {p.dtype}; accepted: bfloat16, float16"
        if p.out_dtype not in split_k.OUT_CODES:
            return f"preferred_element_type {p.out_dtype}; accepted: {', '.join(split_k.OUT_CODES)}"
        for name in ("k", "n"):
            if (size := getattr(p, name)) % 8:
                return f"{name}={size}, which is contiguous; accepted: multiples of 8"
        for name in ("m", "k", "n"):
            if (size := getattr(p, name)) > MAX_SIZE:
                return f"{name}={size}; accepted: at most {MAX_SIZE}"
        if p.size_count > MAX_GROUPS:
            return f"{p.size_count} groups; accepted: at most {MAX_GROUPS}"
        return None

    def config_refusal(self, problem: RaggedDotProblem, config: Config) -> str | None:
        if (reason := tile_refusal(config, self.tiles(config))) is not None:
            return reason
        ranges = {"stages": range(MIN_STAGES, MAX_STAGES + 1), "workers": range(1, MAX_WORKERS + 1)}
        if (reason := field_refusal(config, **ranges, parts=(1, 2, 4), swap=self.swaps, cut=self.cuts)) is not None:
            return reason
        part = config.tile_n * jnp.dtype(problem.out_dtype).itemsize // config.parts
        if config.parts > 1 and (config.swap or part % ROW_BYTES):
            accepted = f"parts of whole {ROW_BYTES} bytes, without swap"
            return f"parts {config.parts} of {config.tile_n} columns; accepted: {accepted}"
        if (needed := shared_bytes(problem, config)) > SHARED_BYTES:
            return f"{needed} bytes of shared memory; accepted: at most {SHARED_BYTES}"
        return None

    swaps: Sequence[bool] = (False,)
    cuts: Sequence[bool] = (False,)
    stores_plainly = False  # whether the main kernel stores some results without a tensor map

    def tiles(self, config: Config) -> Sequence[tuple[int, int]]:
        """The possible (tile_m, tile_n)."""
        return self.TILES

    # ---- search ----------------------------------------------------------------------------------------------------

    def blocks_per_sm(self, problem: RaggedDotProblem, config: Config) -> int:
        return 1

    def shapes(self, problem: RaggedDotProblem, target: Target) -> Iterator[Config]:
        """Candidates with one stage, and results in one part."""
        yield from (self.Config(m, n, 1, target.cores) for m, n in self.TILES)

    def candidates(self, problem: RaggedDotProblem, target: Target) -> list[Config]:
        """The best by the estimates; of those that differ in `parts` alone, the one with the fewest."""
        found: dict[tuple[Config, int], Config] = {}
        for shape in self.shapes(problem, target):
            for parts in (1, 2, 4):
                config = dataclasses.replace(shape, parts=parts)
                room = SHARED_BYTES - shared_bytes(problem, config) + config.stage_bytes
                stages = min(MAX_STAGES, room // config.stage_bytes)
                found.setdefault((shape, stages), dataclasses.replace(config, stages=stages))
        useful = [config for config in found.values() if config.stages >= _FEW_STAGES]
        legal = [config for config in useful if self.config_refusal(problem, config) is None]
        return self.by_estimate(problem, legal, target)[:_MOST_CANDIDATES]

    def neighbours(self, problem: RaggedDotProblem, config: Config, target: Target) -> list[Config]:
        return [dataclasses.replace(config, stages=config.stages - 1)]

    # ---- plan ------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def sizes(self, problem: RaggedDotProblem, config: Config) -> dict[str, int]:
        """The first fields of the kernels' struct `Args`."""

    def args(self, problem: RaggedDotProblem, config: Config) -> Struct:
        fields = self.sizes(problem, config)
        return Struct("Args", {**fields, "groups": problem.size_count, "matrices": problem.groups})

    def macros(self, problem: RaggedDotProblem, config: Config) -> dict[str, int]:
        return {
            "ELEMENT": split_k.OUT_CODES[problem.dtype],
            "OUT": split_k.OUT_CODES[problem.out_dtype],
            **field_macros(config, "tile_m", "tile_n", "stages", "parts", "swap"),
            "CTAS_PER_SM": 1,
            "PERSISTENT": 1,
            "GROUPS": group_count(problem),
            "HAS_OFFSET": int(problem.has_offset),
        }

    def out_buffer(self, problem: RaggedDotProblem) -> int:
        return 3 + problem.has_offset

    @abc.abstractmethod
    def cut_tiles(self, problem: RaggedDotProblem, config: Config) -> int:
        """The most tiles that may be cut into pieces, which a second kernel adds."""

    def launches(self, problem: RaggedDotProblem, config: Config) -> tuple[plan.Launch, ...]:
        maps = tuple(plan.MapParam(i) for i in range(3))
        sizes, offset = plan.Pointer(2), plan.Pointer(2 + problem.has_offset)
        args, out = self.args(problem, config), self.out_buffer(problem)
        result, slots = plan.Pointer(out), plan.Pointer(out + 1)
        main = plan.Launch(
            kernel=self.kernel_name(problem),
            grid=(config.workers, 1, 1),
            block=(config.threads, 1, 1),
            params=(*maps, sizes, offset, args, slots, *((result,) if self.stores_plainly else ())),
            shared_bytes=_dynamic_bytes(problem, config),
        )
        if (tiles := self.cut_tiles(problem, config)) == 0:
            return (main,)
        reduce = plan.Launch(
            kernel=self.kernel_name(problem, "_reduce"),
            grid=(tiles, _ADD_BLOCKS, 1),
            block=(_ADD_THREADS, 1, 1),
            params=(slots, result, sizes, offset, args),
            programmatic=True,
        )
        return main, reduce
