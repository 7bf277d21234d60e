"""Kernel family: weight gradients that TMA cannot load, or of float32 (device code: wgrad_gather.cu).

Any channel counts (the 3-channel stem, single-channel images), float32 inputs of any, one to three spatial dimensions,
any strides, dilations and padding. A thread block keeps in shared memory the part of X that a tile of output pixels
touches, as it is, and its warps gather WGMMA's A operand from there into registers. Splits and their reduction are
those of wgrad_sm90.

float32 is computed as products of bf16 parts ("bfloat16_3x": three products; for precision HIGHEST exact parts and six
products). Henry, Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision
Computations" (2019).
"""

import dataclasses
import functools
import itertools
import math

from jax import numpy as jnp

from jax_splitk import compiler, plan
from jax_splitk.kernels import split_k, wgrad_sm90
from jax_splitk.problem import ConvWgradProblem
from jax_splitk.target import Target, hopper_limit

name = "wgrad_gather"
implementation = "cutlass"
platform = "cuda"
ABI = 1

TILE_N = (8, 16, 32, 64, 96, 128, 192, 256)  # columns of one WGMMA
STEP = 16  # pixels of one WGMMA
SLICES = (128, 64, 32, 16, 8)  # about as many channels of X in a stage
SHARED_BYTES = 227 * 1024 - 256  # dynamic; the barriers are beside it
RESERVED_BYTES = 2 * 1024  # alignment of the ring and barriers
MAX_STAGES = 4
FEW_CHANNELS = 32  # of X, half of what wgrad_sm90 loads at a time
MAX_PIXELS = 256
BANKS = 32
# Consumers' registers by (thread blocks on an SM, consumer warpgroups): CONSUMER_REGS in the device code, and those
# that remain for the accumulators and fragments.
_REGISTERS = {(1, 1): 240, (1, 2): 208, (1, 3): 152, (1, 4): 104, (2, 1): 184, (2, 2): 88, (2, 3): 72}
_OTHER_REGISTERS = 26
# WGMMA truncates its fp32 sums, an error that grows with the number of additions in a row (see wgrad_sm90). A float32
# result is summed in splits of at most this many; with three parts the device code cuts its chains itself.
MAX_FLOAT32_CHAIN = 2048
INT32_MAX = 2**31 - 1

_ELEMENTS = {"float32": 0, "bfloat16": 1, "float16": 2}  # macro ELEMENT


@dataclasses.dataclass(frozen=True)
class Config:
    """How a weight gradient is computed.

    Attributes:
      consumers, blocks: consumer warpgroups, and 64-row blocks of (filter tap, input channel) of each.
      tile_n: output channels of a thread block; see `TILE_N`.
      images, tile_p, tile_q: a stage's tile of output pixels, [images, tile_p rows, tile_q columns].
      slice: input channels of a thread block.
      stages: depth of the shared-memory ring.
      splits: parts into which the reduction is cut; none may be empty.
    """

    consumers: int
    blocks: int
    tile_n: int
    images: int
    tile_p: int
    tile_q: int
    slice: int
    stages: int
    splits: int

    @property
    def pixels(self) -> int:
        return self.images * self.tile_p * self.tile_q

    @property
    def tile_m(self) -> int:
        return 64 * self.consumers * self.blocks


# ---- the problem in three dimensions -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Volume:
    """A problem with three spatial dimensions; what fewer have not are ones in front."""

    batch: int
    size: tuple[int, int, int]
    out: tuple[int, int, int]
    kernel: tuple[int, int, int]
    stride: tuple[int, int, int]
    pad: tuple[int, int, int]  # low sides
    lhs_dilation: tuple[int, int, int]
    rhs_dilation: tuple[int, int, int]
    channels: int
    out_channels: int
    item: int  # bytes of an element
    parts: int  # bf16 numbers that hold one of the inputs'

    @property
    def copies(self) -> int:
        """Of an operand (COPIES in the device code)."""
        return 1 if self.parts == 1 else self.parts + 1

    @property
    def products(self) -> int:
        return {1: 1, 2: 3, 3: 6}[self.parts]


