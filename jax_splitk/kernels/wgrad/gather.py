"""Kernel family: weight gradients that TMA cannot load, or of float32 (device code: wgrad/gather.cu).

Any channel counts (the 3-channel stem, single-channel images), float32 inputs of any, one to three spatial dimensions,
any strides, dilations and padding. A thread block keeps in shared memory the part of X that a tile of output pixels
touches, as it is, and its warps gather WGMMA's A operand from there into registers. Splits and their reduction are
those of wgrad_im2col.

float32 is computed as products of bf16 parts ("bfloat16_3x": three products; for precision HIGHEST exact parts and six
products). Henry, Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision
Computations" (2019).
"""

import dataclasses
import functools
import itertools
import math

from jax_splitk.kernels.device import split_k, split_search
from jax_splitk.kernels.device.structs import declarations
from jax_splitk.kernels.wgrad import limits
from jax_splitk.kernels.wgrad.gather_stage import (
    SHARED_BYTES,
    Config,
    Volume,
    chain,
    conflicts,
    ctas_per_sm,
    is_ragged,
    lattice,
    layout,
    most_registers,
    registers,
    shared_bytes,
    slices,
    volume,
)
from jax_splitk.kernels.wgrad.limits import INT32_MAX
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime import plan
from jax_splitk.runtime.source import Source
from jax_splitk.runtime.target import Target, hopper_limit

name = "wgrad_gather"
implementation = "cutlass"
platform = "cuda"
ABI = 1

TILE_N = (8, 16, 32, 64, 96, 128, 192, 256)  # columns of one WGMMA
STEP = 16  # pixels of one WGMMA
MAX_STAGES = 4
FEW_CHANNELS = 32  # of X, half of what wgrad_im2col loads at a time
MAX_PIXELS = 256
# Additions in a row for a float32 result: see split_k.least_splits. WGMMA's, or where they go in short chains onto sums
# (three parts) those, which round: 256 give a relative error of about 3e-7.
MAX_FLOAT32_CHAIN = 2048
MAX_ROUNDED_CHAIN = 256

_ELEMENTS = {"float32": 0, "bfloat16": 1, "float16": 2}  # macro ELEMENT


# ---- tiles and splits ----------------------------------------------------------------------------------------------


