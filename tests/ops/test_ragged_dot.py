"""`jax_splitk.ragged_dot` and `ragged_dot_general`: lax's semantics where lax is right, and what lax refuses."""

import functools
import itertools
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp

import jax_splitk
from jax_splitk.problems.ragged_dot import RaggedDotProblem
from tests.problems import generator, on_device, seeded
from tests.ragged_dots import exactly, group_rows

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="these are the CPU's paths")

CONTRACTION = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
IMPLEMENTATIONS = ["host", "xla"]


def _integers(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return rng.integers(-2, 3, shape).astype(dtype)


def _forward(lhs: np.ndarray, rhs: np.ndarray, sizes: Any, first: int = 0) -> np.ndarray:
    """The forward product in float64, group by group."""
    out, (groups, _, n) = np.zeros((lhs.shape[0], rhs.shape[-1])), rhs.shape
    del n
    for i, rows in enumerate(group_rows(lhs.shape[0], sizes, first, groups)):
        out[rows] = lhs[rows].astype(np.float64) @ rhs[i].astype(np.float64)
    return out


# ---- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("sizes", [
    [3, 0, 4, 2],  # fewer than the rows
    [5, 3, 2, 2],  # all rows
    [0, 0, 0, 0],  # none: a total of 0
    [7, 0, 9, 1],  # more than the rows
    [-3, 4, -1, 5],  # negative ones count as 0
    [2**31 - 1, 2**31 - 1, 3, 1],  # a sum that int32 does not hold
    [12, 0, 0, 0],  # one hot
    [0, 0, 0, 12],
    [1, 0, 0, 11],  # every group but the last is small
])  # fmt: skip
def test_sizes(sizes: list[int], implementation: Any) -> None:
    """Results and both gradients depend only on the groups' rows, whatever is in the other rows."""
    rng = generator(400)
    lhs, rhs, ct = _integers(rng, 12, 3), _integers(rng, 4, 3, 5), _integers(rng, 12, 5)
    free = np.ones(12, bool)
    for rows in group_rows(12, sizes, 0, 4):
        free[rows] = False
    poisoned, poisoned_ct = (np.where(free[:, None], np.nan, x) for x in (lhs, ct))
    product = functools.partial(jax_splitk.ragged_dot, group_sizes=jnp.array(sizes), implementation=implementation)
    out, back = jax.vjp(product, jnp.asarray(poisoned, jnp.float32), rhs)
    d_lhs, d_rhs = back(jnp.asarray(poisoned_ct, jnp.float32))
    np.testing.assert_array_equal(out, _forward(lhs, rhs, sizes))
    np.testing.assert_array_equal(d_lhs, _forward(ct, rhs.swapaxes(1, 2), sizes))
    exact = RaggedDotProblem("rhs_gradient", 4, 12, 3, 5, "float32", "float32")
    np.testing.assert_array_equal(d_rhs, exactly(exact, lhs, ct, np.array(sizes)))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
def test_sizes_of_any_integer_dtype(dtype: str) -> None:
    """The sum of the sizes may exceed the range of their dtype, in which lax adds them."""
    rng, sizes = generator(401), np.array([100, 27, 120, 100]).astype(dtype)
    lhs, rhs = _integers(rng, 360, 2), _integers(rng, 4, 2, 3)
    np.testing.assert_array_equal(jax_splitk.ragged_dot(lhs, rhs, sizes), _forward(lhs, rhs, sizes))


def test_sizes_of_64_bits() -> None:
    rng, sizes = generator(402), [2**40, 3]
    lhs, rhs = _integers(rng, 6, 2), _integers(rng, 2, 2, 3)
    with jax.enable_x64(True):
        out = jax_splitk.ragged_dot(lhs, rhs, jnp.array(sizes, jnp.int64))
    np.testing.assert_array_equal(out, _forward(lhs, rhs, [6, 0]))


@pytest.mark.parametrize(("m", "k", "n", "g"), [(0, 3, 4, 2), (5, 0, 4, 2), (5, 3, 0, 2), (5, 3, 4, 0), (0, 0, 0, 0)])
def test_empty_dimensions(m: int, k: int, n: int, g: int) -> None:
    lhs, rhs, sizes = np.ones((m, k), np.float32), np.ones((g, k, n), np.float32), np.ones(g, np.int32)
    out, back = jax.vjp(lambda x, w: jax_splitk.ragged_dot(x, w, sizes), lhs, rhs)
    np.testing.assert_array_equal(out, _forward(lhs, rhs, sizes))
    assert [x.shape for x in back(out)] == [lhs.shape, rhs.shape]


