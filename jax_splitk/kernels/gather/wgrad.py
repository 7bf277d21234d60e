"""Kernel family: weight gradients in float32, or of operands that TMA cannot load (device code: gather/wgrad.cu).

It serves any channel counts (stems with 3 channels, single-channel images), one to three spatial dimensions, any
strides, dilations and padding.

float32 is computed as products of bf16 parts ("bfloat16_3x": three products; for precision HIGHEST exact parts and six
products). Henry, Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision
Computations" (2019).
"""

import dataclasses
import itertools
import math

from jax_splitk.kernels.base import refusals
from jax_splitk.kernels.base.family import box_map, field_macros, field_refusal, varied
from jax_splitk.kernels.base.geometry import axis_macros, bytes_touched
from jax_splitk.kernels.base.split import SplitFamily, nearby, whole_fours
from jax_splitk.kernels.base.work import Work
from jax_splitk.kernels.device import split_k
from jax_splitk.kernels.device.registers import consumer_registers, share_macros, wgmma_fits
from jax_splitk.kernels.device.structs import Struct
from jax_splitk.kernels.device.wgmma_tile import lines_of_row
from jax_splitk.kernels.gather.layout import (
    CONTENTION,
    SHARED_BYTES,
    GatherTile,
    Layout,
    Volume,
    fits_twice,
    lattice,
    layout_of,
    slices,
    turns_of,
    volume,
    waits,
)
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime import plan
from jax_splitk.runtime.target import Target

TILE_N = (8, 16, 32, 64, 96, 128, 192, 256)  # columns of one WGMMA
STEP = 16  # pixels of one WGMMA
MAX_STAGES = 4
MAX_PIXELS = 256
# Additions in a row for a float32 result: WGMMA's, or where they go in short chains onto sums
# (three parts) those, which round: 256 give a relative error of about 3e-7.
MAX_FLOAT32_CHAIN = 2048
MAX_ROUNDED_CHAIN = 256

RESERVED_BYTES = 2 * 1024  # alignment of the pipeline and barriers
EXACT_REGISTERS = 224  # with three parts ptxas spills above
_OTHER_REGISTERS = 26
_PIXEL_TILES = 8  # shapes that are tried


@dataclasses.dataclass(frozen=True)
class Config(GatherTile):
    """How a weight gradient is computed: see `GatherTile`; rows are (filter tap, input channel), and a tile is the tile
    of a stage.

    Attributes:
      slice: input channels of a thread block.
      stages: depth of the shared-memory pipeline.
      splits: parts of the reduction; none may be empty.
    """

    slice: int
    stages: int
    splits: int


def layout(v: Volume, config: Config) -> Layout:
    return layout_of(v, config.tile, config.slice)


