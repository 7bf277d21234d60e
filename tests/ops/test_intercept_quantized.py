"""Functions of jax.numpy and jax.lax that take quantized weights inside of `intercept`."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp

import jax_splitk
from jax_splitk.quantized import dequantize, prepack, quantize, unpack
from tests.problems import on_device, seeded

NUMBERS = (((2,), (0,)), ((), ()))
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "einsum": lambda x, w: jnp.einsum("btk,kn->btn", x, w),
    "einsum, precision": lambda x, w: jnp.einsum("btk,kn->btn", x, w, precision="highest", preferred_element_type=None),
    "einsum, weight first": lambda x, w: jnp.einsum("kn,btk->btn", w, x),
    "dot": lambda x, w: jnp.dot(x, w),  # noqa: PLW0108 - replaced when it is called
    "matmul": lambda x, w: jnp.matmul(x, w),  # noqa: PLW0108
    "tensordot": lambda x, w: jnp.tensordot(x, w, 1),
    "tensordot, axes": lambda x, w: jnp.tensordot(x, w, axes=((-1,), (0,))),
    "dot_general": lambda x, w: lax.dot_general(x, w, NUMBERS),
    "dot_general, keywords": lambda x, w: lax.dot_general(x, w, dimension_numbers=NUMBERS, out_sharding=None),
}


@pytest.mark.parametrize("name", CALLS)
def test_products_take_quantized_weights(name: str) -> None:
    call = CALLS[name]
    with seeded(0) as rng:
        q = quantize(on_device(rng.standard_normal((64, 32)), jnp.float32), "int4", group_size=32)
        x = on_device(rng.standard_normal((2, 3, 64)), jnp.float32)
        expected = call(x, dequantize(q))
        for w in (prepack(q), q, jax_splitk.PermutedWeight(q, jnp.arange(64))):
            if isinstance(w, jax_splitk.PermutedWeight) and name.split(",", maxsplit=1)[0] not in ("dot", "matmul"):
                continue
            with jax_splitk.intercept():
                y = jax.jit(call)(x, w)
                plain = call(x, dequantize(q))
            np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
            np.testing.assert_array_equal(plain, expected)
            with pytest.raises(TypeError):  # outside, as before
                call(x, w)
        with jax_splitk.intercept():
            (decision,) = jax_splitk.explain(call, x.astype(jnp.bfloat16), prepack(q), platform="cuda").decisions
        assert decision.implementation == "cutlass"


def test_matmul_takes_a_stack_of_weights() -> None:
    with seeded(1) as rng:
        w = prepack(
            quantize(jnp.asarray(rng.standard_normal((3, 64, 32))), "int4", group_size=32, axis=1), axis=1, stack=1
        )
        x = on_device(rng.standard_normal((3, 2, 64)), jnp.float32)
        with jax_splitk.intercept():
            y = jnp.matmul(x, w)
        np.testing.assert_allclose(y, jnp.matmul(x, dequantize(unpack(w))), rtol=1e-4, atol=1e-4)


def test_numpy_is_put_back() -> None:
    before = {name: getattr(jnp, name) for name in ("einsum", "dot", "matmul", "tensordot")} | {"lax": lax.dot_general}
    with jax_splitk.intercept():
        assert jnp.einsum is not before["einsum"]
    after = {name: getattr(jnp, name) for name in ("einsum", "dot", "matmul", "tensordot")} | {"lax": lax.dot_general}
    assert all(after[name] is function for name, function in before.items())
