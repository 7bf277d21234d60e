"""`jax_splitk.intercept`: code that calls lax gets our weight gradients, in its thread and its block only."""

import functools
import inspect
import logging
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp

import jax_splitk
from jax_splitk import explain, intercept
from jax_splitk.ops import conv
from jax_splitk.problems.conv_reference import lax_conv
from tests.problems import generator, on_device

NHWC = ("NHWC", "HWIO", "NHWC")
NAMES = (
    "conv_general_dilated",
    "conv_transpose",
    "conv_with_general_padding",
    "conv",
    "ragged_dot",
    "ragged_dot_general",
)


def present() -> dict[str, Any]:
    """What a block replaces, as it is now."""
    operator = vars(type(jax.typeof(0)))["_matmul"]
    assert isinstance(operator, staticmethod), "traced arrays pass themselves as the first argument"
    return {name: getattr(lax, name) for name in (*NAMES, "scan")} | {"x @ w": operator.__func__}


STOCK = present()
X, W = (on_device(generator(455).standard_normal(shape), "float32") for shape in ((4, 6, 6, 8), (3, 3, 8, 8)))


def plain(w: jax.Array, x: jax.Array) -> jax.Array:
    y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC)
    return jnp.square(y.astype(jnp.float32)).mean()


def ours(fn: Callable[..., Any], *args: Any) -> int:
    """How many of our operations the gradient of fn has."""
    return sum(d.count for d in explain(jax.grad(fn), *args).decisions)


def stock() -> bool:
    return present() == STOCK


@pytest.fixture(autouse=True)
def _restored() -> Any:
    assert stock()
    yield
    assert stock()


