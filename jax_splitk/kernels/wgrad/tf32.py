"""Kernel family: float32 weight gradients on Hopper's tf32 tensor cores (device code: wgrad/tf32.cu).

For what XLA computes in tf32 too: precision DEFAULT and HIGH. One or two spatial dimensions. A line of X is loaded once
for all filter taps of a thread block and multiplied from registers; dY is transposed in shared memory by warps of their
own, since WGMMA takes tf32 operands from there with the reduction contiguous only. Splits and their reduction are those
of wgrad_im2col.
"""

import dataclasses
import functools
import itertools
import math

from jax_splitk.kernels.device import split_k, split_search
from jax_splitk.kernels.device.structs import declarations
from jax_splitk.kernels.wgrad import im2col, limits
from jax_splitk.kernels.wgrad.limits import INT32_MAX
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime import plan
from jax_splitk.runtime.source import Source
from jax_splitk.runtime.target import Target, hopper_limit

name = "wgrad_tf32"
implementation = "cutlass"
platform = "cuda"
ABI = 1

BOX_CHANNELS = 32  # 128 bytes, TMA's swizzle
BLOCK_CHANNELS = 64  # input channels of a consumer warpgroup
PIXEL_BYTES = BOX_CHANNELS * 4
TILE_N = (32, 64, 96, 128, 192, 256)
SHARED_BYTES = 226 * 1024  # dynamic; the barriers have more of their own
BARRIER_BYTES = 1024
RESERVED_BYTES = 1024  # alignment
RAW_STAGES = 2  # rows of dY as they come
AHEAD = 2  # rows of dY that are transposed before they are needed
MAX_STAGES = 8
MAX_PIXELS = 128  # of a line
MIN_MIXED = 7  # columns where images of a line may meet within four pixels: at most two then do within eight
MAX_BOX = 256  # TMA's
MAX_TAPS_H, MAX_CONSUMERS = 3, 4
# Accumulators that fit beside the rest in a consumer's registers, by consumer warpgroups.
MAX_ACCUMULATORS = {1: 192, 2: 144, 3: 96, 4: 64}
MAX_FLOAT32_CHAIN = 16384  # pixels of a float32 result's split: see split_k.least_splits


@dataclasses.dataclass(frozen=True)
class Config:
    """How a weight gradient is computed.

    Attributes:
      taps_h, taps_w: filter rows and columns of a thread block's tile.
      blocks: its input channels, in blocks of 64; there is a consumer warpgroup for each of taps_w * blocks.
      tile_n: its output channels.
      images, tile_p, tile_q: a strip (a unit of work): output rows and columns of some images.
      stages: lines of X that fit in shared memory.
      splits: parts into which the reduction is cut, in whole strips; none may be empty.
    """

    taps_h: int
    taps_w: int
    blocks: int
    tile_n: int
    images: int
    tile_p: int
    tile_q: int
    stages: int
    splits: int

    @property
    def consumers(self) -> int:
        return self.taps_w * self.blocks

    @property
    def pixels(self) -> int:
        """Of a line."""
        return self.images * self.tile_q

    @property
    def accumulators(self) -> int:
        """A consumer thread's."""
        return self.taps_h * self.tile_n // 2


# ---- the problem as the kernel sees it -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class View:
    """Both inputs as images of rows and columns, without the input pixels that no window touches.

    `lhs_strides`: elements from one column, row and image of X to the next.
    """

    batch: int
    size: tuple[int, int]
    lhs_strides: tuple[int, int, int]
    out: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    pad: tuple[int, int]  # low sides
    dilation: tuple[int, int]


def _matrix_shape(pixels: int) -> tuple[int, int]:
    """Rows and columns for pixels without neighbours: whole lines, if they divide so."""
    width = next((w for w in range(MAX_PIXELS, 31, -8) if pixels % w == 0), pixels)
    return pixels // width, width


