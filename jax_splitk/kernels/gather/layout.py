"""The data of wgrad_gather: the problem in three dimensions, and the layout in shared memory of a stage's part of X,
for a tile (images, rows, columns) of output pixels (device code: gather/wgrad.cu)."""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

from jax import numpy as jnp

from jax_splitk.kernels.base.geometry import Geometry, geometry, is_matrix_product
from jax_splitk.problems.conv_wgrad import ConvWgradProblem

SLICES = (128, 64, 32, 16, 8)  # about as many channels of X in a stage
BANKS = 32
_SHARED_PER_SM = 228 * 1024
_BESIDE_BYTES = 1024 + 256  # of each thread block: CUDA's own, and at most so many for barriers
SHARED_BYTES = _SHARED_PER_SM - _BESIDE_BYTES  # dynamic

Tile = tuple[int, int, int]


def fits_twice(shared_bytes: int) -> bool:
    """Whether an SM has the shared memory of two thread blocks."""
    return 2 * (shared_bytes + _BESIDE_BYTES) <= _SHARED_PER_SM


@dataclasses.dataclass(frozen=True)
class GatherTile:
    """Common fields of configs for kernels that gather windows.

    Attributes:
      consumers, blocks: consumer warpgroups, and the 64-row blocks of each.
      tile_n: output channels of a thread block.
      images, tile_p, tile_q: a tile of output pixels, [images, tile_p rows, tile_q columns].
    """

    consumers: int
    blocks: int
    tile_n: int
    images: int
    tile_p: int
    tile_q: int

    @property
    def tile(self) -> Tile:
        return self.images, self.tile_p, self.tile_q

    @property
    def pixels(self) -> int:
        return self.images * self.tile_p * self.tile_q

    @property
    def tile_m(self) -> int:
        return 64 * self.consumers * self.blocks

    def block_counts(self, v: "Volume") -> tuple[int, int, int, int]:
        """Numbers of tiles of pixels along groups of images, planes, rows and columns."""
        return -(-v.batch // self.images), v.out[0], -(-v.out[1] // self.tile_p), -(-v.out[2] // self.tile_q)


@dataclasses.dataclass(frozen=True)
class Volume(Geometry):
    """A problem with three spatial dimensions."""

    channels: int  # of a group, as are the output channels
    out_channels: int
    groups: int
    item: int  # bytes of an element
    parts: int  # bf16 numbers that hold one of the inputs'

    def __hash__(self) -> int:
        """The hash is stored: a ranking asks for one problem's layouts thousands of times."""
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(dataclasses.astuple(self))

    @property
    def copies(self) -> int:
        """bf16 parts of an operand in shared memory, and a copy of the first part in which values that are not finite
        are zeros."""
        return 1 if self.parts == 1 else self.parts + 1

    @property
    def products(self) -> int:
        return {1: 1, 2: 3, 3: 6}[self.parts]

    def column_tiles(self, widths: Sequence[int]) -> list[int]:
        """Widths of tiles: the smallest of `widths` that holds all output channels, and common widths below their
        number."""
        whole = [n for n in widths if n >= self.out_channels][:1]
        return sorted({*whole, *(n for n in (64, 128, 192, 256) if n < self.out_channels)})


@functools.lru_cache(maxsize=4096)
def volume(p: ConvWgradProblem) -> Volume:
    g = geometry(p, 3)
    if is_matrix_product(p):
        pixels = (1, 1, p.reduction_size)
        g = dataclasses.replace(g, batch=1, size=pixels, out=pixels)
    item = jnp.dtype(p.dtype).itemsize
    parts = 1 if p.dtype != "float32" else 3 if "highest" in p.precision else 2
    channels, out_channels = p.group_channels
    groups = p.feature_group_count
    return Volume(**vars(g), channels=channels, out_channels=out_channels, groups=groups, item=item, parts=parts)


@dataclasses.dataclass(frozen=True)
class Layout:
    """X's layout in a stage. The fields are macros of the device code (see there); lengths are in elements."""

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
    segment: int
    segment_rows: int  # of the product, with those that fill a segment up, `parity` of them in front
    segments: int
    parity: int

    @property
    def is_copied(self) -> bool:
        """Whether asynchronous copies load X: none is shorter than 4 bytes."""
        return self.granule >= 4

    def stage_bytes(self, v: Volume, images: int) -> int:
        return -(-images * v.kernel[0] * self.rows * self.row_pitch * v.item // 1024) * 1024

    @property
    def gemm_rows(self) -> int:
        """Rows of the product for a slice of channels."""
        return self.segments * self.segment_rows


def lattice(tile: int, stride: int, kernel: int, dilation: int) -> tuple[int, int]:
    """(step, count) of the input positions that a tile's windows touch, or of the finest even grid through them."""
    step = math.gcd(stride if tile > 1 else 0, dilation if kernel > 1 else 0) or 1
    return step, ((tile - 1) * stride + (kernel - 1) * dilation) // step + 1


def conflicts(layout: Layout, v: Volume, tile: Tile, in_rows: bool) -> int:
    """Turns of shared memory for one load of A's elements by a warp (at best 1 for each 128 bytes). `in_rows`: pixels
    are rows of A; four lanes load neighbouring elements of a pixel."""
    image = v.kernel[0] * layout.rows * layout.row_pitch
    places = []
    for k in range(8):
        rest, q = divmod(k, tile[2])
        n, p = divmod(rest, tile[1])
        places.append(q * layout.pixel_col + p * layout.pixel_row + n * image)
    return _turns(tuple(places), layout.lead // 2 * 2, v.item, v.item * (2 if layout.paired else 1), in_rows)


@functools.lru_cache(maxsize=65536)
def _turns(places: tuple[int, ...], first: int, item: int, width: int, in_rows: bool) -> int:
    """The `conflicts` of eight pixels at these places, in elements, of which `width` bytes are loaded at a time. Most
    tiles have eight neighbouring pixels."""
    if in_rows:
        together = 4 if width == 8 else 8  # pixels that are served at once
        served = [(places[i : i + together], range(4)) for i in range(0, 8, together)]
    else:
        lanes = 8 if width < 8 else 4  # quarters of the lanes that are served at once
        served = [(places[::2], range(eight, eight + lanes)) for eight in range(0, 8, lanes)]
    turns = 0
    for some, pairs in served:
        addresses = {(first + 2 * pair + place) * item for pair in pairs for place in some}
        words = {byte // 4 for address in addresses for byte in range(address, address + width, 4)}
        turns += max(collections.Counter(word % BANKS for word in words).values())
    return turns


# How much longer shared memory takes where registers and tensor cores both read it: fitted to 3,500 times.
CONTENTION = 1.5


def waits(elements: float) -> float:
    """Loads in sequence of a producer's thread, for elements that no asynchronous copy loads."""
    return elements / 128 / 4


def _granule_items(v: Volume, *counts: int) -> int:
    """Elements of the longest copy that divides all these lengths."""
    sizes = (16 // v.item, 8 // v.item, 4 // v.item, 1)
    return next(n for n in sizes if all(count % n == 0 for count in counts))


def layout_of(v: Volume, tile: Tile, channels: int, in_rows: bool = False) -> Layout:
    """X's stage for a slice of `channels` channels. Pitches are chosen for few bank conflicts: see `conflicts`."""
    return _chosen(v, tile, channels, in_rows)[1]


def turns_of(v: Volume, tile: Tile, channels: int) -> int:
    """The `conflicts` of `layout_of`."""
    return _chosen(v, tile, channels, in_rows=False)[0]


@functools.lru_cache(maxsize=65536)
def _chosen(v: Volume, tile: Tile, channels: int, in_rows: bool) -> tuple[int, Layout]:
    _, tile_p, tile_q = tile
    (_, stride_h, stride_w), (_, kernel_h, kernel_w) = v.stride, v.kernel
    _, dilation_h, dilation_w = v.dilation
    grid_h, rows = lattice(tile_p, stride_h, kernel_h, dilation_h)
    grid_w, columns = lattice(tile_q, stride_w, kernel_w, dilation_w)
    few = v.groups == 1 and channels == v.channels and (channels < 16 or channels * v.item % 4 != 0)
    dense = few and grid_w == 1 and v.lhs_dilation[2] == 1
    runs = dense and (dilation_w == 1 or kernel_w == 1)
    # Copies of whole rows begin at the first pixel of each tile and at an image's edges.
    step = tile_q * stride_w * v.channels if v.out[2] > tile_q else 0
    items = _granule_items(v, *((v.size[2] * v.channels, step) if dense else (v.channels, channels)))
    lead = -v.pad[2] * channels % items if dense else 0
    segment, segments = channels * (kernel_w if runs else 1), v.kernel[0] * kernel_h * (1 if runs else kernel_w)
    even = math.lcm(items, 2)  # of pitches
    tried: list[tuple[int, Layout]] = []
    for extra, row_extra in itertools.product(range(1 if dense else 9), range(1 if tile_q >= 8 else 9)):
        pitch = channels if dense else -(-channels // even) * even + extra * even
        width = -(-(lead + columns * pitch) // even) * even
        row_pitch = width + row_extra * even
        paired = (tile_q == 1 or pitch * (stride_w // grid_w) % 2 == 0) and (
            runs or kernel_w == 1 or pitch * (dilation_w // grid_w) % 2 == 0
        )
        parity = lead % 2 if paired else 0
        found = Layout(
            *(rows, columns, pitch, row_pitch, lead),
            *(v.dilation[0], grid_h, grid_w),
            *(dense, runs, paired),
            pixel_col=stride_w // grid_w * pitch if tile_q > 1 else 0,
            pixel_row=stride_h // grid_h * row_pitch if tile_p > 1 else 0,
            tap_col=dilation_w // grid_w * pitch if kernel_w > 1 else 0,
            tap_row=dilation_h // grid_h * row_pitch if kernel_h > 1 else 0,
            granule=items * v.item,
            segment=segment,
            segment_rows=-(-(parity + segment) // 2) * 2 if paired else segment,
            segments=segments,
            parity=parity,
        )
        tried.append((conflicts(found, v, tile, in_rows), found))
        if tried[-1][0] <= (2 if v.item == 4 else 1):  # the fewest there may be
            break
    return min(tried, key=lambda turns: (turns[0], turns[1].row_pitch))


@functools.lru_cache(maxsize=4096)
def slices(v: Volume) -> tuple[int, ...]:
    """Possible slices of channels, largest first: all channels if they are few, else equal parts."""
    found = {v.channels} if v.channels <= SLICES[0] else set()
    for most in SLICES:
        equal = -(-v.channels // -(-v.channels // most))
        items = _granule_items(v, v.channels)
        found.add(min(v.channels, -(-equal // items) * items))
    return tuple(sorted(found, reverse=True))