def _stage_bytes(v: Volume, config: Config) -> int:
    """Bytes of dY's copies, in boxes of 64 channels, and of X."""
    dy_bytes = v.copies * -(-config.tile_n // 64) * config.pixels * 128
    return dy_bytes + layout(v, config).stage_bytes(v, config.images)


def shared_bytes(v: Volume, config: Config) -> int:
    return config.stages * _stage_bytes(v, config) + RESERVED_BYTES


# With three parts: steps of 16 pixels whose products WGMMA adds, before CUDA cores add their sum with rounding. WGMMA
# truncates, which gives an error of one sign that grows with what is added to large sums. So a chain's large products
# come last; 4 of them give 1.9e-7 in all.
CHAINS = (4, 2)


def chain(v: Volume, config: Config) -> int:
    """The longest chain that costs no thread block its place on an SM (CHAIN in the device code); 1 with fewer
    parts."""
    if v.parts < 3:
        return 1
    *longer, shortest = CHAINS
    most = consumer_registers(blocks_per_sm(v, config, shortest), config.consumers)
    fitting = (c for c in longer if config.pixels % (16 * c) == 0 and registers(v, config, c) <= most)
    return next(fitting, shortest)


def registers(v: Volume, config: Config, steps: int | None = None) -> int:
    """About how many registers a consumer's thread needs, with chains of `steps` steps."""
    steps = steps or chain(v, config)
    exact = v.parts == 3
    accumulators = config.blocks * config.tile_n // 2 * (2 if exact else 1)
    # Two fragments alternate; with three parts the first fragment stays for the whole chain.
    fragments = 2 * 4 * (v.copies - exact) + (4 * config.blocks * steps if exact else 0)
    masks = 8 if is_ragged(v, config) else 0
    return accumulators + fragments + 2 * config.blocks + masks + _OTHER_REGISTERS


def is_ragged(v: Volume, config: Config) -> bool:
    """Whether some tiles of pixels reach beyond the output."""
    return v.batch % config.images + v.out[1] % config.tile_p + v.out[2] % config.tile_q > 0


def blocks_per_sm(v: Volume, config: Config, steps: int | None = None) -> int:
    """2 if shared memory and registers allow it, with chains of `steps` steps."""
    few = registers(v, config, steps) <= consumer_registers(2, config.consumers)
    fits = few and wgmma_fits(config.tile_n, 2, config.consumers)
    return 2 if fits and fits_twice(shared_bytes(v, config)) else 1


def _steps_add_up(config: Config) -> bool:
    """Whether a pixel's place is the sum of the place of its eight pixels and its place within the first eight, as the
    device code assumes."""
    if config.tile_q % 8 == 0:
        return True
    row = config.tile_q * config.tile_p
    return 8 % config.tile_q == 0 and (row % 8 == 0 or 8 % row == 0)


def _window_refusal(v: Volume) -> str | None:
    """Why the smallest stage's X does not fit in shared memory."""
    tiles = ((32, 1, 1), (16, 1, 2), (4, 1, 8), (1, 1, 32), (4, 8, 1), (1, 32, 1))
    least, sizes = slices(v)[-1], []
    for tile in tiles:
        sizes.append(shared_bytes(v, Config(1, 1, 8, *tile, least, 2, 1)))
        if sizes[-1] <= SHARED_BYTES:  # usually the first one fits, and each lowering asks this
            return None
    return f"the window's input takes {min(sizes)} bytes of shared memory; accepted: at most {SHARED_BYTES}"


def _pixel_tiles(v: Volume) -> list[tuple[int, int, int]]:
    """(images, tile_p, tile_q) with the least work: padding of the output, X touched for each pixel, short stages."""
    score, least = {}, slices(v)[-1]
    widths = {1, 2, 4, *range(8, 129, 8), -(-v.out[2] // 8) * 8}
    for q, p, n in itertools.product(sorted(widths), (1, 2, 4, 7, 8, 14, 16, 28, 32), (1, 2, 4, 8, 16, 32, 64)):
        config = Config(1, 1, 8, n, p, q, least, 2, 1)
        if config.pixels not in range(32, MAX_PIXELS + 1, 32) or not _steps_add_up(config):
            continue
        covered = -(-v.batch // n) * n * -(-v.out[1] // p) * p * -(-v.out[2] // q) * q
        waste = covered / (v.batch * v.out[1] * v.out[2])
        rows = lattice(p, v.stride[1], v.kernel[1], v.dilation[1])[1]
        columns = lattice(q, v.stride[2], v.kernel[2], v.dilation[2])[1]
        x = rows * columns * v.kernel[0] / (p * q)
        score[config] = waste * (1 + 0.01 * x * min(v.channels, 64) * v.item / 4 + 4 / config.pixels)
    ordered = sorted(score, key=lambda config: (score[config], config.tile))
    fitting = (config.tile for config in ordered if shared_bytes(v, config) <= SHARED_BYTES)
    return list(itertools.islice(fitting, _PIXEL_TILES))


# ---- the cost model ------------------------------------------------------------------------------------------------


# A warp's instructions for a fragment, by the number of parts of a float32.
_CONVERSIONS = {1: 16, 2: 184, 3: 364}


def stage_work(v: Volume, config: Config) -> dict[str, float]:
    """The work of one thread block's stage."""
    x = layout(v, config)
    blocks, steps = config.consumers * config.blocks, config.pixels // STEP
    loads = 4 * (1 if x.paired else 2)  # of a warp, for a block's fragment
    dy_bytes, b_bytes = config.pixels * config.tile_n * 2 * v.copies, STEP * config.tile_n * 2 * v.products
    x_items = config.images * v.kernel[0] * x.rows * x.columns * config.slice
    conversion = _CONVERSIONS[v.parts]
    sums = config.tile_n / 2 / chain(v, config) if v.parts == 3 else 0  # rounding additions
    copies = x_items * v.item / x.granule * (20 if x.granule > 2 else 26) / 32
    dy_stores = 0 if _dy_by_tma(v) else config.pixels * config.tile_n / 8 * 48 * v.parts / 32
    waiting = 0.0 if x.is_copied else x_items
    if dy_stores and (vec := _dy_vec(v)) < (4 if v.parts > 1 else 2):  # loads, which are waited for, and not copies
        waiting += config.pixels * config.tile_n / vec / 2
    turns = turns_of(v, config.tile, config.slice)
    boxes, row = -(-config.tile_n // 64), 2 * min(config.tile_n, 64)
    lines = config.pixels * boxes * lines_of_row(2 * v.out_channels, row) if _dy_by_tma(v) else 0
    return {
        "tensor_clocks": steps * blocks * v.products * config.tile_n / 2,
        "shared_bytes": CONTENTION * (steps * blocks * (512 * loads * turns + b_bytes) + dy_bytes + x_items * v.item),
        "instructions": steps * blocks * 4 * (loads + conversion + 10 + v.products + sums) + copies + dy_stores,
        "turns": 1 + steps * config.blocks * v.parts / blocks_per_sm(v, config),
        "waits": waits(waiting),
        "l2_bytes": (x_items + config.pixels * config.tile_n) * v.item,
        "rows": lines,
    }


# ---- the plan ------------------------------------------------------------------------------------------------------


def _dy_by_tma(v: Volume) -> bool:
    return v.item == 2 and v.out_channels % 8 == 0


def _dy_vec(v: Volume) -> int:
    """Channels of dY that are loaded or copied at a time where TMA cannot load it."""
    return math.gcd(v.out_channels, 4)


class Gather(SplitFamily[ConvWgradProblem, Config]):
    name = "wgrad_gather"
    ABI = 2
    file = "gather/wgrad.cu"

    def problem_refusal(self, problem: ConvWgradProblem) -> str | None:
        reason = refusals.dtypes(problem, tuple(split_k.OUT_CODES)) or refusals.groups(problem)
        reason = reason or refusals.gathered(problem, volume(problem), MAX_PIXELS)
        return reason or _window_refusal(volume(problem))

    def config_refusal(self, problem: ConvWgradProblem, config: Config) -> str | None:
        reason = field_refusal(
            config, consumers=range(1, 5), blocks=range(1, 5), tile_n=TILE_N, stages=range(2, MAX_STAGES + 1)
        )
        if reason is not None:
            return reason
        pixels = f"images {config.images}, tile_p {config.tile_p} and tile_q {config.tile_q}"
        if min(config.tile) < 1 or config.pixels % 32 or config.pixels > MAX_PIXELS:
            return f"{pixels}; accepted: products of 32 to {MAX_PIXELS} that are multiples of 32"
        if not _steps_add_up(config):
            return f"{pixels}; accepted: eights of pixels in a line or in whole lines and images"
        v = volume(problem)
        count, most = registers(v, config), consumer_registers(1, config.consumers)
        most = min(most, EXACT_REGISTERS) if v.parts == 3 else most
        if count > most:
            return (
                f"{config.blocks} blocks by tile_n {config.tile_n} take about {count} registers a thread; accepted "
                f"with {config.consumers} consumers: at most {most}"
            )
        if config.slice not in slices(v):
            return f"slice {config.slice}; accepted for {v.channels} channels: {', '.join(map(str, slices(v)))}"
        if (needed := shared_bytes(v, config)) > SHARED_BYTES:
            return f"stages {config.stages} take {needed} bytes of shared memory; accepted: at most {SHARED_BYTES}"
        return split_k.splits_refusal(config.splits, self.reduction_blocks(problem, config), "tiles of pixels")

    def tile_counts(self, problem: ConvWgradProblem, config: Config) -> tuple[int, int, int]:
        """Slices of channels, tiles along M of one slice, tiles along N."""
        v = volume(problem)
        rows = layout(v, config).gemm_rows
        return -(-v.channels // config.slice), -(-rows // config.tile_m), -(-v.out_channels // config.tile_n)

    def block_counts(self, problem: ConvWgradProblem, config: Config) -> tuple[int, int, int, int]:
        """Numbers of tiles of pixels along groups of images, planes, rows and columns."""
        return config.block_counts(volume(problem))

    def longest_chain(self, problem: ConvWgradProblem, config: Config) -> int:
        v, steps = volume(problem), config.pixels // STEP  # of one tile
        if v.parts == 3:
            return MAX_ROUNDED_CHAIN * chain(v, config) // steps
        return MAX_FLOAT32_CHAIN // (steps * v.products)

    def blocks_per_sm(self, problem: ConvWgradProblem, config: Config) -> int:
        return blocks_per_sm(volume(problem), config)

    def variants(self, problem: ConvWgradProblem, target: Target) -> list[Config]:
        """Legal configs of a single split, the most promising first."""
        v, found = volume(problem), {}
        for tile, tile_n, channels in itertools.product(_pixel_tiles(v), v.column_tiles(TILE_N), slices(v)):
            smallest = Config(1, 1, tile_n, *tile, channels, 1, 1)
            most = min(MAX_STAGES, (SHARED_BYTES - RESERVED_BYTES) // _stage_bytes(v, smallest))
            rows = layout(v, smallest).gemm_rows
            for consumers, blocks in itertools.product((1, 2, 3, 4), (1, 2, 3, 4)):
                if 64 * consumers * (blocks - 1) >= rows:
                    continue  # with a block less they have all rows
                for stages in range(most, 1, -1):
                    config = Config(consumers, blocks, tile_n, *tile, channels, stages, 1)
                    if self.config_refusal(problem, config) is None:
                        # The largest number of stages, and the largest with which two thread blocks share an SM.
                        found[config] = None
                        shallow = Config(consumers, blocks, tile_n, *tile, channels, 2, 1)
                        if blocks_per_sm(v, config) == 2 or blocks_per_sm(v, shallow) == 1:
                            break
                    elif v.parts < 3:  # it needs too many registers with any number of stages
                        break
        of = {self.filling(problem, c, target): c for c in found}
        return [of[c] for c in self.by_estimate(problem, of, target)]

    def neighbours(self, problem: ConvWgradProblem, config: Config, target: Target) -> list[Config]:
        """Other split counts (nearby, doubled and halved), a stage more or less, and tiles with twice or half the
        rows."""
        found = self.other_splits(problem, config, nearby(config.splits, self.wave(problem, config, target)))
        found += varied(config, stages=(config.stages - 1, config.stages + 1))
        for tile_p in (config.tile_p * 2, config.tile_p // 2):
            if tile_p:
                other = dataclasses.replace(config, tile_p=tile_p)
                found.append(self.with_splits(problem, other, config.splits))
        return found

    def work(self, problem: ConvWgradProblem, config: Config, target: Target) -> Work:
        """Also counts the parts of tiles beyond the problem."""
        together = blocks_per_sm(volume(problem), config)
        blocks = self.thread_blocks(problem, config) * config.splits
        chain = -(-self.reduction_blocks(problem, config) // config.splits)
        resident = min(together, -(-blocks // target.cores))
        stages, waves = -(-blocks // target.cores) * chain, self.waves(problem, config, target)
        # All but one of a thread block's stages are being loaded. The first loads do not wait.
        late = max(0.0, 1 - config.stages / chain) / (config.stages - 1) / resident
        of_stage = stage_work(volume(problem), config)
        of_stage["waits"] += late
        return Work(
            **{name: stages * value for name, value in of_stage.items()},
            memory_bytes=bytes_touched(problem),
            waves=waves,
            stored_bytes=waves * config.tile_m * config.tile_n * 4,
            **self.reduction_work(problem, config),
        )

    def macros(self, problem: ConvWgradProblem, config: Config) -> dict[str, int]:
        """Macros, specialised to the window, channels and tiles, but not to batch, sizes or splits."""
        v, has_map = volume(problem), _dy_by_tma(volume(problem))
        return {
            **super().macros(problem, config),
            **field_macros(v, "parts", "copies"),
            **field_macros(config, "consumers", "blocks", "tile_n", "stages", "tile_p", "tile_q", "slice"),
            "TILE_IMAGES": config.images,
            "CHAIN": chain(v, config),
            "STAGE_BYTES": _stage_bytes(v, config),
            **share_macros(blocks_per_sm(v, config), config.consumers),
            "RAGGED": int(is_ragged(v, config)),
            "DY_TMA": int(has_map),
            "DY_VEC": 8 if has_map else _dy_vec(v),
            **axis_macros(KERNEL=v.kernel, LHS=v.lhs_dilation),
            **field_macros(layout(v, config)),
        }

    def maps(self, problem: ConvWgradProblem, config: Config) -> tuple[plan.TiledMap, ...]:
        v = volume(problem)
        dy_box = (64, config.tile_q, config.tile_p, 1, config.images)
        return (box_map(problem, 1, (v.batch, *v.out, v.out_channels), dy_box),) if _dy_by_tma(v) else ()

    def _args(self, problem: ConvWgradProblem, config: Config) -> Struct:
        v, tiles = volume(problem), self.reduction_blocks(problem, config)
        _, m_tiles, n_tiles = self.tile_counts(problem, config)
        _, _, tiles_h, tiles_w = self.block_counts(problem, config)
        return Struct(
            "Args",
            {
                "batch": v.batch,
                "in": v.size,
                "channels": v.channels,
                "out_channels": v.out_channels,
                "out": v.out,
                "stride": v.stride,
                "pad": v.pad,
                "m_tiles": m_tiles,  # of one slice of channels
                "n_tiles": n_tiles,
                "tiles_h": tiles_h,
                "tiles_w": tiles_w,
                "k_tiles": tiles,  # of pixels
                "k_tiles_per_split": -(-tiles // config.splits),
                "partial_stride": whole_fours(self.partial_size(problem, config)),
            },
        )

    def main(self, problem: ConvWgradProblem, config: Config) -> plan.Launch:
        dy = plan.MapParam(0) if _dy_by_tma(volume(problem)) else plan.Pointer(1)
        params = (dy, self._args(problem, config), plan.Pointer(0))
        return self.launch(
            problem, config, 128 * (config.consumers + 1), shared_bytes(volume(problem), config), *params
        )


FAMILY = Gather(Config)
