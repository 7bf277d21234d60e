"""The last values that families of weight gradients take, run on a GPU, and the first ones that they do not: other
families or XLA serve those."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax

import jax_splitk
from jax_splitk import kernels
from jax_splitk.kernels.wgrad import grouped, halo, im2col, tf32
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime import compiler
from jax_splitk.runtime.target import DEFAULT_CUDA, target_for
from jax_splitk.tuning import select
from jax_splitk.tuning.options import Options
from tests import float64, gpu_wgrad, poison
from tests.kernels.wgrad.test_gpu_im2col import spatial, with_splits

pytestmark = pytest.mark.gpu

INT32_MAX = 2**31 - 1
CHANNELS = (24, 40)
SM90_CONFIGS = (
    im2col.Config(64, 64, 8, False, 1),
    im2col.Config(64, 128, 4, True, 3),
    im2col.Config(192, 64, 5, False, 2),
)


def at(rank: int, axis: int, value: Any, other: Any) -> tuple[Any, ...]:
    return tuple(value if i == axis else other for i in range(rank))


def windows(rank: int, axis: int, extent: int, window: int = 3, **changes: Any) -> ConvWgradProblem:
    """A filter of `window` along one axis; `changes` are of that axis."""
    return spatial(
        2,
        at(rank, axis, extent, 12 if rank == 2 else 6),
        at(rank, axis, window, 3),
        CHANNELS,
        stride=at(rank, axis, changes.get("stride", 1), 1),
        padding=at(rank, axis, changes.get("padding", (1, 1)), (1, 1)),
        dilation=at(rank, axis, changes.get("dilation", 1), 1),
    )


def im2col_edges() -> Iterator[tuple[str, ConvWgradProblem, ConvWgradProblem]]:
    """(name, the last legal problem, the first that is not) at each limit of TMA's im2col mode."""
    for rank, long, lower, upper, reach in ((2, 300, -128, 127, 255), (3, 40, -16, 15, 31)):
        for axis in range(rank):
            # The corners of the box of window origins; with three taps the high one is its padding less 2.
            for name, pads, beyond in (
                ("low", (-lower, 1), (1 - lower, 1)),
                ("low_crop", (-upper, 1), (-upper - 1, 1)),
                ("high", (1, upper + 2), (1, upper + 3)),
                ("high_crop", (1, lower + 2), (1, lower + 1)),
            ):
                first, second = (windows(rank, axis, long, padding=p) for p in (pads, beyond))
                yield f"{rank}d_{axis}_{name}", first, second
            pads = (0, reach - 10)
            first, second = (windows(rank, axis, long, 2, dilation=d, padding=pads) for d in (reach, reach + 1))
            yield f"{rank}d_{axis}_dilation", first, second
            first, second = (windows(rank, axis, long, stride=s) for s in (8, 9))
            yield f"{rank}d_{axis}_stride", first, second
    yield (
        "2d_taps",
        windows(2, 0, 300, 18, dilation=15, padding=(0, 150)),
        windows(2, 0, 300, 17, dilation=16, padding=(0, 150)),
    )
    yield "3d_taps", windows(3, 2, 40, 32, padding=(0, 20)), windows(3, 2, 40, 33, padding=(0, 20))
    yield (
        "1d_dilation",
        spatial(2, (400,), (4,), CHANNELS, dilation=85, padding=((0, 250),)),
        spatial(2, (400,), (3,), CHANNELS, dilation=128, padding=((0, 250),)),
    )


IM2COL = {name: pair for name, *pair in im2col_edges()}


@dataclasses.dataclass(frozen=True)
class Edge:
    """A config's limit: `problem(last)` is legal, one more is not, for that reason."""

    family: kernels.Family
    config: Any
    problem: Callable[[int], ConvWgradProblem]
    last: int
    reason: str


def float32(p: ConvWgradProblem) -> ConvWgradProblem:
    return dataclasses.replace(p, dtype="float32")


TILED = {
    # Boxes of 256 columns, strips of 64 rows.
    "halo_columns": Edge(
        halo.FAMILY,
        halo.Config(1, 16, 1, 3, 2),
        lambda d: spatial(2, (5, 16), (1, 3), (72, 72), padding=((0, 0), (d, d)), dilation=(1, d)),
        120,
        "rows of 258 pixels; accepted: at most 256",
    ),
    "halo_rows": Edge(
        halo.FAMILY,
        halo.Config(2, 16, 3, 2, 1),
        lambda d: spatial(2, (8, 17), (3, 2), (72, 72), padding=((d, d), (0, 0)), dilation=(d, 1)),
        31,
        "66 rows; accepted: at most 64",
    ),
    # Filter columns that one thread block reads from one box, and those that are others'.
    "tf32_columns": Edge(
        tf32.FAMILY,
        tf32.Config(1, 3, 1, 32, 1, 1, 16, 2, 2),
        lambda d: float32(spatial(2, (5, 16), (1, 3), (36, 40), padding=((0, 0), (d, d)), dilation=(1, d))),
        120,
        "tile_q 16 needs 258 input columns; accepted: at most 256",
    ),
    "tf32_coordinates": Edge(
        tf32.FAMILY,
        tf32.Config(1, 1, 1, 32, 1, 1, 16, 2, 1),
        lambda d: float32(spatial(1, (16,), (3,), (36, 40), padding=((d, d),), dilation=(d,))),
        (INT32_MAX - 16 - tf32.MAX_PIXELS) // 4,
        "padded input of up to ",
    ),
    "grouped_columns": Edge(
        grouped.FAMILY,
        grouped.Config(32, 32, 1, 1, 8, 1, 2, 2),
        lambda s: spatial(2, (3, 300), (3, 3), (32, 32), padding=((1, 1), (0, 0)), stride=(1, s), groups=8),
        36,
        "window stride (1, 37) and rhs_dilation (1, 1): 3x264 pixels of input",
    ),
}

