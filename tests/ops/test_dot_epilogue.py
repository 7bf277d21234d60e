"""`matmul` and `dot_general` with a bias, an activation and a residual: values, transformations, errors."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_splitk
from jax_splitk.problems import dot_reference, random_operands
from jax_splitk.problems.dot_general import DotProblem
from tests import dots
from tests.exhaustive import crossed
from tests.problems import SEED, differentiated, on_device, together

NONE = ((), ())
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "none": lambda x: x,
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "gelu_exact": lambda x: jax.nn.gelu(x, approximate=False),
    "silu": jax.nn.silu,
}


def normals(*shapes: tuple[int, ...]) -> list[jax.Array]:
    rng = np.random.default_rng(SEED)
    return [on_device(rng.normal(size=shape), jnp.float32) for shape in shapes]


def activation_of(name: str) -> str | None:
    return None if name == "none" else name


@pytest.mark.parametrize("after", dots.epilogues(), ids=str)
def test_the_reference_is_float64s(after: dict[str, Any]) -> None:
    """The reference, which XLA runs and kernels are checked against, agrees with float64."""
    problem = DotProblem(2, 24, 16, 40, "bmk", "bkn", "bfloat16", "float32", **after)
    problem.validate()
    operands = random_operands.normals(problem.operand_types, SEED)
    exact = dots.exactly(problem, *(np.asarray(x, np.float64) for x in operands))
    np.testing.assert_allclose(dot_reference.dot_general(problem, *operands), exact, rtol=1e-5, atol=1e-5)
    assert problem.epilogue in str(problem)
    assert problem.bytes_moved - problem.product.bytes_moved == sum(x.nbytes for x in operands[2:])


@pytest.mark.parametrize(("activation", "dtype"), crossed(list(ACTIVATIONS), ["float32", "bfloat16"]))
def test_values_and_gradients_are_plain_jaxs(activation: str, dtype: str) -> None:
    """Results are rounded once, at the end; each cotangent has its operand's dtype."""
    x, w, bias, residual, cotangent = normals((6, 4, 40), (40, 24), (24,), (6, 4, 24), (6, 4, 24))
    x, w, residual = (z.astype(dtype) for z in (x, w, residual))

    def ours(x: jax.Array, w: jax.Array, bias: jax.Array, residual: jax.Array) -> jax.Array:
        return jax_splitk.matmul(x, w, bias=bias, activation=activation_of(activation), residual=residual)

    def theirs(x: jax.Array, w: jax.Array, bias: jax.Array, residual: jax.Array) -> jax.Array:
        sums = jnp.matmul(x, w, preferred_element_type=jnp.float32)
        return (ACTIVATIONS[activation](sums + bias) + residual).astype(dtype)

    operands = (x, w, bias, residual)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == "float32" else {"rtol": 2**-7, "atol": 2**-6}
    (out, got), (wanted, expected) = (differentiated(f, operands, cotangent.astype(dtype)) for f in (ours, theirs))
    assert out.dtype == dtype
    as_numbers = lambda z: np.asarray(z, np.float32)  # noqa: E731
    for value in (out, ours(*operands)):  # differentiated or not
        np.testing.assert_allclose(as_numbers(value), as_numbers(wanted), **tolerance)
    assert [z.dtype for z in got] == [z.dtype for z in operands]
    for one, other in zip(got, expected, strict=True):
        difference = np.linalg.norm(as_numbers(one) - as_numbers(other))
        assert difference <= tolerance["rtol"] * np.linalg.norm(as_numbers(other))
    moved = (x, w, 2 * bias, residual)
    (_, tangent), (_, wanted) = (jax.jit(functools.partial(jax.jvp, f))(operands, moved) for f in (ours, theirs))
    difference = np.linalg.norm(as_numbers(tangent) - as_numbers(wanted))
    assert difference <= tolerance["rtol"] * np.linalg.norm(as_numbers(wanted))