def test_groups_begin_anywhere() -> None:
    """No power of two divides the groups' starts, and results have any width."""
    with seeded(403) as rng:
        for m, k, n, g in [(1000, 64, 100, 7), (257, 33, 129, 16), (64, 16, 200, 3), (513, 128, 64, 5)]:
            cuts = np.sort(rng.integers(0, m + 1, g - 1))
            sizes = np.diff([0, *cuts, m])
            lhs, rhs = _integers(rng, m, k), _integers(rng, g, k, n)
            out = jax.jit(functools.partial(jax_splitk.ragged_dot, implementation="host"))(lhs, rhs, sizes)
            np.testing.assert_array_equal(out, _forward(lhs, rhs, sizes))


# ---- group_offset ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("first", [-1, 0, 1, 2, 3, 9])
def test_an_offset_takes_some_groups(first: int, implementation: Any) -> None:
    """Rows of other groups are zeros, and so are groups that are not there; gradients, too."""
    rng, sizes = generator(404), [2, 3, 1, 4]
    lhs, rhs, ct = _integers(rng, 12, 3), _integers(rng, 2, 3, 5), _integers(rng, 12, 5)

    def product(x: Any, w: Any) -> jax.Array:
        offset = jnp.array([first])
        return jax_splitk.ragged_dot(x, w, jnp.array(sizes), group_offset=offset, implementation=implementation)

    out, back = jax.vjp(product, lhs, rhs)
    d_lhs, d_rhs = back(jnp.asarray(ct))
    np.testing.assert_array_equal(out, _forward(lhs, rhs, sizes, first))
    np.testing.assert_array_equal(d_lhs, _forward(ct, rhs.swapaxes(1, 2), sizes, first))
    exact = RaggedDotProblem("rhs_gradient", 2, 12, 3, 5, "float32", "float32", total_groups=4)
    np.testing.assert_array_equal(d_rhs, exactly(exact, lhs, ct, np.array(sizes), np.array([first])))


def test_parts_of_the_experts_add_up() -> None:
    """Each part is the result of a device that has some of the experts."""
    rng, sizes = generator(405), jnp.array([2, 3, 0, 4, 1, 1])
    lhs, rhs = _integers(rng, 12, 3), _integers(rng, 6, 3, 5)
    parts = [jax_splitk.ragged_dot(lhs, rhs[i : i + 2], sizes, group_offset=jnp.array([i])) for i in (0, 2, 4)]
    np.testing.assert_array_equal(sum(parts), jax_splitk.ragged_dot(lhs, rhs, sizes))


def test_an_offset_is_checked() -> None:
    lhs, rhs, sizes = jnp.ones((4, 2)), jnp.ones((2, 2, 2)), jnp.array([1, 2])
    with pytest.raises(ValueError, match=r"group_offset of shape \(2,\); accepted: \(1,\)"):
        jax_splitk.ragged_dot(lhs, rhs, sizes, group_offset=jnp.array([0, 1]))
    with pytest.raises(TypeError, match="group_offset of dtype float32"):
        jax_splitk.ragged_dot(lhs, rhs, sizes, group_offset=jnp.array([0.0]))
    with pytest.raises(TypeError, match="rhs of 2 groups with group_offset; accepted: at most 1"):
        jax_splitk.ragged_dot(lhs, rhs, sizes[:1], group_offset=jnp.array([0]))


# ---- dtypes ----------------------------------------------------------------------------------------------------------

_DTYPES = ("bfloat16", "float16", "float32", "int8")


@pytest.mark.parametrize("preferred", [None, "float32"])
def test_dtypes_are_laxs(preferred: Any) -> None:
    rng, sizes = generator(406), jnp.array([2, 0, 3])
    pairs = list(itertools.product(_DTYPES, repeat=2))
    x, w = _integers(rng, 6, 3), _integers(rng, 3, 3, 4)

    def products(function: Any) -> list[jax.Array]:
        operands = ((jnp.asarray(x, lhs), jnp.asarray(w, rhs)) for lhs, rhs in pairs)
        return [function(*each, sizes, preferred_element_type=preferred) for each in operands]

    found = (jax.jit(functools.partial(products, f))() for f in (jax_splitk.ragged_dot, lax.ragged_dot))
    for pair, ours, theirs in zip(pairs, *found, strict=True):
        assert ours.dtype == theirs.dtype, pair
        np.testing.assert_array_equal(ours, theirs, err_msg=str(pair))


_EVERY_DTYPE = ("bfloat16", "float16", "float32", "float64", "int8", "uint8", "int16", "int32", "uint32", "int64")


@pytest.mark.parametrize("pair", list(itertools.product(_EVERY_DTYPE, repeat=2)), ids="-".join)
def test_the_result_of_any_two_dtypes_has_laxs_dtype(pair: tuple[str, str]) -> None:
    """lax refuses two integer dtypes of one width that differ in sign alone; so does ours."""
    with jax.enable_x64(True):
        x, w = (jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(((6, 3), (3, 3, 4)), pair, strict=True))
        sizes = jax.ShapeDtypeStruct((3,), jnp.int32)

        def dtype_of(product: Any) -> Any:
            try:
                return jax.eval_shape(product, x, w, sizes).dtype
            except TypeError as refused:
                return str(refused)

        assert dtype_of(jax_splitk.ragged_dot) == dtype_of(lax.ragged_dot)


