"""Products of few rows in scans: `intercept(few_rows=True)` routes them, `explain` lists those that XLA copies for."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_splitk
from jax_splitk.kernels import catalogue
from jax_splitk.kernels.contraction import few_rows
from jax_splitk.ops.decision import Decision
from jax_splitk.problems.dot_general import DotProblem
from tests.problems import on_device, seeded

LAYERS, WIDTH = 3, 1024
NUMBERS = (((1,), (0,)), ((), ()))
PRODUCTS: dict[str, Callable[[Any, Any], Any]] = {
    "dot": lambda x, w: jnp.dot(x, w),  # noqa: PLW0108 - replaced when it is called
    "matmul": lambda x, w: jnp.matmul(x, w),  # noqa: PLW0108
    "operator": lambda x, w: x @ w,
    "matmul, wide": lambda x, w: jnp.matmul(x, w, preferred_element_type=jnp.float32).astype(x.dtype),
    "einsum": lambda x, w: jnp.einsum("bk,kn->bn", x, w),
    "dot_general": lambda x, w: lax.dot_general(x, w, NUMBERS),
    "dot_general, keywords": lambda x, w: lax.dot_general(x, rhs=w, dimension_numbers=NUMBERS, precision=None),
}


def scanned(product: Callable[[Any, Any], Any], x: jax.Array, stack: jax.Array) -> jax.Array:
    return lax.scan(lambda x, w: (product(x, w), None), x, stack)[0]


def types(rows: int = 8, width: int = WIDTH, dtype: Any = jnp.bfloat16) -> tuple[Any, Any]:
    return jax.ShapeDtypeStruct((rows, width), dtype), jax.ShapeDtypeStruct((LAYERS, width, width), dtype)


def problems(decisions: Sequence[Decision]) -> list[DotProblem]:
    found = [decision.problem for decision in decisions]
    assert all(isinstance(problem, DotProblem) for problem in found)
    return found  # pyright: ignore[reportReturnType]


def kernels(function: Callable[..., Any], *given: Any, platform: str = "cuda") -> int:
    text = jax.jit(function).trace(*given).lower(lowering_platforms=(platform,)).as_text()
    return text.count("jax_splitk_launch")


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_in_a_scan_are_routed(name: str) -> None:
    function = functools.partial(scanned, PRODUCTS[name])
    with jax_splitk.intercept(few_rows=True):
        (decision,) = jax_splitk.explain(function, *types(), platform="cuda").decisions
        assert (decision.implementation, problems([decision])[0].m) == ("cutlass", 8)
        assert jax_splitk.explain(function, *types(), platform="cpu").decisions == ()
    for others in (jax_splitk.intercept(), jax_splitk.intercept(few_rows=False)):
        with others:
            assert jax_splitk.explain(function, *types(), platform="cuda").decisions == ()


def test_the_operator_of_other_operands_is_jaxs() -> None:
    """Operands that are quantized weights, NumPy's arrays or no arrays, and blocks that route no products."""
    x, stack = types()
    weight = jax_splitk.quantize(jnp.ones((WIDTH, 64), jnp.bfloat16), "int8", group_size=128)

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        with pytest.raises(TypeError, match="unsupported operand"):
            _ = x @ "w"  # pyright: ignore[reportOperatorIssue]
        assert (x[0] @ w[0]).shape == () and (np.ones(WIDTH, np.float32) @ x.T).shape == (8,)
        return x + (x @ weight).astype(x.dtype).sum() + (x @ np.ones((WIDTH, WIDTH), x.dtype)).sum(), None

    def body(x: jax.Array, stack: jax.Array) -> jax.Array:
        return lax.scan(layer, x, stack)[0]

    with jax_splitk.intercept(few_rows=True):
        decisions = jax_splitk.explain(body, x, stack, platform="cuda").decisions
        with jax_splitk.intercept(few_rows=False):
            assert [d.problem.op for d in jax_splitk.explain(body, x, stack, platform="cuda").decisions] == [
                "quantized_matmul"
            ]
    assert [d.problem.op for d in decisions] == ["quantized_matmul", "dot_general"]
    assert [d.problem.op for d in jax_splitk.explain(body, x, stack, platform="cuda").decisions] == ["quantized_matmul"]