def test_gradients_of_single_operands_and_second_ones() -> None:
    x, w, bias = normals((8, 16), (16, 4), (4,))

    def ours(w: jax.Array, bias: jax.Array) -> jax.Array:
        return (jax_splitk.matmul(x, w, bias=bias, activation="gelu") ** 2).sum()

    def theirs(w: jax.Array, bias: jax.Array) -> jax.Array:
        return (jax.nn.gelu(x @ w + bias) ** 2).sum()

    def derivatives(f: Callable[..., jax.Array]) -> Any:
        of_bias = jax.grad(f, 1)
        second = jax.jvp(lambda bias: of_bias(w, bias), (bias,), (jnp.ones(4),))[1]
        return jax.grad(f)(w, bias), of_bias(w, bias), second, jax.grad(jax.checkpoint(f))(w, bias)

    for got, wanted in zip(*(jax.jit(derivatives, static_argnums=0)(f) for f in (ours, theirs)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("over", ["m", "n"])
def test_vmap_of_every_operand(over: str) -> None:
    """Operands also have several free and batch dimensions, and the bias as many."""
    rng = np.random.default_rng(SEED)
    dimensions = (((3,), (1,)), ((1,), (0,)))  # [batch 2; 3, 4; 5]
    shapes = ((3, 2, 4, 6), (2, 6, 5), (3, 4, 1) if over == "m" else (5,), (2, 3, 4, 5))

    def ours(x: jax.Array, y: jax.Array, bias: jax.Array, residual: jax.Array) -> jax.Array:
        after = {"bias": bias, "activation": "relu", "residual": residual}
        return jax_splitk.dot_general(x, y, dimensions, **after)

    def theirs(x: jax.Array, y: jax.Array, bias: jax.Array, residual: jax.Array) -> jax.Array:
        return jax.nn.relu(jnp.einsum("pbmk,bkn->bpmn", x, y) + bias) + residual

    plain = [rng.integers(-3, 4, shape).astype(np.float32) for shape in shapes]
    np.testing.assert_array_equal(ours(*plain), theirs(*plain))
    for axes in itertools.product((None, 0), (None, -1), (None, 0), (None, 1)):
        if set(axes) == {None}:
            continue
        mapped = [z if axis is None else np.stack([z, 1 - z], axis) for z, axis in zip(plain, axes, strict=True)]
        found = together([jax.vmap(function, axes) for function in (ours, theirs)], *mapped)
        np.testing.assert_array_equal(*found, str(axes))


def test_mapped_products_stay_one_product() -> None:
    """Mapped are a stack of rows, weights with a bias each, or both with one bias for all."""
    x, w, bias = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 64), (64, 32), (32,)))

    def layer(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
        return jax_splitk.matmul(x, w, bias=bias, activation="silu")

    for axes, said in (((0, None, None), "24x32x64 bmk,bkn"), ((None, 0, 0), "8x96x64"), ((0, 0, None), "3x 8x32x64")):
        stacked = [
            z if axis is None else jax.ShapeDtypeStruct((3, *z.shape), z.dtype)
            for z, axis in zip((x, w, bias), axes, strict=True)
        ]
        (decision,) = jax_splitk.explain(jax.vmap(layer, axes), *stacked, platform="cuda").decisions
        assert said in str(decision.problem)
        assert decision.problem.epilogue == "bias over n in bfloat16, silu"


def test_explain_shows_what_a_kernel_takes_with_the_product() -> None:
    x, w, bias = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((64, 4096), (4096, 64), (64,)))

    def layer(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
        return jax_splitk.matmul(x, w, bias=bias, activation="gelu", residual=x[:, :64], implementation="cutlass")

    (decision,) = jax_splitk.explain(layer, x, w, bias, platform="cuda").decisions
    assert decision.family == "dot_tma"
    assert "(bias over n in bfloat16, gelu, residual in bfloat16)" in str(decision.problem)
    gradient = jax.grad(lambda *operands: layer(*operands).astype(jnp.float32).sum(), (0, 1, 2))
    problems = [str(each.problem) for each in jax_splitk.explain(gradient, x, w, bias, platform="cuda").decisions]
    # The product before the activation, and the products of its cotangent.
    assert [text.split()[1] for text in problems] == ["bfloat16->float32", "bfloat16->bfloat16", "bfloat16->bfloat16"]


def test_on_the_cpu_the_product_has_a_kernel_and_xla_the_rest() -> None:
    rng = np.random.default_rng(SEED)
    x, g, bias = (on_device(rng.integers(-3, 4, shape), jnp.float32) for shape in ((512, 24), (512, 16), (24, 1)))

    def layer(x: jax.Array, g: jax.Array, bias: jax.Array) -> jax.Array:
        after = {"bias": bias, "activation": "relu"}
        return jax_splitk.dot_general(x, g, (((0,), (0,)), NONE), implementation="host", **after)

    (decision,) = jax_splitk.explain(layer, x, g, bias, platform="cpu").decisions
    assert (decision.family, decision.problem.epilogue) == ("dot_host", "")
    assert decision.why.endswith("; XLA computes the epilogue (bias over m in float32, relu)")
    assert jax.jit(layer).lower(x, g, bias).as_text().count("custom_call @jax_splitk_host") == 1
    np.testing.assert_array_equal(jax.jit(layer)(x, g, bias), np.maximum(np.asarray(x).T @ g + bias, 0))
    (key, _), *others = jax_splitk.tune(layer, x, g, bias, seconds=0.05)
    assert not others and key.problem == decision.problem


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_divided_reduction_is_summed_before_the_epilogue(kind: AxisType) -> None:
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))
    rng = np.random.default_rng(SEED)
    shapes = ((64, 32), (64, 16), (16,), (32, 16))
    plain = [on_device(rng.integers(-3, 4, shape), jnp.float32) for shape in shapes]

    def layer(x: jax.Array, g: jax.Array, bias: jax.Array, residual: jax.Array) -> jax.Array:
        after = {"bias": bias, "activation": "relu", "residual": residual}
        return jax_splitk.dot_general(x, g, (((0,), (0,)), NONE), implementation="host", **after)

    expected = np.maximum(np.asarray(plain[0]).T @ plain[1] + plain[2], 0) + plain[3]
    with jax.set_mesh(mesh):
        for specs, part in (
            ((P("data"), P("data"), P(), P()), "32x16x32"),
            ((P("data", "model"), P("data"), P(), P("model")), "16x16x32"),
            ((P(None, "model"), P(None, "data"), P("data"), P("model", "data")), "16x8x64"),
        ):
            operands = [jax.device_put(z, NamedSharding(mesh, of)) for z, of in zip(plain, specs, strict=True)]
            compiled = jax.jit(layer).lower(*operands).compile()
            np.testing.assert_array_equal(compiled(*operands), expected)
            assert ("all-reduce" in compiled.as_text()) == (part != "16x8x64")
            (decision,) = jax_splitk.explain(jax.jit(layer), *operands).decisions
            assert part in str(decision.problem)