def test_a_trace_asks_lax_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """lax checks each combination of shapes once."""
    asked, check = [], jax.eval_shape
    monkeypatch.setattr(jax, "eval_shape", lambda *args: (asked.append(args), check(*args))[1])
    types = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((61, 3), (3, 3, 4), (61, 4))]
    sizes = jax.ShapeDtypeStruct((3,), jnp.int32)

    def layer(x: jax.Array, w: jax.Array, y: jax.Array, sizes: jax.Array) -> Any:
        out = jax_splitk.ragged_dot(x, w, sizes) + y
        return out, jax_splitk.dot_general(x, out, (((0,), (0,)), ((), ())))

    for _ in range(3):
        jax.make_jaxpr(functools.partial(layer))(*types, sizes)
    assert len(asked) == 2


def test_float64() -> None:
    rng, sizes = generator(407), [2, 0, 3]
    with jax.enable_x64(True):
        lhs, rhs = rng.normal(size=(6, 3)), rng.normal(size=(3, 3, 4))
        out = jax_splitk.ragged_dot(lhs, rhs, jnp.array(sizes))
        assert out.dtype == jnp.float64
        np.testing.assert_allclose(out, _forward(lhs, rhs, sizes), rtol=1e-13, atol=1e-13)


def test_gradients_have_their_operands_dtypes() -> None:
    """float32 weights, bfloat16 arithmetic and a float32 gradient, which is not rounded to bfloat16."""
    rng, sizes = generator(408), jnp.array([300, 0, 212])
    lhs = on_device(rng.normal(size=(512, 8)), jnp.bfloat16)
    rhs, ct = on_device(rng.normal(size=(3, 8, 8)), jnp.float32), on_device(rng.normal(size=(512, 8)), jnp.bfloat16)

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax_splitk.ragged_dot(x, w, sizes, None, jnp.bfloat16, compute_dtype=jnp.bfloat16)

    out, back = jax.vjp(product, lhs, rhs)
    d_lhs, d_rhs = back(ct)
    assert [x.dtype for x in (out, d_lhs, d_rhs)] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
    p = RaggedDotProblem("rhs_gradient", 3, 512, 8, 8, "bfloat16", "float32")
    exact = exactly(p, *(np.asarray(x, np.float64) for x in (lhs, ct)), np.asarray(sizes))
    assert np.abs(np.asarray(d_rhs, np.float64) - exact).max() < 1e-4 * np.abs(exact).max()
    with pytest.raises(TypeError, match="compute_dtype='int8'"):
        jax_splitk.ragged_dot(lhs, rhs, sizes, compute_dtype="int8")


@pytest.mark.parametrize("preferred", [None, "float32"])
def test_gradients_have_laxs_dtypes(preferred: Any) -> None:
    """Compares the gradients of operands of any two floating dtypes, of which integers are exact."""
    rng, sizes = generator(410), jnp.array([2, 0, 3])
    x, w = _integers(rng, 6, 3), _integers(rng, 3, 3, 4)

    def gradients(product: Any) -> Any:
        product = functools.partial(product, group_sizes=sizes, preferred_element_type=preferred)
        found = []
        for pair in itertools.product(_DTYPES[:3], repeat=2):
            out, back = jax.vjp(product, jnp.asarray(x, pair[0]), jnp.asarray(w, pair[1]))
            found.append((out, *back(out)))
        return found

    ours, theirs = (
        jax.tree.leaves(jax.jit(lambda f=f: gradients(f))()) for f in (jax_splitk.ragged_dot, lax.ragged_dot)
    )
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("mode", ["forward", "rhs_gradient"])
def test_errors_are_at_most_xlas(mode: Any) -> None:
    """The errors are those of long sums of random numbers, relative to float64: the greatest of several products."""
    forward, greatest = mode == "forward", {"host": 0.0, "xla": 0.0}
    p = RaggedDotProblem(mode, 4, 40 if forward else 4000, 4000 if forward else 40, 24, "float32", "float32")
    product = jax_splitk.ragged_dot if forward else _contracted
    with seeded(409) as rng:
        for _ in range(8):
            sizes = rng.multinomial(p.m, [0.6, 0.0, 0.3, 0.1])
            lhs, rhs = (rng.normal(size=shape).astype(np.float32) for shape, _ in p.operand_types[:2])
            exact = exactly(p, lhs, rhs, sizes)
            for implementation, before in greatest.items():
                options = {"precision": "highest", "implementation": implementation}
                error = np.abs(np.asarray(product(lhs, rhs, sizes, **options), np.float64) - exact).max()
                greatest[implementation] = max(before, float(error))
        assert greatest["host"] <= greatest["xla"]


def _contracted(x: Any, y: Any, sizes: Any, **options: Any) -> jax.Array:
    return jax_splitk.ragged_dot_general(x, y, sizes, CONTRACTION, **options)