@functools.lru_cache(maxsize=4096)
def volume(p: ConvWgradProblem) -> Volume:
    pad = 3 - p.rank
    ones = (1,) * pad

    def three(values: tuple[int, ...]) -> tuple[int, int, int]:
        a, b, c = (*ones, *values)
        return a, b, c

    batch, size, out = p.batch, three(p.input_spatial), three(p.output_spatial)
    if wgrad_sm90.is_matrix_product(p) and set(p.lhs_dilation) == {1}:
        batch, size, out = 1, (1, 1, p.reduction_size), (1, 1, p.reduction_size)
    low = (0,) * pad + tuple(low for low, _ in p.padding)
    return Volume(
        batch=batch,
        size=size,
        out=out,
        kernel=three(p.kernel_spatial),
        stride=three(p.window_strides),
        pad=(low[0], low[1], low[2]),
        lhs_dilation=three(p.lhs_dilation),
        rhs_dilation=three(p.rhs_dilation),
        channels=p.in_channels,
        out_channels=p.out_channels,
        item=jnp.dtype(p.dtype).itemsize,
        parts=1 if p.dtype != "float32" else 3 if "highest" in p.precision else 2,
    )


# ---- X's stage in shared memory ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Layout:
    """X's stage; the fields are the device code's macros (see there), lengths in elements."""

    rows: int
    columns: int
    pitch: int
    row_pitch: int
    lead: int
    grid_d: int
    grid_h: int
    grid_w: int
    dense: bool
    runs: bool
    paired: bool
    pixel_col: int
    pixel_row: int
    tap_col: int
    tap_row: int
    granule: int  # bytes

    def stage_bytes(self, v: Volume, config: Config) -> int:
        x_bytes = config.images * v.kernel[0] * self.rows * self.row_pitch * v.item
        return v.copies * -(-config.tile_n // 64) * config.pixels * 128 + -(-x_bytes // 1024) * 1024

    def gemm_rows(self, v: Volume, channels: int) -> int:
        """Rows of the product for a slice of that many channels, with those that fill up segments."""
        segment = channels * (v.kernel[2] if self.runs else 1)
        if self.paired:
            segment = (self.lead % 2 + segment + 1) // 2 * 2
        return math.prod(v.kernel[:2]) * (1 if self.runs else v.kernel[2]) * segment


def _lattice(tile: int, stride: int, kernel: int, dilation: int) -> tuple[int, int]:
    """(step, count) of the input positions that a tile's windows touch, or of the finest even grid through them."""
    step = math.gcd(stride if tile > 1 else 0, dilation if kernel > 1 else 0) or 1
    return step, ((tile - 1) * stride + (kernel - 1) * dilation) // step + 1


def _pixel_places(layout: Layout, v: Volume, config: Config, count: int) -> list[int]:
    image = v.kernel[0] * layout.rows * layout.row_pitch
    places = []
    for k in range(count):
        rest, q = divmod(k, config.tile_q)
        n, p = divmod(rest, config.tile_p)
        places.append(q * layout.pixel_col + p * layout.pixel_row + n * image)
    return places


def conflicts(layout: Layout, v: Volume, config: Config) -> int:
    """Turns that shared memory takes to serve one of a warp's loads of A's elements (at best 1 for each 128 bytes)."""
    places = _pixel_places(layout, v, config, 8)
    width = v.item * (2 if layout.paired else 1)
    lanes_at_once = 16 if width == 8 else 32
    turns = 0
    for first in range(0, 32, lanes_at_once):
        words: dict[int, set[int]] = {}
        for lane in range(first, first + lanes_at_once):
            address = (layout.lead // 2 * 2 + 2 * (lane // 4) + places[2 * (lane % 4)]) * v.item
            for byte in range(address, address + width, 4):
                words.setdefault(byte // 4 % BANKS, set()).add(byte // 4)
        turns += max(map(len, words.values()))
    return turns


def _granule_items(v: Volume, channels: int) -> int:
    """The longest copy's elements, where pixels are copied one by one, a slice of channels of each."""
    return next(n for n in (16 // v.item, 8 // v.item, 4 // v.item, 1) if v.channels % n == 0 and channels % n == 0)


def _dense_granule_items(v: Volume, config: Config) -> int:
    """The longest copy's elements, where rows are: also at the first pixel of each tile and at an image's edges."""
    step = config.tile_q * v.stride[2] * v.channels if v.out[2] > config.tile_q else 0
    sizes = (16 // v.item, 8 // v.item, 4 // v.item, 1)
    return next(n for n in sizes if v.size[2] * v.channels % n == 0 and step % n == 0)


@functools.lru_cache(maxsize=65536)
def _layout(v: Volume, images: int, tile_p: int, tile_q: int, channels: int) -> Layout:
    """X's stage; pitches are chosen for few bank conflicts."""
    config = Config(1, 1, 8, images, tile_p, tile_q, channels, 2, 1)
    (_, stride_h, stride_w), (_, kernel_h, kernel_w) = v.stride, v.kernel
    _, dilation_h, dilation_w = v.rhs_dilation
    grid_h, rows = _lattice(tile_p, stride_h, kernel_h, dilation_h)
    grid_w, columns = _lattice(tile_q, stride_w, kernel_w, dilation_w)
    few = channels == v.channels and (channels < 16 or channels * v.item % 4 != 0)
    dense = few and grid_w == 1 and v.lhs_dilation[2] == 1
    runs = dense and (dilation_w == 1 or kernel_w == 1)
    items = _dense_granule_items(v, config) if dense else _granule_items(v, channels)
    lead = -v.pad[2] * channels % items if dense else 0
    even = math.lcm(items, 2)  # of pitches
    best, best_score = None, None
    fewest = 2 if v.item == 4 else 1
    for extra, row_extra in itertools.product(range(1 if dense else 9), range(1 if tile_q >= 8 else 9)):
        pitch = channels if dense else -(-channels // even) * even + extra * even
        width = -(-(lead + columns * pitch) // even) * even
        row_pitch = width + row_extra * even
        paired = (tile_q == 1 or pitch * (stride_w // grid_w) % 2 == 0) and (
            runs or kernel_w == 1 or pitch * (dilation_w // grid_w) % 2 == 0
        )
        found = Layout(
            rows=rows,
            columns=columns,
            pitch=pitch,
            row_pitch=row_pitch,
            lead=lead,
            grid_d=v.rhs_dilation[0],
            grid_h=grid_h,
            grid_w=grid_w,
            dense=dense,
            runs=runs,
            paired=paired,
            pixel_col=stride_w // grid_w * pitch if tile_q > 1 else 0,
            pixel_row=stride_h // grid_h * row_pitch if tile_p > 1 else 0,
            tap_col=dilation_w // grid_w * pitch if kernel_w > 1 else 0,
            tap_row=dilation_h // grid_h * row_pitch if kernel_h > 1 else 0,
            granule=items * v.item,
        )
        score = (conflicts(found, v, config), row_pitch)
        if best_score is None or score < best_score:
            best, best_score = found, score
        if score[0] <= fewest:
            break
    assert best is not None
    return best


def layout(p: ConvWgradProblem, config: Config) -> Layout:
    return _layout(volume(p), config.images, config.tile_p, config.tile_q, config.slice)


@functools.lru_cache(maxsize=4096)
def _slices(v: Volume) -> tuple[int, ...]:
    """Slices of channels to choose from, largest first: all of them if few, else equal parts."""
    found = {v.channels} if v.channels <= SLICES[0] else set()
    for most in SLICES:
        equal = -(-v.channels // -(-v.channels // most))
        items = _granule_items(v, 0)
        found.add(min(v.channels, -(-equal // items) * items))
    return tuple(sorted(found, reverse=True))


def _shared_bytes(v: Volume, config: Config) -> int:
    x = _layout(v, config.images, config.tile_p, config.tile_q, config.slice)
    return config.stages * x.stage_bytes(v, config) + RESERVED_BYTES


def shared_bytes(p: ConvWgradProblem, config: Config) -> int:
    return _shared_bytes(volume(p), config)


def _registers(v: Volume, config: Config) -> int:
    """A consumer thread's, about."""
    accumulators = config.blocks * config.tile_n // 2 * (2 if v.parts == 3 else 1)
    masks = 8 if _is_ragged(v, config) else 0
    return accumulators + 2 * 4 * v.copies + 2 * config.blocks + masks + _OTHER_REGISTERS


def _is_ragged(v: Volume, config: Config) -> bool:
    """Some tiles of pixels reach beyond the output."""
    return v.batch % config.images + v.out[1] % config.tile_p + v.out[2] % config.tile_q > 0


def ctas_per_sm(p: ConvWgradProblem, config: Config) -> int:
    """2 where shared memory and registers allow it."""
    fits = _registers(volume(p), config) <= _REGISTERS.get((2, config.consumers), 0)
    return 2 if fits and 2 * shared_bytes(p, config) <= SHARED_BYTES else 1


# ---- tiles and splits ----------------------------------------------------------------------------------------------


def k_tiles(p: ConvWgradProblem, config: Config) -> int:
    """Tiles of pixels in the reduction."""
    v = volume(p)
    return -(-v.batch // config.images) * v.out[0] * -(-v.out[1] // config.tile_p) * -(-v.out[2] // config.tile_q)


def tile_counts(p: ConvWgradProblem, config: Config) -> tuple[int, int, int]:
    """(slices of channels, tiles along M of one slice, tiles along N)."""
    v, x = volume(p), layout(p, config)
    return (
        -(-v.channels // config.slice),
        -(-x.gemm_rows(v, config.slice) // config.tile_m),
        -(-v.out_channels // config.tile_n),
    )


def whole_splits(p: ConvWgradProblem, config: Config, splits: int) -> int:
    """The nearest split count not above `splits` (and at least 1) that leaves no split empty."""
    return split_k.whole_splits(k_tiles(p, config), splits)


def least_splits(p: ConvWgradProblem, config: Config) -> int:
    """Fewest splits for the accuracy that is promised (explicit configs may have fewer)."""
    v = volume(p)
    if p.out_dtype != "float32" or v.parts == 3:
        return 1
    tiles = k_tiles(p, config)
    most = max(1, MAX_FLOAT32_CHAIN // (config.pixels // STEP * v.products))
    return -(-tiles // -(-tiles // -(-tiles // most)))


def workspace_bytes(problem: ConvWgradProblem, config: Config) -> int:
    """fp32 partial sums, one set for each split; none when there is a single split."""
    return split_k.workspace_bytes(problem, config.splits)


# ---- what is legal -------------------------------------------------------------------------------------------------


def supports(problem: ConvWgradProblem, config: Config | None = None, target: Target | None = None) -> str | None:
    """None when the family (with that config, on that target) can compute the problem, else the reason."""
    reason = hopper_limit(target) or _problem_limit(problem) or _window_limit(problem)
    if reason is None and config is not None:
        reason = _config_limit(problem, config)
    return reason


def preferred(problem: ConvWgradProblem, target: Target) -> str | None:
    """Where it was measured to be faster than XLA: few channels, true float32, and float32 without strides."""
    del target
    float32 = problem.dtype == "float32"
    dense = float32 and problem.taps > 1 and set(problem.window_strides) == {1}
    if problem.in_channels <= FEW_CHANNELS or dense or (float32 and "highest" in problem.precision):
        return None
    return f"{problem.in_channels} input channels; not known to be faster than XLA above {FEW_CHANNELS}"


def _problem_limit(p: ConvWgradProblem) -> str | None:
    types = split_k.type_limit(p, tuple(_ELEMENTS))
    if types is not None:
        return types
    if p.feature_group_count != 1 or p.batch_group_count != 1:
        groups = f"feature_group_count {p.feature_group_count}, batch_group_count {p.batch_group_count}"
        return f"{groups}; accepted: 1"
    if 0 in p.input_spatial:
        return f"input of {p.input_spatial} pixels; accepted: at least 1 in each dimension"
    pixels = p.batch * math.prod(p.input_spatial)
    if pixels > INT32_MAX:
        return f"{pixels} input pixels; accepted: at most {INT32_MAX}"
    # A tile may reach beyond the output, by less than MAX_PIXELS in each dimension.
    most = INT32_MAX - MAX_PIXELS**2
    if not 0 < p.reduction_size <= most:
        return f"{p.reduction_size} output pixels; accepted: 1 to {most}"
    if not 0 < math.prod(p.out_shape) <= INT32_MAX:
        return f"{math.prod(p.out_shape)} weights; accepted: 1 to {INT32_MAX}"
    v = volume(p)
    for axis in range(3):
        span = abs(v.pad[axis]) + (v.out[axis] + MAX_PIXELS) * v.stride[axis] + v.kernel[axis] * v.rhs_dilation[axis]
        span *= v.channels if axis == 2 else 1
        if span > INT32_MAX:
            where = f"in spatial dimension {axis - 3 + p.rank}"
            return f"padded input of up to {span} elements {where}; accepted: at most {INT32_MAX}"
    return None


def _window_limit(p: ConvWgradProblem) -> str | None:
    """Whether the smallest stage's X fits in shared memory."""
    tiles = ((32, 1, 1), (16, 1, 2), (4, 1, 8), (1, 1, 32), (4, 8, 1), (1, 32, 1))
    smallest = [Config(1, 1, 8, *tile, _slices(volume(p))[-1], 2, 1) for tile in tiles]
    needed = min(shared_bytes(p, config) for config in smallest)
    if needed <= SHARED_BYTES:
        return None
    return f"the window's input takes {needed} bytes of shared memory; accepted: at most {SHARED_BYTES}"


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
    registers, most = _registers(v, config), _REGISTERS[1, config.consumers]
    if registers > most:
        return (
            f"{config.blocks} blocks by tile_n {config.tile_n} take about {registers} registers a thread; accepted "
            f"with {config.consumers} consumers: at most {most}"
        )
    if config.slice not in _slices(v):
        return f"slice {config.slice}; accepted for {v.channels} channels: {', '.join(map(str, _slices(v)))}"
    needed = shared_bytes(p, config)
    if needed > SHARED_BYTES:
        return f"stages {config.stages} take {needed} bytes of shared memory; accepted: at most {SHARED_BYTES}"
    tiles = k_tiles(p, config)
    if not 1 <= config.splits <= min(tiles, 65535):
        return f"splits {config.splits}; accepted for {tiles} tiles of pixels: 1 to {min(tiles, 65535)}"
    if whole_splits(p, config, config.splits) != config.splits:
        nearest = whole_splits(p, config, config.splits)
        return f"splits {config.splits} leaves some of {tiles} tiles of pixels' splits empty; use {nearest}"
    return None


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
        if _shared_bytes(v, dataclasses.replace(config, slice=_slices(v)[-1])) > SHARED_BYTES:
            continue
        covered = -(-v.batch // n) * n * -(-v.out[1] // p) * p * -(-v.out[2] // q) * q
        waste = covered / (v.batch * v.out[1] * v.out[2])
        rows = _lattice(p, v.stride[1], v.kernel[1], v.rhs_dilation[1])[1]
        columns = _lattice(q, v.stride[2], v.kernel[2], v.rhs_dilation[2])[1]
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
    for tile, columns, channels in itertools.product(_pixel_tiles(v), _columns(v), _slices(v)):
        for consumers, blocks in itertools.product((1, 2, 3, 4), (1, 2, 3, 4)):
            for stages in range(MAX_STAGES, 1, -1):
                config = Config(consumers, blocks, columns, *tile, channels, stages, 1)
                if _config_limit(p, config) is None:
                    # The deepest ring, and the deepest that lets two thread blocks share an SM.
                    found[config] = None
                    if ctas_per_sm(p, config) == 2 or ctas_per_sm(p, dataclasses.replace(config, stages=2)) == 1:
                        break
    rows = {c: layout(p, c).gemm_rows(v, c.slice) for c in found}
    useful = [c for c in found if c.tile_m < rows[c] + 64 * c.consumers or c.tile_m == 64]

    def seconds(config: Config) -> float:
        tiles = math.prod(tile_counts(p, config))
        slots = target.cores * ctas_per_sm(p, config)
        splits = whole_splits(p, config, max(least_splits(p, config), slots // tiles))
        return estimate(p, dataclasses.replace(config, splits=splits), target)

    return sorted(useful, key=seconds)


@functools.lru_cache(maxsize=256)
def _candidates(p: ConvWgradProblem, target: Target) -> tuple[Config, ...]:
    found = {}
    for variant in _variants(p, target)[:_VARIANTS]:
        tiles = math.prod(tile_counts(p, variant))
        slots, least = target.cores * ctas_per_sm(p, variant), least_splits(p, variant)
        wanted = [least, *(slots * waves // tiles for waves in (1, 2, 3, 4))]
        for splits in sorted({whole_splits(p, variant, max(s, least)) for s in wanted}):
            config = dataclasses.replace(variant, splits=splits)
            if _config_limit(p, config) is None:
                found[config] = estimate(p, config, target)
    # The fewest splits of each stay, however slow: a small workspace may allow no others.
    ranked = sorted(found, key=lambda c: found[c])
    fewest = sorted(ranked, key=lambda c: c.splits)[:4]
    return tuple(dict.fromkeys([*ranked[: MAX_CANDIDATES - len(fewest)], *fewest]))


def candidates(problem: ConvWgradProblem, target: Target) -> list[Config]:
    """Configs worth considering: the most promising variants with the split counts that fill 1 to 4 whole waves."""
    return list(_candidates(problem, target))


def neighbours(problem: ConvWgradProblem, config: Config, target: Target) -> list[Config]:
    """Split counts nearby, doubled and halved, a stage more or less, and tiles of twice or half the rows."""
    tiles = math.prod(tile_counts(problem, config))
    wave = target.cores * ctas_per_sm(problem, config) / tiles
    wanted = {config.splits // 2, config.splits * 2, round(config.splits + wave / 2), round(config.splits - wave / 2)}
    least = least_splits(problem, config)
    splits = {whole_splits(problem, config, s) for s in wanted if s >= least}
    found = [dataclasses.replace(config, splits=s) for s in sorted(splits - {config.splits})]
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


def clocks(p: ConvWgradProblem, config: Config) -> dict[str, float]:
    """Clocks of each of an SM's units for one thread block's stage; `latency`: of one warpgroup's fragments in turn."""
    v, x = volume(p), layout(p, config)
    blocks, steps = config.consumers * config.blocks, config.pixels // STEP
    loads = 4 * (1 if x.paired else 2)  # of a warp, for a block's fragment
    dy_bytes, b_bytes = config.pixels * config.tile_n * 2 * v.copies, STEP * config.tile_n * 2 * v.products
    x_items = config.images * v.kernel[0] * x.rows * x.columns * config.slice
    conversion = {1: 4, 2: 44, 3: 76}[v.parts]
    copies = x_items * v.item / x.granule * (20 if x.granule > 2 else 26) / 32
    dy_stores = 0 if _dy_by_tma(v) else config.pixels * config.tile_n / 8 * 48 * v.parts / 32
    shared = steps * blocks * (4 * loads * conflicts(x, v, config) + b_bytes / _SHARED_BYTES_PER_CLOCK)
    shared += (dy_bytes + x_items * v.item) / _SHARED_BYTES_PER_CLOCK
    return {
        "tensor": steps * blocks * v.products * config.tile_n / 2,
        "shared": shared,
        "issue": (steps * blocks * 4 * (loads + conversion + 10 + v.products) + copies + dy_stores) / 4,
        "latency": steps * config.blocks * _FRAGMENT_CLOCKS[v.parts] / ctas_per_sm(p, config),
        "l2": (x_items + config.pixels * config.tile_n) * v.item / _L2_BYTES_PER_CLOCK,
    }


def estimate(problem: ConvWgradProblem, config: Config, target: Target) -> float:
    """Predicted seconds: the busiest SM's thread blocks at the rate of its busiest unit, plus the reduction.

    What tiles reach beyond the problem counts as work; device memory bounds the whole from below.
    """
    together = ctas_per_sm(problem, config)
    blocks = math.prod(tile_counts(problem, config)) * config.splits
    units = sorted(clocks(problem, config).values())
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


def source(problem: ConvWgradProblem, config: Config) -> compiler.Source:
    """The device code's specialisation: it depends on the window, channels and tiles, not on batch, sizes or splits."""
    v, x = volume(problem), layout(problem, config)
    tma = _dy_by_tma(v)
    macros = {
        "ELEMENT": _ELEMENTS[problem.dtype],
        "PARTS": v.parts,
        "OUT": split_k.OUT_CODES[problem.out_dtype],
        "CONSUMERS": config.consumers,
        "BLOCKS": config.blocks,
        "TILE_N": config.tile_n,
        "STAGES": config.stages,
        "CTAS_PER_SM": ctas_per_sm(problem, config),
        "TILE_IMAGES": config.images,
        "TILE_P": config.tile_p,
        "TILE_Q": config.tile_q,
        "SLICE": config.slice,
        "KERNEL_T": v.kernel[0],
        "KERNEL_R": v.kernel[1],
        "KERNEL_S": v.kernel[2],
        "RAGGED": int(_is_ragged(v, config)),
        "DY_TMA": int(tma),
        "DY_VEC": 8 if tma else math.gcd(v.out_channels, 4),
        "LHS_D": v.lhs_dilation[0],
        "LHS_H": v.lhs_dilation[1],
        "LHS_W": v.lhs_dilation[2],
        **{field.upper(): int(value) for field, value in dataclasses.asdict(x).items()},
    }
    return compiler.Source("wgrad_gather.cu", tuple(macros.items()))


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
    buffers = (
        plan.Buffer(math.prod(problem.lhs_shape) * v.item, 16),
        plan.Buffer(math.prod(problem.g_shape) * v.item, 16),
        plan.Buffer(math.prod(problem.out_shape) * jnp.dtype(problem.out_dtype).itemsize, 16),
        plan.Buffer(workspace_bytes(problem, config), 16),
    )
    tma, split = _dy_by_tma(v), config.splits > 1
    main = plan.Launch(
        kernel="wgrad_partial" if split else "wgrad_direct",
        grid=(math.prod(tile_counts(problem, config)), config.splits, 1),
        block=(128 * (config.consumers + 1), 1, 1),
        params=(
            plan.MapParam(0) if tma else plan.Pointer(1),
            _args(problem, config),
            plan.Pointer(0),
            plan.Pointer(3 if split else 2),
        ),
        shared_bytes=shared_bytes(problem, config),
    )
    launches = (main, split_k.reduce_launch(problem, config.splits)) if split else (main,)
    maps = (_dy_map(problem, config),) if tma else ()
    return plan.DevicePlan(source(problem, config), buffers, maps, launches, label=f"{name} {config}")
