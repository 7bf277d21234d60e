"""Products of quantized weights with a bias, an activation and a residual, and weights of gate and up as one: values,
gradients, transformations, decisions, errors."""

import dataclasses
import functools
import pathlib
import pickle
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import export
from jax import numpy as jnp

import jax_splitk
from jax_splitk import JoinedWeight, QuantizedArray, dequantize, join_gate_up, prepack, quantize, quantized_matmul
from jax_splitk.kernels.cpu.quantized import Config
from jax_splitk.problems.operations import OPERATIONS
from jax_splitk.problems.quantized_epilogue import QuantizedEpilogueProblem
from jax_splitk.runtime.target import DEFAULT_CUDA
from jax_splitk.tuning import buckets, key
from jax_splitk.tuning.options import current
from jax_splitk.tuning.select import select
from tests import float64, products
from tests.exhaustive import thinned
from tests.problems import SEED, differentiated, generator, on_device, together
from tests.products import GATED, Case, error, exact_epilogue, exact_weight, integers, with_epilogue

PLAIN: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu, "gelu": jax.nn.gelu, "gelu_exact": lambda x: jax.nn.gelu(x, approximate=False),
    "silu": jax.nn.silu,
}  # fmt: skip
JAX: dict[str, Callable[..., jax.Array]] = {
    "swiglu": lambda gate, up: jax.nn.silu(gate) * up,
    "geglu": lambda gate, up: jax.nn.gelu(gate) * up,
    "swigluoai": lambda gate, up: (
        jnp.minimum(gate, 7) * jax.nn.sigmoid(1.702 * jnp.minimum(gate, 7)) * (jnp.clip(up, -7, 7) + 1)
    ),
}
WHOLE = {"bias": "float32", "residual": "bfloat16"}
K, FEATURES = 96, 80


def normal(*shape: int, dtype: str = "float32", seed: int = 0) -> jax.Array:
    return on_device(generator(430 + seed).standard_normal(shape), dtype)


def weight(features: int = FEATURES, seed: int = 5, qtype: Any = "int4", group: int = 32) -> QuantizedArray:
    return quantize(normal(K, features, seed=seed) / K**0.5, qtype, group_size=group)


def value(q: QuantizedArray) -> jax.Array:
    return dequantize(q).astype(jnp.float32)


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [
    Case(5, 128, 80, bias="float32"), Case(5, 64, 70, residual="bfloat16"),
    *(Case(7, 64, 40, activation=name, **WHOLE) for name in PLAIN),
    *(Case(7, 64, 48, activation=name, **WHOLE) for name in GATED),
    Case(3, 64, 48, "uint4", 32, "own", activation="swiglu", out_dtype="float32"),
    Case(3, 64, 48, "nf4", 64, activation="geglu", x_dtype="float16", out_dtype="float16", bias="float16"),
    Case(3, 64, 32, "float4_e2m1fn", 16, None, "float8_e4m3fn", channel=True, activation="swigluoai"),
], ids=str)  # fmt: skip
def test_the_reference_is_float64s(case: Case) -> None:
    """The reference, which XLA runs and kernels are checked against, agrees with float64."""
    problem = case.problem
    problem.validate()
    operation = OPERATIONS[problem.op]
    operands = operation.random_operands(problem, SEED)
    own = len(problem.operand_types) - len(problem.epilogue_operands)
    product = dataclasses.replace(problem.product, out_dtype="float32")
    one = np.eye(problem.k, dtype=np.float32)
    whole = dataclasses.replace(product, rows=problem.k, x_dtype="bfloat16")
    reference = jax.jit(functools.partial(OPERATIONS[product.op].reference, whole))
    w = np.asarray(reference(one.astype(jnp.bfloat16), *operands[1:own]), np.float64)
    sums = np.asarray(operands[0], np.float64) @ w
    named = dict(zip([n for n in ("bias", "residual") if getattr(case, n) != "none"], operands[own:], strict=True))
    exact = with_epilogue(case, sums, **{name: np.asarray(x, np.float64) for name, x in named.items()})
    both = (dataclasses.replace(problem, out_dtype="float32"), problem)
    wide, rounded = together([functools.partial(operation.reference, p) for p in both], *operands)
    assert wide.shape == problem.out_shape == exact.shape
    assert error(wide, exact) < 1e-5
    # XLA:CPU also rounds the operands of the last product or sum, since its result is rounded.
    roundings = 3 if case.activation in GATED else 2
    assert error(rounded, exact) < (roundings * 2**-9 + 1e-5 if problem.out_dtype != "float32" else 1e-5)
    assert problem.epilogue in str(problem)
    more = sum(x.nbytes for x in operands[own:])
    out = problem.product.out_shape[1] - problem.out_shape[1]
    assert problem.bytes_moved == problem.product.bytes_moved + more - out * problem.rows * jnp.dtype(
        problem.out_dtype
    ).itemsize  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"implementation": "xla"}, {"config": Config(1, 24)}], ids=str)
