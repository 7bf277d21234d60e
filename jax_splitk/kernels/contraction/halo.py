"""Kernel family: weight gradients of unit-stride 2D convolutions that load each input row once for all filter taps
(device code: contraction/halo.cu).

An implicit GEMM reads its input from the L2 once per filter tap, which bounds it with few channels. It also loses time
if tiles do not fit the filter. A tile here has 64 output channels by 9 taps of 64 input channels.
"""

import dataclasses
import math

from jax_splitk.kernels.base import refusals
from jax_splitk.kernels.base.family import box_map, field_macros, varied
from jax_splitk.kernels.base.geometry import equal_parts
from jax_splitk.kernels.base.refusals import INT32_MAX
from jax_splitk.kernels.base.split import SplitFamily
from jax_splitk.kernels.base.work import Work
from jax_splitk.kernels.device import split_k
from jax_splitk.kernels.device.structs import Divisor, Struct
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime import plan
from jax_splitk.runtime.target import Target

CHANNELS = 64  # of a block, on both sides
PIXEL_BYTES = CHANNELS * 2
SHARED_BYTES = 226 * 1024  # dynamic; the barriers have a KiB of their own
RESERVED_BYTES = 1024  # alignment
MAX_LINES = 64
MAX_PITCH = 256  # TMA's box
MIN_TILE_Q = 32  # narrower strips have more halo, and more barriers a product
MAX_TAPS = (3, 3)
MAX_FLOAT32_PIXELS = 128 * 64  # that are summed one after the other, of a float32 result


@dataclasses.dataclass(frozen=True)
class Config:
    """How a weight gradient is computed.

    Attributes:
      tile_p, tile_q: output rows and columns of a strip (a unit of work). tile_q divides the output's width.
      splits: parts of the reduction of a tile, in whole strips, none of them empty.
    """

    tile_p: int
    tile_q: int
    splits: int


def taps(problem: ConvWgradProblem) -> tuple[int, int]:
    """Filter rows and columns of a thread block's tile, which has 64 output and 64 input channels: the fewest equal
    parts of the filter."""
    height, width = (equal_parts(n, most)[0] for n, most in zip(problem.kernel_spatial, MAX_TAPS, strict=True))
    return height, width


def tile_bytes(problem: ConvWgradProblem) -> int:
    """Bytes of a tile's fp32 partial sums."""
    return math.prod(taps(problem)) * CHANNELS * CHANNELS * 4


def lines(problem: ConvWgradProblem, config: Config) -> int:
    """Input rows of a strip."""
    return config.tile_p + (taps(problem)[0] - 1) * problem.rhs_dilation[0]


def pitch(problem: ConvWgradProblem, config: Config) -> int:
    """Pixels of an input row of a strip."""
    return config.tile_q + (taps(problem)[1] - 1) * problem.rhs_dilation[1]