def test_inside_shard_map() -> None:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    x, w, bias = normals((32, 16), (16, 8), (8,))

    def loss(w: jax.Array, bias: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.psum(jax_splitk.matmul(x, w, bias=bias, activation="silu").sum(), "data")

    divided = jax.shard_map(loss, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P())
    got = jax.grad(divided, (0, 1))(w, bias, x)
    wanted = jax.grad(lambda w, bias: jax.nn.silu(x @ w + bias).sum(), (0, 1))(w, bias)
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_what_kernels_do_not_take_is_plain_jax() -> None:
    x, w, bias = normals((8, 16), (16, 4), (4,))
    out = jax_splitk.matmul(x.astype(jnp.bfloat16), w, bias=bias, activation="relu")
    wanted = jax.nn.relu(x.astype(jnp.bfloat16).astype(jnp.float32) @ w + bias)
    np.testing.assert_allclose(out, wanted, rtol=1e-2, atol=1e-2)
    shape = jax.export.symbolic_shape("n, 16")
    layer = jax.jit(lambda x: jax_splitk.matmul(x, w, bias=bias, activation="relu"))
    exported = jax.export.export(layer)(jax.ShapeDtypeStruct(shape, jnp.float32))
    np.testing.assert_allclose(exported.call(x), jax.nn.relu(x @ w + bias), rtol=1e-5, atol=1e-5)
    whole = jnp.ones((2, 2), jnp.int32)
    with pytest.raises(TypeError, match="of a product of dtype int32; accepted: floating"):
        jax_splitk.matmul(whole, whole, activation="relu")


@pytest.mark.parametrize(
    ("after", "error", "message"),
    [
        ({"bias": np.ones(8)}, ValueError, r"bias of shape \(8,\); accepted: \(4,\) or \(8, 1\)"),
        ({"bias": np.ones((8, 4))}, ValueError, r"bias of shape \(8, 4\); accepted: \(4,\) or \(8, 1\)"),
        ({"bias": np.ones(4, np.int32)}, TypeError, "bias of dtype int32; accepted: bfloat16, float16, float32"),
        ({"activation": "tanh"}, ValueError, "activation='tanh'; accepted: None, 'relu', 'gelu', 'gelu_exact', 'silu'"),
        ({"activation": jax.nn.relu}, ValueError, "activation=.*; accepted: None, 'relu'"),
        ({"residual": np.ones((4, 8))}, ValueError, r"residual of shape \(4, 8\); accepted: \(8, 4\)"),
        ({"residual": np.ones((8, 4), bool)}, TypeError, "residual of dtype bool; accepted: bfloat16"),
    ],
)
def test_errors(after: dict[str, Any], error: type[Exception], message: str) -> None:
    for precision in (None, jax.lax.DotAlgorithmPreset.F32_F32_F32):  # the latter is lax's
        with pytest.raises(error, match=message):
            jax_splitk.matmul(jnp.ones((8, 16)), jnp.ones((16, 4)), precision=precision, **after)


def test_vectors_have_no_bias() -> None:
    with pytest.raises(ValueError, match=r"a of shape \(8, 16\) and b of shape \(16,\); accepted: no vectors"):
        jax_splitk.matmul(jnp.ones((8, 16)), jnp.ones(16), bias=jnp.ones(8))


def test_problems_with_parts_that_do_not_belong_together_are_refused() -> None:
    for fields, message in (
        ({"bias": "k"}, "bias='k'; accepted: 'none', 'm', 'n'"),
        ({"bias_dtype": "float32"}, "bias_dtype='float32'; accepted: 'none'"),
        ({"bias": "m"}, "bias_dtype='none'; accepted: 'bfloat16'"),
        ({"activation": "tanh"}, "activation='tanh'; accepted: 'none', 'relu'"),
        ({"residual_dtype": "int8"}, "residual_dtype='int8'; accepted: 'none', 'bfloat16'"),
    ):
        with pytest.raises(ValueError, match=message):
            DotProblem(1, 8, 8, 8, "bmk", "bkn", "bfloat16", "float32", **fields).validate()