@pytest.mark.parametrize("case", [
    Case(6, 128, 72, bias="float32", activation="relu", residual="float32"),
    Case(6, 128, 48, activation="swiglu", **WHOLE), Case(6, 128, 48, activation="geglu", **WHOLE),
    Case(6, 128, 48, bias="bfloat16", activation="swigluoai"),
], ids=str)  # fmt: skip
def test_exact_on_integers(case: Case, options: dict[str, Any]) -> None:
    q, w = exact_weight(case, 11)
    x = integers(case, 2, 12)
    after, exact = exact_epilogue(case, x @ w, 13)
    given: dict[str, Any] = dict(
        zip([n for n in ("bias", "residual") if getattr(case, n) != "none"], after, strict=False)
    )
    packed = prepack(q)
    packed = JoinedWeight(packed) if case.activation in GATED else packed
    out = quantized_matmul(on_device(x, case.x_dtype), packed, activation=case.activation, **given, **options)
    np.testing.assert_array_equal(out, float64.rounded(exact, case.out_dtype))


# ---- gate and up as one ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("qtype", "group", "scale", "zero"), [
    ("int4", 32, "bfloat16", False), ("nf4", 96, "float32", False), ("int8", 16, "float16", False),
    ("uint4", 32, "bfloat16", True), ("float4_e2m1fn", 32, "float8_e8m0fnu", False),
])  # fmt: skip
def test_joined_weights_are_the_two(qtype: Any, group: int, scale: Any, zero: bool) -> None:
    """Values do not change, in whatever order they come, and `split` is the inverse."""
    options: dict[str, Any] = {"group_size": group, "scale_dtype": scale, "symmetric": not zero}
    gate, up = (quantize(normal(K, 40, seed=i), qtype, **options) for i in range(2))
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b], 1), gate, up)
    turns = jax.tree.map(lambda a, b: jnp.stack([a, b], 2).reshape(a.shape[0], -1), gate, up)
    joined = join_gate_up(gate, up)
    for other in (
        join_gate_up(prepack(gate), prepack(up)),
        join_gate_up(both, order="concatenated"),
        join_gate_up(prepack(turns), order="interleaved"),
        jax.jit(join_gate_up)(gate, up),
    ):
        assert jax.tree.structure(other) == jax.tree.structure(joined)
        assert all(jax.tree.leaves(jax.tree.map(np.array_equal, bits(other), bits(joined))))
    for part, q in zip(joined.split(), (gate, up), strict=True):
        assert all(jax.tree.leaves(jax.tree.map(np.array_equal, bits(part), bits(prepack(q)))))
    assert joined.shape == (K, 80)
    assert joined.nbytes == joined.weight.nbytes


def bits(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x).view(np.uint8), tree)


def test_a_stack_of_joined_weights() -> None:
    gate, up = (
        prepack(jax.vmap(lambda x: quantize(x, "int4", group_size=32))(normal(3, K, 40, seed=i)), stack=1, axis=1)
        for i in range(2)
    )
    stack = join_gate_up(gate, up)
    x, bias = normal(3, 4, K, dtype="bfloat16"), normal(3, 2, 40)
    whole = quantized_matmul(x, stack, activation="swiglu", bias=bias)
    one = [quantized_matmul(x[i], stack[i], activation="swiglu", bias=bias[i]) for i in range(3)]
    apart = [quantized_matmul(x[i], join_gate_up(gate[i], up[i]), activation="swiglu", bias=bias[i]) for i in range(3)]
    scanned = jax.lax.scan(lambda _, o: (0, quantized_matmul(o[0], o[1], activation="swiglu", bias=o[2])), 0, (
        x, stack, bias,
    ))[1]  # fmt: skip
    for other in (jnp.stack(one), jnp.stack(apart), scanned):
        np.testing.assert_array_equal(np.asarray(whole, np.float32), np.asarray(other, np.float32))
    assert len(list(stack)) == 3
    with pytest.raises(TypeError, match="iteration over a PackedWeight"):
        list(stack[0])
    with pytest.raises(IndexError, match=r"index .* accepted: one of the stack"):
        stack[0, :, :64]


