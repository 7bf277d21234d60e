"""Chains of products with quantized weights: which products are chained, values, transformations, the custom call."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import export, lax
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

import jax_splitk
from jax_splitk import _ffi, chained, join_gate_up, prepack, quantize, quantized_matmul
from jax_splitk.kernels.quantized import stream
from jax_splitk.ops import equations
from jax_splitk.ops.chained import MOST_ROWS, chain_p
from jax_splitk.runtime import compiler
from jax_splitk.runtime.joined_plan import JoinedPlan
from tests.problems import generator, on_device

K, HIDDEN = 128, 256
Weights = dict[str, Any]


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return on_device(generator(900 + seed).standard_normal(shape), "bfloat16")


def weight(k: int = K, features: int = K, qtype: str = "int4", seed: int = 0) -> Any:
    return prepack(quantize(normal(k, features, seed=seed) / k**0.5, qtype, group_size=64))


@functools.cache
def weights(qtype: str = "int4") -> Weights:
    gate, up = (quantize(normal(K, HIDDEN, seed=i) / K**0.5, qtype, group_size=64) for i in (1, 2))
    return {
        **{"o": weight(qtype=qtype), "gate_up": join_gate_up(gate, up)},
        **{"down": weight(HIDDEN, K, qtype, 3), "qkv": weight(K, 2 * K, qtype, 4)},
    }


def block(w: Weights, attention: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    x = quantized_matmul(attention, w["o"], residual=x)
    y = quantized_matmul(x, w["gate_up"], norm_epsilon=1e-5, activation="swiglu")
    x = quantized_matmul(y, w["down"], residual=x)
    return x, quantized_matmul(x, w["qkv"], norm_epsilon=1e-5)


def chains(function: Callable[..., Any], *operands: Any) -> list[int]:
    """The numbers of products of each chain of a function."""
    found = equations.walk(jax.make_jaxpr(function)(*operands).jaxpr)
    inner = [list(equations.inner(eqn)) for eqn in found if eqn.primitive is chain_p]
    return [sum(eqn.primitive.name.startswith("quantized") for eqn in jaxpr.eqns) for (jaxpr,) in inner]


def equal(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


@pytest.mark.parametrize("qtype", ["int4", "nf4", "int8"])
@pytest.mark.parametrize("shape", [(1,), (3, 1), (4, 5)])
def test_a_block_is_one_chain_with_the_same_results(qtype: str, shape: tuple[int, ...]) -> None:
    operands = weights(qtype), normal(*shape, K), normal(*shape, K, seed=1)
    assert chains(chained(block), *operands) == [4]
    equal(chained(block)(*operands), block(*operands))
    equal(jax.jit(chained(block))(*operands), jax.jit(block)(*operands))


# ---- which products are chained --------------------------------------------------------------------------------------


def between(w: Weights, x: jax.Array) -> jax.Array:
    """Something else than a reshape computes the second product's activations."""
    return quantized_matmul(jnp.sin(quantized_matmul(x, w["o"])), w["o"])


def after(w: Weights, x: jax.Array) -> Any:
    """What depends on a product, but not what the next one takes, does not end the chain."""
    y = quantized_matmul(x, w["o"])
    z = jnp.sin(y)
    return z, quantized_matmul(y, w["o"], residual=x), jnp.cos(z)


def independent(w: Weights, x: jax.Array) -> Any:
    return [quantized_matmul(x, w["o"]) for _ in range(3)]


def as_bias(w: Weights, x: jax.Array) -> jax.Array:
    """A kernel loads its bias late, too, but only activations and residuals are results of the chain."""
    return quantized_matmul(x, w["o"], bias=quantized_matmul(x[:1], w["o"])[0])


def as_residual_alone(w: Weights, x: jax.Array) -> jax.Array:
    return quantized_matmul(x, w["o"], residual=quantized_matmul(x, w["o"]).reshape(x.shape))


def printed(w: Weights, x: jax.Array) -> jax.Array:
    y = quantized_matmul(x, w["o"])
    jax.debug.callback(lambda: None)
    return quantized_matmul(y, w["o"])


def in_jit(w: Weights, x: jax.Array) -> jax.Array:
    return jax.jit(lambda x: quantized_matmul(x, w["o"]))(quantized_matmul(x, w["o"]))


def in_scan(w: Weights, x: jax.Array) -> jax.Array:
    step = lambda x, _: (quantized_matmul(quantized_matmul(x, w["o"]), w["o"]), None)  # noqa: E731
    return lax.scan(step, x, length=2)[0]