# Not the coordinates: XLA would hold all that padding in memory.
SERVED = ("halo_columns", "halo_rows", "tf32_columns", "grouped_columns")


def sm90_configs(p: ConvWgradProblem) -> list[im2col.Config]:
    return [with_splits(p, config, config.splits) for config in SM90_CONFIGS]


def device_code() -> set[compiler.Source]:
    plans = [gpu_wgrad.plan(im2col.FAMILY, p, config) for p, _ in IM2COL.values() for config in sm90_configs(p)]
    plans += [gpu_wgrad.plan(edge.family, edge.problem(edge.last), edge.config) for edge in TILED.values()]
    for beyond in (*(p for _, p in IM2COL.values()), *(TILED[name].problem(TILED[name].last + 1) for name in SERVED)):
        choice = select.select(beyond, target_for("cuda"), Options(), measure=False)
        if choice.family is not None:
            plans.append(gpu_wgrad.plan(choice.family, beyond, choice.config))
    return {plan.source for plan in plans}


def exact(p: ConvWgradProblem, lhs: np.ndarray, g: np.ndarray) -> np.ndarray:
    """By the definition, one filter tap at a time: windows may reach far beyond the input."""
    found = np.zeros(p.out_shape)
    groups = p.feature_group_count
    for tap in np.ndindex(*p.kernel_spatial):
        places = [
            np.arange(out) * stride - low + t * dilation
            for out, stride, (low, _), t, dilation in zip(
                p.output_spatial, p.window_strides, p.padding, tap, p.rhs_dilation, strict=True
            )
        ]
        inside = [
            np.flatnonzero((place >= 0) & (place < size)) for place, size in zip(places, p.input_spatial, strict=True)
        ]
        everything = np.arange(p.batch)
        windows = lhs[np.ix_(everything, *(place[kept] for place, kept in zip(places, inside, strict=True)))]
        cotangents = g[np.ix_(everything, *inside)]
        windows, cotangents = (a.reshape(-1, groups, a.shape[-1] // groups) for a in (windows, cotangents))
        found[tap] = np.einsum("xgc,xgk->cgk", windows, cotangents).reshape(p.out_shape[-2:])
    return found


def operands(p: ConvWgradProblem) -> tuple[jax.Array, jax.Array, np.ndarray]:
    """Small integers, and the exact result."""
    lhs, g = gpu_wgrad.integers(p)
    return lhs, g, exact(p, np.asarray(lhs, np.float64), np.asarray(g, np.float64)).astype(np.float32)


def public(p: ConvWgradProblem, lhs: jax.Array, g: jax.Array, **options: Any) -> jax.Array:
    """By jax_splitk.conv_wgrad, jitted."""
    spatial_dimensions = "DHW"[-p.rank :]
    numbers = lax.conv_dimension_numbers(
        p.lhs_shape, p.out_shape, (f"N{spatial_dimensions}C", f"{spatial_dimensions}IO", f"N{spatial_dimensions}C")
    )

    @jax.jit
    def wgrad(lhs: jax.Array, g: jax.Array) -> jax.Array:
        return jax_splitk.conv_wgrad(
            lhs, g, p.out_shape, p.window_strides, p.padding, p.rhs_dilation, numbers, p.feature_group_count,
            preferred_element_type=p.out_dtype, **options,
        )  # fmt: skip

    return wgrad(lhs, g)


@pytest.mark.parametrize("name", IM2COL)
def test_im2cols_last_legal_values_are_exact(name: str) -> None:
    p, _ = IM2COL[name]
    lhs, g, expected = operands(p)
    for config in sm90_configs(p):
        assert im2col.FAMILY.refusal(p, config) is None
        out = poison.run(gpu_wgrad.plan(im2col.FAMILY, p, config), p, lhs, g)
        np.testing.assert_array_equal(out, expected, err_msg=str(config))


@pytest.mark.parametrize("name", IM2COL)
def test_beyond_im2cols_limits_others_serve(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", "off")
    _, p = IM2COL[name]
    assert im2col.FAMILY.refusal(p) is not None
    lhs, g, expected = operands(p)
    np.testing.assert_array_equal(public(p, lhs, g), expected)


@pytest.mark.parametrize("name", TILED)
def test_the_last_legal_extents_are_exact(name: str) -> None:
    edge = TILED[name]
    p = edge.problem(edge.last)
    assert edge.family.refusal(p, edge.config, DEFAULT_CUDA) is None
    assert edge.reason in str(edge.family.refusal(edge.problem(edge.last + 1), edge.config, DEFAULT_CUDA))
    lhs, g, expected = operands(p)
    out = poison.run(gpu_wgrad.plan(edge.family, p, edge.config), p, lhs, g)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("name", SERVED)
def test_beyond_the_last_legal_extents_others_serve(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", "off")
    p = TILED[name].problem(TILED[name].last + 1)
    lhs, g, expected = operands(p)
    np.testing.assert_array_equal(public(p, lhs, g), expected)
    np.testing.assert_array_equal(
        float64.conv_wgrad_on_host(p, *(np.asarray(a, np.float64) for a in (lhs, g))), expected
    )