def test_joined_weights_are_saved(tmp_path: pathlib.Path) -> None:
    """Nothing else reads them as a weight whose features have their places."""
    q = weight()
    tree = {"mlp": join_gate_up(q, weight(seed=6)), "down": prepack(q)}
    jax_splitk.save_file(tree, tmp_path / "model.safetensors")
    for read in (
        jax_splitk.load_file(tmp_path / "model.safetensors"),
        jax_splitk.load_file(tmp_path / "model.safetensors", tree),
        jax_splitk.from_state(jax_splitk.to_state(tree)),
        pickle.loads(pickle.dumps(tree)),
    ):
        assert jax.tree.structure(read) == jax.tree.structure(tree)
        assert all(jax.tree.leaves(jax.tree.map(np.array_equal, bits(read), bits(tree))))
    assert "JoinedWeight(PackedWeight(shape=(96, 160)" in repr(tree["mlp"])


# ---- gradients and transformations -----------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", thinned(["none", *PLAIN, *JAX], 2))
def test_values_and_gradients_are_plain_jaxs(activation: str) -> None:
    """Gradients of x, the scales, bias and residual, in reverse and forward mode, and with remat."""
    gated = activation in JAX
    qs = [weight(seed=i) for i in range(1 + gated)]
    bias = normal(2, FEATURES) if gated else normal(FEATURES)
    x, residual = normal(3, 4, K, dtype="bfloat16"), normal(3, 4, FEATURES, dtype="bfloat16")
    scales = [q.scale for q in qs]

    def ours(x: Any, bias: Any, residual: Any, *scales: Any) -> jax.Array:
        of = [dataclasses.replace(q, scale=scale) for q, scale in zip(qs, scales, strict=True)]
        w = join_gate_up(*of) if gated else prepack(of[0])
        name: Any = None if activation == "none" else activation
        return quantized_matmul(x, w, bias=bias, activation=name, residual=residual)

    def theirs(x: Any, bias: Any, residual: Any, *scales: Any) -> jax.Array:
        of = [value(dataclasses.replace(q, scale=scale)) for q, scale in zip(qs, scales, strict=True)]
        sums = [jnp.matmul(x.astype(jnp.float32), w, precision="highest") for w in of]
        # As the product is kept for the gradient. Otherwise relu's derivative differs where sum and bias cancel.
        sums = [jax.lax.reduce_precision(z, 8, 7) for z in sums]
        sums = [z + b for z, b in zip(sums, bias if gated else [bias], strict=True)]
        function = JAX[activation] if gated else PLAIN.get(activation, lambda z: z)
        return (function(*sums) + residual).astype(jnp.bfloat16)

    operands = (x, bias, residual, *scales)
    cotangent = normal(3, 4, FEATURES, dtype="bfloat16", seed=9)
    (out, got), (wanted, expected), (_, again) = (
        differentiated(f, operands, cotangent) for f in (ours, theirs, jax.checkpoint(ours))
    )
    near(out, wanted)
    near(ours(*operands), wanted)
    for one, other, third in zip(got, expected, again, strict=True):
        assert one.dtype == other.dtype
        near(one, other)
        near(third, other)
    moved = tuple(normal(*z.shape, dtype=z.dtype.name, seed=20 + i) for i, z in enumerate(operands))
    near(*(jax.jit(functools.partial(jax.jvp, f))(operands, moved)[1] for f in (ours, theirs)))


def near(one: Any, other: Any) -> None:
    assert one.shape == other.shape
    assert error(one, np.asarray(other).astype(np.float64)) < 0.02


def test_the_gradient_of_one_operand_alone() -> None:
    w, x, bias = prepack(weight()), normal(4, K, dtype="bfloat16"), normal(FEATURES)
    for i in range(2):
        loss = lambda x, bias: jnp.sum(quantized_matmul(x, w, bias=bias).astype(jnp.float32))  # noqa: E731
        found = jax.grad(loss, i)(x, bias)
        assert found.shape == (x, bias)[i].shape
    text = str(jax.make_jaxpr(jax.grad(loss))(x, bias))
    assert "quantized_matmul_epilogue[" in text  # a bias stays in the kernel under differentiation