def test_a_program_for_a_gpu_has_the_kernel() -> None:
    function = functools.partial(scanned, jnp.matmul)
    with jax_splitk.intercept(few_rows=True):
        assert kernels(lambda x, w: scanned(PRODUCTS["matmul"], x, w), *types()) == 1
        assert kernels(lambda x, w: scanned(PRODUCTS["matmul"], x, w), *types(), platform="cpu") == 0
    assert kernels(function, *types()) == 0


@pytest.mark.parametrize(
    ("product", "given"),
    [
        (PRODUCTS["dot"], types(rows=65)),
        (PRODUCTS["dot"], types(width=512)),  # a copy of 512 KiB takes under a microsecond
        (PRODUCTS["dot"], types(dtype=jnp.float32)),
        (lambda x, w: lax.dot_general(x, w, NUMBERS, precision="highest"), types()),
        (lambda x, w: jnp.dot(w, x.T).T, types()),  # the weight is the first operand
        (lambda x, w: jnp.dot(x, w.astype(jnp.float32)).astype(x.dtype), types()),
    ],
)
def test_other_products_stay_laxs(product: Callable[[Any, Any], Any], given: Any) -> None:
    function = functools.partial(scanned, product)
    with jax_splitk.intercept(few_rows=True):
        assert jax_splitk.explain(function, *given, platform="cuda").decisions == ()


def test_products_outside_of_scans_stay_laxs() -> None:
    """Also those of a loop of another kind: its weights may be the same in each turn."""

    def unrolled(x: jax.Array, stack: jax.Array) -> jax.Array:
        for w in stack:
            x = jnp.dot(x, w)
        return lax.fori_loop(0, 4, lambda i, x: jnp.dot(x, stack[0]), x)

    with jax_splitk.intercept(few_rows=True):
        assert jax_splitk.explain(unrolled, *types(), platform="cuda").decisions == ()


def test_results_and_gradients_on_a_cpu_are_laxs_bit_for_bit() -> None:
    with seeded(3) as rng:
        x = on_device(rng.standard_normal((4, WIDTH)), jnp.bfloat16)
        stack = on_device(rng.standard_normal((LAYERS, WIDTH, WIDTH)) / 32, jnp.bfloat16)

    def loss(x: jax.Array, stack: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(scanned(PRODUCTS["matmul"], x, stack).astype(jnp.float32)))

    def run(x: jax.Array, stack: jax.Array) -> Any:
        return jax.jit(jax.value_and_grad(loss, (0, 1)))(x, stack)

    expected = run(x, stack)
    with jax_splitk.intercept(few_rows=True):
        for found, wanted in zip(jax.tree.leaves(run(x, stack)), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(wanted, np.float32))


def test_a_gradient_of_x_has_few_rows_and_that_of_the_weight_is_laxs() -> None:
    def gradients(x: jax.Array, stack: jax.Array) -> Any:
        return jax.grad(lambda *a: jnp.sum(scanned(PRODUCTS["dot"], *a).astype(jnp.float32)), (0, 1))(x, stack)

    with jax_splitk.intercept(few_rows=True):
        decisions = jax_splitk.explain(gradients, *types(), platform="cuda").decisions
    assert {(p.m, p.rhs_order) for p in problems(decisions)} == {(8, "bkn"), (8, "bnk")}
    assert all(d.family is not None for d in decisions)