def chained_in_scan(w: Weights, x: jax.Array) -> jax.Array:
    step = lambda x, _: (chained(lambda x: quantized_matmul(quantized_matmul(x, w["o"]), w["o"]))(x), None)  # noqa: E731
    return lax.scan(step, x, length=2)[0]


def twelve(w: Weights, x: jax.Array) -> jax.Array:
    """A custom call has at most 64 buffers: each product three operands, of which x is another one's result, and two
    more."""
    for _ in range(14):
        x = quantized_matmul(x, w["o"])
    return x


def literal(w: Weights, x: jax.Array) -> jax.Array:
    return quantized_matmul(quantized_matmul(x * 2, w["o"]), w["o"]) + 1


@pytest.mark.parametrize(("function", "rows", "expected"), [
    (between, 2, []), (after, 2, [2]), (independent, 2, [3]), (as_bias, 2, []), (printed, 2, []),
    (as_residual_alone, 2, [2]), (in_jit, 2, [2]), (in_scan, 2, []), (chained_in_scan, 2, [2]), (twelve, 1, [12, 2]),
    (literal, 3, [2]), (independent, MOST_ROWS, [3]), (independent, MOST_ROWS + 1, []),
], ids=lambda value: getattr(value, "__name__", value))  # fmt: skip
def test_which_products_are_chained(function: Callable[..., Any], rows: int, expected: list[int]) -> None:
    operands = weights(), normal(rows, K)
    assert chains(chained(function), *operands) == expected
    equal(chained(function)(*operands), function(*operands))
    equal(jax.jit(chained(function))(*operands), jax.jit(function)(*operands))


def test_arguments_by_name_trees_and_constants() -> None:
    x, w = normal(2, K), weights()

    @chained
    def function(x: Any, *, factor: Any) -> Any:
        return {"y": quantized_matmul(quantized_matmul(x["x"], w["o"]), w["o"]) * factor, "x": x, "none": None}

    found = function({"x": x}, factor=jnp.bfloat16(2))
    equal(found["y"], 2 * quantized_matmul(quantized_matmul(x, w["o"]), w["o"]))
    assert found["none"] is None and function.__name__ == "function"
    # An operand of the enclosing function that `chained` does not get.
    equal(jax.jit(lambda w, x: chained(lambda x: block(w, x, x))(x))(w, x), jax.jit(block)(w, x, x))


@jax.custom_vjp
def halved(x: jax.Array) -> jax.Array:
    return x / 2


halved.defvjp(lambda x: (x / 2, None), lambda _, ct: (ct / 2,))