@pytest.mark.parametrize("gated", [False, True])
def test_vmap_of_every_operand(gated: bool) -> None:
    w = join_gate_up(weight(), weight(seed=6)) if gated else prepack(weight())
    plain = (normal(4, K, dtype="bfloat16"), normal(*[2] * gated, FEATURES), normal(4, FEATURES, dtype="bfloat16"))
    name: Any = "swiglu" if gated else "silu"

    def ours(x: Any, w: Any, bias: Any, residual: Any) -> jax.Array:
        return quantized_matmul(x, w, bias=bias, activation=name, residual=residual)

    for axes in [(1, None, None, None), (0, None, None, 1), (None, None, 0, None), (None, None, None, 0),
                 (0, None, 0, 0), (0, 0, 0, 0), (None, 0, None, None)]:  # fmt: skip
        mapped = [
            z if axis is None else jax.device_put(np.stack([z, np.asarray(z) + 1], axis))
            for z, axis in zip(plain, (axes[0], *axes[2:]), strict=True)
        ]
        stack = w if axes[1] is None else jax.tree.map(lambda z: jax.device_put(np.stack([z, z])), w)
        found = jax.jit(jax.vmap(ours, axes))(mapped[0], stack, *mapped[1:])
        for i in range(2):
            one = [
                z if axis is None else np.take(np.asarray(z), i, axis)
                for z, axis in zip(mapped, (axes[0], *axes[2:]), strict=False)
            ]
            near(found[i], ours(one[0], w, *one[1:]))


def test_export_and_an_odd_batch() -> None:
    w = join_gate_up(weight(), weight(seed=6))
    f = jax.jit(lambda x, w: quantized_matmul(x, w, activation="swigluoai"))
    x = normal(5, K, dtype="bfloat16")
    exported = export.export(f, disabled_checks=jax_splitk.EXPORT_CHECKS)(x, w)
    again = export.deserialize(exported.serialize())
    np.testing.assert_array_equal(np.asarray(again.call(x, w), np.float32), np.asarray(f(x, w), np.float32))
    assert f(x[:0], w).shape == (0, FEATURES)
    assert f(x.astype(jnp.float32), w).dtype == jnp.float32


def test_padded_weights() -> None:
    """With tiles of padding XLA computes the epilogue."""
    q, x, bias = weight(), normal(4, K, dtype="bfloat16"), normal(FEATURES)
    padded = prepack(q, shards=(1, 4))
    wanted = quantized_matmul(x, prepack(q), bias=bias, activation="gelu")
    near(quantized_matmul(x, padded, bias=bias, activation="gelu"), wanted)


# ---- decisions -------------------------------------------------------------------------------------------------------


def problem(**changes: Any) -> QuantizedEpilogueProblem:
    fields = {"bias_dtype": "bfloat16", "activation": "swiglu", "residual_dtype": "none", **changes}
    return QuantizedEpilogueProblem(**vars(products.valid_problem(8, 4096, 28672)), **fields)


def test_explain_and_keys_have_the_epilogue() -> None:
    w, x = join_gate_up(weight(), weight(seed=6)), normal(4, K, dtype="bfloat16")
    found = jax_splitk.explain(lambda x: quantized_matmul(x, w, activation="swiglu", bias=normal(2, FEATURES)), x)
    assert "XLA computes the epilogue (bias in float32, swiglu)" in found.decisions[0].because
    p = problem()
    assert p.brief == "quantized_matmul_epilogue 8, 4096 -> 28672, int4 by 64, bf16, bias in bfloat16, swiglu"
    data = key.problem_as_dict(p)
    assert key.problem_from_dict(data.pop("op"), data) == p
    assert key.key_for(p, DEFAULT_CUDA).digest != key.key_for(problem(activation="geglu"), DEFAULT_CUDA).digest
    assert "bias_dtype" not in key.key_for(p.product, DEFAULT_CUDA).as_dict()["problem"]  # old decisions hold


def test_a_decision_for_the_product_holds() -> None:
    """The table that ships with the package has none with an epilogue."""
    p = dataclasses.replace(problem(activation="none"), k=8192, features=3584)
    found = [k.problem for k in buckets.representatives(key.key_for(p, DEFAULT_CUDA))]
    assert found == [p.product]
    five = dataclasses.replace(p, rows=5)  # is tuned with 8 rows and its epilogue, so that an export has its kernel
    assert [k.problem for k in buckets.representatives(key.key_for(five, DEFAULT_CUDA))][:2] == [p, p.product]
    assert five in [dataclasses.replace(each, rows=5) for each in p.represented()]
    choice = select(p, DEFAULT_CUDA, current())
    assert "quantized_matmul" in choice.because


