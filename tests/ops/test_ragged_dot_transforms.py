"""`jax_splitk.ragged_dot` under JAX's transformations, where the sizes take part, and what lax refuses."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import export, lax
from jax import numpy as jnp

import jax_splitk
from jax_splitk.kernels.cpu.ragged import Config
from jax_splitk.ops import trace
from jax_splitk.ops.equations import walk
from tests.exhaustive import thinned
from tests.problems import generator

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="these are the CPU's paths")

SIZES = jnp.array([2, 0, 3, 1])
Numbers = lax.RaggedDotDimensionNumbers


def _operands(seed: int, *shapes: tuple[int, ...]) -> list[jax.Array]:
    rng = generator(seed)
    return [jax.device_put(rng.integers(-2, 3, shape).astype(np.float32)) for shape in shapes]


def _dense(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """Multiplies each row with the matrix of its group, by masks. It uses only JAX's own functions, so that it works
    under any transformation."""
    ends = jnp.cumsum(sizes)
    row = jnp.arange(x.shape[0])[:, None]
    member = ((row >= ends - sizes) & (row < ends)).astype(x.dtype)
    return jnp.einsum("mg,mk,gkn->mn", member, x, w)


# ---- vmap ------------------------------------------------------------------------------------------------------------

_MAPPED = [those for n in range(1, 4) for those in itertools.combinations(range(3), n)]


@pytest.mark.parametrize("those", _MAPPED, ids=str)
@pytest.mark.parametrize("config", [None, Config(1, 4)], ids=["chosen", "config"])
def test_vmap_of_any_operands(those: tuple[int, ...], config: Any) -> None:
    """Maps lhs, rhs and sizes, with axes anywhere; compares values and gradients."""
    x, w = _operands(420, (7, 3), (4, 3, 5))
    many = _operands(421, (3, 7, 3), (3, 4, 3, 5))
    sizes = jnp.array([[1, 2, 0, 3], [0, 7, 0, 0], [2, 2, 2, 2]])
    places = [min(1, i) if i in those else None for i in range(3)]
    operands = [
        jnp.moveaxis(each, 0, places[i] or 0) if i in those else one
        for i, (one, each) in enumerate(zip((x, w, SIZES), (*many, sizes), strict=True))
    ]

    def results(product: Callable[..., jax.Array]) -> Any:
        mapped = jax.vmap(product, tuple(places))
        out, back = jax.vjp(lambda x, w: mapped(x, w, operands[2]), *operands[:2])
        return out, back(out)

    ours = functools.partial(jax_splitk.ragged_dot, config=config)
    found, expected = jax.jit(lambda: [results(f) for f in (ours, _dense)])()
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("inner", _MAPPED, ids=str)
def test_vmap_of_vmap(inner: tuple[int, ...]) -> None:
    """Maps each subset inside each other subset: operands have none, one or both of the axes."""
    given = []
    for outer in _MAPPED:
        x, w = _operands(
            422, *(((2,) * ((i in inner) + (i in outer)) + shape) for i, shape in enumerate(((7, 3), (4, 3, 5))))
        )
        sizes = np.broadcast_to(SIZES, (2,) * ((2 in inner) + (2 in outer)) + (4,))
        given.append((x, w, sizes * np.arange(1, 1 + sizes.size // 4).reshape(*sizes.shape[:-1], 1)))

    @jax.jit
    def results(given: list[Any]) -> list[Any]:
        found = []
        for outer, operands in zip(_MAPPED, given, strict=True):
            for product in (jax_splitk.ragged_dot, _dense):
                mapped: Callable[..., jax.Array] = product
                for those in (inner, outer):
                    mapped = jax.vmap(mapped, tuple(0 if i in those else None for i in range(3)))
                found.append(mapped(*operands))
        return found

    found = results(given)
    for outer, ours, theirs in zip(_MAPPED, found[::2], found[1::2], strict=True):
        np.testing.assert_array_equal(ours, theirs, err_msg=str(outer))


def test_vmap_of_an_offset_and_of_nothing() -> None:
    x, w = _operands(423, (7, 3), (2, 3, 5))
    some = lambda offset: jax_splitk.ragged_dot(x, w, SIZES, group_offset=offset)  # noqa: E731
    each = jax.vmap(some)(jnp.arange(3)[:, None])
    np.testing.assert_array_equal(each, jnp.stack([some(jnp.array([i])) for i in range(3)]))
    nothing = jax.vmap(lambda t: t * some(jnp.array([1])))(jnp.arange(3.0))
    np.testing.assert_array_equal(nothing, jnp.arange(3.0)[:, None, None] * each[1])


# ---- derivatives -----------------------------------------------------------------------------------------------------


def test_gradients_of_gradients() -> None:
    """Compares Hessians by both modes, and third derivatives: the passes are each other's transposes."""
    x, w = _operands(424, (6, 2), (4, 2, 2))

    def results(product: Callable[..., jax.Array]) -> Any:
        loss = lambda x, w: jnp.sum(product(x, w, SIZES) ** 3)  # noqa: E731
        third = jax.grad(lambda x, w: jnp.vdot(jax.grad(loss)(x, w), x) ** 2, (0, 1))
        return (
            jax.hessian(loss, (0, 1))(x, w),
            jax.jacrev(jax.grad(loss, 1), 0)(x, w),
            jax.grad(lambda x, w: sum(jnp.sum(each) for each in third(x, w)), (0, 1))(x, w),
        )

    ours, theirs = (jax.jit(lambda f=f: results(f))() for f in (jax_splitk.ragged_dot, _dense))
    for one, other in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_every_pass_is_ours() -> None:
    """The trace of a gradient has three grouped products, and no transposed copy of the weights."""
    x, w = _operands(425, (6, 3), (4, 3, 5))
    gradient = jax.grad(lambda x, w: jnp.sum(jax_splitk.ragged_dot(x, w, SIZES) ** 2), (0, 1))
    equations = list(walk(jax.make_jaxpr(gradient)(x, w).jaxpr))
    named = [eqn.primitive.name for eqn in equations]
    assert named.count("jax_splitk_ragged_dot") == 3
    assert not {"transpose", "ragged_dot_general", "dot_general"} & set(named)
    problems: list[Any] = [problem for _, problem in trace.ours(jax.make_jaxpr(gradient)(x, w).jaxpr, "cpu")]
    assert [(p.mode, getattr(p, "rhs_order", "")) for p in problems] == [
        ("forward", "gkn"), ("rhs_gradient", "gkn"), ("forward", "gnk"),
    ]  # fmt: skip