def buffer_bytes(problem: ConvWgradProblem, config: Config) -> int:
    """Bytes of a strip of both inputs in shared memory."""
    x = -(-lines(problem, config) * pitch(problem, config) // 8) * 8
    return (x + config.tile_p * config.tile_q) * PIXEL_BYTES


def buffers(problem: ConvWgradProblem, config: Config) -> int:
    """Strips that fit in shared memory at a time; 0 if none does."""
    fitting = (SHARED_BYTES - RESERVED_BYTES) // buffer_bytes(problem, config)
    return min(fitting, MAX_LINES // lines(problem, config))


def shared_bytes(problem: ConvWgradProblem, config: Config) -> int:
    return max(1, buffers(problem, config)) * buffer_bytes(problem, config) + RESERVED_BYTES


def batch_rows(problem: ConvWgradProblem, config: Config) -> int:
    """Output rows whose products are issued together: at least four for each warpgroup, if the rows divide so."""
    row = 2 if pairs(config) else 1
    rows = row * max(1, 4 * 16 // (config.tile_q * row))
    while rows > row and (problem.output_spatial[0] % rows or config.tile_p % rows):
        rows -= row
    return rows


def pairs(config: Config) -> bool:
    """Whether a block of 16 pixels has 8 pixels from each of two rows."""
    return config.tile_q % 16 != 0


def _smallest_strip(problem: ConvWgradProblem) -> tuple[int, int]:
    """The rows and columns of the smallest strip."""
    return (1, 16) if problem.output_spatial[0] % 2 else (2, 8)


def _window_refusal(p: ConvWgradProblem) -> str | None:
    if any(s != 1 for s in p.window_strides):
        return f"window_strides {p.window_strides}; accepted: 1"
    if p.kernel_spatial[1] < 2:
        return f"a filter {p.kernel_spatial[1]} wide; accepted: at least 2"
    return None


def _extent_refusal(p: ConvWgradProblem) -> str | None:
    height, width = p.output_spatial
    if width % 8 or (width % 16 and height % 2):
        return f"output of {height}x{width}; accepted: a width of whole 16 pixels, or of whole 8 with an even height"
    sizes = (p.reduction_size, math.prod(p.out_shape), *p.lhs_shape)
    if max(sizes) > INT32_MAX - 1024:
        return f"{max(sizes)} pixels, weights or rows; accepted: at most {INT32_MAX - 1024}"
    return refusals.padded_input(p, MAX_LINES)


class Halo(SplitFamily[ConvWgradProblem, Config]):
    """Its estimates are comparable with those of other families, so they decide."""

    name = "wgrad_halo"
    ABI = 1
    file = "contraction/halo.cu"
    roles = ("", "", "_reduce")

    def problem_refusal(self, problem: ConvWgradProblem) -> str | None:
        return (
            refusals.operands(problem, (2,), refusals.groups)
            or _window_refusal(problem)
            or refusals.empty_dimensions(problem)
            or _extent_refusal(problem)
            or self.smallest_refusal(problem, Config(*_smallest_strip(problem), splits=1))
        )

    def config_refusal(self, problem: ConvWgradProblem, config: Config) -> str | None:
        height, width = problem.output_spatial
        if config.tile_q < 8 or config.tile_q % 8 or width % config.tile_q:
            return f"tile_q {config.tile_q}; accepted: divisors of {width} in multiples of 8"
        if config.tile_p < 1 or (pairs(config) and (config.tile_p % 2 or height % 2)):
            return f"tile_p {config.tile_p} of {height} rows; accepted with tile_q {config.tile_q}: even numbers"
        if pitch(problem, config) > MAX_PITCH:
            return f"rows of {pitch(problem, config)} pixels; accepted: at most {MAX_PITCH}"
        if lines(problem, config) > MAX_LINES:
            return f"{lines(problem, config)} rows; accepted: at most {MAX_LINES}"
        if (needed := shared_bytes(problem, config)) > SHARED_BYTES:
            return f"{needed} bytes of shared memory; accepted: at most {SHARED_BYTES}"
        if (count := self.thread_blocks(problem, config)) > split_k.MAX_GRID_Y:
            return f"{count} tiles; accepted: at most {split_k.MAX_GRID_Y}"
        return split_k.splits_refusal(config.splits, self.reduction_blocks(problem, config), "strips")

    def tile_counts(self, problem: ConvWgradProblem, config: Config) -> tuple[int, int, int, int]:
        """Numbers of blocks along filter rows and columns, input channels and output channels."""
        (r, s), (taps_h, taps_w) = problem.kernel_spatial, taps(problem)
        slots, k_blocks = (-(-channels // CHANNELS) for channels in problem.group_channels)
        return -(-r // taps_h), -(-s // taps_w), slots, k_blocks

    def block_counts(self, problem: ConvWgradProblem, config: Config) -> tuple[int, int, int]:
        """Numbers of images, strips of rows, and strips of columns."""
        p, q = problem.output_spatial
        return problem.batch, -(-p // config.tile_p), q // config.tile_q

    def longest_chain(self, problem: ConvWgradProblem, config: Config) -> int:
        return MAX_FLOAT32_PIXELS // (config.tile_p * config.tile_q)

    def variants(self, problem: ConvWgradProblem, target: Target) -> list[Config]:
        """The largest strips that fit: for each width, heights that cut the output into equal parts."""
        width, found = problem.output_spatial[1], list[Config]()
        for tile_q in (width // n for n in range(1, width // 8 + 1) if width % n == 0):
            if tile_q < MIN_TILE_Q and found:
                break
            row = Config(1, tile_q, 1)
            heights = equal_parts(problem.output_spatial[0], MAX_LINES)
            strips = varied(row, tile_p=dict.fromkeys(h + h % 2 if pairs(row) else h for h in heights))
            found += [strip for strip in strips if self.config_refusal(problem, strip) is None][:3]
        return found

    def neighbours(self, problem: ConvWgradProblem, config: Config, target: Target) -> list[Config]:
        """Other strips with as many splits, and more and fewer splits."""
        wanted = (config.splits - 1, config.splits + 1, config.splits * 2, config.splits // 2)
        strips = [dataclasses.replace(strip, splits=config.splits) for strip in self.variants(problem, target)]
        found = [c for c in strips if c.splits >= self.least_splits(problem, c) and c != config]
        return found + self.other_splits(problem, config, wanted)

    def work(self, problem: ConvWgradProblem, config: Config, target: Target) -> Work:
        blocks = self.thread_blocks(problem, config) * config.splits
        units = -(-blocks // target.cores) * -(-self.reduction_blocks(problem, config) // config.splits)
        height, (taps_h, taps_w) = problem.output_spatial[0], taps(problem)
        rows = height / -(-height // config.tile_p)  # of a strip, on average
        products = rows * config.tile_q // 16 * taps_h  # of 64 rows of sums
        columns = CHANNELS * taps_w
        load = (lines(problem, config) * pitch(problem, config) + config.tile_p * config.tile_q) * PIXEL_BYTES
        return Work(
            tensor_clocks=units * products * columns / 2,
            shared_bytes=units * (products * (64 + columns) * 32 + load),
            l2_bytes=units * load,
            turns=units * (1 + rows / batch_rows(problem, config)),
            memory_bytes=problem.bytes_moved,
            waves=-(-blocks // target.cores),
            **self.reduction_work(problem, config),
        )

    def partial_size(self, problem: ConvWgradProblem, config: Config) -> int:
        """Elements of a split's partial sums, including the parts of tiles beyond the result."""
        return self.thread_blocks(problem, config) * tile_bytes(problem) // 4

    def macros(self, problem: ConvWgradProblem, config: Config) -> dict[str, int]:
        """Macros, specialised to taps and the strip's geometry."""
        taps_h, taps_w = taps(problem)
        return {
            **super().macros(problem, config),
            **{"TAPS_H": taps_h, "TAPS_W": taps_w, "TILE_N": CHANNELS * taps_w},
            **field_macros(config, "tile_q"),
            "BATCH_ROWS": batch_rows(problem, config),
        }

    def maps(self, problem: ConvWgradProblem, config: Config) -> tuple[plan.TiledMap, ...]:
        p, width = problem, pitch(problem, config)
        x_map = box_map(p, 0, p.lhs_shape, (CHANNELS, width, 1, 1))
        return x_map, box_map(p, 1, p.g_shape, (CHANNELS, config.tile_q, 1, 1))

    def _args(self, problem: ConvWgradProblem, config: Config) -> Struct:
        p, units = problem, self.reduction_blocks(problem, config)
        _, groups_w, slots, k_blocks = self.tile_counts(p, config)
        batch, _, tiles_q = self.block_counts(p, config)
        return Struct(
            "Args",
            {
                "channels": p.in_channels,
                "out_channels": p.out_channels,
                "filter": p.kernel_spatial,
                "groups_w": Divisor.of(groups_w),  # blocks of taps along S
                "slots": Divisor.of(slots),  # blocks of input channels
                "k_blocks": Divisor.of(k_blocks),
                "out_h": p.output_spatial[0],
                "tile_p": config.tile_p,
                "in_image": Divisor.of(units // batch),  # strips
                "tiles_q": Divisor.of(tiles_q),
                "pitch": pitch(p, config),  # pixels of an X line
                "pad": (p.padding[0][0], p.padding[1][0]),
                "dilation": p.rhs_dilation,
                "units_per_tile": units,
                "units_per_split": -(-units // config.splits),
                "buffers": buffers(p, config),
                "splits": config.splits,
                "lanes": self._lanes(p, config),
            },
        )

    def _lanes(self, problem: ConvWgradProblem, config: Config) -> int:
        """Threads of a block of the reduction that share an element's splits."""
        return split_k.reduce_lanes(self.partial_size(problem, config) // 4, config.splits)

    def main(self, problem: ConvWgradProblem, config: Config) -> plan.Launch:
        """The main kernel. Its parameters always include both the result and the partial sums."""
        params = plan.MapParam(0), plan.MapParam(1), self._args(problem, config)
        threads = 128 * (taps(problem)[0] + 1)
        main = self.launch(problem, config, threads, shared_bytes(problem, config), *params)
        return dataclasses.replace(main, params=(*params, plan.Pointer(2), plan.Pointer(3)))

    def reduction(self, problem: ConvWgradProblem, config: Config) -> plan.Launch:
        pieces = tile_bytes(problem) // 16 * self._lanes(problem, config) // split_k.REDUCE_THREADS
        grid = (pieces, self.thread_blocks(problem, config), 1)
        return self.adding(problem, config, grid, self._args(problem, config))


FAMILY = Halo(Config)
