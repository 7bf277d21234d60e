"""`dot_general` and `matmul` against lax: values, every transformation, dtypes, errors."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_splitk
from jax_splitk.problems import dot_layout
from tests.problems import SEED, on_device

NONE = ((), ())
# (lhs shape, rhs shape, dimension numbers): every major, several batch and contracting dimensions, in any order.
PRODUCTS = [
    ((40, 24), (40, 16), (((0,), (0,)), NONE)),
    ((24, 40), (40, 16), (((1,), (0,)), NONE)),
    ((24, 40), (16, 40), (((1,), (1,)), NONE)),
    ((40, 24), (16, 40), (((0,), (1,)), NONE)),
    ((3, 24, 40), (3, 40, 16), (((2,), (1,)), ((0,), (0,)))),
    ((24, 3, 40), (16, 40, 3), (((2,), (1,)), ((1,), (2,)))),
    ((2, 3, 4, 5), (5, 3, 4, 2), (((3, 1), (0, 1)), ((0,), (3,)))),
    ((2, 3, 4, 5), (3, 4, 7), (((1, 2), (0, 1)), NONE)),
    ((2, 3, 4, 5), (4, 3, 7), (((1, 2), (1, 0)), NONE)),
    ((2, 3, 4, 5), (2, 3, 6, 5), (((3,), (3,)), ((0, 1), (0, 1)))),
    ((2, 3, 4, 5), (2, 3, 6, 5), (((3,), (3,)), ((1, 0), (1, 0)))),
    ((2, 1, 4), (1, 4, 1), (((2,), (1,)), NONE)),
    ((5,), (5,), (((0,), (0,)), NONE)),
    ((4, 2), (3,), (NONE, NONE)),
    ((0, 4), (4, 3), (((1,), (0,)), NONE)),
    ((2, 0), (0, 3), (((1,), (0,)), NONE)),
]


def integers(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jax.device_put(rng.integers(-3, 4, shape).astype(np.float32))


@pytest.mark.parametrize(("lhs", "rhs", "dimensions"), PRODUCTS, ids=str)
def test_as_lax_under_every_transformation(lhs: Any, rhs: Any, dimensions: Any) -> None:
    rng = np.random.default_rng(SEED)
    x, y = integers(rng, *lhs), integers(rng, *rhs)

    def ours(x: jax.Array, y: jax.Array) -> jax.Array:
        return jax_splitk.dot_general(x, y, dimensions)

    def theirs(x: jax.Array, y: jax.Array) -> jax.Array:
        return lax.dot_general(x, y, dimensions)

    cotangent = integers(rng, *jax.eval_shape(theirs, x, y).shape)

    def everything(f: Callable[..., jax.Array]) -> list[Any]:
        found = [f(x, y), jax.vjp(f, x, y)[1](cotangent), jax.jvp(f, (x, y), (y.sum() * x, y))]
        found.append(jax.linear_transpose(lambda x: f(x, y), x)(cotangent))
        for axes in ((0, 0), (0, None), (None, -1), (-1, 0)):
            stacked = [
                z if axis is None else jnp.stack([z, 2 * z, z - 1], axis) for z, axis in zip((x, y), axes, strict=True)
            ]
            found.append(jax.vmap(f, axes)(*stacked))
        return found

    results = jax.jit(lambda: [everything(f) for f in (ours, theirs)])()
    for got, wanted in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_neighbouring_dimensions_are_not_transposed() -> None:
    for lhs, rhs, dimensions, orders in (
        ((40, 24), (40, 16), (((0,), (0,)), NONE), ("bkm", "bkn")),
        ((8, 6, 24), (8, 6, 16), (((0, 1), (0, 1)), NONE), ("bkm", "bkn")),
        ((5, 24, 6, 8), (5, 16, 6, 8), (((2, 3), (2, 3)), ((0,), (0,))), ("bmk", "bnk")),
        ((24, 5, 8), (16, 5, 8), (((2,), (2,)), ((1,), (1,))), ("mbk", "nbk")),
        ((1, 24, 1, 8), (8, 16, 1), (((3,), (0,)), NONE), ("bmk", "bkn")),
    ):
        found = dot_layout.operands(lhs, rhs, dimensions)
        assert tuple(operand.order for operand in found) == orders
        assert [operand.transpose for operand in found] == [None, None]
    # A contiguous batch, and a reduction in another order, are transposed.
    moved, kept = dot_layout.operands((24, 8, 5), (5, 8, 16), (((1,), (1,)), ((2,), (0,))))
    assert moved.transpose == (2, 0, 1) and kept.transpose is None
    first, second = dot_layout.operands((3, 4, 5), (4, 3, 7), (((0, 1), (1, 0)), NONE))
    assert first.transpose is None and second.transpose == (1, 0, 2)


def test_weights_keep_their_dtype_where_arithmetic_is_narrower() -> None:
    rng = np.random.default_rng(SEED)
    w, x = (on_device(rng.normal(size=shape), jnp.float32) for shape in ((64, 32), (96, 64)))

    def loss(w: jax.Array) -> jax.Array:
        y = jax_splitk.matmul(x.astype(jnp.bfloat16), w, compute_dtype=jnp.bfloat16, preferred_element_type=jnp.float32)
        return (y * y).sum()

    gradient = jax.grad(loss)(w)
    rounded = np.asarray(x.astype(jnp.bfloat16), np.float64)
    product = rounded @ np.asarray(w.astype(jnp.bfloat16), np.float64)
    exact = rounded.T @ np.asarray(jnp.asarray(2 * product, jnp.bfloat16), np.float64)
    assert gradient.dtype == jnp.float32
    assert np.linalg.norm(gradient - exact) <= 1e-3 * np.linalg.norm(exact)
    bits = np.asarray(gradient).view(np.uint32)
    assert (bits & 0xFFFF).any()  # it was not rounded to bfloat16


def test_what_kernels_do_not_take_is_laxs() -> None:
    x = jnp.arange(6).reshape(2, 3)
    np.testing.assert_array_equal(jax_splitk.dot_general(x, x.T, (((1,), (0,)), NONE)), x @ x.T)
    half, single = jnp.ones((2, 3), jnp.bfloat16), jnp.ones((3, 2), jnp.float32)
    expected = lax.dot_general(half, single, (((1,), (0,)), NONE))
    assert jax_splitk.dot_general(half, single, (((1,), (0,)), NONE)).dtype == expected.dtype
    precision = lax.DotAlgorithmPreset.F32_F32_F32
    out = jax_splitk.dot_general(single, single, (((0,), (0,)), NONE), precision)
    np.testing.assert_array_equal(out, np.full((2, 2), 3))
    with pytest.raises(NotImplementedError, match="lhs of dtype int32; kernels take"):
        jax_splitk.dot_general(x, x.T, (((1,), (0,)), NONE), implementation="cutlass")


def test_e4m3_as_lax() -> None:
    """Its cotangents are products in bfloat16, which holds e4m3 exactly, and are rounded once."""
    rng = np.random.default_rng(SEED)
    x, y = (on_device(rng.normal(size=shape), jnp.float8_e4m3fn) for shape in ((96, 32), (80, 32)))
    numbers = (((1,), (1,)), NONE)

    def ours(x: jax.Array, y: jax.Array) -> jax.Array:
        return jax_splitk.dot_general(x, y, numbers, preferred_element_type=jnp.bfloat16)

    exact = np.asarray(x, np.float64) @ np.asarray(y, np.float64).T
    np.testing.assert_array_equal(ours(x, y), exact.astype(np.float32).astype(jnp.bfloat16))
    cotangent = on_device(rng.normal(size=exact.shape), jnp.bfloat16)
    for got, wanted in zip(
        jax.vjp(ours, x, y)[1](cotangent),
        (
            np.asarray(cotangent, np.float64) @ np.asarray(y, np.float64),
            np.asarray(cotangent, np.float64).T @ np.asarray(x, np.float64),
        ),
        strict=True,
    ):
        assert got.dtype == jnp.float8_e4m3fn
        np.testing.assert_allclose(np.asarray(got, np.float64), wanted, rtol=2**-3, atol=2**-9)
    with jax_splitk.options(implementation="cutlass"):
        (decision,) = jax_splitk.explain(ours, x, y, platform="cuda").decisions
    assert (decision.family, str(decision.problem)) == (
        "dot_tma",
        "dot_general float8_e4m3fn->bfloat16 96x80x32 bmk,bnk",
    )
    out = jax_splitk.matmul(x, y.T, bias=jnp.ones(80), activation="relu", preferred_element_type=jnp.float32)
    np.testing.assert_allclose(out, np.maximum(exact + 1, 0), rtol=1e-5)
    assert jax_splitk.dot_general(x, y, numbers).dtype == lax.dot_general(x, y, numbers).dtype
    with pytest.raises(
        NotImplementedError, match="lhs of dtype float8_e4m3fn with preferred_element_type=None; accepted"
    ):
        jax_splitk.dot_general(x, y, numbers, implementation="cutlass")


def test_errors_are_laxs() -> None:
    x, y = jnp.ones((2, 3)), jnp.ones((4, 5))
    for dimensions in ((((1,), (0,)), NONE), (((2,), (0,)), NONE), (((0,), ()), NONE)):
        messages = []
        for product in (jax_splitk.dot_general, lax.dot_general):
            with pytest.raises((TypeError, ValueError)) as caught:
                product(x, y, dimensions)
            messages.append(str(caught.value))
        assert messages[0] == messages[1]
    with pytest.raises(ValueError, match=r"a of shape \(2, 3\) and b of shape \(4, 5\); accepted"):
        jax_splitk.matmul(x, y)
    with pytest.raises(ValueError, match="implementation='fast'; accepted"):
        jax_splitk.matmul(x, x.T, implementation="fast")


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((4,), (4,)),
        ((3, 4), (4,)),
        ((4,), (2, 4, 5)),
        ((3, 4), (4, 5)),
        ((2, 3, 4), (4, 5)),
        ((3, 4), (2, 4, 5)),
        ((2, 1, 3, 4), (6, 4, 5)),
    ],
    ids=str,
)
def test_matmul_as_numpys(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    rng = np.random.default_rng(SEED)
    x, y = integers(rng, *a), integers(rng, *b)
    np.testing.assert_array_equal(jax_splitk.matmul(x, y), np.asarray(x) @ np.asarray(y))


def test_on_the_cpu_the_weight_gradient_of_a_layer_has_a_kernel() -> None:
    rng = np.random.default_rng(SEED)
    x, g = integers(rng, 512, 24), integers(rng, 512, 16)
    product = jax.jit(lambda x, g: jax_splitk.dot_general(x, g, (((0,), (0,)), NONE), implementation="host"))
    assert "jax_splitk_host" in product.lower(x, g).as_text()
    np.testing.assert_array_equal(product(x, g), np.asarray(x).T @ np.asarray(g))


def test_explain_names_the_products_of_a_gradient() -> None:
    w, x = jnp.ones((64, 32)), jnp.ones((8192, 64))
    report = jax_splitk.explain(
        jax.grad(lambda w: jax_splitk.matmul(x, w, compute_dtype=jnp.bfloat16).sum()), w, platform="cuda"
    )
    problems = [str(decision.problem) for decision in report.decisions]
    assert "dot_general bfloat16->float32 64x32x8192 bkm,bkn" in problems


def test_symbolic_sizes_are_xlas() -> None:
    shape = jax.export.symbolic_shape("n, 4")
    function = jax.jit(jax_splitk.matmul)
    exported = jax.export.export(function)(jax.ShapeDtypeStruct(shape, jnp.float32), jnp.ones((4, 3)))
    np.testing.assert_array_equal(exported.call(jnp.ones((5, 4)), jnp.ones((4, 3))), np.full((5, 3), 4))


def test_every_pair_of_letters_has_one_problem() -> None:
    """For any order of an operand's dimensions, the problem's operands have the product's sizes."""
    sizes = {"b": 2, "m": 3, "k": 5}
    for order in itertools.permutations("bmk"):
        shape = tuple(sizes[letter] for letter in order)
        dims = {letter: order.index(letter) for letter in order}
        lhs, _ = dot_layout.operands(shape, (2, 5, 7), (((dims["k"],), (1,)), ((dims["b"],), (0,))))
        assert {letter: lhs.size(letter) for letter in "bmk"} == sizes
        assert (lhs.transpose is None) == (order[-1] != "b")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_divided_among_devices(kind: AxisType) -> None:
    """A divided reduction is summed, and nothing is gathered; each device has a kernel for its part."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))
    rng = np.random.default_rng(SEED)
    x, g = integers(rng, 64, 32), integers(rng, 64, 16)
    product = jax.jit(lambda x, g: jax_splitk.dot_general(x, g, (((0,), (0,)), NONE), implementation="host"))
    with jax.set_mesh(mesh):
        for of_x, of_g, summed in (
            (P("data"), P("data"), True),
            (P("data", "model"), P("data"), True),
            (P(None, "model"), P(None, "data"), False),
        ):
            operands = (jax.device_put(z, NamedSharding(mesh, of)) for z, of in ((x, of_x), (g, of_g)))
            compiled = product.lower(*(operands := tuple(operands))).compile()
            np.testing.assert_array_equal(compiled(*operands), np.asarray(x).T @ np.asarray(g))
            text = compiled.as_text()
            assert ("all-reduce" in text) == summed
            assert "all-gather" not in text
            assert text.count("jax_splitk_host") == 1


def test_ours_in_laxs_place_does_not_call_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Users replace lax's function if a layer takes no other one. Operands that are left to lax, and quantized weights,
    still work."""
    numbers = (((1,), (0,)), ((), ()))
    weight = jax_splitk.quantize(jnp.ones((64, 8)), "int8", group_size=64)
    monkeypatch.setattr(lax, "dot_general", jax_splitk.dot_general)
    for dtype in ("float32", "int8"):
        a, b = jnp.ones((3, 4), dtype), jnp.ones((4, 5), dtype)
        np.testing.assert_array_equal(lax.dot_general(a, b, numbers), np.full((3, 5), 4))
    gradient = jax.grad(lambda x: jax_splitk.quantized_matmul(x, weight).sum())(jnp.ones((2, 64)))
    np.testing.assert_allclose(gradient, 8, atol=0.05)  # of a quantized 1


@pytest.mark.parametrize("policy", ["everything_saveable", "nothing_saveable", "dots_saveable"])
def test_products_of_scalars_that_jax_keeps_as_numbers_of_python(policy: str) -> None:
    """jax 0.12 keeps a number as it is between the passes, without what arrays have."""
    dot = lambda x, y: jax_splitk.dot_general(x, y, (((), ()), ((), ())))  # noqa: E731
    cube = jax.checkpoint(lambda x: dot(x, dot(x, x)), policy=getattr(jax.checkpoint_policies, policy))
    pulled = lambda x: jax.vjp(jax.grad(cube), x)[1](1.0)[0]  # noqa: E731
    for second in (jax.grad(jax.grad(cube)), jax.jacfwd(jax.grad(cube)), pulled):
        assert second(3.0) == 18