def test_checkpoint_policies_see_a_product() -> None:
    """`dots_saveable` keeps it, as it does all products; lax's own grouped product it does not know."""
    x, w = _operands(426, (6, 3), (4, 3, 3))

    def count(policy: Any) -> int:
        block = jax.checkpoint(lambda x, w: jnp.sin(jax_splitk.ragged_dot(x, w, SIZES)), policy=policy)
        jaxpr = jax.make_jaxpr(jax.grad(lambda x, w: jnp.sum(block(x, w)), (0, 1)))(x, w)
        return [e.primitive.name for e in walk(jaxpr.jaxpr)].count("jax_splitk_ragged_dot")

    policies = jax.checkpoint_policies
    assert count(policies.dots_saveable) == count(policies.dots_with_no_batch_dims_saveable) == 3
    assert count(policies.everything_saveable) == 3
    assert count(policies.nothing_saveable) == 4


# ---- ragged_dot_general ----------------------------------------------------------------------------------------------

# Dimension numbers, and the shapes of lhs, rhs and sizes.
_GENERAL = {
    "batch": (Numbers((((2,), (2,)), ((0,), (0,))), [1], [1]), (2, 7, 3), (2, 4, 3, 5), (2, 4)),
    "batch, groups first": (Numbers((((2,), (2,)), ((0,), (1,))), [1], [0]), (2, 7, 3), (4, 2, 3, 5), (4,)),
    "rows of several dimensions": (Numbers((((2,), (1,)), ((), ())), [0], [0]), (7, 2, 3), (4, 3, 5), (4,)),
    "outer rows": (Numbers((((2,), (1,)), ((), ())), [1], [0]), (2, 7, 3), (4, 3, 5), (2, 4)),
    "outer rows, the same sizes": (Numbers((((2,), (1,)), ((), ())), [1], [0]), (2, 7, 3), (4, 3, 5), (4,)),
    "two of each": (
        Numbers((((0, 4), (3, 0)), ((1,), (2,))), [3], [4]), (3, 2, 2, 7, 4), (4, 5, 2, 3, 4, 2), (2, 2, 4),
    ),
    "no columns": (Numbers((((1,), (1,)), ((), ())), [0], [0]), (7, 3), (4, 3), (4,)),
    "rhs transposed": (Numbers((((1,), (2,)), ((), ())), [0], [0]), (7, 3), (4, 5, 3), (4,)),
    "groups last": (Numbers((((1,), (0,)), ((), ())), [0], [2]), (7, 3), (3, 5, 4), (4,)),
    "contraction": (Numbers((((0,), (0,)), ((), ())), [0], []), (7, 3), (7, 5), (4,)),
    "contraction of a batch": (Numbers((((1,), (1,)), ((0,), (0,))), [1], []), (2, 7, 3), (2, 7, 5), (2, 4)),
    "contraction of two": (Numbers((((0, 1), (1, 0)), ((), ())), [1], []), (2, 7, 3), (7, 2, 5), (2, 4)),
    "contraction of two, the same sizes": (
        Numbers((((0, 1), (1, 0)), ((), ())), [1], []), (2, 7, 3), (7, 2, 5), (4,),
    ),
    "contraction of inner ones": (Numbers((((1, 2), (0, 1)), ((), ())), [1], []), (3, 7, 2), (7, 2, 5), (4,)),
    "batch ragged": (Numbers((((2,), (1,)), ((0,), (0,))), [0], []), (4, 7, 3), (4, 3, 5), (2,)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "implementation"),
    thinned(((name, (None, "xla")[(i + j) % 2]) for i, name in enumerate(_GENERAL) for j in range(2)), 2),
)
def test_general_products_are_laxs(name: str, implementation: Any) -> None:
    numbers, lhs_shape, rhs_shape, sizes_shape = _GENERAL[name]
    x, w = _operands(427, lhs_shape, rhs_shape)
    sizes = np.array(np.broadcast_to(SIZES if sizes_shape[-1] == 4 else [1, 2], sizes_shape), np.int32)
    if len(sizes_shape) > 1:
        sizes = np.roll(sizes, sizes.size // 4 - 1, -1)
        sizes[..., 0] += np.arange(sizes_shape[-2], dtype=np.int32)

    def ours(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax_splitk.ragged_dot_general(x, w, sizes, numbers, implementation=implementation)

    def laxs(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.ragged_dot_general(x, w, sizes, numbers)

    # lax differentiates few of these: by its values, which are bilinear.
    directions = _operands(429, x.shape, w.shape)

    @jax.jit
    def results(x: jax.Array, w: jax.Array) -> Any:
        (one, back), other = jax.vjp(ours, x, w), laxs(x, w)
        (ct,) = _operands(428, other.shape)
        moved = laxs(directions[0], w), laxs(x, directions[1])
        inner = [(jnp.vdot(a, b), jnp.vdot(ct, c)) for a, b, c in zip(back(ct), directions, moved, strict=True)]
        return (one, other), *inner

    for one, other in results(x, w):
        np.testing.assert_array_equal(one, other)


def test_wrong_operands_are_refused_as_by_lax() -> None:
    x, w = _operands(431, (7, 3), (4, 2, 5))
    for args in ((x, w, SIZES), (x, w[:, :1], SIZES), (x, x, SIZES), (x, w, SIZES[:2]), (x, w, SIZES * 1.0)):
        with pytest.raises(TypeError) as theirs:
            lax.ragged_dot(*args)
        with pytest.raises(TypeError) as ours:
            jax_splitk.ragged_dot(*args)
        assert str(ours.value) == str(theirs.value)


def test_what_no_kernel_takes_is_laxs() -> None:
    x, w = _operands(432, (7, 3), (4, 3, 5))
    integers = jax_splitk.ragged_dot(x.astype(jnp.int8), w.astype(jnp.int8), SIZES, preferred_element_type=jnp.int32)
    np.testing.assert_array_equal(integers, _dense(x, w, SIZES))
    with pytest.raises(NotImplementedError, match="operands of dtypes int32 and int32; kernels take"):
        jax_splitk.ragged_dot(x.astype(int), w.astype(int), SIZES, implementation="host")
    with pytest.raises(NotImplementedError, match="implementation='xla'"):
        jax.jit(lambda: jax_splitk.ragged_dot(x, w, SIZES, implementation="cutlass"))()


# ---- loops, export ---------------------------------------------------------------------------------------------------


def test_scan_over_layers_with_remat() -> None:
    x, layers = _operands(433, (6, 3), (5, 4, 3, 3))
    sizes = jnp.array([[2, 0, 3, 1], [6, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 6], [0, 3, 3, 0]])

    def loss(product: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        def step(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
            return x + jnp.sin(product(x, *layer)), None

        return lambda x, layers: jnp.sum(lax.scan(jax.checkpoint(step), x, (layers, sizes))[0])

    ours, theirs = (jax.jit(jax.value_and_grad(loss(f), (0, 1)))(x, layers) for f in (jax_splitk.ragged_dot, _dense))
    for one, other in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_export() -> None:
    x, w = _operands(434, (6, 3), (4, 3, 5))
    function = jax.jit(jax.grad(lambda x, w, sizes: jnp.sum(jax_splitk.ragged_dot(x, w, sizes) ** 2), (0, 1)))
    exported = export.export(function, disabled_checks=jax_splitk.EXPORT_CHECKS)(x, w, SIZES)
    again = export.deserialize(bytearray(exported.serialize()))
    for one, other in zip(again.call(x, w, SIZES), function(x, w, SIZES), strict=True):
        np.testing.assert_array_equal(one, other)


def test_export_with_a_symbolic_number_of_rows() -> None:
    """lax's operation is exported: kernels are compiled for sizes that are known."""
    (m,) = export.symbolic_shape("m")
    _, w = _operands(435, (6, 3), (4, 3, 5))
    function = jax.jit(lambda x, sizes: jax_splitk.ragged_dot(x, w, sizes))
    types = jax.ShapeDtypeStruct((m, 3), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.int32)
    exported = export.export(function)(*types)
    (x,) = _operands(436, (9, 3))
    np.testing.assert_array_equal(exported.call(x, SIZES), function(x, SIZES))
