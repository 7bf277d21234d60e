"""A newcomer's mistakes: each message says what to do. Mistakes of installation (a checkout that is not built, an old
jax, an old Python) are in tests/runtime/test_requirements.py."""

import functools
import inspect
import re
import typing
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import jax_splitk
from jax_splitk.problems.dot_general import ACTIVATIONS, Activation
from jax_splitk.problems.epilogue import GATED
from jax_splitk.quantized.formats import FORMATS, QType
from jax_splitk.tuning.options import Implementation
from tests.problems import ones

NHWC = ("NHWC", "HWIO", "NHWC")
NCHW = ("NCHW", "OIHW", "NCHW")
X, W = ones((8, 28, 28, 32), jnp.bfloat16), ones((3, 3, 32, 64), jnp.bfloat16)
G = ones((8, 28, 28, 64), jnp.bfloat16)
KERNEL, ROWS = ones((256, 512), jnp.bfloat16), ones((8, 256), jnp.bfloat16)

IN_ORDER = "accepted: quantized_matmul(x, w), the activations x first, then the weight w"
AS_ARRAY = "used as an array; accepted: x @ w, jax_splitk.quantized_matmul, quantized_dot_general and quantized_einsum"
FITS_NHWC = f"these shapes fit dimension_numbers={NHWC} (None means {NCHW})"


@functools.cache
def quantized() -> jax_splitk.QuantizedArray:
    return jax_splitk.quantize(KERNEL, "int4", group_size=64)


@functools.cache
def packed() -> jax_splitk.PackedWeight:
    return jax_splitk.prepack(quantized())


def conv(x: Any = X, w: Any = W, numbers: Any = NHWC, **arguments: Any) -> jax.Array:
    return jax_splitk.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers, **arguments)


MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "arguments the other way round": (
        lambda: jax_splitk.quantized_matmul(packed(), ROWS),  # pyright: ignore[reportArgumentType]
        TypeError,
        IN_ORDER,
    ),
    "the same, of a weight that is not packed": (
        lambda: jax_splitk.quantized_matmul(quantized(), ROWS),  # pyright: ignore[reportArgumentType]
        TypeError,
        f"x of type QuantizedArray and w of type ArrayImpl; {IN_ORDER}",
    ),
    "a weight that is not quantized": (
        lambda: jax_splitk.quantized_matmul(ROWS, KERNEL),
        TypeError,
        "w of type ArrayImpl; accepted: QuantizedArray, PackedWeight, a qwix QArray, an AQT QTensor; to pack an array "
        "once: jax_splitk.prepack(jax_splitk.quantize(w, 'int4', group_size=64))",
    ),
    "packing what is not quantized": (
        lambda: jax_splitk.prepack(KERNEL),
        TypeError,
        "jax_splitk.quantize makes a QuantizedArray of an array",
    ),
    "a packed weight as an array": (lambda: jnp.asarray(packed()), TypeError, f"PackedWeight {AS_ARRAY}"),
    "a quantized array in NumPy": (lambda: np.asarray(quantized()), TypeError, f"QuantizedArray {AS_ARRAY}"),
    "packed @ x": (lambda: packed() @ ROWS, TypeError, "PackedWeight @ ArrayImpl, w of shape (256, 512) that c"),
    "a kernel of three dimensions": (
        lambda: jax_splitk.quantize(jnp.ones((64, 4, 16)), "int4", group_size=64),
        ValueError,
        "axis=None with w of rank 3; accepted: the axis or axes that a product contracts, such as 0 or (0, 1)",
    ),
    "quantized along the features": (
        lambda: jax_splitk.prepack(jax_splitk.quantize(KERNEL, "int4", group_size=64, axis=1)),
        ValueError,
        "groups of 1 along axis 0 of a weight of shape (256, 512), scales of shape (256, 8); accepted: multiples of "
        "16, or 256; quantize along the axis that a product x @ w contracts",
    ),
    "a format that there is not": (
        lambda: jax_splitk.quantize(KERNEL, "fp4", group_size=64),  # pyright: ignore[reportArgumentType]
        TypeError,
        "dtype='fp4'; accepted: int4, uint4, int8, float8_e4m3fn, float4_e2m1fn, nf4",
    ),
    "NHWC arrays without dimension_numbers": (lambda: conv(numbers=None), ValueError, FITS_NHWC),
    "the same, for a weight gradient": (
        lambda: jax_splitk.conv_wgrad(X, G, W.shape, (1, 1), "SAME"),
        ValueError,
        FITS_NHWC,
    ),
    "the same, for an input gradient": (
        lambda: jax_splitk.conv_dgrad(G, W, X.shape, (1, 1), "SAME"),
        ValueError,
        FITS_NHWC,
    ),
    "NCHW arrays with NHWC's numbers": (
        lambda: conv(jnp.ones((8, 32, 28, 28)), jnp.ones((64, 32, 3, 3))),
        ValueError,
        f"; these shapes fit dimension_numbers={NCHW}",
    ),
    "two dtypes": (
        lambda: conv(w=W.astype(jnp.float32)),
        TypeError,
        "lhs is bfloat16 and rhs is float32; accepted: one of bfloat16, float16, float32, float64 for both, or "
        "compute_dtype=",
    ),
    "a config that is a dictionary": (
        lambda: conv(config={}),
        TypeError,
        "config={} of type dict; accepted: None (leave it out: the fastest is chosen), or the Config of a family that "
        "computes conv_wgrad, e.g. jax_splitk.kernels.",
    ),
    "an implementation that there is not": (
        lambda: conv(implementation="cudnn"),
        ValueError,
        "implementation='cudnn'; accepted: None, 'cutlass', 'host', 'xla'",
    ),
    "an activation that there is not": (
        lambda: jax_splitk.matmul(ROWS, KERNEL, activation="swish"),  # pyright: ignore[reportArgumentType]
        ValueError,
        "activation='swish'; accepted: None, 'relu', 'gelu', 'gelu_exact', 'silu'",
    ),
    "intercept with a dtype by place": (
        lambda: jax_splitk.intercept(jnp.bfloat16),  # pyright: ignore[reportArgumentType, reportCallIssue]
        TypeError,
        "intercept(<class 'jax.numpy.bfloat16'>); accepted: a function, or compute_dtype= by its name",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_with_the_way_out(mistake: str) -> None:
    call, error, message = MISTAKES[mistake]
    with pytest.raises(error, match=re.escape(message)) as raised:
        call()
    assert len(str(raised.value)) < 400, "an error is read, not searched"


def test_there_is_no_hint_of_a_layout_that_does_not_fit_either() -> None:
    with pytest.raises(ValueError, match="feature dimension size") as raised:
        conv(w=jnp.ones((3, 3, 5, 64), jnp.bfloat16))
    assert "these shapes fit" not in str(raised.value)
    with pytest.raises(ValueError, match=r"g has shape .*; the convolution's output has") as raised:
        jax_splitk.conv_wgrad(X, G[:, 1:], W.shape, (1, 1), "SAME", dimension_numbers=NHWC)
    assert "these shapes fit" not in str(raised.value)


def test_the_repr_of_a_weight_is_one_line() -> None:
    assert repr(quantized()) == (
        "QuantizedArray(qvalue=int4[256,512], scale=bfloat16[4,512], zero_point=None, qtype='int4')"
    )
    assert repr(packed()) == (
        "PackedWeight(shape=(256, 512), qtype='int4', group_size=64, words=uint32[8,4,512], scale=bfloat16[8,4,64], "
        "zero_point=None)"
    )
    for weight in (quantized(), packed()):
        for leaves in (object(), None, jax.sharding.PartitionSpec("x"), 3):  # as jax.tree.map may put there
            assert "\n" not in repr(jax.tree.map(lambda _, leaves=leaves: leaves, weight))
    assert "scale=float32[2,4,512]" in repr(jax.vmap(lambda w: jax_splitk.quantize(w, "int8", group_size=64))(
        jnp.ones((2, 256, 512))))  # fmt: skip


def test_intercept_needs_no_parentheses() -> None:
    @jax_splitk.intercept
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        """Says what it is."""
        return jnp.sum(jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC))

    w, x = jnp.ones((3, 3, 4, 8)), jnp.ones((2, 8, 8, 4))
    assert (loss.__name__, loss.__doc__) == ("loss", "Says what it is.")
    assert [d.problem.op for d in jax_splitk.explain(jax.grad(loss), w, x).decisions if d.problem] == ["conv_wgrad"]
    np.testing.assert_array_equal(jax.grad(loss)(w, x)[1, 1], np.full((4, 8), 2 * 8 * 8))


def literals(hint: Any) -> set[Any]:
    """The strings that a type hint allows."""
    return {value for part in typing.get_args(hint) for value in (literals(part) or {part}) if isinstance(value, str)}


def test_strings_of_public_functions_are_literals() -> None:
    """A type checker knows the words that each function accepts."""
    accepted = {
        "implementation": set(typing.get_args(Implementation)),
        "activation": set(typing.get_args(Activation)),
    }
    assert accepted["activation"] == set(ACTIVATIONS)
    found = set()
    for name in jax_splitk.__all__:
        function = getattr(jax_splitk, name)
        if not inspect.isfunction(function):
            continue
        for argument, hint in typing.get_type_hints(function).items():
            if argument in accepted:
                gated = set(GATED) if argument == "activation" and name in ("quantized_matmul", "ragged_dot") else set()
                assert literals(hint) == accepted[argument] | gated, (name, argument)
                found.add(name)
    assert found >= {"conv_wgrad", "conv_fprop", "conv_dgrad", "conv_general_dilated", "dot_general", "matmul"}
    assert found >= {"quantized_matmul", "options", "intercept"}
    assert literals(typing.get_type_hints(jax_splitk.quantize)["dtype"]) == set(FORMATS) == set(typing.get_args(QType))
