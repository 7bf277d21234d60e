"""Every operation under `jax_numpy_dtype_promotion=strict` and `jax_numpy_rank_promotion=raise`: the same results."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import jax_splitk
from tests.exhaustive import thinned
from tests.problems import generator
from tests.transformations import operations

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="these are the CPU's paths")

_Case = tuple[str, Callable[..., jax.Array], tuple[np.ndarray, ...]]
_ACTIVATIONS = ("relu", "gelu", "gelu_exact", "silu")
_F32, _BF16, _F16 = "float32", "bfloat16", "float16"


def _given(*of: tuple[tuple[int, ...], str]) -> tuple[np.ndarray, ...]:
    rng = generator(71)
    return tuple(rng.integers(-2, 3, shape).astype(jnp.dtype(dtype)) for shape, dtype in of)


def _cases() -> Iterator[_Case]:
    for name, operation in operations().items():
        yield name, operation.ours, _given(*((shape, _F32) for shape in operation.shapes))
    lhs, rhs, geometry = (2, 4, 3, 2), (2, 2, 2, 4), ((1, 1), "SAME")
    numbers = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    for implementation in (None, "xla"):
        more = {**numbers, "preferred_element_type": _F32, "implementation": implementation}
        wgrad = lambda x, g, m=more: jax_splitk.conv_wgrad(x, g, rhs, *geometry, **m)  # noqa: E731
        yield f"wgrad-{implementation}", wgrad, _given((lhs, _BF16), ((2, 4, 3, 4), _BF16))
    for compute, one, other, out in (
        (_BF16, _F32, _F32, None),
        (_BF16, _BF16, _F32, _F32),
        (_F16, _F32, _BF16, None),
        (_F32, _BF16, _F16, _F32),
    ):
        types = {"compute_dtype": compute, "preferred_element_type": out}
        said = f"{compute}-of-{one}-{other}-to-{out}"
        conv = lambda x, w, t=types: jax_splitk.conv_general_dilated(x, w, *geometry, **numbers, **t)  # noqa: E731
        yield f"conv-{said}", conv, _given((lhs, one), (rhs, other))
        product = lambda a, b, t=types: jax_splitk.matmul(a, b, **t)  # noqa: E731
        yield f"matmul-{said}", product, _given(((3, 4), one), ((4, 5), other))
        yield f"matmul-batch-{said}", product, _given(((2, 3, 4), one), ((4, 5), other))
        wide = lambda a, b, bias, t=types: jax_splitk.matmul(a, b, bias=bias, **t)  # noqa: E731
        yield f"bias-of-columns-{said}", wide, _given(((2, 3, 4), one), ((4, 5), other), ((5,), _F16))
    for activation in _ACTIVATIONS:
        for bias in ((5,), (3, 1)):
            options = {"activation": activation}
            epilogue = lambda a, b, c, d, o=options: jax_splitk.matmul(a, b, bias=c, residual=d, **o)  # noqa: E731
            operands = _given(((3, 4), _BF16), ((4, 5), _BF16), (bias, _F32), ((3, 5), _F16))
            yield f"{activation}-{len(bias)}", epilogue, operands
    yield "matmul-left-to-lax", _of_integers, _given(((3, 4), _F32), ((4, 5), _F32))
    for qtype in ("int4", "uint4", "int8", "float8_e4m3fn", "float4_e2m1fn", "nf4"):
        for x in (_BF16, _F32):
            yield f"quantized-{qtype}-{x}", functools.partial(_quantized, qtype=qtype), _given(((3, 64), x))


def _of_integers(a: jax.Array, b: jax.Array) -> jax.Array:
    return jax_splitk.matmul(a.astype(jnp.int8), b.astype(jnp.int8)).astype(a.dtype)


def _quantized(x: jax.Array, qtype: str) -> jax.Array:
    """The products with a weight in both forms, QuantizedArray and PackedWeight."""
    weight = jnp.asarray(generator(72).normal(size=(64, 8)), jnp.float32)
    packed = jax_splitk.prepack(jax_splitk.quantize(weight, qtype, group_size=32, symmetric=qtype != "uint4"))
    return jax_splitk.quantized_matmul(x, packed) + jax_splitk.quantized_matmul(x, jax_splitk.unpack(packed))


CASES = {name: (function, operands) for name, function, operands in _cases()}


def _everything(function: Callable[..., jax.Array], operands: tuple[jax.Array, ...]) -> Any:
    out, back = jax.vjp(function, *operands)
    tangent = jax.jvp(function, operands, operands)[1]
    mapped = jax.vmap(function)(*(x[None] for x in operands))
    return out, back(out), tangent, mapped


@pytest.mark.parametrize("name", thinned(CASES, 4))
def test_results_are_those_of_the_default_modes(name: str) -> None:
    function, given = CASES[name]
    operands = tuple(map(jnp.asarray, given))

    @jax.jit
    def both() -> Any:
        expected = _everything(function, operands)
        with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
            return _everything(function, operands), expected

    found, expected = both()
    for ours, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == wanted.dtype
        np.testing.assert_array_equal(ours, wanted)