def k_tiles(p: ConvWgradProblem, config: Config) -> int:
    """Tiles of pixels in the reduction."""
    v = volume(p)
    return -(-v.batch // config.images) * v.out[0] * -(-v.out[1] // config.tile_p) * -(-v.out[2] // config.tile_q)


def tile_counts(p: ConvWgradProblem, config: Config) -> tuple[int, int, int]:
    """(slices of channels, tiles along M of one slice, tiles along N)."""
    v = volume(p)
    return (
        -(-v.channels // config.slice),
        -(-layout(v, config).gemm_rows(v, config.slice) // config.tile_m),
        -(-v.out_channels // config.tile_n),
    )


def whole_splits(p: ConvWgradProblem, config: Config, splits: int) -> int:
    """The nearest split count not above `splits` (and at least 1) that leaves no split empty."""
    return split_k.whole_splits(k_tiles(p, config), splits)


def least_splits(p: ConvWgradProblem, config: Config) -> int:
    """Fewest splits for the accuracy that is promised (explicit configs may have fewer)."""
    v = volume(p)
    steps = config.pixels // STEP  # of one tile
    if v.parts == 3:
        return split_k.least_splits(p, k_tiles(p, config), MAX_ROUNDED_CHAIN * chain(v, config) // steps)
    return split_k.least_splits(p, k_tiles(p, config), MAX_FLOAT32_CHAIN // (steps * v.products))


def workspace_bytes(problem: ConvWgradProblem, config: Config) -> int:
    """fp32 partial sums, one set for each split; none when there is a single split."""
    return split_k.workspace_bytes(problem, config.splits)


# ---- what is legal -------------------------------------------------------------------------------------------------


def supports(problem: ConvWgradProblem, config: Config | None = None, target: Target | None = None) -> str | None:
    """None when the family (with that config, on that target) can compute the problem, else the reason."""
    return hopper_limit(target) or _problem_limit(problem) or (_config_limit(problem, config) if config else None)


def preferred(problem: ConvWgradProblem, target: Target) -> str | None:
    """Where it was measured to be faster than XLA: few channels, true float32, and float32 without strides."""
    del target
    float32 = problem.dtype == "float32"
    dense = float32 and problem.taps > 1 and set(problem.window_strides) == {1}
    if problem.in_channels <= FEW_CHANNELS or dense or (float32 and "highest" in problem.precision):
        return None
    return f"{problem.in_channels} input channels; not known to be faster than XLA above {FEW_CHANNELS}"


def _problem_limit(p: ConvWgradProblem) -> str | None:
    pixels = p.batch * math.prod(p.input_spatial)
    return (
        split_k.type_limit(p, tuple(_ELEMENTS))
        or limits.groups(p)
        or limits.input_pixels(p)
        or (f"{pixels} input pixels; accepted: at most {INT32_MAX}" if pixels > INT32_MAX else None)
        # A tile may reach beyond the output, by less than MAX_PIXELS in each dimension.
        or limits.output_pixels(p, INT32_MAX - MAX_PIXELS**2)
        or limits.weights(p)
        or _span_limit(volume(p), p.rank)
        or _window_limit(volume(p))
    )


def _span_limit(v: Volume, rank: int) -> str | None:
    for axis in range(3):
        span = abs(v.pad[axis]) + (v.out[axis] + MAX_PIXELS) * v.stride[axis] + v.kernel[axis] * v.rhs_dilation[axis]
        span *= v.channels if axis == 2 else 1
        if span > INT32_MAX:
            where = f"in spatial dimension {axis - 3 + rank}"
            return f"padded input of up to {span} elements {where}; accepted: at most {INT32_MAX}"
    return None


def _window_limit(v: Volume) -> str | None:
    """Whether the smallest stage's X fits in shared memory."""
    tiles = ((32, 1, 1), (16, 1, 2), (4, 1, 8), (1, 1, 32), (4, 8, 1), (1, 32, 1))
    least, sizes = slices(v)[-1], []
    for tile in tiles:
        sizes.append(shared_bytes(v, Config(1, 1, 8, *tile, least, 2, 1)))
        if sizes[-1] <= SHARED_BYTES:  # the first does, as a rule, and each lowering asks
            return None
    return f"the window's input takes {min(sizes)} bytes of shared memory; accepted: at most {SHARED_BYTES}"


def _steps_add_up(config: Config) -> bool:
    """A pixel's place is the sum of its eight's and of its place within the first eight: the device code's walk."""
    if config.tile_q % 8 == 0:
        return True
    row = config.tile_q * config.tile_p
    return 8 % config.tile_q == 0 and (row % 8 == 0 or 8 % row == 0)


def _config_limit(p: ConvWgradProblem, config: Config) -> str | None:
    if not 1 <= config.consumers <= 4:
        return f"consumers {config.consumers}; accepted: 1 to 4"
    if not 1 <= config.blocks <= 4:
        return f"blocks {config.blocks}; accepted: 1 to 4"
    if config.tile_n not in TILE_N:
        return f"tile_n {config.tile_n}; accepted: {', '.join(map(str, TILE_N))}"
    if not 2 <= config.stages <= MAX_STAGES:
        return f"stages {config.stages}; accepted: 2 to {MAX_STAGES}"
    pixels = f"images {config.images}, tile_p {config.tile_p} and tile_q {config.tile_q}"
    if min(config.images, config.tile_p, config.tile_q) < 1 or config.pixels % 32 or config.pixels > MAX_PIXELS:
        return f"{pixels}; accepted: products of 32 to {MAX_PIXELS} that are multiples of 32"
    if not _steps_add_up(config):
        return f"{pixels}; accepted: eights of pixels in a line or in whole lines and images"
    v = volume(p)
    count, most = registers(v, config), most_registers(v, config)
    if count > most:
        return (
            f"{config.blocks} blocks by tile_n {config.tile_n} take about {count} registers a thread; accepted "
            f"with {config.consumers} consumers: at most {most}"
        )
    if config.slice not in slices(v):
        return f"slice {config.slice}; accepted for {v.channels} channels: {', '.join(map(str, slices(v)))}"
    needed = shared_bytes(v, config)
    if needed > SHARED_BYTES:
        return f"stages {config.stages} take {needed} bytes of shared memory; accepted: at most {SHARED_BYTES}"
    return split_k.splits_limit(config.splits, k_tiles(p, config), "tiles of pixels")


# ---- candidates ----------------------------------------------------------------------------------------------------

MAX_CANDIDATES = 56
_PIXEL_TILES = 8  # shapes that are tried
_VARIANTS = 20  # of which split counts are tried


def _pixel_tiles(v: Volume) -> list[tuple[int, int, int]]:
    """(images, tile_p, tile_q) with the least work: padding of the output, X touched for each pixel, short stages."""
    found = {}
    widths = {1, 2, 4, *range(8, 129, 8), -(-v.out[2] // 8) * 8}
    for q, p, n in itertools.product(sorted(widths), (1, 2, 4, 7, 8, 14, 16, 28, 32), (1, 2, 4, 8, 16, 32, 64)):
        config = Config(1, 1, 8, n, p, q, 1, 2, 1)
        if not 32 <= config.pixels <= MAX_PIXELS or config.pixels % 32 or not _steps_add_up(config):
            continue
        if shared_bytes(v, dataclasses.replace(config, slice=slices(v)[-1])) > SHARED_BYTES:
            continue
        covered = -(-v.batch // n) * n * -(-v.out[1] // p) * p * -(-v.out[2] // q) * q
        waste = covered / (v.batch * v.out[1] * v.out[2])
        rows = lattice(p, v.stride[1], v.kernel[1], v.rhs_dilation[1])[1]
        columns = lattice(q, v.stride[2], v.kernel[2], v.rhs_dilation[2])[1]
        x = rows * columns * v.kernel[0] / (p * q)
        found[n, p, q] = waste * (1 + 0.01 * x * min(v.channels, 64) * v.item / 4 + 4 / config.pixels)
    return sorted(found, key=lambda tile: (found[tile], tile))[:_PIXEL_TILES]


def _columns(v: Volume) -> list[int]:
    """Tiles of output channels: the least that holds all, and whole parts of them."""
    whole = [n for n in TILE_N if n >= v.out_channels][:1]
    return sorted({*whole, *(n for n in (64, 128, 192, 256) if n < v.out_channels)})


def _variants(p: ConvWgradProblem, target: Target) -> list[Config]:
    """Legal configs of a single split, the most promising first."""
    v, found = volume(p), {}
    for tile, columns, channels in itertools.product(_pixel_tiles(v), _columns(v), slices(v)):
        for consumers, blocks in itertools.product((1, 2, 3, 4), (1, 2, 3, 4)):
            for stages in range(MAX_STAGES, 1, -1):
                config = Config(consumers, blocks, columns, *tile, channels, stages, 1)
                if _config_limit(p, config) is None:
                    # The deepest ring, and the deepest that lets two thread blocks share an SM.
                    found[config] = None
                    if ctas_per_sm(v, config) == 2 or ctas_per_sm(v, dataclasses.replace(config, stages=2)) == 1:
                        break
    rows = {c: layout(v, c).gemm_rows(v, c.slice) for c in found}
    useful = [c for c in found if c.tile_m < rows[c] + 64 * c.consumers or c.tile_m == 64]

    def seconds(config: Config) -> float:
        tiles = math.prod(tile_counts(p, config))
        slots = target.cores * ctas_per_sm(v, config)
        splits = whole_splits(p, config, max(least_splits(p, config), slots // tiles))
        return estimate(p, dataclasses.replace(config, splits=splits), target)

    return sorted(useful, key=seconds)


@functools.lru_cache(maxsize=256)
def _candidates(p: ConvWgradProblem, target: Target) -> tuple[Config, ...]:
    found = {}
    for variant in _variants(p, target)[:_VARIANTS]:
        tiles, slots = math.prod(tile_counts(p, variant)), target.cores * ctas_per_sm(volume(p), variant)
        for splits in split_search.wave_splits(k_tiles(p, variant), tiles, slots, least_splits(p, variant)):
            config = dataclasses.replace(variant, splits=splits)
            if _config_limit(p, config) is None:
                found[config] = estimate(p, config, target)
    return split_search.fastest_and_fewest(found, MAX_CANDIDATES)


def candidates(problem: ConvWgradProblem, target: Target) -> list[Config]:
    """Configs worth considering: the most promising variants with the split counts that fill 1 to 4 whole waves."""
    return list(_candidates(problem, target))


def neighbours(problem: ConvWgradProblem, config: Config, target: Target) -> list[Config]:
    """Split counts nearby, doubled and halved, a stage more or less, and tiles of twice or half the rows."""
    tiles = math.prod(tile_counts(problem, config))
    wave = target.cores * ctas_per_sm(volume(problem), config) / tiles
    wanted = {config.splits // 2, config.splits * 2, round(config.splits + wave / 2), round(config.splits - wave / 2)}
    found = split_search.with_splits(config, k_tiles(problem, config), wanted, least_splits(problem, config))
    found += [dataclasses.replace(config, stages=config.stages + step) for step in (-1, 1)]
    for tile_p in (config.tile_p * 2, config.tile_p // 2):
        if tile_p:
            other = dataclasses.replace(config, tile_p=tile_p)
            found.append(dataclasses.replace(other, splits=whole_splits(problem, other, config.splits)))
    return found


# ---- the cost model ------------------------------------------------------------------------------------------------

_CLOCK = 1.6e9  # under load
_SHARED_BYTES_PER_CLOCK = 128
_L2_BYTES_PER_CLOCK = 40  # one SM's loads
_HBM_BYTES = 4.0e12
_PARTIAL_BYTES = 4.8e12  # partial sums stay in L2 for the most part
_OVERLAP = {1: 0.82, 2: 0.87}  # of the busiest unit's rate is reached, by thread blocks on an SM
_FRAGMENT_CLOCKS = {1: 90, 2: 220, 3: 320}  # from a warpgroup's loads to its WGMMA, by parts
_STAGE_CLOCKS = 120  # of a thread block, besides
_WAVE_SECONDS = 3e-6  # filling the ring and the epilogue
_LAUNCH_SECONDS = 4.5e-6
_REDUCE_SECONDS = 0.7e-6


def clocks(v: Volume, config: Config) -> dict[str, float]:
    """Clocks of each of an SM's units for one thread block's stage; `latency`: of one warpgroup's fragments in turn."""
    x = layout(v, config)
    blocks, steps = config.consumers * config.blocks, config.pixels // STEP
    loads = 4 * (1 if x.paired else 2)  # of a warp, for a block's fragment
    dy_bytes, b_bytes = config.pixels * config.tile_n * 2 * v.copies, STEP * config.tile_n * 2 * v.products
    x_items = config.images * v.kernel[0] * x.rows * x.columns * config.slice
    conversion = {1: 4, 2: 44, 3: 76}[v.parts]
    sums = config.tile_n / 2 / chain(v, config) if v.parts == 3 else 0  # rounding additions
    copies = x_items * v.item / x.granule * (20 if x.granule > 2 else 26) / 32
    dy_stores = 0 if _dy_by_tma(v) else config.pixels * config.tile_n / 8 * 48 * v.parts / 32
    shared = steps * blocks * (4 * loads * conflicts(x, v, config) + b_bytes / _SHARED_BYTES_PER_CLOCK)
    shared += (dy_bytes + x_items * v.item) / _SHARED_BYTES_PER_CLOCK
    return {
        "tensor": steps * blocks * v.products * config.tile_n / 2,
        "shared": shared,
        "issue": (steps * blocks * 4 * (loads + conversion + 10 + v.products + sums) + copies + dy_stores) / 4,
        "latency": steps * config.blocks * _FRAGMENT_CLOCKS[v.parts] / ctas_per_sm(v, config),
        "l2": (x_items + config.pixels * config.tile_n) * v.item / _L2_BYTES_PER_CLOCK,
    }


def estimate(problem: ConvWgradProblem, config: Config, target: Target) -> float:
    """Predicted seconds: the busiest SM's thread blocks at the rate of its busiest unit, plus the reduction.

    What tiles reach beyond the problem counts as work; device memory bounds the whole from below.
    """
    together = ctas_per_sm(volume(problem), config)
    blocks = math.prod(tile_counts(problem, config)) * config.splits
    units = sorted(clocks(volume(problem), config).values())
    step = ((units[-1] + 0.25 * units[-2]) / _OVERLAP[together] + _STAGE_CLOCKS / together) / _CLOCK
    stages = -(-blocks // target.cores) * -(-k_tiles(problem, config) // config.splits)
    waves = -(-blocks // (target.cores * together))
    seconds = stages * step + waves * _WAVE_SECONDS
    seconds = max(seconds, problem.bytes_moved / _HBM_BYTES) + _LAUNCH_SECONDS
    if config.splits > 1:
        seconds += _REDUCE_SECONDS + 2 * workspace_bytes(problem, config) / _PARTIAL_BYTES
    return seconds


# ---- the plan ------------------------------------------------------------------------------------------------------


def _dy_by_tma(v: Volume) -> bool:
    return v.item == 2 and v.out_channels % 8 == 0


def source(problem: ConvWgradProblem, config: Config) -> Source:
    """The device code's specialisation: it depends on the window, channels and tiles, not on batch, sizes or splits."""
    v = volume(problem)
    tma = _dy_by_tma(v)
    macros = {
        "ELEMENT": _ELEMENTS[problem.dtype],
        "PARTS": v.parts,
        "CHAIN": chain(v, config),
        "OUT": split_k.OUT_CODES[problem.out_dtype],
        "CONSUMERS": config.consumers,
        "BLOCKS": config.blocks,
        "TILE_N": config.tile_n,
        "STAGES": config.stages,
        "CTAS_PER_SM": ctas_per_sm(v, config),
        "TILE_IMAGES": config.images,
        "TILE_P": config.tile_p,
        "TILE_Q": config.tile_q,
        "SLICE": config.slice,
        "KERNEL_T": v.kernel[0],
        "KERNEL_R": v.kernel[1],
        "KERNEL_S": v.kernel[2],
        "RAGGED": int(is_ragged(v, config)),
        "DY_TMA": int(tma),
        "DY_VEC": 8 if tma else math.gcd(v.out_channels, 4),
        "LHS_D": v.lhs_dilation[0],
        "LHS_H": v.lhs_dilation[1],
        "LHS_W": v.lhs_dilation[2],
        **{field.upper(): int(value) for field, value in dataclasses.asdict(layout(v, config)).items()},
    }
    return Source("wgrad/gather.cu", tuple(macros.items()), declarations(split_k.ReduceArgs))


def _args(p: ConvWgradProblem, config: Config) -> plan.Int32Struct:
    """`struct Args` of the device code, in its order."""
    v, tiles = volume(p), k_tiles(p, config)
    values = (
        *(v.batch, *v.size, v.channels, v.out_channels),
        *v.out,
        *(*v.stride, *v.pad),
        *tile_counts(p, config)[1:],
        *(-(-v.out[1] // config.tile_p), -(-v.out[2] // config.tile_q)),
        *(tiles, -(-tiles // config.splits)),
        split_k.stride(p),
    )
    return plan.Int32Struct(values)


def _dy_map(p: ConvWgradProblem, config: Config) -> plan.TiledMap:
    v = volume(p)
    dims = (v.out_channels, v.out[2], v.out[1], v.out[0], v.batch)
    box = (64, config.tile_q, config.tile_p, 1, config.images)
    return plan.TiledMap(1, p.dtype, dims, plan.tensor_map_strides(dims, v.item), box)


def make_plan(problem: ConvWgradProblem, config: Config) -> plan.DevicePlan:
    """Exact launches. Buffers: lhs, g, dW, workspace."""
    v = volume(problem)
    tma = _dy_by_tma(v)
    launches = split_k.launches(
        problem,
        config.splits,
        grid=(math.prod(tile_counts(problem, config)), config.splits, 1),
        threads=128 * (config.consumers + 1),
        params=(plan.MapParam(0) if tma else plan.Pointer(1), _args(problem, config), plan.Pointer(0)),
        shared_bytes=shared_bytes(v, config),
    )
    buffers = split_k.buffers(problem, workspace_bytes(problem, config))
    maps = (_dy_map(problem, config),) if tma else ()
    return plan.DevicePlan(source(problem, config), buffers, maps, launches, label=f"{name} {config}")