def test_wrong_arguments_raise_laxs_errors() -> None:
    x, w = jnp.ones((4, 8), jnp.bfloat16), jnp.ones((2, 8, 8), jnp.bfloat16)
    with jax_splitk.intercept(few_rows=True), pytest.raises(TypeError, match="dot_general"):
        lax.scan(lambda x, w: (lax.dot_general(x, w, (((0,), (0,)), ((), ()))), None), x, w)
    with pytest.raises(ValueError, match="few_rows='yes'; accepted: None, True, False"):
        jax_splitk.intercept(few_rows="yes").__enter__()  # pyright: ignore[reportArgumentType, reportCallIssue]


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        dense = nn.Dense(WIDTH, use_bias=False, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
        return x + dense(x), None


class Model(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scanned = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
        return scanned()(x, None)[0]


def test_layers_of_linen_under_nn_scan_are_routed() -> None:
    x, _ = types()
    params = jax.eval_shape(Model().init, jax.random.key(0), x)
    with jax_splitk.intercept(few_rows=True):
        (decision,) = jax_splitk.explain(Model().apply, params, x, platform="cuda").decisions
    assert decision.family is not None and problems([decision])[0].n == WIDTH
    assert len(jax_splitk.explain(Model().apply, params, x, platform="cuda").unrouted) == 1


# ---- explain ---------------------------------------------------------------------------------------------------------


def sliced_by_hand(x: jax.Array, stack: jax.Array) -> jax.Array:
    return lax.fori_loop(0, LAYERS, lambda i, x: x @ lax.dynamic_index_in_dim(stack, i, 0, keepdims=False), x)


def within_jit(x: jax.Array, stack: jax.Array) -> jax.Array:
    return scanned(jax.jit(lambda x, w: x @ w.reshape(WIDTH, WIDTH)), x, stack)


@pytest.mark.parametrize(
    "function", [functools.partial(scanned, PRODUCTS["dot"]), sliced_by_hand, within_jit], ids=["scan", "loop", "jit"]
)
def test_explain_names_the_products_that_xla_copies_for(function: Callable[..., Any]) -> None:
    explained = jax_splitk.explain(function, *types(), platform="cuda")
    (decision,) = explained.unrouted
    (problem,) = problems([decision])
    assert (problem.m, problem.n, problem.k) == (8, WIDTH, WIDTH)
    assert decision.family is not None and "XLA copies the weight out of its stack first" in decision.why
    # The copy reads and writes 2 MiB each: at least a microsecond more than the product alone.
    assert decision.xla_us is not None and decision.saved_us is not None and decision.saved_us > 0
    assert "intercept(few_rows=True)" in str(explained)
    assert jax_splitk.explain(function, *types(), platform="cpu").unrouted == ()


def test_explain_leaves_out_what_xla_reads_in_place() -> None:
    def constant(x: jax.Array, stack: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 4, lambda i, x: x @ stack[0], x)

    def converted(x: jax.Array, stack: jax.Array) -> jax.Array:
        return scanned(lambda x, w: x @ jnp.exp(w), x, stack)

    for function, given in ((constant, types()), (converted, types()), (sliced_by_hand, types(rows=65))):
        assert jax_splitk.explain(function, *given, platform="cuda").unrouted == ()


def test_the_family_is_the_one_for_few_rows() -> None:
    few = [family for families in catalogue.FAMILIES.values() for family in families if family.few_rows]
    assert few == [few_rows.FAMILY]


# ---- several devices -------------------------------------------------------------------------------------------------


def test_a_program_for_several_devices_is_laxs_and_a_shard_map_is_not() -> None:
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    x, stack = types()
    divided = jax.ShapeDtypeStruct(
        stack.shape, stack.dtype, sharding=NamedSharding(mesh, PartitionSpec(None, None, "d"))
    )
    function = functools.partial(scanned, PRODUCTS["dot"])
    rows = {"in_specs": (PartitionSpec("d"), PartitionSpec()), "out_specs": PartitionSpec("d")}
    with jax_splitk.intercept(few_rows=True):
        assert jax_splitk.explain(function, x, divided, platform="cuda").decisions == ()
        assert kernels(function, x, divided) == 0
        (decision,) = jax_splitk.explain(
            jax.shard_map(function, mesh=mesh, **rows), x, stack, platform="cuda"
        ).decisions
    assert problems([decision])[0].m == 4


def test_mapped_rows_are_more_rows() -> None:
    x, stack = types()
    batch = jax.ShapeDtypeStruct((3, *x.shape), x.dtype)
    function = functools.partial(scanned, PRODUCTS["dot"])
    with jax_splitk.intercept(few_rows=True):
        (decision,) = jax_splitk.explain(jax.vmap(function, (0, None)), batch, stack, platform="cuda").decisions
        assert problems([decision])[0].m == 24
        many = jax.ShapeDtypeStruct((9, *x.shape), x.dtype)  # 72 rows
        assert jax_splitk.explain(jax.vmap(function, (0, None)), many, stack, platform="cuda").decisions == ()
