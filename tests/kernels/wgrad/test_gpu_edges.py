"""The last values that families of weight gradients serve, run on a GPU, and the first ones that they refuse and other
families or XLA serve."""

import jax
import numpy as np
import pytest
from jax import lax

import jax_splitk
from jax_splitk.kernels.contraction import wgrad as im2col
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.runtime import compiler
from jax_splitk.runtime.target import target_for
from jax_splitk.tuning import select
from jax_splitk.tuning.options import Options
from tests import on_gpu, poison
from tests.kernels.wgrad import test_refusals
from tests.kernels.wgrad.edges import TILED

pytestmark = pytest.mark.gpu

IM2COL_CONFIGS = (
    im2col.Config(64, 64, 8, False, 1),
    im2col.Config(64, 128, 4, True, 3),
    im2col.Config(192, 64, 5, False, 2),
)
IM2COL = {
    f"{len(last['size'])}d {reason}": tuple(test_refusals.problem(im2col.FAMILY, **each) for each in (last, beyond))
    for last, beyond, reason in test_refusals.IM2COL
}


# Not the coordinates: XLA would hold all that padding in memory.
SERVED = ("halo_columns", "halo_rows", "tf32_columns", "grouped_columns")


def im2col_configs(p: ConvWgradProblem) -> list[im2col.Config]:
    return [im2col.FAMILY.with_splits(p, config, config.splits) for config in IM2COL_CONFIGS]


def device_code() -> set[compiler.Source]:
    plans = [on_gpu.plan(im2col.FAMILY, p, config) for p, _ in IM2COL.values() for config in im2col_configs(p)]
    plans += [on_gpu.plan(edge.family, edge.problem(edge.last), edge.config) for edge in TILED.values()]
    for beyond in (*(p for _, p in IM2COL.values()), *(TILED[name].problem(TILED[name].last + 1) for name in SERVED)):
        choice = select.select(beyond, target_for("cuda"), Options(), measure=False)
        if choice.family is not None:
            plans.append(on_gpu.plan(choice.family, beyond, choice.config))
    return {plan.source for plan in plans}


def exact(p: ConvWgradProblem, lhs: np.ndarray, g: np.ndarray) -> np.ndarray:
    """The exact weight gradient by its definition, one filter tap at a time: windows may reach far beyond the input."""
    found = np.zeros(p.out_shape)
    groups = p.feature_group_count
    for tap in np.ndindex(*p.kernel_spatial):
        geometry = zip(p.output_spatial, p.window_strides, p.padding, tap, p.rhs_dilation, strict=True)
        places = [np.arange(out) * stride - low + t * dilation for out, stride, (low, _), t, dilation in geometry]
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
    """lhs and g of small integers, and the exact weight gradient."""
    lhs, g = on_gpu.integers(p)
    return lhs, g, exact(p, np.asarray(lhs, np.float64), np.asarray(g, np.float64)).astype(np.float32)


def check_others_serve(p: ConvWgradProblem) -> None:
    """jax_splitk.conv_wgrad under jit is exact on problems that a family refuses."""
    lhs, g, expected = operands(p)
    letters = "DHW"[-p.rank :]
    numbers = lax.conv_dimension_numbers(p.lhs_shape, p.out_shape, (f"N{letters}C", f"{letters}IO", f"N{letters}C"))
    out = jax.jit(
        lambda lhs, g: jax_splitk.conv_wgrad(
            lhs, g, p.out_shape, p.window_strides, p.padding, p.rhs_dilation, numbers, p.feature_group_count,
            preferred_element_type=p.out_dtype,
        )
    )(lhs, g)  # fmt: skip
    np.testing.assert_array_equal(out, expected)


@pytest.fixture(autouse=True)
def without_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", "off")


@pytest.mark.parametrize("name", IM2COL)
def test_im2cols_last_legal_values_are_exact_and_others_serve_the_next(name: str) -> None:
    p, beyond = IM2COL[name]
    lhs, g, expected = operands(p)
    for config in im2col_configs(p):
        out = poison.run(on_gpu.plan(im2col.FAMILY, p, config), p, lhs, g)
        np.testing.assert_array_equal(out, expected, err_msg=str(config))
    check_others_serve(beyond)


@pytest.mark.parametrize("name", TILED)
def test_the_last_legal_extents_are_exact(name: str) -> None:
    edge = TILED[name]
    p, beyond = edge.problem(edge.last), edge.problem(edge.last + 1)
    lhs, g, expected = operands(p)
    out = poison.run(on_gpu.plan(edge.family, p, edge.config), p, lhs, g)
    np.testing.assert_array_equal(out, expected)
    if name in SERVED:
        check_others_serve(beyond)
