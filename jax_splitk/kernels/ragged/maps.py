"""Tensor maps whose bounds are those of one group of rows, wherever the group begins and ends.

Outside of a tensor TMA loads zeros and stores nothing. Only the device knows a group's bounds, and it cannot change a
map cheaply. So the map has more dimensions than the matrix, and its coordinates say where the group ends. Row i of a
group of `size` rows that begins at row `start` has the coordinates

    (column, 2**30 - size + i, start + size, 2**30)

of the dimensions (columns, 2**30, 2**31, 2**31). The byte strides of the last three are (row, row, 2**34 - row), where
`row` is the bytes of a row. The address is then that of row start + i, plus 2**64, which wraps to 0. If i >= size, the
second coordinate is out of bounds.

Source of the method: the `ragged_tma` of Triton's kernels.
"""

from jax import numpy as jnp

from jax_splitk.runtime.plan import SWIZZLE_128B, TiledMap

ROW_BYTES = 128  # of a box: the swizzle
_ROWS = 2**30


def group_map(buffer: int, dtype: str, columns: int, rows: int) -> TiledMap:
    """The map of a matrix with `columns` columns, in boxes of `rows` rows of 128 bytes. A row of the matrix is a
    multiple of 16 bytes."""
    item = jnp.dtype(dtype).itemsize
    row = columns * item
    dims, strides = (columns, _ROWS, 2 * _ROWS, 2 * _ROWS), (row, row, 2**34 - row)
    return TiledMap(buffer, dtype, dims, strides, (ROW_BYTES // item, rows, 1, 1), SWIZZLE_128B)
