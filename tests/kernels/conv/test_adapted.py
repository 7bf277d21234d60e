"""Families that use another family's kernels on an equivalent convolution: XLA's operations around the kernels,
refusals, times and memory. tests/every_kernel.py has a run of each with the kernels."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import jax_splitk
from jax_splitk.kernels import Family, catalogue
from jax_splitk.problems.conv_passes import ConvDgradProblem, ConvFpropProblem
from jax_splitk.problems.conv_wgrad import ConvProblem, ConvWgradProblem
from jax_splitk.problems.problem import nbytes
from jax_splitk.runtime.around import Around
from jax_splitk.runtime.target import DEFAULT_CUDA
from jax_splitk.tuning.options import Options
from jax_splitk.tuning.select import select
from tests import every_kernel, float64
from tests.kernels import emulated
from tests.problems import conv_of, seeded

ADAPTED: dict[str, Any] = {family.name: family for families in catalogue.ADAPTED.values() for family in families}
PASSES: tuple[type[Any], ...] = (ConvFpropProblem, ConvDgradProblem, ConvWgradProblem)
FLOATS = {"dtype": "float32", "out_dtype": "float32"}
HALF = {"dtype": "float16", "out_dtype": "float16"}


def problems() -> Iterator[tuple[str, Any]]:
    """Odd channels, and groups of them, of all ranks and steps. float32 has exact sums on the host."""
    shapes: list[tuple[Any, Any, dict[str, Any]]] = [
        ((9,), (5,), {"padding": 2}),
        ((5, 6), (3, 3), {"padding": ((1, 0), (2, 1))}),
        ((7, 8), (3, 2), {"stride": (2, 3), "padding": 1}),
        ((7, 8), (3, 2), {"rhs_dilation": (2, 1), "padding": 1}),
        ((3, 4, 5), (2, 1, 3), {"padding": 1}),
        ((1, 1), (1, 1), {"batch": 7}),
    ]
    channels: list[tuple[int, int, int]] = [
        *((37, 53, 1), (61, 24, 1), (24, 61, 1), (33, 17, 1), (20, 36, 1), (100, 19, 1)),
        *((15, 15, 3), (21, 36, 3), (36, 28, 4), (30, 50, 5), (60, 21, 3), (16, 8, 4), (74, 4, 2)),
    ]
    for kind, number in itertools.product(PASSES, range(0, 130, 5)):
        size, kernel, more = shapes[number % len(shapes)]
        *sides, groups = channels[number % len(channels)]
        more = more | {"groups": groups} | (HALF, FLOATS)[number // len(channels) % 2]
        p = conv_of(kind, size, kernel, tuple(sides), **more)
        yield from ((name, p) for name, family in ADAPTED.items() if p.op.endswith(name[:5]) and serves(family, p))


def serves(family: Family, p: ConvProblem) -> bool:
    return family in catalogue.ADAPTED[p.op] and family.refusal(p) is None


PROBLEMS = list(problems())


def operands(p: ConvProblem, rng: np.random.Generator) -> list[np.ndarray]:
    return [rng.integers(-2, 3, shape).astype(p.dtype) for shape in p.operand_shapes]


@functools.cache
def jitted(around: Around) -> tuple[Any, Any]:
    """XLA's operations before and after the kernels."""
    return jax.jit(around.before), jax.jit(around.after)


