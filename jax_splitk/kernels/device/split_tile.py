"""Output tiles whose reduction is split, and the addition of the splits: the host's side of `split_tile.cuh`.

A thread block computes one tile of one split. Splits take turns at the blocks of the reduction, which are 128 bytes of
a row. Either a second kernel adds their fp32 partial sums from the workspace (programmatic dependent launch), or a
thread-block cluster adds them through distributed shared memory, in one launch and without a workspace. Both use a
fixed order, so that the result is deterministic, bit for bit.

The methods are those of CUTLASS's split-k and parallel reduction ("Efficient GEMM in CUDA" in its documentation).
"""

import dataclasses
import math

from jax import numpy as jnp

from jax_splitk.kernels.device.wgmma_tile import BOX, MIN_STAGES, ROW_BYTES, WgmmaTile, rows_of
from jax_splitk.runtime import plan

MAX_CLUSTER = 8  # larger ones leave whole GPCs' multiprocessors empty
# Blocks of the reduction of a float32 result's split: the tensor cores truncate their sums.
MAX_FLOAT32_CHAIN = 512
MAX_ELEMENTS = 2**31 - 1 - 2**20  # of an array; 32-bit integers count them, and what tiles have beyond
MAX_GRID_YZ = 65535
SWIZZLES = {32: 1, 64: 2, 128: plan.SWIZZLE_128B}  # CUtensorMapSwizzle by a row's bytes
REDUCTIONS = {"none": 0, "workspace": 1, "cluster": 2}  # macro REDUCTION


@dataclasses.dataclass(frozen=True)
class SplitTile(WgmmaTile):
    """Common fields of configs for such kernels.

    Attributes:
      tile_m, tile_n, stages: see `WgmmaTile`.
      splits: parts of the reduction; none may be empty.
      reduction: where the splits are added: "none" (there is one), "workspace" or "cluster".
    """

    splits: int = 1
    reduction: str = "none"


def least_stages(tile_m: int, tile_n: int) -> int:
    """The fewest stages that can hold the fp32 sums of a tile, with rows that are padded by 8."""
    return max(MIN_STAGES, -(-tile_m * (tile_n + 8) * 4 // ((tile_m + tile_n) * ROW_BYTES)))


def is_whole(size: int) -> bool:
    """Whether an operand's contiguous m or n is split into dimensions of `BOX` elements, so that one load replaces one
    for each box."""
    return size % BOX == 0


def map_dtype(dtype: str) -> str:
    """The dtype of an operand's tensor map. Its loads round float32 to tf32, since the tensor cores would truncate."""
    return plan.TF32 if dtype == "float32" else dtype


def operand_map(
    buffer: int,
    dtype: str,
    shape: tuple[int, ...],
    order: str,
    tile: int,
    row_bytes: int = ROW_BYTES,
    whole: bool = True,
) -> plan.TiledMap:
    """A map with dimensions (contiguous, other, batch), wherever the batch lies in memory. `order` names them by b, k
    and another letter. A box has `tile` elements of the other letter's dimension, and `row_bytes` of k. `whole`: tiles
    begin at multiples of `BOX`."""
    item, dtype = jnp.dtype(dtype).itemsize, map_dtype(dtype)
    strides = {order[axis]: math.prod(shape[axis + 1 :]) * item for axis in range(3)}
    sizes = dict(zip(order, shape, strict=True))
    inner = order[-1]
    outer = next(name for name in order if name not in ("b", inner))
    block_k = row_bytes // item
    if inner == "k":
        dims, box = (sizes["k"], sizes[outer], sizes["b"]), (block_k, tile, 1)
        return plan.TiledMap(buffer, dtype, dims, (strides[outer], strides["b"]), box, SWIZZLES[row_bytes])
    if not (whole and is_whole(sizes[inner])):
        columns = min(rows_of(tile), BOX)
        dims, box = (sizes[inner], sizes["k"], sizes["b"]), (columns, block_k, 1)
        return plan.TiledMap(buffer, dtype, dims, (strides["k"], strides["b"]), box, SWIZZLES[columns * item])
    dims = (BOX, sizes["k"], sizes[inner] // BOX, sizes["b"])
    box = (BOX, block_k, tile // BOX, 1)
    return plan.TiledMap(buffer, dtype, dims, (strides["k"], BOX * item, strides["b"]), box)
