"""Convolutions of every geometry that lax has, through lax and through jax_splitk."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

import jax_splitk
from tests.problems import on_device

NHWC = ("NHWC", "HWIO", "NHWC")


@dataclasses.dataclass(frozen=True)
class Conv:
    """A convolution: sizes by dimension letter, and lax's keyword arguments."""

    spatial: tuple[int, ...] = (9, 8)
    kernel: tuple[int, ...] = (3, 2)
    batch: int = 4
    channels: tuple[int, int] = (6, 10)
    dimension_numbers: Any = NHWC
    strides: tuple[int, ...] | None = None
    padding: Any = "SAME"
    lhs_dilation: tuple[int, ...] | None = None
    rhs_dilation: tuple[int, ...] | None = None
    groups: int = 1
    batch_groups: int = 1

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "window_strides": self.strides or (1,) * len(self.spatial),
            "padding": self.padding,
            "lhs_dilation": self.lhs_dilation,
            "rhs_dilation": self.rhs_dilation,
            "dimension_numbers": self.dimension_numbers,
            "feature_group_count": self.groups,
            "batch_group_count": self.batch_groups,
        }

    @property
    def lhs_shape(self) -> tuple[int, ...]:
        return self._arranged(0, self.batch, self.channels[0], self.spatial)

    @property
    def rhs_shape(self) -> tuple[int, ...]:
        return self._arranged(1, self.channels[1], self.channels[0] // self.groups, self.kernel)

    @functools.cached_property
    def g_shape(self) -> tuple[int, ...]:
        shapes = (jax.ShapeDtypeStruct(shape, np.float32) for shape in (self.lhs_shape, self.rhs_shape))
        return jax.eval_shape(self.lax, *shapes).shape

    def _arranged(self, which: int, first: int, second: int, spatial: tuple[int, ...]) -> tuple[int, ...]:
        if self.dimension_numbers is None:
            return (first, second, *spatial)
        letters = self.dimension_numbers[which]
        names = "OI" if which == 1 else "NC"
        order = [letter for letter in self.dimension_numbers[0] if letter not in "NC"]
        sizes = {names[0]: first, names[1]: second, **dict(zip(order, spatial, strict=True))}
        return tuple(sizes[letter] for letter in letters)

    def lax(self, lhs: jax.Array, rhs: jax.Array, **more: Any) -> jax.Array:
        return lax.conv_general_dilated(lhs, rhs, **self.arguments, **more)

    def ours(self, lhs: jax.Array, rhs: jax.Array, **more: Any) -> jax.Array:
        return jax_splitk.conv_general_dilated(lhs, rhs, **self.arguments, **more)

    def wgrad(self, lhs: jax.Array, g: jax.Array, **more: Any) -> jax.Array:
        return jax_splitk.conv_wgrad(lhs, g, self.rhs_shape, **self.arguments, **more)

    def lax_wgrad(self, lhs: jax.Array, g: jax.Array) -> jax.Array:
        transpose = jax.linear_transpose(
            lambda rhs: self.lax(lhs, rhs), jax.ShapeDtypeStruct(self.rhs_shape, lhs.dtype)
        )
        return transpose(g)[0]

    def integers(self, rng: np.random.Generator, dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array, jax.Array]:
        """lhs, rhs and g, small enough that every sum is exact."""
        shapes = (self.lhs_shape, self.rhs_shape, self.g_shape)
        lhs, rhs, g = (on_device(rng.integers(-2, 3, shape), dtype) for shape in shapes)
        return lhs, rhs, g

    def normals(self, rng: np.random.Generator, dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array, jax.Array]:
        shapes = (self.lhs_shape, self.rhs_shape, self.g_shape)
        lhs, rhs, g = (on_device(rng.standard_normal(shape), dtype) for shape in shapes)
        return lhs, rhs, g


PLAIN = Conv()
GEOMETRIES = {
    "plain": PLAIN,
    "default_numbers": Conv(dimension_numbers=None),
    "nchw_hwio_nhwc": Conv(dimension_numbers=("NCHW", "HWIO", "NHWC")),
    "nhwc_oihw_nchw": Conv(dimension_numbers=("NHWC", "OIHW", "NCHW")),
    "chwn_ihwo": Conv(dimension_numbers=("CHWN", "IHWO", "HWNC"), strides=(2, 1)),
    "swapped_spatial": Conv(dimension_numbers=("NHWC", "WHIO", "NWHC"), strides=(2, 1)),
    "one_dimension": Conv((17,), (5,), dimension_numbers=("NWC", "WIO", "NWC"), strides=(2,)),
    "one_dimension_default": Conv((17,), (4,), dimension_numbers=None, rhs_dilation=(3,)),
    "three_dimensions": Conv((5, 6, 4), (2, 3, 3), 2, dimension_numbers=("NDHWC", "DHWIO", "NDHWC"), strides=(1, 2, 1)),
    "strides": Conv(strides=(2, 3)),
    "valid": Conv(padding="VALID"),
    "same_lower": Conv(padding="SAME_LOWER", strides=(2, 2)),
    "explicit_padding": Conv(padding=((0, 3), (2, -1))),
    "list_padding": Conv(padding=[[1, 1], [0, 2]]),
    "rhs_dilation": Conv(rhs_dilation=(2, 3)),
    "lhs_dilation": Conv(lhs_dilation=(2, 3), padding=((1, 2), (0, 1)), strides=(2, 1)),
    "unread_input": Conv((10, 11), (2, 2), strides=(3, 4), padding="VALID"),
    "kernel_beyond_image": Conv((3, 3), (5, 5), padding=((2, 2), (3, 1))),
    "groups": Conv(channels=(6, 12), groups=3),
    "depthwise": Conv(channels=(6, 6), groups=6, padding="SAME", strides=(2, 2)),
    "depthwise_multiplied": Conv(channels=(5, 15), groups=5, dimension_numbers=None),
    "batch_groups": Conv(channels=(6, 8), batch_groups=2),
    "batch_groups_default": Conv(channels=(3, 8), batch_groups=4, dimension_numbers=None, strides=(2, 2)),
    "one_tap": Conv(kernel=(1, 1)),
    "one_pixel": Conv((3, 2), (3, 2), padding="VALID"),
    "empty_batch": Conv(batch=0),
    "empty_image": Conv((0, 8), padding=((2, 2), (1, 1)), lhs_dilation=(2, 1)),
}
EMPTY_OUTPUT = Conv((2, 2), (3, 3), padding="VALID")