def computed(family: Any, p: ConvProblem, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The result, with the convolution of the kernels computed on the host."""
    around, other = family.around(p), family.translated(p)
    before, after = jitted(around)
    changed = [np.asarray(array) for array in before([x, y])]
    assert [array.shape for array in changed] == list(other.operand_shapes)
    own = float64.ON_HOST[p.op](other, *changed)
    assert (own.shape, p.out_dtype) == around.returned
    return np.asarray(after(own.astype(p.out_dtype)))


def test_the_problems_are_of_every_family() -> None:
    assert {name for name, _ in PROBLEMS} == set(ADAPTED)
    of = {name: [p for each, p in PROBLEMS if each == name] for name in ADAPTED}
    assert all({p.rank for p in of[name]} == {1, 2, 3} for name in ("fprop_im2col_padded", "wgrad_gather_merged"))
    assert all(len(found) >= 2 for found in of.values()), {name: len(found) for name, found in of.items()}


def test_the_equivalent_convolution_is_exact() -> None:
    with seeded(81) as rng:
        for name, p in PROBLEMS:
            x, y = operands(p, rng)
            want = float64.ON_HOST[p.op](p, x, y).astype(p.out_dtype)
            np.testing.assert_array_equal(computed(ADAPTED[name], p, x, y), want, err_msg=f"{name} {p}")


@pytest.mark.parametrize(("sides", "groups", "kernel", "dtypes", "grouped", "im2col"), [
    ((20, 36), 1, (1, 1), HALF, (24, 40), (32, 48)),  # one tap: multiples of 32 bytes
    ((20, 36), 1, (3, 3), HALF, (24, 40), (32, 64)),  # several: of 64
    ((20, 37), 1, (3, 3), FLOATS, (20, 40), (20, 48)),  # 20 need no padding
    ((61, 24), 1, (3,), HALF, (64, 24), (64, 24)),
    ((9 * 4, 33 * 4), 4, (3,), HALF, (16 * 4, 40 * 4), (16 * 4, 64 * 4)),  # 32 would double 16
])  # fmt: skip
def test_channels_become_multiples(
    sides: tuple[int, int],
    groups: int,
    kernel: tuple[int, ...],
    dtypes: dict[str, str],
    grouped: tuple[int, int],
    im2col: tuple[int, int],
) -> None:
    p = conv_of(ConvWgradProblem, (9,) * len(kernel), kernel, sides, groups=groups, **dtypes)
    for name, padded in {"wgrad_grouped_padded": grouped, "wgrad_im2col_padded": im2col}.items():
        other = ADAPTED[name].translated(p)
        assert (other.in_channels, other.out_channels) == padded, name


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_reaches_what_depends_on_it(value: float) -> None:
    """In either operand: it does not reach other groups, nor does it meet padded channels."""
    with seeded(82) as rng, np.errstate(invalid="ignore"):
        for (name, p), which in itertools.product(PROBLEMS, (0, 1)):
            arrays = operands(p, rng)
            place = tuple(int(rng.integers(size)) for size in arrays[which].shape)
            arrays[which][place] = value
            want = float64.ON_HOST[p.op](p, *arrays).astype(p.out_dtype)
            np.testing.assert_array_equal(computed(ADAPTED[name], p, *arrays), want, err_msg=f"{name} {p}")


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["fprop_grouped_padded", "wgrad_tf32_merged"])
def test_what_is_not_finite_in_the_kernels(name: str, value: float) -> None:
    (run,) = (run for run in every_kernel.RUNS if run.family.name == name)
    emulated.check_not_finite(run.family, run.problem, run.config, value)  # type: ignore[arg-type]


BASES: dict[str, Any] = {
    "grouped_padded": conv_of(ConvFpropProblem, (9, 9), (3, 3), (27, 27), groups=3, **HALF),
    "im2col_padded": conv_of(ConvFpropProblem, (9, 9), (3, 3), (37, 53), **HALF),
    "tf32_merged": conv_of(ConvWgradProblem, (9, 9), (3, 3), (16, 8), groups=4, **FLOATS),
    "gather_merged": conv_of(ConvWgradProblem, (9, 9), (3, 3), (9, 15), groups=3, **FLOATS),
}


@pytest.mark.parametrize(("name", "changes", "reason"), [
    ("fprop_im2col_padded", {"in_channels": 40, "out_channels": 64}, "40 input and 64 output channels, which need no"),
    ("fprop_im2col_padded", {"in_channels": 3}, "3 channels; accepted: more than 16"),
    ("dgrad_im2col_padded", {"out_channels": 13}, "13 channels; accepted: more than 16"),
    ("wgrad_im2col_padded", {"out_channels": 12}, "12 channels; accepted: more than 16"),
    ("fprop_im2col_padded", {"dtype": "float64"}, "dtype float64; accepted"),
    ("fprop_im2col_padded", {"batch_group_count": 2}, "batch_group_count 2"),
    ("fprop_im2col_padded", {"window_strides": (9, 1)}, "as conv_fprop 2, 9x9, 64 -> 64, 3x3 stride 9x1, f16: window"),
    ("fprop_grouped_padded", {"in_channels": 9}, "groups of 3 channels to 9; accepted: at least 4 each"),
    ("dgrad_grouped_padded", {"dtype": "float32"}, "3 groups, f32->f16: dtype float32; accepted"),
    ("wgrad_grouped_padded", {"in_channels": 72, "out_channels": 72, "feature_group_count": 8},
     "a problem of wgrad_grouped; accepted: problems that it refuses"),
    ("wgrad_tf32_merged", {"feature_group_count": 1}, "channels in 1 groups; accepted: at least 2 groups of 2"),
    ("wgrad_tf32_merged", {"feature_group_count": 8}, "16 input and 8 output channels in 8 groups; accepted: at"),
    ("wgrad_tf32_merged", {"in_channels": 260}, "accepted: at least 2 groups of 2 channels, 256 channels in all"),
    ("wgrad_tf32_merged", {"in_channels": 20, "out_channels": 9, "feature_group_count": 1}, "accepted: at least 2"),
    ("wgrad_tf32_merged", {"precision": "highest"}, "as conv_wgrad 2, 9x9, 16 -> 8, 3x3, f32: precision highest"),
    ("wgrad_gather_merged", {"in_channels": 72, "out_channels": 72, "feature_group_count": 4, "dtype": "bfloat16"},
     "a problem of wgrad_grouped; accepted: 64 channels in all, or problems that it refuses"),
])  # fmt: skip
def test_refusals(name: str, changes: dict[str, Any], reason: str) -> None:
    pass_, _, kind = name.partition("_")
    base = PASSES[("fprop", "dgrad", "wgrad").index(pass_)](**vars(BASES[kind]))
    family = ADAPTED[name]
    served = family.problem_refusal(dataclasses.replace(base, in_channels=37) if kind == "im2col_padded" else base)
    assert served is None
    assert reason in str(family.refusal(dataclasses.replace(base, **changes)))


def test_copies_count_in_times_and_memory() -> None:
    for name, p in PROBLEMS:
        family, config = ADAPTED[name], ADAPTED[name].candidates(p, DEFAULT_CUDA)[0]
        other, inner = family.translated(p), family.inner
        before, after = ((*q.operand_types, (q.out_shape, q.out_dtype)) for q in (p, other))
        copied = [new for old, new in zip(before, after, strict=True) if old != new]
        assert copied
        memory = sum(nbytes(*array) for array in copied)
        assert family.workspace_bytes(p, config) == inner.workspace_bytes(other, config) + memory
        assert family.plan(p, config).workspace_bytes == inner.workspace_bytes(other, config)
        assert family.estimate(p, config, DEFAULT_CUDA) > inner.estimate(other, config, DEFAULT_CUDA) + 1e-6


def layer(kind: type[Any], batch: int, size: int, channels: tuple[int, int], groups: int, **more: Any) -> Any:
    return conv_of(kind, (size, size), (3, 3), channels, groups=groups, batch=batch, padding=1, **more)


@pytest.mark.parametrize(("p", "name"), [
    (layer(ConvFpropProblem, 594, 14, (144, 144), 16, **HALF), "fprop_grouped_padded"),
    (layer(ConvDgradProblem, 133, 56, (40, 40), 8, **HALF), "dgrad_grouped_padded"),
    (layer(ConvWgradProblem, 64, 28, (128, 128), 8, **FLOATS), "wgrad_tf32_merged"),
    (layer(ConvFpropProblem, 350, 28, (61, 24), 1, **HALF), "fprop_im2col_padded"),
    (layer(ConvFpropProblem, 64, 112, (3, 64), 1, **HALF), "fprop_gather"),
    (layer(ConvFpropProblem, 64, 28, (128, 128), 16, **HALF), "fprop_grouped"),
    (conv_of(ConvFpropProblem, (56, 56), (1, 1), (1028, 1028), groups=4, batch=5, **HALF), "fprop_im2col_padded"),
    (conv_of(ConvDgradProblem, (56, 56), (1, 1), (260, 260), groups=4, batch=20, **HALF), "dgrad_im2col_padded"),
], ids=str)  # fmt: skip
def test_untuned_choices(p: ConvProblem, name: str) -> None:
    choice = select(p, DEFAULT_CUDA, Options(implied=not isinstance(p, ConvWgradProblem)))
    assert choice.candidate.name == name, choice.why


def test_the_limit_of_the_workspace_holds_for_copies() -> None:
    p = layer(ConvFpropProblem, 594, 14, (144, 144), 16, **HALF)
    padded = 2 * nbytes((*p.lhs_shape[:-1], 256), p.dtype)
    for limit, name in ((padded * 2, "fprop_grouped_padded"), (padded // 2, "fprop_gather")):
        candidate = select(p, DEFAULT_CUDA, Options(implementation="cutlass", workspace_limit_bytes=limit)).candidate
        assert candidate.name == name


def test_lowered_code_has_the_operations_and_the_call() -> None:
    """The pads are lowered around the kernel, and gradients and vmap come to the same families."""

    def layer_of(x: jax.Array, w: jax.Array) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax_splitk.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=16, implementation="cutlass"
        )

    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((594, 14, 14, 144), (3, 3, 9, 144)))
    text = jax.jit(layer_of).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.pad") == 2 and text.count("jax_splitk_launch") == 1
    assert "594x14x14x256xbf16" in text

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return layer_of(x, w).astype(jnp.float32).sum()

    mapped = jax.vmap(jax.grad(loss, (0, 1)), (1, None))
    made = jax_splitk.explain(mapped, x.update(shape=(594, 1, 14, 14, 144)), w, platform="cuda").decisions
    assert {decision.family for decision in made} >= {"fprop_grouped_padded", "dgrad_grouped_padded"}
