"""`ragged_dot` of quantized experts with a bias of each expert and an activation: values, gradients, transformations,
decisions, several devices, errors, and the layers of mixtures of experts."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax import export, lax
from jax import numpy as jnp

import jax_splitk
from jax_splitk import JoinedWeight, join_gate_up, ragged_dot
from jax_splitk.cli.defaults import with_defaults
from jax_splitk.kernels.cpu.experts import Config
from jax_splitk.problems import quantized_ragged_reference as reference
from jax_splitk.problems.operations import OPERATIONS
from jax_splitk.problems.quantized_ragged_epilogue import QuantizedRaggedEpilogueProblem
from jax_splitk.quantized import PackedWeight, QuantizedArray, dequantize, prepack, quantize
from jax_splitk.runtime import compiler
from jax_splitk.runtime.plan import LAUNCH_TARGET
from jax_splitk.runtime.target import DEFAULT_CUDA
from jax_splitk.tuning import buckets, key
from tests import experts, products, ragged_dots
from tests.ops.test_partitioning import KINDS, ONE_SUM, compiled, partitioned
from tests.problems import generator, on_device, together
from tests.products import Case, error

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="these are the CPU's paths")

M, K, N, GROUPS = 24, 64, 48, 4
SIZES = np.array([3, 0, 13, 1], np.int32)  # seven rows are in no group
PLAIN = {"relu": jax.nn.relu, "silu": jax.nn.silu, "gelu": jax.nn.gelu}


def stack(seed: int = 0, n: int = N, groups: int = GROUPS) -> QuantizedArray:
    values = on_device(generator(490 + seed).standard_normal((groups, K, n)), jnp.float32) / 8
    return quantize(values, "int4", group_size=32, axis=1)


def packed(q: QuantizedArray) -> PackedWeight:
    return prepack(q, stack=1)


def joined() -> JoinedWeight:
    return join_gate_up(packed(stack()), packed(stack(1)))


def normal(*shape: int, dtype: Any = "float32", seed: int = 0) -> jax.Array:
    return on_device(generator(495 + seed).standard_normal(shape), dtype)


def in_float64(case: Case, x: Any, weights: Any, bias: Any, rows: list[slice]) -> np.ndarray:
    """The result, from [groups, k, n] weights in the order of the kernels and their biases."""
    columns = case.features // 2 if case.activation in products.GATED else case.features
    out = np.zeros((len(x), columns))
    for i, of in enumerate(rows):
        if of.start == of.stop:
            continue
        each = None if bias is None else np.asarray(bias[i], np.float64)
        sums = np.asarray(x[of], np.float64) @ np.asarray(weights[i], np.float64)
        out[of] = products.with_epilogue(case, sums, each)
    return out


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("groups", "case", "total"), [
    (3, Case(20, 64, 40, activation="silu", bias="bfloat16"), 5),
    (4, Case(20, 64, 48, "float4_e2m1fn", 32, None, "float8_e8m0fnu", activation="swigluoai", bias="float32"), 0),
    (2, Case(20, 64, 32, "nf4", 64, x_dtype="float16", out_dtype="float16", activation="geglu"), 0),
], ids=str)  # fmt: skip
def test_the_references_are_float64s(groups: int, case: Case, total: int) -> None:
    """What XLA runs, and what kernels are checked against: for groups of every distribution."""
    p = experts.problem(groups, case, total)
    operation, wide = OPERATIONS[p.op], dataclasses.replace(p, out_dtype="float32")
    assert operation.check is not None
    functions = [functools.partial(f, each) for f, each in (
        (operation.reference, wide), (operation.check, wide), (operation.reference, p),
    )]  # fmt: skip
    results = jax.jit(lambda *operands: [function(*operands) for function in functions])
    for seed in range(operation.kinds):
        operands = operation.random_operands(p, seed)
        assert [(x.shape, x.dtype.name) for x in operands] == list(p.operand_types)
        layout, x, leaves, rest = reference.parts(p.alone, *operands[: len(p.alone.operand_types)])  # pyright: ignore
        weights = jax.jit(functools.partial(reference.dequantized, layout))(leaves)
        rows = ragged_dots.group_rows(p.m, np.asarray(rest[0]), int(rest[1][0]) if total else 0, groups)
        exact = in_float64(case, x, weights, operands[-1] if case.bias != "none" else None, rows)
        found, blocks, rounded = results(*operands)
        assert found.shape == p.out_shape == exact.shape
        for out, limit in ((found, 1e-5), (blocks, 1e-5), (rounded, 4 * 2**-9)):  # all rows may be of other groups
            assert np.linalg.norm(np.asarray(out, np.float64) - exact) <= limit * np.linalg.norm(exact)


@pytest.mark.parametrize("options", [{}, {"implementation": "xla"}, {"config": Config(1, 24)}], ids=str)
@pytest.mark.parametrize(("groups", "case", "total"), [
    (4, Case(30, 128, 72, bias="float32", activation="relu"), 0),
    (4, Case(30, 128, 48, bias="bfloat16", activation="swiglu"), 6),
    (70, Case(90, 64, 48, bias="bfloat16", activation="swigluoai"), 0),
], ids=str)  # fmt: skip
def test_exact_on_integers(groups: int, case: Case, total: int, options: dict[str, Any]) -> None:
    """Rows of no group, and scales and biases of experts without rows, are NaN: but XLA multiplies with all scales."""
    p = experts.problem(groups, case, total)
    operands, exact = experts.exact(p, 5, poison=options != {"implementation": "xla"})
    x, words, scale, sizes, *offset, bias = map(jnp.asarray, operands)
    w = dataclasses.replace(packed(stack(n=p.n, groups=groups)), words=words, scale=scale, dims=(p.k, p.n),
                            group_size=p.group_size)  # fmt: skip
    given: Any = JoinedWeight(w) if case.activation in products.GATED else w
    more = {"group_offset": offset[0]} if offset else {}
    out = ragged_dot(x, given, sizes, bias=bias, activation=case.activation, **more, **options)
    np.testing.assert_array_equal(out, exact)


def test_a_bias_for_all_experts_and_padded_weights() -> None:
    """A bias without groups is that of each. With tiles of padding in n XLA computes the epilogue."""
    q, x, bias = stack(), normal(M, K, dtype="bfloat16"), normal(GROUPS, N)
    same = jnp.broadcast_to(bias[0], bias.shape)
    one, all_ = (ragged_dot(x, packed(q), SIZES, bias=b, activation="gelu") for b in (bias[0], same))
    np.testing.assert_array_equal(one, all_)
    padded = prepack(q, stack=1, shards=(1, 4))
    found, wanted = (ragged_dot(x, w, SIZES, bias=bias, activation="gelu") for w in (padded, packed(q)))
    assert error(found, np.asarray(wanted, np.float64)) < 2**-7


# ---- derivatives -----------------------------------------------------------------------------------------------------

MEMBER = np.repeat(np.eye(GROUPS + 1, GROUPS, dtype=np.float32), np.append(SIZES, M - SIZES.sum()), axis=0)


def test_gradients() -> None:
    """Gradients of rows, scales and the bias of gate and up are those of the same in plain lax."""
    gate, up = stack(), stack(1)
    given = (normal(M, K), gate.scale, normal(GROUPS, 2, N, seed=1))

    def ours(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
        w = join_gate_up(packed(dataclasses.replace(gate, scale=scale)), packed(up))
        return ragged_dot(x, w, SIZES, bias=bias, activation="swigluoai")

    def plain(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
        weights = (gate.qvalue.astype(jnp.float32) * jnp.repeat(scale, 32, 1), dequantize(up))
        a, b = (
            jnp.einsum("mg,mk,gkn->mn", MEMBER, x, w, precision="highest") + MEMBER @ bias[:, i]
            for i, w in enumerate(weights)
        )
        return jnp.minimum(a, 7) * jax.nn.sigmoid(1.702 * jnp.minimum(a, 7)) * (jnp.clip(b, -7, 7) + 1)

    factors = generator(499).standard_normal((M, N))
    loss = lambda f, *a: jnp.sum(jnp.sin(f(*a)) * factors)  # noqa: E731
    found, wanted = together([jax.grad(functools.partial(loss, f), (0, 1, 2)) for f in (ours, plain)], *given)
    for one, other in zip(found, wanted, strict=True):
        assert error(one, np.asarray(other, np.float64)) < 1e-4


def test_a_bias_stays_in_the_kernel_and_its_gradient_has_no_scatter() -> None:
    """Its gradient is a product, and nothing in rows of no group reaches it."""
    w, x, bias = packed(stack()), normal(M, K), normal(GROUPS, N)
    g = normal(M, N, seed=3).at[17:].set(jnp.nan)
    pulled = lambda x, bias: jax.vjp(lambda x, b: ragged_dot(x, w, SIZES, bias=b), x, bias)[1](g)  # noqa: E731
    text = str(jax.make_jaxpr(pulled)(x, bias))
    assert "quantized_ragged_dot_epilogue[" in text and "scatter" not in text
    dx, db = jax.jit(pulled)(x, bias)
    assert not np.isnan(dx).any()
    np.testing.assert_allclose(db, MEMBER.T[:, :17] @ g[:17], rtol=1e-5, atol=1e-5)


# ---- transformations -------------------------------------------------------------------------------------------------


def test_vmap_and_scan() -> None:
    """Mapped rows are one product of more rows; layers are scanned."""
    w, many, bias = joined(), normal(3, M, K, dtype="bfloat16"), normal(GROUPS, 2, N)
    layer = lambda x: ragged_dot(x, w, SIZES, bias=bias, activation="swiglu")  # noqa: E731
    assert str(jax.make_jaxpr(jax.vmap(layer))(many)).count("quantized_ragged_dot_epilogue[") == 1
    np.testing.assert_array_equal(jax.vmap(layer)(many), jnp.stack([layer(x) for x in many]))
    biases = jnp.stack([bias, -bias])
    found = jax.vmap(lambda b: ragged_dot(many[0], w, SIZES, bias=b, activation="swiglu"))(biases)
    np.testing.assert_array_equal(found[0], layer(many[0]))
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), w)
    _, out = lax.scan(lambda x, w: (x, ragged_dot(x, w[0], SIZES, bias=w[1], activation="swiglu")), many[0],
                      (stacked, biases))  # fmt: skip
    np.testing.assert_array_equal(out, found)


def calls(function: Any, *args: Any) -> int:
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text().count(f"@{LAUNCH_TARGET}")


def test_hopper_runs_one_call_and_exports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "compile_source", lambda source: compiler.Compiled(b"machine code", ""))
    monkeypatch.setenv("JAX_SPLITK_COMPILE_AHEAD", "off")
    w, x, bias = joined(), normal(M, K, dtype="bfloat16"), normal(GROUPS, 2, N)
    f = lambda x, bias: ragged_dot(x, w, SIZES, bias=bias, activation="swigluoai")  # noqa: E731
    assert calls(f, x, bias) == 1
    (decision,) = jax_splitk.explain(f, x, bias, platform="cuda").decisions
    assert (decision.implementation, decision.problem.op) == ("cutlass", "quantized_ragged_dot_epilogue")
    exported = export.export(
        jax.jit(f), platforms=["cpu", "cuda"], disabled_checks=jax_splitk.EXPORT_CHECKS
    )(x, bias)  # fmt: skip
    again = export.deserialize(exported.serialize())
    assert f"@{LAUNCH_TARGET}" in again.mlir_module()
    np.testing.assert_array_equal(again.call(x, bias), jax.jit(f)(x, bias))
    assert f(x[:0], bias).shape == (0, N)


# ---- decisions -------------------------------------------------------------------------------------------------------


def problem(**changes: Any) -> QuantizedRaggedEpilogueProblem:
    case = Case(64, 2880, 5760, "float4_e2m1fn", 32, None, "float8_e8m0fnu", bias="bfloat16", activation="swigluoai")
    made: Any = experts.problem(32, case)
    return dataclasses.replace(made, **changes)


def test_keys_and_words_have_the_epilogue() -> None:
    p = problem()
    assert p.brief == (
        "quantized_ragged_dot_epilogue 64 x 2880 x 5760, 32 groups, float4_e2m1fn by 32, bf16, bias in bfloat16, "
        "swigluoai"
    )
    data = key.problem_as_dict(p)
    assert key.problem_from_dict(data.pop("op"), data) == p
    assert key.key_for(p, DEFAULT_CUDA).digest != key.key_for(problem(activation="geglu"), DEFAULT_CUDA).digest
    assert "bias_dtype" not in key.key_for(p.alone, DEFAULT_CUDA).as_dict()["problem"]  # old decisions hold
    assert [k.problem for k in buckets.representatives(key.key_for(p, DEFAULT_CUDA))] == [p.alone]
    given = {"groups": 4, "m": 8, "k": 64, "n": 16, "qtype": "nf4", "group_size": 16, "activation": "swiglu"}
    made = key.problem_from_dict(p.op, with_defaults(p.op, given))
    assert (made.brief, made.out_shape) == (
        "quantized_ragged_dot_epilogue 8 x 64 x 16, 4 groups, nf4 by 16, bf16, swiglu", (8, 8)
    )  # fmt: skip
    less = 64 * 2880 * 2 - 32 * 2 * 2880 * 2  # half of the result, but a bias for each expert
    assert p.alone.bytes_moved - p.bytes_moved == less


def test_explain_says_that_xla_computes_the_epilogue_on_a_cpu() -> None:
    w, x = joined(), normal(M, K, dtype="bfloat16")
    found = jax_splitk.explain(lambda x: ragged_dot(x, w, SIZES, bias=normal(GROUPS, 2, N), activation="swiglu"), x)
    assert "XLA computes the epilogue (bias in float32, swiglu)" in found.decisions[0].because


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "message"), [
    ({"activation": "tanh"}, "activation='tanh'"), ({"bias_dtype": "int8"}, "bias_dtype='int8'"),
    ({"n": 72}, "n=72 with swigluoai; accepted: multiples of 16"),
])  # fmt: skip
def test_problems_from_files_are_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        problem(**changes).validate()


def test_errors() -> None:
    x, w, both, dense = normal(M, K, dtype="bfloat16"), packed(stack()), joined(), jnp.ones((GROUPS, K, N))
    product: Any = functools.partial(ragged_dot, x)
    for call, kind, message in (
        (lambda: product(both, SIZES), ValueError, "activation=None and rhs of type JoinedWeight; .* 'swiglu'"),
        (lambda: product(both, SIZES, activation="silu"), ValueError, "'silu' and rhs of type JoinedWeight"),
        (lambda: product(w, SIZES, activation="swiglu"), ValueError, "rhs of type PackedWeight; accepted: .*join_gate"),
        (lambda: product(w, SIZES, activation="tanh"), ValueError, "activation='tanh'; accepted: None, 'relu'"),
        (lambda: product(w, SIZES, bias=jnp.ones(3)), ValueError,
         r"bias of shape \(3,\); accepted: \(48,\) or \(4, 48\)"),
        (lambda: product(both, SIZES, bias=jnp.ones(48), activation="swiglu"), ValueError,
         r"accepted: \(2, 48\) or \(4, 2, 48\)"),
        (lambda: product(dense, SIZES, bias=jnp.ones(48)), TypeError,
         "bias with rhs of type ArrayImpl; accepted: bias=None, or a stack of quantized weights"),
        (lambda: product(dense, SIZES, activation="silu"), TypeError, "activation with rhs of type ArrayImpl"),
        (lambda: product(w, SIZES, bias=jnp.ones(48), implementation="cutlass"), NotImplementedError, "cuda, not cpu"),
    ):  # fmt: skip
        with pytest.raises(kind, match=message):
            call()


# ---- several devices -------------------------------------------------------------------------------------------------


@pytest.mark.skipif(jax.device_count() < 8, reason="needs several devices")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("x_spec", "w_spec", "local", "exchanged"), [
    (("data",), ("model",), "32x512x256 2 of 8 groups", ONE_SUM),
    ((), (None, "model"), "64x512x64 8 groups", {}),
    ((None, "model"), (None, None, "model"), "64x128x256 8 groups", ONE_SUM),
    (("data", "model"), (None, None, "model"), "32x128x256 8 groups", ONE_SUM),
    ((None, "model"), ("data", None, "model"), "64x128x256 4 of 8 groups", {"all-reduce": 1, "all-gather": 1}),
])  # fmt: skip
def test_divided_among_devices(kind: str, x_spec: Any, w_spec: Any, local: str, exchanged: Any) -> None:
    """Each device has its experts' biases, and its columns'. If k is divided, the epilogue is computed once, from the
    sum, with the biases of all experts."""
    values = on_device(generator(475).integers(-7, 8, (8, 512, 256)), jnp.float32)
    q = quantize(values, "int4", group_size=64, axis=1)
    w, x = packed(q), on_device(generator(476).integers(-2, 3, (64, 512)), jnp.bfloat16) / 64
    sizes, bias = np.array([3, 0, 20, 1, 9, 2, 17, 3], np.int32), normal(8, 2, 128)

    def layer(x: jax.Array, w: PackedWeight, sizes: jax.Array, bias: jax.Array) -> jax.Array:
        return ragged_dot(x, JoinedWeight(w), sizes, bias=bias, activation="swiglu", preferred_element_type="float32")

    expected = jax.jit(layer)(x, w, sizes, bias)
    with partitioned(kind) as put:
        spec = (*w_spec, None, None)[:2]
        placed = dataclasses.replace(w, words=put(w.words, *w_spec), scale=put(w.scale, *w_spec),
                                     guard=put(w.guard, *w_spec[:1]))  # fmt: skip
        out, found, (name,) = compiled(layer, put(x, *x_spec), placed, put(sizes), put(bias, spec[0], None, spec[1]))
    assert local in name
    assert found == exchanged
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)


# ---- layers ----------------------------------------------------------------------------------------------------------


def test_a_layer_of_gpt_oss_is_the_same_with_the_epilogues() -> None:
    """gate_up_proj as the checkpoint has it, gate and linear columns in turns, with its bias [experts, 2 * hidden]."""
    width, hidden = 64, 96
    rng = generator(480)
    draw = lambda *shape: on_device(rng.standard_normal(shape), jnp.bfloat16)  # noqa: E731

    def of_experts(k: int, n: int) -> PackedWeight:
        q = quantize(draw(GROUPS, k, n) / 8, "float4_e2m1fn", group_size=32, axis=1, scale_dtype="float8_e8m0fnu")
        return packed(q)

    weights = {"up": of_experts(width, 2 * hidden), "down": of_experts(hidden, width)}
    bias = {"up": draw(GROUPS, 2 * hidden), "down": draw(GROUPS, width)}
    x, of_row = draw(M, width), np.minimum(np.repeat(np.arange(GROUPS + 1), [*SIZES, M - SIZES.sum()]), GROUPS - 1)

    def apart(x: jax.Array) -> jax.Array:
        both = ragged_dot(x, weights["up"], SIZES, preferred_element_type="float32") + bias["up"][of_row]
        gate, linear = jnp.minimum(both[:, ::2], 7), jnp.clip(both[:, 1::2], -7, 7)
        inner = (gate * jax.nn.sigmoid(1.702 * gate) * (linear + 1)).astype(x.dtype)
        return ragged_dot(inner, weights["down"], SIZES) + bias["down"][of_row]

    joined, of_parts = (
        join_gate_up(weights["up"], order="interleaved"),
        bias["up"].reshape(GROUPS, -1, 2).swapaxes(1, 2),
    )

    def fused(x: jax.Array) -> jax.Array:
        inner = ragged_dot(x, joined, SIZES, bias=of_parts, activation="swigluoai")
        return ragged_dot(inner, weights["down"], SIZES, bias=bias["down"])

    inside = SIZES.sum()
    one, other = (jax.jit(f)(x) for f in (fused, apart))
    assert error(one[:inside], np.asarray(other[:inside], np.float64)) < 2**-7
    assert not np.asarray(one[inside:], np.float32).any()  # rows of no group have no bias
