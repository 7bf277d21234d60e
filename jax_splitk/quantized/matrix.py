"""A weight of any rank as the matrix [k, features] of a product: k runs over the axes that the product contracts, and
features over all others, each in row-major order. A group of k that shares a scale is a run of that order."""

import math
from collections.abc import Sequence
from typing import Any

from jax_splitk.runtime.arguments import integer, require


def contracted_axes(axis: int | Sequence[int] | None, rank: int, name: str, stack: int = 0) -> tuple[int, ...]:
    """The axes that a product contracts, ascending, from the user's argument `axis`.

    None stands for the first axis after the stack of an array that has at most two others. An array of more dimensions
    needs the argument: [K, H, D] contracts axis 0 in one product, and axes 0 and 1 of [H, D, K] in another.
    """
    require(rank > stack, f"{name} of rank {rank}", f"a rank of at least {stack + 1}")
    if axis is None:
        given = f"axis=None with {name} of rank {rank}"
        require(rank - stack <= 2, given, "the axis or axes that a product contracts, such as 0 or (0, 1)")
        return (stack,)
    axes = [integer(one) for one in (axis if isinstance(axis, tuple | list) else (axis,))]
    valid = [one is not None and -rank <= one < rank and one % rank >= stack for one in axes]
    found = sorted({one % rank for one in axes if one is not None})
    accepted = f"{stack - rank} to -1 or {stack} to {rank - 1}, one or several" if rank > stack else "none"
    require(
        bool(axes) and all(valid) and len(found) == len(axes), f"axis={axis!r} of an array of rank {rank}", accepted
    )
    return tuple(found)


def group_tile(sizes: Sequence[int], group_size: int) -> tuple[int, ...] | None:
    """How far a group reaches along each contracted axis, of these sizes; None if a group is not a rectangle."""
    tile, rest = [1] * len(sizes), group_size
    for i in reversed(range(len(sizes))):
        tile[i] = min(rest, sizes[i])
        if tile[i] == 0 or sizes[i] % tile[i] or rest % tile[i]:
            return None
        rest //= tile[i]
        if tile[i] < sizes[i]:
            break
    return tuple(tile) if rest == 1 else None


def features_of(rank: int, contracted: Sequence[int]) -> tuple[int, ...]:
    """The axes that a product keeps."""
    return tuple(i for i in range(rank) if i not in contracted)


def matrix_shape(dims: Sequence[int], contracted: Sequence[int]) -> tuple[int, int]:
    """(k, features) of an array of shape `dims`."""
    sizes = (contracted, features_of(len(dims), contracted))
    k, features = (math.prod(dims[i] for i in axes) for axes in sizes)
    return k, features


def to_matrix(x: Any, contracted: Sequence[int]) -> Any:
    """The array as [k, features]."""
    order = (*contracted, *features_of(x.ndim, contracted))
    moved = x if order == tuple(range(x.ndim)) else x.transpose(order)
    return moved.reshape(matrix_shape(x.shape, contracted))


def from_matrix(x: Any, dims: Sequence[int], contracted: Sequence[int]) -> Any:
    """The array of shape `dims` that `to_matrix` makes [k, features] of."""
    order = (*contracted, *features_of(len(dims), contracted))
    moved = x.reshape([dims[i] for i in order])
    return (
        moved if order == tuple(range(len(dims))) else moved.transpose(sorted(range(len(order)), key=order.__getitem__))
    )
