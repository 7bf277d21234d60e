"""Products with quantized weights whose activations are normalized first: values, gradients, transformations, what XLA
computes, errors."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import jax_splitk
from jax_splitk import PermutedWeight, dequantize, join_gate_up, prepack, quantize, quantized_matmul
from jax_splitk.kernels.quantized import stream
from jax_splitk.ops.routing import served
from jax_splitk.problems.operations import OPERATIONS
from jax_splitk.problems.quantized_epilogue import QuantizedEpilogueProblem
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import products
from tests.problems import SEED, differentiated, generator, on_device
from tests.products import Case, error

K, FEATURES, EPSILON = 96, 80, 1e-5


def normal(*shape: int, dtype: str = "float32", seed: int = 0) -> jax.Array:
    return on_device(generator(470 + seed).standard_normal(shape), dtype)


def weight(features: int = FEATURES, seed: int = 5) -> Any:
    return quantize(normal(K, features, seed=seed) / K**0.5, "int4", group_size=32)


def rms_norm(x: Any, scale: Any = None) -> jax.Array:
    """As models write it, in float32."""
    x = x.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPSILON)
    return x if scale is None else x * scale.astype(jnp.float32)


def near(one: Any, other: Any, bound: float = 0.02) -> None:
    assert one.shape == other.shape
    assert error(one, np.asarray(other).astype(np.float64)) < bound


@pytest.mark.parametrize("case", [
    Case(5, 128, 80, norm="one", epsilon=EPSILON), Case(5, 64, 70, norm="float32", residual="bfloat16"),
    Case(7, 64, 48, norm="bfloat16", activation="swiglu", bias="float32", epsilon=1e-6),
    Case(3, 70, 40, "int8", 70, norm="float16", x_dtype="float16", out_dtype="float16"),
], ids=str)  # fmt: skip
def test_the_reference_is_float64s(case: Case) -> None:
    """The reference, which XLA runs and kernels are checked against, agrees with float64."""
    p: Any = case.problem
    p.validate()
    operation = OPERATIONS[p.op]
    operands = operation.random_operands(p, SEED)
    own, end = len(p.product.operand_types), len(operands) - len(p.norm_operands)
    plain = dataclasses.replace(p.with_x_as_it_is, x_dtype="bfloat16", out_dtype="float32")
    x = products.normalized(case, operands[0], *operands[end:])
    rounded = on_device(x, p.x_dtype).astype(jnp.float32)
    near(rounded, x, 2**-8)
    expected = OPERATIONS[plain.op].reference(plain, rounded.astype(p.x_dtype), *operands[1:own], *operands[own:end])
    near(operation.reference(p, *operands), expected, 2**-7)
    assert "x normalized" in str(p)
    assert p.bytes_moved == p.with_x_as_it_is.bytes_moved + sum(z.nbytes for z in operands[end:])


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("activation", [None, "silu", "swiglu"])
def test_values_and_gradients_are_plain_jaxs(activation: Any, scaled: bool) -> None:
    """Gradients of x, the scale and the residual, in reverse and forward mode, and with remat."""
    gated = activation == "swiglu"
    qs = [weight(seed=i) for i in range(1 + gated)]
    w = join_gate_up(*qs) if gated else prepack(qs[0])
    x, residual = normal(3, 4, K, dtype="bfloat16") * 3, normal(3, 4, FEATURES, dtype="bfloat16")
    scale = normal(K, dtype="bfloat16", seed=1)

    def ours(x: Any, residual: Any, scale: Any) -> jax.Array:
        given = {"norm_scale": scale} if scaled else {}
        return quantized_matmul(x, w, activation=activation, residual=residual, norm_epsilon=EPSILON, **given)

    def theirs(x: Any, residual: Any, scale: Any) -> jax.Array:
        y = rms_norm(x, scale if scaled else None)
        sums = [jnp.matmul(y, dequantize(q).astype(jnp.float32), precision="highest") for q in qs]
        out = jax.nn.silu(sums[0]) * (sums[1] if gated else 1) if activation else sums[0]
        return (out + residual.astype(jnp.float32)).astype(x.dtype)

    operands = (x, residual, scale)
    cotangent = normal(3, 4, FEATURES, dtype="bfloat16", seed=9)
    (out, got), (wanted, expected), (_, again) = (
        differentiated(f, operands, cotangent) for f in (ours, theirs, jax.checkpoint(ours))
    )
    near(out, wanted)
    near(ours(*operands), wanted)
    for one, other, third in list(zip(got, expected, again, strict=True))[: 2 + scaled]:
        assert one.dtype == other.dtype
        near(one, other)
        near(third, other)
    moved = tuple(normal(*z.shape, dtype=z.dtype.name, seed=20 + i) for i, z in enumerate(operands))
    near(*(jax.jit(lambda a, b, f=f: jax.jvp(f, a, b)[1])(operands, moved) for f in (ours, theirs)))


def test_a_residual_stays_in_the_product_under_differentiation() -> None:
    w, x, residual = prepack(weight()), normal(4, K, dtype="bfloat16"), normal(4, FEATURES, dtype="bfloat16")
    loss = lambda x: jnp.sum(quantized_matmul(x, w, residual=residual, norm_epsilon=EPSILON).astype(jnp.float32))  # noqa: E731
    text = str(jax.make_jaxpr(jax.grad(loss))(x))
    assert "residual=True" in text and "norm_epsilon" not in text


def test_vmap_of_every_operand() -> None:
    w, x, scale = prepack(weight()), normal(2, 4, K, dtype="bfloat16"), normal(2, K, dtype="bfloat16", seed=1)

    def ours(x: Any, w: Any, scale: Any) -> jax.Array:
        return quantized_matmul(x, w, residual=x[..., :FEATURES], norm_epsilon=EPSILON, norm_scale=scale)

    stack = jax.tree.map(lambda z: jax.device_put(np.stack([z, z])), w)
    for axes in [(0, None, None), (None, None, 0), (0, None, 0), (0, 0, None), (0, 0, 0)]:
        given = (x if axes[0] == 0 else x[0], w if axes[1] is None else stack, scale if axes[2] == 0 else scale[0])
        found = jax.jit(jax.vmap(ours, axes))(*given)
        for i in range(2):
            near(found[i], ours(x[i * (axes[0] == 0)], w, scale[i * (axes[2] == 0)]))


def test_a_stack_of_weights() -> None:
    qs = jax.vmap(lambda x: quantize(x, "int4", group_size=32))(normal(3, K, FEATURES))
    stack = prepack(qs, stack=1, axis=1)
    x, scale = normal(3, 4, K, dtype="bfloat16"), normal(3, K, seed=1)
    whole = quantized_matmul(x, stack, norm_epsilon=EPSILON, norm_scale=scale)
    one = [quantized_matmul(x[i], stack[i], norm_epsilon=EPSILON, norm_scale=scale[i]) for i in range(3)]
    near(whole, jnp.stack(one))
    near(quantized_matmul(x, stack, norm_epsilon=EPSILON, norm_scale=scale[0])[0], one[0])


def test_other_weights_and_dtypes() -> None:
    """Weights that are not packed, padded or permuted; x of other dtypes."""
    q, x, scale = weight(), normal(4, K, dtype="bfloat16"), normal(K, seed=1)
    given: dict[str, Any] = {"norm_epsilon": EPSILON, "norm_scale": scale}
    wanted = rms_norm(x, scale) @ dequantize(q).astype(jnp.float32)
    order = jax.device_put(generator(479).permutation(K).astype(np.int32))
    moved = dataclasses.replace(q, qvalue=q.qvalue[order], scale=q.scale)
    in_order = rms_norm(x, scale)[:, order] @ dequantize(moved).astype(jnp.float32)
    near(quantized_matmul(x, q, **given), wanted)
    near(quantized_matmul(x, prepack(q), **given), wanted)
    near(quantized_matmul(x, prepack(q, shards=(4, 4)), bias=jnp.zeros(FEATURES), **given), wanted)
    near(quantized_matmul(x, PermutedWeight(prepack(moved), order), **given), in_order)
    near(quantized_matmul(x.astype(jnp.float16), prepack(q), **given), wanted)
    assert quantized_matmul(x.astype(jnp.float32), prepack(q), **given).dtype == jnp.float32
    assert quantized_matmul(x[:0], prepack(q), **given).shape == (0, FEATURES)


def problem(**changes: Any) -> QuantizedEpilogueProblem:
    case = Case(8, 4096, 6144, norm="bfloat16", epsilon=EPSILON)
    return dataclasses.replace(case.problem, **changes)  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize(("changes", "said"), [
    ({}, ""), ({"activation": "silu"}, ""), ({"norm_scale_dtype": "none"}, ""),
    ({"rows": 33}, "XLA normalizes x"), ({"norm_scale_dtype": "float32"}, "XLA normalizes x"),
    ({"x_dtype": "float16", "out_dtype": "float16"}, "XLA normalizes x"),
    ({"rows": 33, "activation": "silu"}, "XLA normalizes x"),
], ids=str)  # fmt: skip
def test_who_normalizes_on_a_gpu(changes: dict[str, Any], said: str) -> None:
    p = problem(**changes)
    found, around = served(p, "cuda")
    assert around == said
    plain = p.with_x_as_it_is if p.epilogue else p.product
    assert found == (plain if said else p)


def test_the_widest_tile() -> None:
    """A tile of 64 rows has no room for its sums of squares."""
    config = stream.FAMILY.candidates(problem(rows=32), DEFAULT_CUDA)[0]
    wide = dataclasses.replace(config, tile_n=64)
    assert stream.FAMILY.config_refusal(problem(rows=32), wide) == "tile_n 64 with normalized x; accepted: at most 32"
    assert wide in stream.FAMILY.neighbours(problem(rows=32), config, DEFAULT_CUDA)


def test_who_normalizes_on_a_cpu() -> None:
    w, x = prepack(weight()), normal(4, K, dtype="bfloat16")
    found = jax_splitk.explain(lambda x: quantized_matmul(x, w, activation="silu", norm_epsilon=EPSILON), x)
    assert "XLA normalizes x, XLA computes the epilogue (silu)" in found.decisions[0].because


@pytest.mark.parametrize(("given", "error", "message"), [
    ({"norm_scale": np.ones(K, np.float32)}, ValueError, "norm_scale without norm_epsilon"),
    ({"norm_epsilon": -1.0}, ValueError, r"norm_epsilon=-1.0; accepted: None, a finite number of at least 0"),
    ({"norm_epsilon": np.inf}, ValueError, "norm_epsilon=inf"), ({"norm_epsilon": "1"}, TypeError, "norm_epsilon='1'"),
    ({"norm_epsilon": 0, "norm_scale": np.ones(3, np.float32)}, ValueError, r"norm_scale of shape \(3,\); .* \(96,\)"),
    ({"norm_epsilon": 0, "norm_scale": np.ones(K, int)}, TypeError, "norm_scale of dtype int"),
])  # fmt: skip
def test_refusals(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        quantized_matmul(normal(4, K, dtype="bfloat16"), prepack(weight()), **given)


@pytest.mark.parametrize(("changes", "message"), [
    ({"norm_epsilon": "-1"}, "norm_epsilon='-1'"), ({"norm_epsilon": 1e-5}, "norm_epsilon=1e-05"),
    ({"norm_epsilon": "none"}, "norm_scale_dtype='bfloat16' without norm_epsilon"),
    ({"norm_scale_dtype": "int8"}, "norm_scale_dtype='int8'"),
])  # fmt: skip
def test_problems_from_files_are_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        problem(**changes).validate()