CALLS = {
    "conv_general_dilated": lambda x, w: lax.conv_general_dilated(x, w, (2, 1), "SAME", dimension_numbers=NHWC),
    "conv_transpose": lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME"),
    "conv_transpose_of_a_kernel": lambda x, w: lax.conv_transpose(x, w, (2, 1), "VALID", transpose_kernel=True),
    "conv_with_general_padding": lambda x, w: lax.conv_with_general_padding(
        x.transpose(0, 3, 1, 2), w.transpose(3, 2, 0, 1), (1, 1), [(1, 0), (0, 2)], None, (2, 1)
    ),
    "conv": lambda x, w: lax.conv(x.transpose(0, 3, 1, 2), w.transpose(3, 2, 0, 1), (1, 1), "VALID"),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_function_of_lax_is_routed_with_its_result(name: str) -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.square(CALLS[name](x, w)).sum()

    expected = jax.jit(jax.value_and_grad(loss, (0, 1)))(W, X)
    assert ours(loss, W, X) == 0
    with intercept():
        assert ours(loss, W, X) == 1
        value, grads = jax.jit(jax.value_and_grad(loss, (0, 1)))(W, X)
    np.testing.assert_allclose(value, expected[0], rtol=1e-6)
    for got, wanted in zip(grads, expected[1], strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-4 * float(jnp.abs(wanted).max()))


def test_only_the_gradient_of_the_weight_is_ours() -> None:
    """Calls of lax.conv_general_dilated by lax's own rules are not routed."""
    with intercept():
        assert explain(jax.grad(plain, 1), W, X).decisions == ()
        assert explain(plain, W, X).decisions == ()
        assert ours(plain, W, X) == 1
        many = jnp.stack([W, W])
        assert ours(lambda ws: jax.vmap(plain, (0, None))(ws, X).sum(), many) == 1


def test_compute_dtype_keeps_the_results_dtype_and_float32_gradients() -> None:
    rounded = lambda x: x.astype(jnp.bfloat16).astype(jnp.float32)  # noqa: E731
    expected = jax.grad(plain)(rounded(W), rounded(X))
    with intercept(compute_dtype=jnp.bfloat16):
        assert jax.eval_shape(CALLS["conv"], X, W).dtype == jnp.float32
        grads = jax.grad(plain)(W, X)
        (decision,) = explain(jax.grad(plain), W, X).decisions
        half = jax.eval_shape(CALLS["conv"], X.astype(jnp.float16), W.astype(jnp.float16))
    assert half.dtype == jnp.float16
    assert (decision.problem.dtype, decision.problem.out_dtype, grads.dtype) == ("bfloat16", "float32", jnp.float32)
    assert not np.array_equal(grads, rounded(grads))
    np.testing.assert_allclose(grads, expected, atol=1e-2 * float(jnp.abs(expected).max()))


def test_a_decorated_function_is_differentiated_outside() -> None:
    decorated = intercept(compute_dtype="bfloat16")(plain)
    assert inspect.signature(decorated) == inspect.signature(plain)
    for fn in (decorated, jax.jit(decorated), jax.checkpoint(decorated)):
        assert ours(fn, W, X) == 1
    # As often as one likes, and inside of itself.
    assert ours(intercept()(lambda w, x: decorated(w, x) + decorated(w, x)), W, X) == 2


def test_functions_jitted_outside_are_traced_again() -> None:
    fn = jax.jit(plain)
    fn(W, X)
    for _ in range(2):
        assert ours(fn, W, X) == 0
        with intercept():
            assert ours(fn, W, X) == 1
            lowered = jax.jit(jax.grad(fn)).lower(W, X).as_text()
        assert "jax_splitk" in lowered


def test_blocks_nest_and_inherit() -> None:
    def problems() -> list[tuple[str, str]]:
        return [(d.problem.dtype, d.implementation) for d in explain(jax.grad(plain), W, X).decisions]

    with intercept(compute_dtype="bfloat16"):
        with intercept(implementation="xla"):
            assert problems() == [("bfloat16", "xla")]
            with intercept(compute_dtype="float16"):
                assert problems() == [("float16", "xla")]
        assert [dtype for dtype, _ in problems()] == ["bfloat16"]
        assert not stock()
    with jax_splitk.options(implementation="xla"), intercept():
        assert problems() == [("float32", "xla")]


def test_restored_after_an_error() -> None:
    with pytest.raises(KeyError), intercept(), intercept():
        raise KeyError
    assert stock()
    assert ours(plain, W, X) == 0
    for arguments in ({"compute_dtype": "int8"}, {"implementation": "best"}, {"workspace_limit_bytes": -1}):
        (name,) = arguments
        with pytest.raises((TypeError, ValueError), match=f"{name}=.*; accepted: "), intercept(**arguments):
            pytest.fail("the block began")
        assert stock()


def test_what_others_put_into_lax_meanwhile_stays() -> None:
    with intercept():
        theirs = functools.partial(lax.conv_general_dilated)
        lax.conv_general_dilated = theirs
    try:
        assert lax.conv_general_dilated is theirs
        assert ours(plain, W, X) == 0
    finally:
        lax.conv_general_dilated = STOCK["conv_general_dilated"]


def test_other_threads_keep_lax() -> None:
    """This includes threads during which a block begins and ends, and blocks of several threads that overlap."""
    found: dict[str, list[int]] = {"inside": [], "outside": []}
    steps = threading.Barrier(2, timeout=60)

    def inside() -> None:
        with intercept():
            steps.wait()
            found["inside"].append(ours(plain, W, X))
            steps.wait()
        steps.wait()
        found["inside"].append(ours(plain, W, X))

    def outside() -> None:
        steps.wait()
        found["outside"].append(ours(plain, W, X))
        block = intercept()
        with block:
            steps.wait()
            steps.wait()  # the other block has ended
            found["outside"].append(ours(plain, W, X))

    threads = [threading.Thread(target=target) for target in (inside, outside)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"inside": [1, 0], "outside": [0, 1]}


def test_what_is_not_ours_is_left_to_lax(caplog: pytest.LogCaptureFixture) -> None:
    integers, weights = jnp.ones((1, 4, 4, 2), jnp.int8), jnp.ones((3, 3, 2, 2), jnp.int8)
    geometry: dict[str, Any] = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": NHWC}
    with caplog.at_level(logging.INFO, "jax_splitk"), intercept(compute_dtype="bfloat16"):
        whole = lax.conv_general_dilated(integers, weights, **geometry)
        turned = lax.conv_general_dilated(X * 1j, W * 1j, **geometry)
        with pytest.raises(TypeError, match="missing"):
            lax.conv_general_dilated(X)  # pyright: ignore[reportCallIssue]
    np.testing.assert_array_equal(whole, lax_conv(integers, weights, **geometry))
    np.testing.assert_allclose(turned, -lax_conv(X, W, **geometry), atol=1e-4)
    assert (whole.dtype, turned.dtype) == (jnp.int8, jnp.complex64)


def test_an_error_inside_is_not_taken_for_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a refused argument leaves a convolution to lax: an error of this package must not be hidden."""
    for error in (ValueError, TypeError, NotImplementedError):

        def broken(*args: Any, error: type[Exception] = error, **kwargs: Any) -> jax.Array:
            raise error("inside")

        monkeypatch.setattr(conv, "ConvFprop", broken)
        with intercept(), pytest.raises(error, match="inside"):
            plain(W, X)


def test_ours_in_laxs_place_does_not_call_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Users may replace lax's function instead of opening a block."""
    expected = jax.grad(plain, (0, 1))(W, X)
    monkeypatch.setattr(lax, "conv_general_dilated", jax_splitk.conv_general_dilated)
    assert ours(plain, W, X) == 1
    for got, wanted in zip(jax.grad(plain, (0, 1))(W, X), expected, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-5)
    with intercept():
        assert ours(plain, W, X) == 1
    monkeypatch.undo()


def test_inside_transformations_and_loops() -> None:
    def scanned(w: jax.Array, x: jax.Array) -> jax.Array:
        step = lambda x, _: (lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC), None)  # noqa: E731
        return lax.scan(jax.checkpoint(step), x, None, 2)[0].sum()

    def mapped(w: jax.Array, x: jax.Array) -> jax.Array:
        one = lambda image: lax.conv_general_dilated(image[None], w, (1, 1), "SAME", dimension_numbers=NHWC)[0]  # noqa: E731
        return jax.vmap(one)(x).sum()

    for fn in (scanned, mapped):
        expected = jax.grad(fn)(W, X)
        with intercept():
            assert ours(fn, W, X) == 1
            got = jax.jit(jax.grad(fn))(W, X)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4 * float(jnp.abs(expected).max()))


