"""The parameters of the forward convolution to which a pass belongs, and their checks."""

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.extend import core
from jax.typing import DTypeLike

from jax_splitk.ops.call import MEMORY
from jax_splitk.problems.conv_reference import cropped, lax_conv, lax_precision, precision_name
from jax_splitk.problems.conv_wgrad import Pairs, conv_output_spatial, dilated
from jax_splitk.runtime import _compat
from jax_splitk.runtime.arguments import RefusedValue, integer

Padding = str | Sequence[tuple[int, int]]
_WORDS = ("SAME", "SAME_LOWER", "VALID")


@dataclasses.dataclass(frozen=True)
class Convolution:
    """The parameters of `lax.conv_general_dilated`, hashable. `padding` is one of lax's words, or pairs."""

    window_strides: tuple[int, ...]
    padding: str | Pairs
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    dimension_numbers: lax.ConvDimensionNumbers
    feature_group_count: int = 1
    batch_group_count: int = 1
    precision: str = "default"

    def __call__(
        self, lhs: jax.Array, rhs: jax.Array, out_dtype: DTypeLike | None = None, out_sharding: Any = None
    ) -> jax.Array:
        """lax's convolution, after `cropped` has sliced the input where it must."""
        if isinstance(self.padding, str):
            return self._by_lax(lhs, rhs, out_dtype, out_sharding)
        lhs, padding = cropped(lhs, self.dimension_numbers.lhs_spec[2:], self.padding, self.lhs_dilation)
        return dataclasses.replace(self, padding=tuple(padding))._by_lax(lhs, rhs, out_dtype, out_sharding)

    def _by_lax(
        self, lhs: jax.Array, rhs: jax.Array, out_dtype: DTypeLike | None = None, out_sharding: Any = None
    ) -> jax.Array:
        arguments = {**vars(self), "precision": lax_precision(self.precision)}
        return lax_conv(lhs, rhs, **arguments, preferred_element_type=out_dtype, out_sharding=out_sharding)

    def transposed(self, g: jax.Array, lhs: Any, rhs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """The cotangent of an input of the type `lhs`, by lax's transpose rule.

        Where the low padding is as long as a window, the windows of the first output pixels hold only padding. Their
        cotangents are sliced off: with them, lax's convolution of g would crop its low side (see `cropped`).
        """
        windows = dilated([rhs.shape[i] for i in self.dimension_numbers.rhs_spec[2:]], self.rhs_dilation)
        axes, padding = self.dimension_numbers.out_spec[2:], self.padding
        for i, (axis, window, stride) in enumerate(zip(axes, windows, self.window_strides, strict=True)):
            if not isinstance(padding, str) and (low := padding[i][0]) >= window:
                unseeing = (low - window) // stride + 1
                if _compat.is_known(g.shape[axis]) and g.shape[axis] <= unseeing:
                    return _compat.placed_like(_compat.vary_like(jnp.zeros(lhs.shape, g.dtype), g, rhs), lhs)
                g = lax.slice_in_dim(g, unseeing, None, axis=axis)
                padding = (*padding[:i], (low - unseeing * stride, padding[i][1]), *padding[i + 1 :])
        conv = dataclasses.replace(self, padding=padding)
        return jax.linear_transpose(lambda lhs: conv._by_lax(lhs, rhs, out_sharding=out_sharding), lhs)(g)[0]

    def out_type(self, lhs: Any, rhs: Any, out_dtype: DTypeLike, out_sharding: Any) -> Any:
        """The type of the result for operands of these types, which have one dtype."""
        specs = self.dimension_numbers
        spatial = ([x.shape[i] for i in spec[2:]] for x, spec in ((lhs, specs.lhs_spec), (rhs, specs.rhs_spec)))
        arguments = {**vars(self), "padding": _sides(self, *spatial), "preferred_element_type": jnp.dtype(out_dtype)}
        try:
            aval, _ = lax.conv_general_dilated_p.abstract_eval(lhs, rhs, **arguments, out_sharding=out_sharding)
        except (TypeError, ValueError) as error:
            if hint := layout_hint(self, lhs.shape, rhs.shape):
                raise type(error)(f"{str(error).rstrip('.')}{hint}") from None
            raise
        return aval


def of_equation(eqn: core.JaxprEqn) -> Convolution:
    """The parameters of an equation of lax."""
    given = {field.name: eqn.params[field.name] for field in dataclasses.fields(Convolution)}
    padding = tuple((low, high) for low, high in given["padding"])
    return Convolution(**{**given, "padding": padding, "precision": precision_name(given["precision"])})


def convolution(
    lhs_shape: tuple[Any, ...],
    rhs_shape: tuple[int, ...],
    window_strides: Sequence[int],
    padding: Padding,
    lhs_dilation: Sequence[int] | None,
    rhs_dilation: Sequence[int] | None,
    dimension_numbers: Any,
    feature_group_count: int,
    batch_group_count: int,
    precision: lax.PrecisionLike,
) -> Convolution:
    """Checks a caller's arguments, in lax's order; ValueError for one outside its range."""
    rank = len(lhs_shape) - 2
    strides = _strides(window_strides, rank)
    if isinstance(padding, str) and lhs_dilation is not None and any(d != 1 for d in lhs_dilation):
        raise RefusedValue(
            "String padding is not implemented for transposed convolution using this op: "
            f"padding={padding!r} with lhs_dilation={lhs_dilation!r}; accepted: explicit pairs"
        )
    feature_groups, batch_groups = _groups(feature_group_count, batch_group_count)
    return Convolution(
        window_strides=strides,
        padding=_padding(padding, rank),
        lhs_dilation=_dilation("lhs_dilation", lhs_dilation, rank),
        rhs_dilation=_dilation("rhs_dilation", rhs_dilation, rank),
        dimension_numbers=lax.conv_dimension_numbers(lhs_shape, rhs_shape, dimension_numbers),
        feature_group_count=feature_groups,
        batch_group_count=batch_groups,
        precision=precision_name(precision),
    )


@functools.lru_cache(maxsize=MEMORY)
def with_output(
    conv: Convolution, lhs_shape: tuple[Any, ...], rhs_shape: tuple[int, ...]
) -> tuple[Convolution, tuple[Any, ...]]:
    """The convolution with its padding as pairs, and the shape of its output; ValueError if it has none."""
    specs = conv.dimension_numbers
    batch, in_channels, *input_spatial = (lhs_shape[i] for i in specs.lhs_spec)
    out_channels, group_channels, *kernel_spatial = (rhs_shape[i] for i in specs.rhs_spec)
    if min(kernel_spatial, default=1) < 1:
        raise RefusedValue(f"rhs_shape={rhs_shape} with a kernel of {kernel_spatial}; accepted: sizes of at least 1")
    feature_groups = conv.feature_group_count
    if group_channels * feature_groups != in_channels:
        whole = in_channels % feature_groups == 0
        accepted = in_channels // feature_groups if whole else f"groups that divide the {in_channels}"
        raise RefusedValue(
            f"rhs_shape={rhs_shape} has {group_channels} input channels a group and lhs {lhs_shape} has {in_channels} "
            f"in feature_group_count={feature_groups} groups; accepted: {accepted}"
            f"{layout_hint(conv, lhs_shape, rhs_shape)}"
        )
    groups = feature_groups * conv.batch_group_count
    if out_channels % groups or batch % conv.batch_group_count:
        raise RefusedValue(
            f"{out_channels} output channels and batch {batch} in {groups} groups; accepted: whole groups"
        )
    conv = dataclasses.replace(conv, padding=_pairs(conv, tuple(input_spatial), tuple(kernel_spatial)))
    spatial = _output_spatial(conv, tuple(input_spatial), tuple(kernel_spatial))
    # By dictionary, not by array: a batch may be symbolic (jax.export).
    sizes = dict(zip(specs.out_spec, (batch // conv.batch_group_count, out_channels, *spatial), strict=True))
    return conv, tuple(sizes[axis] for axis in range(len(lhs_shape)))


# By the number of spatial dimensions: what dimension_numbers=None means, and the order with channels last.
_LAYOUTS = {
    1: (("NCW", "OIW", "NCW"), ("NWC", "WIO", "NWC")),
    2: (("NCHW", "OIHW", "NCHW"), ("NHWC", "HWIO", "NHWC")),
    3: (("NCDHW", "OIDHW", "NCDHW"), ("NDHWC", "DHWIO", "NDHWC")),
}


def layout_hint(
    conv: Convolution, lhs_shape: tuple[Any, ...], rhs_shape: tuple[int, ...], g_shape: tuple[Any, ...] | None = None
) -> str:
    """Ends an error about shapes that do not fit the dimension numbers: names common ones that the shapes fit, if there
    are any."""
    layouts = _LAYOUTS.get(len(lhs_shape) - 2)
    for numbers in layouts or ():
        specs = lax.conv_dimension_numbers(lhs_shape, rhs_shape, numbers)
        fits = rhs_shape[specs.rhs_spec[1]] * conv.feature_group_count == lhs_shape[specs.lhs_spec[1]]
        if specs == conv.dimension_numbers or not fits:
            continue
        with contextlib.suppress(ValueError):
            _, output = with_output(dataclasses.replace(conv, dimension_numbers=specs), lhs_shape, rhs_shape)
            if g_shape in (None, output):
                default = f" (None means {layouts[0]})" if layouts and numbers != layouts[0] else ""
                return f"; these shapes fit dimension_numbers={numbers}{default}"
    return ""


def integers(name: str, value: Sequence[int] | None, count: int, least: int = 1) -> tuple[int, ...]:
    """`count` integers; None is refused."""
    values = ()
    with contextlib.suppress(TypeError):
        values = tuple(operator.index(v) for v in (() if value is None else value))
    if len(values) != count or any(v < least for v in values):
        array = getattr(value, "ndim", 1) != 1
        given = f"{name} is an array of shape {np.shape(value)}" if array else f"{name}={value!r}"  # pyright: ignore
        raise RefusedValue(f"{given}; accepted: {count} integers of at least {least}")
    return values


def _strides(window_strides: Sequence[int], rank: int) -> tuple[int, ...]:
    """An integer for each dimension; another number of them raises lax's error."""
    with contextlib.suppress(TypeError):
        if len(window_strides) != rank:
            same = "conv_general_dilated window and window_strides must have the same number of dimensions"
            raise RefusedValue(f"{same}, but got {rank} and {len(window_strides)}.")
    return integers("window_strides", window_strides, rank)


def _dilation(name: str, value: Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """An integer for each dimension; None for ones."""
    return (1,) * rank if value is None else integers(name, value, rank)


def _groups(feature_group_count: int, batch_group_count: int) -> tuple[int, int]:
    """Both counts, of which only one may be above 1."""
    given = {"feature_group_count": feature_group_count, "batch_group_count": batch_group_count}
    counts = {name: integer(value) or 0 for name, value in given.items()}
    for name, count in counts.items():
        if count < 1:
            raise RefusedValue(f"{name}={given[name]!r}; accepted: an integer of at least 1")
    if min(counts.values()) > 1:
        both = ", ".join(f"{name}={count}" for name, count in counts.items())
        raise RefusedValue(f"{both}; accepted: only one of them above 1")
    return counts["feature_group_count"], counts["batch_group_count"]


def _padding(padding: Padding, rank: int) -> str | Pairs:
    """A known word, or pairs of integers; what is neither raises lax's error."""
    accepted = f"{', '.join(map(repr, _WORDS))} or {rank} pairs (low, high)"
    if isinstance(padding, str):
        if padding.upper() in _WORDS:
            return padding.upper()
        raise RefusedValue(f"padding={padding!r}; accepted: {accepted}")
    try:
        pairs = tuple((operator.index(low), operator.index(high)) for low, high in padding)
    except (TypeError, ValueError):
        form = "padding argument to conv_general_dilated should be a string or a sequence of (low, high) pairs"
        raise RefusedValue(f"{form}, got {padding}; accepted: {accepted}") from None
    if len(pairs) != rank:
        raise RefusedValue(f"padding={padding!r}; accepted: {accepted}")
    return pairs


def _pairs(conv: Convolution, input_spatial: tuple[Any, ...], kernel_spatial: tuple[int, ...]) -> Pairs:
    """The padding that a word means, in numbers."""
    pairs = _sides(conv, input_spatial, kernel_spatial)
    if not _compat.is_known(*(side for pair in pairs for side in pair)):
        raise RefusedValue(
            f"padding={conv.padding!r} of an input of symbolic sizes {input_spatial} at strides {conv.window_strides} "
            "is not known; accepted: explicit pairs, or sizes that are multiples of the strides, as 2*h is of 2"
        )
    return tuple((int(low), int(high)) for low, high in pairs)


def _sides(conv: Convolution, input_spatial: Sequence[Any], kernel_spatial: Sequence[int]) -> Any:
    """The padding as pairs, which are symbolic where the input's sizes are."""
    if not isinstance(conv.padding, str):
        return conv.padding
    window = dilated(kernel_spatial, conv.rhs_dilation)
    return tuple(lax.padtype_to_pads(input_spatial, window, conv.window_strides, conv.padding))


def _output_spatial(conv: Convolution, input_spatial: tuple[Any, ...], kernel_spatial: tuple[int, ...]) -> Any:
    """`conv_output_spatial`, where the input's sizes may be symbolic."""
    geometry: dict[str, Any] = {
        "window_strides": conv.window_strides,
        "padding": conv.padding,
        "lhs_dilation": conv.lhs_dilation,
        "rhs_dilation": conv.rhs_dilation,
    }
    if _compat.is_known(*input_spatial):
        return conv_output_spatial(input_spatial, kernel_spatial, **geometry)
    lhs, rhs = (jax.ShapeDtypeStruct((1, 1, *sizes), jnp.float32) for sizes in (input_spatial, kernel_spatial))
    return jax.eval_shape(lambda x, w: lax_conv(x, w, **geometry), lhs, rhs).shape[2:]