@pytest.mark.parametrize(("changes", "message"), [
    ({"activation": "tanh"}, "activation='tanh'"), ({"bias_dtype": "int8"}, "bias_dtype='int8'"),
    ({"residual_dtype": "float64"}, "residual_dtype='float64'"), ({"features": 72}, "features=72 with swiglu"),
])  # fmt: skip
def test_problems_from_files_are_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(problem(), **changes).validate()


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_errors_of_products() -> None:
    q, x = weight(), normal(4, K, dtype="bfloat16")
    w, joined = prepack(q), join_gate_up(q, q)
    for call, message in (
        (lambda: quantized_matmul(x, joined), "activation=None and w of type JoinedWeight; accepted: .*'swiglu'"),
        (lambda: x @ joined, "activation=None and w of type JoinedWeight"),
        (lambda: quantized_matmul(x, joined, activation="silu"), "activation='silu' and w of type JoinedWeight"),
        (lambda: quantized_matmul(x, w, activation="swiglu"), "w of type PackedWeight; accepted: .*join_gate_up"),
        (lambda: quantized_matmul(x, w, activation="tanh"), "activation='tanh'; accepted: None, 'relu'"),  # pyright: ignore
        (lambda: quantized_matmul(x, w, bias=jnp.ones(3)), r"bias of shape \(3,\); accepted: \(80,\)"),
        (lambda: quantized_matmul(x, joined, activation="swiglu", bias=jnp.ones(80)), r"accepted: \(2, 80\)"),
        (lambda: quantized_matmul(x, w, residual=jnp.ones(80)), r"residual of shape \(80,\); accepted: \(4, 80\)"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_errors_of_joining() -> None:
    q = weight()
    padded = prepack(q, shards=(1, 4))
    for call, message in (
        (lambda: join_gate_up(q), "up of type NoneType with order=None"),
        (lambda: join_gate_up(q, q, order="interleaved"), "up of type QuantizedArray with order='interleaved'"),
        (lambda: join_gate_up(q, order="turns"), "order='turns'; accepted: None, 'concatenated'"),  # pyright: ignore
        (lambda: join_gate_up(q, weight(group=16)), "'group_size': 32.*'group_size': 16"),
        (lambda: join_gate_up(q, weight(88)), "the same of both"),
        (lambda: join_gate_up(weight(84), weight(84)), "84 features of gate; accepted: multiples of 8"),
        (lambda: join_gate_up(padded, padded), "with tiles of padding"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="gate of type JoinedWeight"):
        join_gate_up(join_gate_up(q, q), q)


def test_nothing_else_takes_a_joined_weight() -> None:
    """Its features are in another order than anybody expects."""
    w, x = join_gate_up(weight(), weight()), normal(4, K, dtype="bfloat16")
    for call in (
        lambda: jax_splitk.quantized_einsum("ab,bc->ac", x, w), lambda: jax_splitk.unpack(w), lambda: prepack(w),
        lambda: dequantize(w), lambda: jnp.dot(x, w),
    ):  # fmt: skip
        with pytest.raises(TypeError, match="JoinedWeight"):
            call()
    with pytest.raises(NotImplementedError, match="not linear"):
        jax.linear_transpose(lambda x: quantized_matmul(x, w, activation="swiglu"), x)(
            normal(4, FEATURES, dtype="bfloat16")
        )


def test_shardings_of_joined_weights() -> None:
    """A PartitionSpec of [k, 2 * features] divides gate and up together."""
    w = join_gate_up(*(quantize(normal(K, 128, seed=i), "int4", group_size=32) for i in range(2)))
    spec = jax.sharding.PartitionSpec(None, "model")
    found, inner = jax_splitk.shardings(w, spec), jax_splitk.shardings(w.weight, spec)
    assert isinstance(found, JoinedWeight)
    assert jax.tree.leaves(found.weight) == jax.tree.leaves(inner)


def test_random_weights_of_the_host() -> None:
    """A draw of sizes, without a kernel and with the CPU's."""
    rng = generator(3)
    for _ in range(3):
        k, features = int(rng.integers(1, 5)) * 32, int(rng.integers(1, 9)) * 8
        gate, up = (quantize(normal(k, features, seed=int(rng.integers(99))), "int4", group_size=32) for _ in range(2))
        x, w = normal(int(rng.integers(1, 20)), k, dtype="bfloat16"), join_gate_up(gate, up)
        wanted = JAX["swiglu"](*(jnp.matmul(x.astype(jnp.float32), value(q), precision="highest") for q in (gate, up)))
        for implementation in ("xla", "host"):
            near(quantized_matmul(x, w, activation="swiglu", implementation=implementation), wanted)