@pytest.mark.filterwarnings("default")  # a framework may be behind jax
def test_layers_without_an_argument_for_it() -> None:
    """The layers are transposed convolutions of Flax and Haiku."""
    nn, hk = pytest.importorskip("flax.linen"), pytest.importorskip("haiku")
    nnx = pytest.importorskip("flax.nnx")
    layer = nn.ConvTranspose(4, (3, 3), strides=(2, 2))
    net = hk.transform(lambda x: hk.Conv2DTranspose(4, 3, stride=2)(x))  # noqa: PLW0108 - it must be made inside
    graph, state = nnx.split(nnx.ConvTranspose(8, 4, (3, 3), strides=2, rngs=nnx.Rngs(0)), nnx.Param)
    cases = (
        (lambda params, x: layer.apply(params, x).sum(), jax.jit(layer.init)(jax.random.key(0), X)),
        (lambda params, x: net.apply(params, None, x).sum(), jax.jit(net.init)(jax.random.key(0), X)),
        (lambda params, x: nnx.merge(graph, params)(x).sum(), state),
    )
    for fn, params in cases:
        expected = jax.jit(jax.grad(fn))(params, X)
        with intercept():
            assert ours(fn, params, X) == 1
            got = jax.jit(jax.grad(fn))(params, X)
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