def test_other_operations_of_the_function() -> None:
    """Loops, conditionals, functions with rules of their own and callbacks, before, between and after products."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def function(w: Weights, x: jax.Array) -> Any:
        x = lax.cond(x[0, 0] > 0, lambda x: x + 1, lambda x: x - 1, halved(x))
        y = quantized_matmul(x, w["o"])
        z = lax.while_loop(lambda y: jnp.max(y) > 1, lambda y: y / 2, y)
        y = quantized_matmul(jax.nn.softmax(y), w["o"], residual=y)
        y = jax.shard_map(lambda y: y * 2, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(y)
        y = jax.checkpoint(lambda y: quantized_matmul(jnp.sin(y), w["o"]))(y)
        type_of = jax.ShapeDtypeStruct(y.shape, y.dtype)
        y = jax.pure_callback(lambda y: y, type_of, quantized_matmul(y, w["o"]))
        return halved(y), z, lax.top_k(y, 2)

    operands = weights(), normal(2, K)
    equal(jax.jit(chained(function))(*operands), jax.jit(function)(*operands))
    gradients = [jax.grad(lambda x, each=each: loss(each)(operands[0], x)) for each in (chained(smooth), smooth)]
    equal(*[each(operands[1]) for each in gradients])


def smooth(w: Weights, x: jax.Array) -> jax.Array:
    return halved(quantized_matmul(quantized_matmul(halved(x), w["o"]), w["o"]))


# ---- transformations -------------------------------------------------------------------------------------------------


def loss(function: Callable[..., Any]) -> Callable[..., jax.Array]:
    return lambda *operands: sum(jnp.sum(y.astype(jnp.float32) ** 2) for y in jax.tree.leaves(function(*operands)))


def test_derivatives_and_batches_compute_each_product_by_itself() -> None:
    """The other transformations, and each of each: tests/ops/test_transformations.py."""
    w, x, r = weights(), normal(2, K), normal(2, K, seed=1)
    ours, theirs = (functools.partial(each, w) for each in (chained(block), block))
    gradients = [jax.grad(loss(each), (0, 1)) for each in (ours, theirs)]
    equal(*[each(x, r) for each in gradients])
    assert chains(gradients[0], x, r) == []
    xs = normal(3, 2, K)
    equal(*[jax.jit(jax.vmap(each))(xs, xs) for each in (ours, theirs)])
    assert chains(jax.vmap(ours), xs, xs) == [] and chains(chained(jax.vmap(theirs)), xs, xs) == [4]
    # Nothing prefers kernels for chains then.
    asked = [eqn for eqn in equations.walk(jax.make_jaxpr(jax.vmap(ours))(xs, xs).jaxpr) if "call" in eqn.params]
    assert len(asked) == 4 and not any(eqn.params["call"].options.chained for eqn in asked)


def test_checkpoint_and_linear_transpose() -> None:
    w, x = weights(), normal(2, K)
    two = lambda x: quantized_matmul(quantized_matmul(x, w["o"]), w["o"])  # noqa: E731
    equal(*[jax.grad(loss(jax.checkpoint(each)))(x) for each in (chained(two), two)])
    policy = jax.checkpoint_policies.dots_saveable
    equal(*[jax.grad(loss(jax.checkpoint(each, policy=policy)))(x) for each in (chained(two), two)])
    equal(*[jax.linear_transpose(each, x)(x) for each in (chained(two), two)])


@pytest.mark.parametrize(("flag", "value"), [
    ("jax_enable_checks", True), ("jax_check_tracer_leaks", True), ("jax_debug_nans", True), ("jax_disable_jit", True),
    ("jax_enable_x64", True), ("jax_numpy_dtype_promotion", "strict"), ("jax_numpy_rank_promotion", "raise"),
])  # fmt: skip
def test_debugging_flags_and_strict_modes(flag: str, value: Any) -> None:
    w, x = weights(), normal(2, K)
    expected, before = block(w, x, x), getattr(jax.config, flag)
    jax.config.update(flag, value)
    try:
        equal(chained(block)(w, x, x), expected)
        equal(jax.jit(chained(block))(w, x, x), expected)
    finally:
        jax.config.update(flag, before)


def test_several_devices() -> None:
    """XLA's partitioner divides products, not chains. In shard_map each device has a chain."""
    w, x = weights(), normal(4, K)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    divided = jax.device_put(x, jax.NamedSharding(mesh, P("data")))
    equal(jax.jit(chained(block))(w, divided, divided), jax.jit(block)(w, x, x))
    mapped = jax.shard_map(chained(block), mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P("data"))
    assert chains(mapped, w, divided, divided) == [4]
    equal(jax.jit(mapped)(w, divided, divided), jax.jit(block)(w, x, x))


def test_explain_and_tune_see_the_products() -> None:
    operands = weights(), normal(1, K), normal(1, K)
    one, other = (jax_splitk.explain(each, *operands, platform="cuda") for each in (block, chained(block)))
    assert [d.problem for d in one.decisions] == [d.problem for d in other.decisions]
    assert [d.config for d in one.decisions] == [d.config for d in other.decisions]
    (note,) = set(other.notes) - set(one.notes)
    assert note.startswith("4 products are in 1 chain: ")


# ---- the custom call -------------------------------------------------------------------------------------------------


def calls(function: Callable[..., Any], *operands: Any) -> list[list[str]]:
    """The kernels of each custom call of ours in the function's code for CUDA."""
    text = jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    return [re.split("[,;]", names) for names in re.findall(r'kernels = "([^"]*)"', text)]


def test_a_chain_is_one_custom_call() -> None:
    operands = weights(), normal(1, K), normal(1, K)
    kernels = ["quantized_stream_int4"] * 4
    assert calls(block, *operands) == [[name] for name in kernels]
    assert calls(chained(block), *operands) == [kernels]


def twice(w: Weights, attention: jax.Array, x: jax.Array) -> jax.Array:
    """The last product reads the residual, too."""
    return quantized_matmul(quantized_matmul(attention, w["o"], residual=x), w["o"], residual=x)


