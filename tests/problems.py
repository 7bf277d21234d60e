"""Problems of convolutions, random ones among them, and the seed that names these."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from benchmarks.cases import Case
from jax_splitk.problems.conv_wgrad import ConvWgradProblem, Pairs, conv_output_spatial

# The seed differs in each run of the tests (tests/conftest.py); JAX_SPLITK_TEST_SEED sets it to repeat a run.
SEED = int(os.environ.get("JAX_SPLITK_TEST_SEED", "0"))


def generator(salt: int) -> np.random.Generator:
    """A random generator that differs for each salt and each run of the tests."""
    return np.random.default_rng([SEED, salt])


def on_device(values: Any, dtype: Any) -> jax.Array:
    """The values in the dtype, rounded on the host: `jnp.asarray` compiles a program for each shape."""
    return jax.device_put(np.asarray(values).astype(jnp.dtype(dtype)))


def ones(shape: int | tuple[int, ...], dtype: Any = "float32") -> jax.Array:
    """`jnp.ones`, for which XLA compiles a program for each shape."""
    return on_device(np.ones(shape), dtype)


def together(functions: Iterable[Callable[..., Any]], *operands: Any) -> list[Any]:
    """The functions' results, from one program, in which XLA compiles once what they have in common."""
    return jax.jit(lambda *operands: [function(*operands) for function in functions])(*operands)


@contextlib.contextmanager
def seeded(salt: int) -> Iterator[np.random.Generator]:
    """A fresh generator. A failure in the body gets a note that says how to draw the same numbers again."""
    try:
        yield generator(salt)
    except BaseException as error:
        error.add_note(f"drawn by numpy.random.default_rng([{SEED}, {salt}]); JAX_SPLITK_TEST_SEED={SEED} repeats it")
        raise


def differentiated(function: Callable[..., Any], operands: Sequence[Any], cotangent: Any) -> tuple[Any, Any]:
    """(result, cotangents of the operands), from one program: outside jit, XLA compiles one for each equation."""

    @jax.jit
    def both(operands: Sequence[Any], cotangent: Any) -> tuple[Any, Any]:
        result, pull = jax.vjp(function, *operands)
        return result, pull(cotangent)

    return both(operands, cotangent)


def of_families(edges: Mapping[Any, Sequence[tuple[Any, ...]]]) -> list[Any]:
    """Test parameters: each family with each of its edges, whose last element is the name."""
    return [pytest.param(family, *edge, id=f"{family.name}-{edge[-1]}") for family in edges for edge in edges[family]]


def random_case(rng: np.random.Generator, dtype: str = "bfloat16") -> Case:
    """A 2D convolution within the limits of the Hopper family, of any geometry, with at least one output pixel."""

    def pair(low: int, high: int) -> tuple[int, int]:
        return int(rng.integers(low, high)), int(rng.integers(low, high))

    while True:
        height, width = pair(1, 40)
        case = Case(
            name="random",
            batch=int(rng.integers(1, 9)),
            height=height,
            width=width,
            in_channels=8 * int(rng.integers(1, 40)),
            out_channels=8 * int(rng.integers(1, 40)),
            kernel=pair(1, 8),
            stride=pair(1, 9),
            padding=(pair(-3, 8), pair(-3, 8)),
            dilation=pair(1, 4),
            dtype=dtype,
        )
        # One in five is a plain matrix product.
        if rng.random() < 0.2:
            case = dataclasses.replace(case, kernel=(1, 1), stride=(1, 1), padding=((0, 0), (0, 0)))
        if case.problem().reduction_size > 0:
            return case


def conv(
    size: tuple[int, ...],
    kernel: tuple[int, ...],
    channels: tuple[int, int] = (64, 64),
    *,
    batch: int = 2,
    stride: int | tuple[int, ...] = 1,
    padding: int | Pairs | None = 0,
    lhs_dilation: int | tuple[int, ...] = 1,
    rhs_dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    **fields: Any,
) -> ConvWgradProblem:
    """A weight gradient of any rank. A number stands for the same number in each dimension, padding None for half of
    the kernel; `fields` are fields of the problem."""

    def each(value: Any) -> tuple[Any, ...]:
        return (value,) * len(size) if isinstance(value, int) else value

    pads = tuple((k // 2, k // 2) for k in kernel) if padding is None else padding
    pads = ((pads, pads),) * len(size) if isinstance(pads, int) else pads
    geometry = (each(stride), pads, each(lhs_dilation), each(rhs_dilation))
    made = ConvWgradProblem(
        batch, size, conv_output_spatial(size, kernel, *geometry), kernel, *channels, *geometry, groups, "bfloat16",
        "float32",
    )  # fmt: skip
    return dataclasses.replace(made, **fields)


def conv_of(
    kind: type[Any], size: tuple[int, ...], kernel: tuple[int, ...], channels: tuple[int, int] = (64, 64), **more: Any
) -> Any:
    """The same for another pass: a problem of class `kind`."""
    return kind(**vars(conv(size, kernel, channels, **more)))
