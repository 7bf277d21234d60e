"""Kernel family: float32 weight gradients on Hopper's tf32 tensor cores (device code: tf32/wgrad.cu).

It serves the precisions that XLA computes in tf32, too: DEFAULT and HIGH. One or two spatial dimensions.
"""

import dataclasses
import functools
import itertools
import math

from jax_splitk.kernels.base import refusals
from jax_splitk.kernels.base.family import box_map, field_macros, field_refusal, varied
from jax_splitk.kernels.base.geometry import (
    Geometry,
    axis_macros,
    bytes_touched,
    equal_parts,
    geometry,
    is_matrix_product,
)
from jax_splitk.kernels.base.refusals import INT32_MAX
from jax_splitk.kernels.base.split import SplitFamily, whole_fours
from jax_splitk.kernels.base.work import Work
from jax_splitk.kernels.device import split_k
from jax_splitk.kernels.device.registers import share_macros
from jax_splitk.kernels.device.structs import Struct
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime import plan
from jax_splitk.runtime.target import Target

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
TAPS_H, MAX_TAPS_W, MAX_CONSUMERS = (3, 1), 3, 4
# Accumulators that fit beside the rest in a consumer's registers, by consumer warpgroups.
MAX_ACCUMULATORS = {1: 192, 2: 144, 3: 96, 4: 64}
MAX_FLOAT32_CHAIN = 16384  # pixels of a float32 result's split
_STRIPS = 2  # heights of each variant that are tried


@dataclasses.dataclass(frozen=True)
class Config:
    """How a weight gradient is computed.

    Attributes:
      taps_h, taps_w: filter rows and columns of a thread block's tile.
      blocks: its input channels, in blocks of 64; there is a consumer warpgroup for each of taps_w * blocks.
      tile_n: its output channels.
      images, tile_p, tile_q: a strip (a unit of work): output rows and columns of some images.
      stages: lines of X that fit in shared memory.
      splits: parts of the reduction, in whole strips; none may be empty.
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
        """Pixels of a line."""
        return self.images * self.tile_q

    @property
    def accumulators(self) -> int:
        """A consumer thread's."""
        return self.taps_h * self.tile_n // 2


@dataclasses.dataclass(frozen=True)
class View(Geometry):
    """Both inputs as images of rows and columns, without input pixels that no window reads.

    `lhs_strides`: distances in elements of neighbouring columns, rows and images of X.
    """

    lhs_strides: tuple[int, int, int]


def _matrix_shape(pixels: int) -> tuple[int, int]:
    """The (rows, columns) in which pixels without neighbours are arranged: rows of equal length, where a length of at
    least 32 divides the number of pixels."""
    width = next((w for w in range(MAX_PIXELS, 31, -8) if pixels % w == 0), pixels)
    return pixels // width, width