@functools.lru_cache(maxsize=4096)
def view(p: ConvWgradProblem) -> View:
    """Of a problem of one or two spatial dimensions."""
    c = p.in_channels
    if im2col.is_matrix_product(p) and set(p.lhs_dilation) == {1}:
        height, width = _matrix_shape(p.reduction_size)
        strides = (c, width * c, height * width * c)
        return View(1, (height, width), strides, (height, width), (1, 1), (1, 1), (0, 0), (1, 1))
    ones = (1,) * (2 - p.rank)
    size, out, kernel = (*ones, *p.input_spatial), (*ones, *p.output_spatial), (*ones, *p.kernel_spatial)
    stride, dilation = (*ones, *p.window_strides), (*ones, *p.rhs_dilation)
    pad = (*(0 for _ in ones), *(low for low, _ in p.padding))
    # Every position is a multiple of `step` away from the image's first pixel.
    step = [math.gcd(stride[i], dilation[i] if kernel[i] > 1 else 0, pad[i]) for i in (0, 1)]
    return View(
        batch=p.batch,
        size=(-(-size[0] // step[0]), -(-size[1] // step[1])),
        lhs_strides=(step[1] * c, step[0] * size[1] * c, size[0] * size[1] * c),
        out=(out[0], out[1]),
        kernel=(kernel[0], kernel[1]),
        stride=(stride[0] // step[0], stride[1] // step[1]),
        pad=(pad[0] // step[0], pad[1] // step[1]),
        # One tap has no dilation.
        dilation=(max(1, dilation[0] // step[0]), max(1, dilation[1] // step[1])),
    )


def columns(v: View, config: Config) -> int:
    """Of a line of X, for each image."""
    return (config.tile_q - 1) * v.stride[1] + (config.taps_w - 1) * v.dilation[1] + 1


def reach(v: View, config: Config) -> int:
    """Lines of X beyond the first that a row of dY meets."""
    return (config.taps_h - 1) * v.dilation[0]


def dy_stages(v: View, config: Config) -> int:
    """Transposed rows of dY in shared memory: those that meet a line of X, and more."""
    return reach(v, config) // v.stride[0] + 1 + AHEAD


def _line_bytes(v: View, config: Config) -> int:
    """A line of X in shared memory."""
    return config.images * config.blocks * 2 * -(-columns(v, config) // 8) * 8 * PIXEL_BYTES


def _row_bytes(config: Config) -> int:
    """A row of dY in shared memory."""
    return config.pixels * config.tile_n * 4


def _shared_bytes(v: View, config: Config) -> int:
    rows = RAW_STAGES + dy_stages(v, config)
    return config.stages * _line_bytes(v, config) + rows * _row_bytes(config) + RESERVED_BYTES


def shared_bytes(problem: ConvWgradProblem, config: Config) -> int:
    return _shared_bytes(view(problem), config)


# ---- tiles and splits ----------------------------------------------------------------------------------------------


def tile_counts(problem: ConvWgradProblem, config: Config) -> tuple[int, int, int]:
    """(blocks of taps, of input channels, of output channels)."""
    v = view(problem)
    taps = -(-v.kernel[0] // config.taps_h) * -(-v.kernel[1] // config.taps_w)
    slots = -(-problem.in_channels // (BLOCK_CHANNELS * config.blocks))
    return taps, slots, -(-problem.out_channels // config.tile_n)


def _strip_counts(v: View, config: Config) -> tuple[int, int, int]:
    """(groups of images, strips of rows, strips of columns)."""
    return -(-v.batch // config.images), -(-v.out[0] // config.tile_p), -(-v.out[1] // config.tile_q)


def units(problem: ConvWgradProblem, config: Config) -> int:
    """Strips in the reduction."""
    return math.prod(_strip_counts(view(problem), config))


def whole_splits(problem: ConvWgradProblem, config: Config, splits: int) -> int:
    """The nearest split count not above `splits` (and at least 1) that leaves no split empty."""
    return split_k.whole_splits(units(problem, config), splits)


def least_splits(problem: ConvWgradProblem, config: Config) -> int:
    """Fewest splits for the accuracy that is promised (explicit configs may have fewer)."""
    return split_k.least_splits(problem, units(problem, config), MAX_FLOAT32_CHAIN // (config.pixels * config.tile_p))


def workspace_bytes(problem: ConvWgradProblem, config: Config) -> int:
    """fp32 partial sums, one set for each split; none when there is a single split."""
    return split_k.workspace_bytes(problem, config.splits)


# ---- what is legal -------------------------------------------------------------------------------------------------


def supports(problem: ConvWgradProblem, config: Config | None = None, target: Target | None = None) -> str | None:
    """None when the family (with that config, on that target) can compute the problem, else the reason."""
    return hopper_limit(target) or _problem_limit(problem) or (_config_limit(problem, config) if config else None)


def preferred(problem: ConvWgradProblem, target: Target) -> str | None:
    """Always: it was measured to be as fast as XLA (1x1) or faster (3x3, stride 1 and 2)."""
    del problem, target
    return None


def _problem_limit(p: ConvWgradProblem) -> str | None:
    types = split_k.type_limit(p, ("float32",))
    if types is not None:
        return types
    if "highest" in p.precision:
        return f"precision {p.precision}; accepted: default, high"
    if p.rank > 2:
        return f"{p.rank} spatial dimensions; accepted: 1, 2"
    return (
        limits.groups(p)
        or limits.channels(p, 4)
        or limits.lhs_dilation(p)
        or limits.empty_dimensions(p)
        or limits.weights(p)
        or _extent_limit(p)
    )


def _extent_limit(p: ConvWgradProblem) -> str | None:
    pixels = max(p.reduction_size, p.batch * math.prod(p.input_spatial))
    if pixels > INT32_MAX - MAX_PIXELS**2:
        return f"{pixels} pixels; accepted: at most {INT32_MAX - MAX_PIXELS**2}"
    reason = limits.padded_input(p, MAX_PIXELS)
    if reason is not None:
        return reason
    if not _fits(view(p), 2, 4):
        return f"window_strides {p.window_strides}; 4 columns of the output need more input than fits in shared memory"
    return None


def _fits(v: View, images: int, tile_q: int) -> bool:
    """Whether such lines fit in shared memory for the smallest tile."""
    smallest = Config(1, 1, 1, TILE_N[0], images, 1, tile_q, 2, 1)
    return columns(v, smallest) <= MAX_BOX and _shared_bytes(v, smallest) <= SHARED_BYTES


def _config_limit(p: ConvWgradProblem, config: Config) -> str | None:
    v = view(p)
    if not 1 <= config.taps_h <= MAX_TAPS_H:
        return f"taps_h {config.taps_h}; accepted: 1 to {MAX_TAPS_H}"
    if config.taps_w < 1 or config.blocks < 1 or config.consumers > MAX_CONSUMERS:
        return f"taps_w {config.taps_w} and blocks {config.blocks}; accepted: products of 1 to {MAX_CONSUMERS}"
    if config.tile_n not in TILE_N:
        return f"tile_n {config.tile_n}; accepted: {', '.join(map(str, TILE_N))}"
    most = MAX_ACCUMULATORS[config.consumers]
    if config.accumulators > most:
        return (
            f"tile_n {config.tile_n} and {config.taps_h} filter rows make {config.accumulators} sums a thread; "
            f"accepted with {config.consumers} warpgroups: at most {most}"
        )
    if not 2 <= config.stages <= MAX_STAGES:
        return f"stages {config.stages}; accepted: 2 to {MAX_STAGES}"
    line = f"images {config.images} and tile_q {config.tile_q}"
    narrow = config.tile_q < 4 or (config.tile_q % 4 and config.tile_q < MIN_MIXED)
    if config.images < 1 or narrow or config.pixels % 8 or config.pixels > MAX_PIXELS:
        columns_limit = f"multiples of 4 columns or at least {MIN_MIXED}"
        return f"{line}; accepted: {columns_limit}, products that are multiples of 8 up to {MAX_PIXELS}"
    if not 1 <= config.tile_p <= v.out[0]:
        return f"tile_p {config.tile_p}; accepted: 1 to {v.out[0]}"
    if columns(v, config) > MAX_BOX:
        return f"tile_q {config.tile_q} needs {columns(v, config)} input columns; accepted: at most {MAX_BOX}"
    if _shared_bytes(v, config) > SHARED_BYTES:
        needed = _shared_bytes(v, config)
        return f"stages {config.stages} take {needed} bytes of shared memory; accepted: at most {SHARED_BYTES}"
    barriers = 16 * (config.stages + RAW_STAGES + dy_stages(v, config))
    if barriers > BARRIER_BYTES:
        needed = f"filter rows that reach over {reach(v, config)} input rows take {barriers} bytes of barriers"
        return f"{needed}; accepted: at most {BARRIER_BYTES}"
    count = units(p, config)
    if count > INT32_MAX or math.prod(tile_counts(p, config)) > INT32_MAX:
        return f"{count} strips of {math.prod(tile_counts(p, config))} tiles; accepted: at most {INT32_MAX} each"
    return split_k.splits_limit(config.splits, count, "strips")


# ---- candidates ----------------------------------------------------------------------------------------------------

MAX_CANDIDATES = 40
_VARIANTS = 16  # of which split counts are tried
_STRIPS = 2  # heights of each that are tried


def _equal_parts(size: int, most: int) -> list[int]:
    """Sizes of at most `most` of which the fewest parts make up `size`, for each number of parts."""
    return list(dict.fromkeys(-(-size // -(-size // m)) for m in range(min(size, most), 0, -1)))


def _lines(v: View) -> list[tuple[int, int]]:
    """(images, tile_q): the output's width, or equal parts of it, of few columns beyond the output."""
    found = {}
    for parts in range(1, v.out[1] + 1):
        equal = -(-v.out[1] // parts)
        if equal * 2 < MAX_PIXELS // 4 and found:
            break
        for multiple in (1, 4, 8):
            tile_q = -(-equal // multiple) * multiple
            if tile_q % 4 and tile_q < MIN_MIXED:
                continue
            for images in (1, 2, 4, 8):
                pixels = images * tile_q
                if images > v.batch + v.batch % 2 or pixels % 8 or pixels > MAX_PIXELS or not _fits(v, images, tile_q):
                    continue
                waste = -(-v.out[1] // tile_q) * tile_q / v.out[1] * (-(-v.batch // images) * images / v.batch)
                found[images, tile_q] = waste * (1 + 6 / pixels)
    return sorted(found, key=lambda line: (found[line], line))[:4]


def _heights(v: View) -> list[int]:
    """Rows of a strip: all, equal parts of them, and fixed numbers where even small parts are tall."""
    parts = [-(-v.out[0] // count) for count in (1, 2, 3, 4, 7, 8, 16, 32, 64, 128, 256, 512, 1024)]
    if parts[-1] > 128:
        parts += [128, 64, 32]
    return [rows for rows in dict.fromkeys(parts) if rows <= 128 or rows == v.out[0]]


def _widths(out_channels: int) -> list[int]:
    """Tiles of output channels: the least that holds all, and smaller ones."""
    whole = next((n for n in TILE_N if n >= out_channels), TILE_N[-1])
    return [n for n in TILE_N if n <= whole]


def _variants(p: ConvWgradProblem, target: Target) -> list[Config]:
    """Legal configs, the most promising first; their splits fill the machine once."""
    v, found = view(p), {}
    taps = itertools.product(_equal_parts(v.kernel[0], MAX_TAPS_H), _equal_parts(v.kernel[1], MAX_CONSUMERS))
    slots = -(-p.in_channels // BLOCK_CHANNELS)
    blocks = [b for b in range(1, MAX_CONSUMERS + 1) if b <= slots]
    for (h, w), b, n, (images, tile_q) in itertools.product(taps, blocks, _widths(p.out_channels), _lines(v)):
        shape = Config(h, w, b, n, images, 1, tile_q, MAX_STAGES, 1)
        if shape.consumers > MAX_CONSUMERS or shape.accumulators > MAX_ACCUMULATORS[shape.consumers]:
            continue
        stages = range(MAX_STAGES, 1, -1)
        deepest = next((s for s in stages if _config_limit(p, dataclasses.replace(shape, stages=s)) is None), None)
        if deepest is None:
            continue
        strips: dict[Config, float] = {}
        for rows in _heights(v):
            config = dataclasses.replace(shape, stages=deepest, tile_p=rows)
            if rows * config.pixels > MAX_FLOAT32_CHAIN and rows > 1:
                continue
            wanted = max(least_splits(p, config), target.cores // math.prod(tile_counts(p, config)))
            config = dataclasses.replace(config, splits=whole_splits(p, config, wanted))
            if _config_limit(p, config) is None:
                strips[config] = estimate(p, config, target)
        found |= {config: strips[config] for config in sorted(strips, key=lambda c: strips[c])[:_STRIPS]}
    return sorted(found, key=lambda c: found[c])


@functools.lru_cache(maxsize=256)
def _candidates(p: ConvWgradProblem, target: Target) -> tuple[Config, ...]:
    found = {}
    for variant in _variants(p, target)[:_VARIANTS]:
        tiles, least = math.prod(tile_counts(p, variant)), least_splits(p, variant)
        for splits in split_search.wave_splits(units(p, variant), tiles, target.cores, least):
            config = dataclasses.replace(variant, splits=splits)
            if _config_limit(p, config) is None:
                found[config] = estimate(p, config, target)
    return split_search.fastest_and_fewest(found, MAX_CANDIDATES)


def candidates(problem: ConvWgradProblem, target: Target) -> list[Config]:
    """Configs worth considering: the most promising variants with the split counts that fill 1 to 4 whole waves."""
    return list(_candidates(problem, target))


def neighbours(problem: ConvWgradProblem, config: Config, target: Target) -> list[Config]:
    """Split counts nearby, doubled and halved, a stage more or less, and strips of twice or half the rows."""
    wave = max(1, target.cores // math.prod(tile_counts(problem, config)))
    wanted = {config.splits // 2, config.splits * 2, config.splits + wave, config.splits - wave, config.splits + 1}
    found = split_search.with_splits(config, units(problem, config), wanted, least_splits(problem, config))
    found += [dataclasses.replace(config, stages=config.stages + step) for step in (-1, 1)]
    for tile_p in (config.tile_p * 2, -(-config.tile_p // 2)):
        if tile_p not in (config.tile_p, *range(problem.output_spatial[0] + 1, tile_p + 1)):
            other = dataclasses.replace(config, tile_p=tile_p)
            found.append(dataclasses.replace(other, splits=whole_splits(problem, other, config.splits)))
    return found


# ---- the cost model ------------------------------------------------------------------------------------------------

# Fitted to 17 device times of an H200, the worst of them 4.4% off.
_CLOCK = 1.84e9
_SHARED_BYTES_PER_CLOCK = 128
_L2_BYTES_PER_CLOCK = 40  # one SM's loads
_HBM_BYTES = 3.94e12
_PARTIAL_BYTES = 4.8e12  # partial sums stay in L2 for the most part
_LINE_CLOCKS = 545  # of a line, beside its products
_STEP_CLOCKS = 37  # of a warpgroup's step, likewise; the other warpgroups fill it
_STRIP_CLOCKS = 200
_LOAD_CLOCKS, _LOAD_BYTES_PER_CLOCK = 1500, 30  # until a line is there, while a place of the ring waits for it
_WAVE_SECONDS = 3e-6  # filling the rings and the epilogue
_LAUNCH_SECONDS = 4.5e-6
_REDUCE_SECONDS = 0.7e-6


def clocks(p: ConvWgradProblem, config: Config) -> dict[str, float]:
    """Clocks that each of an SM's units takes for one thread block's strip; `tensor`: with its waits; `ring`: until
    lines of X have come, as far as its other places do not hide it."""
    v = view(p)
    steps, rows = config.pixels // 8, v.out[0] / _strip_counts(v, config)[1]
    lines = (rows - 1) * v.stride[0] + reach(v, config) + 1
    products = config.consumers * rows * steps * config.taps_h
    line = config.images * columns(v, config) * config.blocks * 2 * PIXEL_BYTES
    loaded = lines * line
    dy = rows * _row_bytes(config)
    shared = products * config.tile_n * 32 + config.consumers * lines * steps * 2048 + loaded + 3 * dy
    waits = lines * (_LINE_CLOCKS + steps * _STEP_CLOCKS / config.consumers)
    return {
        "tensor": products * config.tile_n / 2 + waits + _STRIP_CLOCKS,
        "shared": shared / _SHARED_BYTES_PER_CLOCK,
        "l2": (loaded + dy) / _L2_BYTES_PER_CLOCK,
        "ring": lines * (_LOAD_CLOCKS + line / _LOAD_BYTES_PER_CLOCK) / (config.stages - 1),
    }


def estimate(problem: ConvWgradProblem, config: Config, target: Target) -> float:
    """Predicted seconds: the busiest SM's thread blocks at the rate of its busiest unit, plus the reduction.

    What tiles reach beyond the problem counts as work. Device memory bounds the whole from below, and slows it where
    the two are near each other.
    """
    blocks = math.prod(tile_counts(problem, config)) * config.splits
    waves = -(-blocks // target.cores)
    strips = -(-units(problem, config) // config.splits)
    busy = waves * (strips * max(clocks(problem, config).values()) / _CLOCK + _WAVE_SECONDS)
    seconds = math.hypot(busy**2, (problem.bytes_moved / _HBM_BYTES) ** 2) ** 0.5 + _LAUNCH_SECONDS
    if config.splits > 1:
        seconds += _REDUCE_SECONDS + 2 * workspace_bytes(problem, config) / _PARTIAL_BYTES
    return seconds


# ---- the plan ------------------------------------------------------------------------------------------------------


def source(problem: ConvWgradProblem, config: Config) -> Source:
    """The device code's specialisation: it depends on the window's geometry and the tile, not on sizes or splits."""
    v = view(problem)
    macros = {
        "OUT": split_k.OUT_CODES[problem.out_dtype],
        "TAPS_H": config.taps_h,
        "TAPS_W": config.taps_w,
        "BLOCKS": config.blocks,
        "TILE_N": config.tile_n,
        "TILE_IMAGES": config.images,
        "TILE_Q": config.tile_q,
        "STRIDE_H": v.stride[0],
        "STRIDE_W": v.stride[1],
        "DILATION_H": v.dilation[0],
        "DILATION_W": v.dilation[1],
        "X_STAGES": config.stages,
        "DY_STAGES": dy_stages(v, config),
        "RAGGED": int(v.out[1] % config.tile_q > 0),
    }
    return Source("wgrad/tf32.cu", tuple(macros.items()), declarations(split_k.ReduceArgs))


def _args(p: ConvWgradProblem, config: Config) -> plan.Int32Struct:
    """`struct Args` of the device code, in its order."""
    v, count = view(p), units(p, config)
    values = (
        *(p.in_channels, p.out_channels),
        *(*v.kernel, -(-v.kernel[1] // config.taps_w)),
        *tile_counts(p, config)[1:],
        *v.out,
        *(config.tile_p, *_strip_counts(v, config)[1:]),
        *v.pad,
        *(count, -(-count // config.splits)),
        split_k.stride(p),
    )
    return plan.Int32Struct(values)


def make_plan(problem: ConvWgradProblem, config: Config) -> plan.DevicePlan:
    """Exact launches. Buffers: lhs, g, dW, workspace."""
    v = view(problem)
    x_dims = (problem.in_channels, v.size[1], v.size[0], v.batch)
    dy_dims = (problem.out_channels, v.out[1], v.out[0], v.batch)
    x_strides = tuple(4 * elements for elements in v.lhs_strides)
    maps = (
        plan.TiledMap(0, problem.dtype, x_dims, x_strides, (BOX_CHANNELS, columns(v, config), 1, 1)),
        plan.TiledMap(
            1,
            problem.dtype,
            dy_dims,
            plan.tensor_map_strides(dy_dims, 4),
            (BOX_CHANNELS, config.tile_q, 1, config.images),
        ),
    )
    launches = split_k.launches(
        problem,
        config.splits,
        grid=(math.prod(tile_counts(problem, config)), config.splits, 1),
        threads=128 * (config.consumers + 1),
        params=(plan.MapParam(0), plan.MapParam(1), _args(problem, config)),
        shared_bytes=shared_bytes(problem, config),
    )
    buffers = split_k.buffers(problem, workspace_bytes(problem, config))
    return plan.DevicePlan(source(problem, config), buffers, maps, launches, label=f"{name} {config}")