def rounded(w: Weights, attention: jax.Array, x: jax.Array) -> jax.Array:
    """The residual has another type than the later result."""
    h = quantized_matmul(attention, w["o"], residual=x.astype(jnp.float32))
    return quantized_matmul(h, w["o"])


@pytest.mark.parametrize(("function", "replaced"), [(block, [(2, 3)]), (twice, []), (rounded, [])])
def test_a_residuals_memory_becomes_the_last_results_of_its_type(function: Any, replaced: list[Any]) -> None:
    """So XLA copies no activations that a loop carries. The operands are the first product's activations, words, scales
    and residual, then those of the others."""
    operands = weights(), normal(1, K), normal(1, K)
    text = jax.jit(chained(function)).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    found = re.findall(r"output_operand_alias<output_tuple_indices = \[(\d+)\],\s*operand_index = (\d+)", text)
    assert [(int(result), int(operand)) for result, operand in found] == replaced


def test_a_product_that_is_xlas_divides_a_chain() -> None:
    def five(w: Weights, x: jax.Array) -> jax.Array:
        for implementation in (None, None, "xla", None, None):
            x = quantized_matmul(x, w["o"], implementation=implementation)
        return x

    assert [len(each) for each in calls(chained(five), weights(), normal(1, K))] == [2, 2]


def test_an_explicit_config_is_kept() -> None:
    config = stream.Config(8, 1, 1, 3, 1, 2)

    def two(w: Weights, x: jax.Array) -> jax.Array:
        return quantized_matmul(quantized_matmul(x, w["o"], config=config), w["o"], config=config)

    text = jax.jit(chained(two)).trace(weights(), normal(1, K)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(str(config)) == 2 and text.count("kernels = ") == 1


def test_a_kernel_that_cannot_be_chained_gives_way_if_another_one_is_hardly_slower() -> None:
    w, x = weight(4096, 14336), jax.ShapeDtypeStruct((32, 4096), jnp.bfloat16)
    narrow = weight(14336, 4096)

    def two(w: Any, narrow: Any, x: jax.Array) -> jax.Array:
        return quantized_matmul(quantized_matmul(x, w), narrow)

    alone, _ = calls(two, w, narrow, x)
    assert alone == ["quantized_tiled_int4"]
    assert calls(chained(two), w, narrow, x) == [["quantized_stream_int4"] * 2]
    first = jax_splitk.explain(chained(two), w, narrow, x, platform="cuda").decisions[0]
    assert first.family == "quantized_stream" and first.because == "quantized_tiled cannot be chained"


def test_without_a_chains_code_each_product_is_a_custom_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(plan: JoinedPlan) -> Any:
        raise compiler.CompilationError("no")

    monkeypatch.setattr(JoinedPlan, "custom_call", fails)
    operands = weights(), normal(1, K), normal(1, K)
    assert calls(chained(block), *operands) == [["quantized_stream_int4"]] * 4


def test_export() -> None:
    operands = weights(), normal(1, K), normal(1, K)
    function = jax.jit(chained(block))
    exported = export.export(function, platforms=["cpu", "cuda"], disabled_checks=jax_splitk.EXPORT_CHECKS)(*operands)
    equal(export.deserialize(exported.serialize()).call(*operands), block(*operands))


def test_the_buffers_of_a_chain() -> None:
    """Operands come first, each once; then the results; then a workspace of no bytes. All launches but the first may
    start before the one before them has ended."""
    residual = lambda w, x: quantized_matmul(x, w["o"], residual=x)  # noqa: E731
    (decision,) = jax_splitk.explain(residual, weights(), normal(1, K), platform="cuda").decisions
    plan = stream.FAMILY.plan(decision.problem, decision.config)
    x, words, scale, _, out, workspace = plan.buffers
    # The second product's activations are the first one's result, and its residual is another operand.
    joined = JoinedPlan((plan, plan), ((0, 1, 2, 0, 4), (4, 1, 2, 3, 5)))
    assert joined.buffers == (x, words, scale, x, out, out, workspace)
    assert _ffi.check_plan(joined.words(), ";".join(plan.kernels() * 2)) == (7, 2, 2)
    assert [source.defines[-1] for source in joined.sources()] == [("CHAINED", 1)] * 2
    code = joined.custom_call().attributes
    assert sum(code["code_bytes"]) == len(code["code"]) and not (code["code_bytes"] % 64).any()
    encoded, single = joined.words(), plan.words()
    assert len(encoded) == 2 * len(single) - 5 - 2 * (len(plan.buffers) - 1)