@functools.lru_cache(maxsize=4096)
def view(p: ConvWgradProblem) -> View:
    """The view of a problem with one or two spatial dimensions."""
    g, c = geometry(p, 2), p.in_channels
    if is_matrix_product(p):
        lines = _matrix_shape(p.reduction_size)
        g = dataclasses.replace(g, batch=1, size=lines, out=lines, dilation=(1, 1))
    # Every position is a multiple of `step` away from the image's first pixel.
    step = [math.gcd(g.stride[i], g.dilation[i] if g.kernel[i] > 1 else 0, g.pad[i]) for i in (0, 1)]

    def reduced(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(value // by for value, by in zip(values, step, strict=True))

    (height, width), (step_h, step_w) = g.size, step
    changes = {
        "size": (-(-height // step_h), -(-width // step_w)),
        "stride": reduced(g.stride),
        "pad": reduced(g.pad),
        "dilation": tuple(max(1, dilation) for dilation in reduced(g.dilation)),  # one tap has none
        "lhs_strides": (step_w * c, step_h * width * c, height * width * c),
    }
    return View(**{**vars(g), **changes})


def columns(v: View, config: Config) -> int:
    """Columns of a line of X for each image."""
    return (config.tile_q - 1) * v.stride[1] + (config.taps_w - 1) * v.dilation[1] + 1


def reach(v: View, config: Config) -> int:
    """Lines of X beyond the first one that a row of dY needs."""
    return (config.taps_h - 1) * v.dilation[0]


def dy_stages(v: View, config: Config) -> int:
    """Transposed rows of dY in shared memory: those that a line of X multiplies, and further ones."""
    return reach(v, config) // v.stride[0] + 1 + AHEAD


def _pitch_bytes(v: View, config: Config) -> int:
    """Bytes of 32 channels of an image's line of X in shared memory."""
    return -(-columns(v, config) // 8) * 8 * PIXEL_BYTES


def _line_bytes(v: View, config: Config) -> int:
    """Bytes of a line of X in shared memory."""
    return config.images * config.blocks * 2 * _pitch_bytes(v, config)


def _row_bytes(config: Config) -> int:
    """Bytes of a row of dY in shared memory."""
    return config.pixels * config.tile_n * 4


def shared_bytes(v: View, config: Config) -> int:
    rows = RAW_STAGES + dy_stages(v, config)
    return config.stages * _line_bytes(v, config) + rows * _row_bytes(config) + RESERVED_BYTES


def _extent_refusal(p: ConvWgradProblem) -> str | None:
    pixels = max(p.reduction_size, p.batch * math.prod(p.input_spatial))
    if pixels > INT32_MAX - MAX_PIXELS**2:
        return f"{pixels} pixels; accepted: at most {INT32_MAX - MAX_PIXELS**2}"
    return refusals.padded_input(p, MAX_PIXELS)


def _fits(v: View, images: int, tile_q: int) -> bool:
    """Whether lines with these images and columns fit in shared memory for the smallest tile."""
    smallest = Config(1, 1, 1, TILE_N[0], images, 1, tile_q, 2, 1)
    return columns(v, smallest) <= MAX_BOX and shared_bytes(v, smallest) <= SHARED_BYTES


def _lines(v: View) -> list[tuple[int, int]]:
    """(images, tile_q): the output's width, or equal parts of it with few columns beyond the output."""
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
    """Rows of a strip: all, equal parts of them, and fixed numbers if even small parts are tall."""
    parts = [-(-v.out[0] // count) for count in (1, 2, 3, 4, 7, 8, 16, 32, 64, 128, 256, 512, 1024)]
    if parts[-1] > 128:
        parts += [128, 64, 32]
    return [rows for rows in dict.fromkeys(parts) if rows <= 128 or rows == v.out[0]]


# ---- the cost model ------------------------------------------------------------------------------------------------


def strip_work(p: ConvWgradProblem, config: Config) -> dict[str, float]:
    """The work of a thread block's strip."""
    v = view(p)
    steps, rows = config.pixels // 8, v.out[0] / -(-v.out[0] // config.tile_p)
    lines = (rows - 1) * v.stride[0] + reach(v, config) + 1
    products = config.consumers * rows * steps * config.taps_h
    loaded = lines * config.images * columns(v, config) * config.blocks * 2 * PIXEL_BYTES
    dy = rows * _row_bytes(config)
    return {
        "tensor_clocks": products * config.tile_n / 2,
        "shared_bytes": products * config.tile_n * 32 + config.consumers * lines * steps * 2048 + loaded + 3 * dy,
        "l2_bytes": loaded + dy,
        "waits": lines / (config.stages - 1),
        "turns": 1 + lines * (1 + steps / config.consumers),
    }


class Tf32(SplitFamily[ConvWgradProblem, Config]):
    """Preferred whenever it is legal: it was measured to be as fast as XLA (1x1) or faster (3x3, stride 1 and 2)."""

    name = "wgrad_tf32"
    ABI = 1
    file = "tf32/wgrad.cu"

    def problem_refusal(self, problem: ConvWgradProblem) -> str | None:
        reason = refusals.operands(problem, (1, 2), refusals.groups, accepted=("float32",))
        if reason is None and "highest" in problem.precision:
            reason = f"precision {problem.precision}; accepted: default, high"
        return (
            reason
            or refusals.empty_dimensions(problem)
            or refusals.weights(problem)
            or _extent_refusal(problem)
            or self.smallest_refusal(problem, Config(1, 1, 1, TILE_N[0], 2, 1, 4, stages=2, splits=1))
        )

    def config_refusal(self, problem: ConvWgradProblem, config: Config) -> str | None:
        v = view(problem)
        taps = {"taps_h": TAPS_H, "taps_w": range(1, MAX_TAPS_W + 1)}
        fixed = {"tile_n": TILE_N, "stages": range(2, MAX_STAGES + 1)}
        if (reason := field_refusal(config, **taps, **fixed, tile_p=range(1, v.out[0] + 1))) is not None:
            return reason
        if config.blocks < 1 or config.consumers > MAX_CONSUMERS:
            return f"taps_w {config.taps_w} and blocks {config.blocks}; accepted: products of 1 to {MAX_CONSUMERS}"
        most = MAX_ACCUMULATORS[config.consumers]
        if config.accumulators > most:
            return (
                f"tile_n {config.tile_n} and {config.taps_h} filter rows make {config.accumulators} sums a thread; "
                f"accepted with {config.consumers} warpgroups: at most {most}"
            )
        line = f"images {config.images} and tile_q {config.tile_q}"
        narrow = config.tile_q < 4 or (config.tile_q % 4 and config.tile_q < MIN_MIXED)
        if config.images < 1 or narrow or config.pixels % 8 or config.pixels > MAX_PIXELS:
            accepted = f"multiples of 4 columns or at least {MIN_MIXED}"
            return f"{line}; accepted: {accepted}, products that are multiples of 8 up to {MAX_PIXELS}"
        if columns(v, config) > MAX_BOX:
            return f"tile_q {config.tile_q} needs {columns(v, config)} input columns; accepted: at most {MAX_BOX}"
        if (needed := shared_bytes(v, config)) > SHARED_BYTES:
            return f"stages {config.stages} take {needed} bytes of shared memory; accepted: at most {SHARED_BYTES}"
        barriers = 16 * (config.stages + RAW_STAGES + dy_stages(v, config))
        if barriers > BARRIER_BYTES:
            needed = f"filter rows that reach over {reach(v, config)} input rows take {barriers} bytes of barriers"
            return f"{needed}; accepted: at most {BARRIER_BYTES}"
        count, tiles = self.reduction_blocks(problem, config), self.thread_blocks(problem, config)
        if max(count, tiles) > INT32_MAX:
            return f"{count} strips of {tiles} tiles; accepted: at most {INT32_MAX} each"
        return split_k.splits_refusal(config.splits, count, "strips")

    def tile_counts(self, problem: ConvWgradProblem, config: Config) -> tuple[int, int, int, int]:
        """Numbers of blocks along filter rows and columns, input channels and output channels."""
        r, s = view(problem).kernel
        slots = -(-problem.in_channels // (BLOCK_CHANNELS * config.blocks))
        return -(-r // config.taps_h), -(-s // config.taps_w), slots, -(-problem.out_channels // config.tile_n)

    def block_counts(self, problem: ConvWgradProblem, config: Config) -> tuple[int, int, int]:
        """Numbers of groups of images, strips of rows, and strips of columns."""
        v = view(problem)
        return -(-v.batch // config.images), -(-v.out[0] // config.tile_p), -(-v.out[1] // config.tile_q)

    def longest_chain(self, problem: ConvWgradProblem, config: Config) -> int:
        return MAX_FLOAT32_CHAIN // (config.pixels * config.tile_p)

    def variants(self, problem: ConvWgradProblem, target: Target) -> list[Config]:
        """Legal configs, the most promising first; their splits fill the machine once."""
        v, found = view(problem), list[list[Config]]()
        taps = itertools.product([h for h in TAPS_H if h <= v.kernel[0]], equal_parts(v.kernel[1], MAX_TAPS_W))
        slots = -(-problem.in_channels // BLOCK_CHANNELS)
        whole = next((n for n in TILE_N if n >= problem.out_channels), TILE_N[-1])
        widths = [n for n in TILE_N if n <= whole]
        blocks = [b for b in range(1, MAX_CONSUMERS + 1) if b <= slots]
        for (h, w), b, n, (images, tile_q) in itertools.product(taps, blocks, widths, _lines(v)):
            shape = Config(h, w, b, n, images, 1, tile_q, MAX_STAGES, 1)
            if shape.consumers > MAX_CONSUMERS or shape.accumulators > MAX_ACCUMULATORS[shape.consumers]:
                continue
            deepest = self._deepest(problem, shape)
            if deepest is None:
                continue
            strips: list[Config] = []
            for rows in _heights(v):
                config = dataclasses.replace(deepest, tile_p=rows)
                if rows * config.pixels > MAX_FLOAT32_CHAIN and rows > 1:
                    continue
                config = self.filling(problem, config, target)
                if self.config_refusal(problem, config) is None:
                    strips.append(config)
            found.append(strips)
        return self.best_of_each(problem, found, _STRIPS, target)

    def _deepest(self, problem: ConvWgradProblem, shape: Config) -> Config | None:
        """The config with as many stages as fit."""
        depths = (dataclasses.replace(shape, stages=stages) for stages in range(MAX_STAGES, 1, -1))
        return next((config for config in depths if self.config_refusal(problem, config) is None), None)

    def neighbours(self, problem: ConvWgradProblem, config: Config, target: Target) -> list[Config]:
        """Other split counts (nearby, doubled and halved), a stage more or less, and strips with twice or half the
        rows."""
        wave = max(1, target.cores // self.thread_blocks(problem, config))
        wanted = {config.splits // 2, config.splits * 2, config.splits + wave, config.splits - wave, config.splits + 1}
        found = self.other_splits(problem, config, wanted)
        found += varied(config, stages=(config.stages - 1, config.stages + 1))
        for tile_p in (config.tile_p * 2, -(-config.tile_p // 2)):
            if tile_p not in (config.tile_p, *range(problem.output_spatial[0] + 1, tile_p + 1)):
                other = dataclasses.replace(config, tile_p=tile_p)
                found.append(self.with_splits(problem, other, config.splits))
        return found

    def work(self, problem: ConvWgradProblem, config: Config, target: Target) -> Work:
        """Also counts the parts of tiles beyond the problem."""
        waves = self.waves(problem, config, target)
        strips = waves * -(-self.reduction_blocks(problem, config) // config.splits)
        return Work(
            **{name: strips * value for name, value in strip_work(problem, config).items()},
            memory_bytes=bytes_touched(problem),
            waves=waves,
            stored_bytes=waves * config.consumers * BLOCK_CHANNELS * config.taps_h * config.tile_n * 4,
            **self.reduction_work(problem, config),
        )

    def macros(self, problem: ConvWgradProblem, config: Config) -> dict[str, int]:
        """Macros, specialised to the window's geometry and the tile, not to sizes or splits."""
        v = view(problem)
        return {
            **super().macros(problem, config),
            **field_macros(config, "taps_h", "taps_w", "blocks", "tile_n", "tile_q", "consumers"),
            **axis_macros(STRIDE=v.stride, DILATION=v.dilation),
            **share_macros(1, config.consumers),
            "COLUMNS": columns(v, config),
            "REACH": reach(v, config),
            "PITCH_BYTES": _pitch_bytes(v, config),
            "X_BYTES": _line_bytes(v, config),
            "DY_BYTES": _row_bytes(config),
            "X_STAGES": config.stages,
            "RAW_STAGES": RAW_STAGES,
            "DY_STAGES": dy_stages(v, config),
            "TILE_IMAGES": config.images,
            "RAGGED": int(v.out[1] % config.tile_q > 0),
        }

    def maps(self, problem: ConvWgradProblem, config: Config) -> tuple[plan.TiledMap, ...]:
        p, v = problem, view(problem)
        x_dims, x_box = (p.in_channels, v.size[1], v.size[0], v.batch), (BOX_CHANNELS, columns(v, config), 1, 1)
        x_map = plan.TiledMap(0, p.dtype, x_dims, tuple(4 * elements for elements in v.lhs_strides), x_box)
        dy_box = (BOX_CHANNELS, config.tile_q, 1, config.images)
        return x_map, box_map(p, 1, (v.batch, *v.out, p.out_channels), dy_box)

    def _args(self, problem: ConvWgradProblem, config: Config) -> Struct:
        p, v, count = problem, view(problem), self.reduction_blocks(problem, config)
        _, groups_w, slots, k_blocks = self.tile_counts(p, config)
        _, tiles_p, tiles_q = self.block_counts(p, config)
        return Struct(
            "Args",
            {
                "channels": p.in_channels,
                "out_channels": p.out_channels,
                "filter": v.kernel,
                "groups_w": groups_w,  # blocks of taps along S
                "slots": slots,  # blocks of input channels
                "k_blocks": k_blocks,
                "out": v.out,
                "tile_p": config.tile_p,
                "tiles_p": tiles_p,
                "tiles_q": tiles_q,
                "pad": v.pad,
                "units": count,  # strips of all images
                "units_per_split": -(-count // config.splits),
                "partial_stride": whole_fours(self.partial_size(p, config)),
            },
        )

    def main(self, problem: ConvWgradProblem, config: Config) -> plan.Launch:
        params = plan.MapParam(0), plan.MapParam(1), self._args(problem, config)
        return self.launch(problem, config, 128 * (config.consumers + 1), shared_bytes(view(problem), config), *params)


FAMILY = Tf32(Config)
