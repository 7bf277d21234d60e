"""`compute_dtype` of products with quantized weights: what kernels may do with it, and where it has no effect."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from jax import export
from jax import numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_splitk
from jax_splitk.kernels.quantized import fp8, stream, tiled
from jax_splitk.ops.call import call_of
from jax_splitk.ops.equations import walk
from jax_splitk.problems.problem import stored_fields
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.runtime.plan import LAUNCH_TARGET
from jax_splitk.runtime.target import DEFAULT_CUDA
from jax_splitk.tuning.key import key_for, problem_as_dict, problem_from_dict
from jax_splitk.tuning.options import Options
from jax_splitk.tuning.select import select
from tests import products
from tests.problems import on_device

E4M3 = "float8_e4m3fn"
CASE = products.Case(20, 256, 128)


def problem(rows: int, compute_dtype: str = E4M3, **changes: Any) -> QuantizedMatmulProblem:
    return products.valid_problem(rows, 8192, 8192, compute_dtype=compute_dtype, **changes)


def product(x: Any, w: Any, **given: Any) -> jax.Array:
    return jax_splitk.quantized_matmul(x, w, compute_dtype=jnp.float8_e4m3fn, **given)


@pytest.mark.parametrize("x_dtype", ["bfloat16", "float16", E4M3])
def test_many_rows_are_multiplied_in_e4m3(x_dtype: str) -> None:
    found = {rows: select(problem(rows, x_dtype=x_dtype), DEFAULT_CUDA, Options()).family for rows in (1, 16, 1024)}
    assert found == {1: stream.FAMILY, 16: stream.FAMILY, 1024: fp8.FAMILY}


def test_nothing_is_rounded_without_it() -> None:
    assert select(problem(1024, "none"), DEFAULT_CUDA, Options()).family is tiled.FAMILY
    assert fp8.FAMILY.refusal(problem(1024, "none")) is not None
    exact = problem(1024, x_dtype=E4M3, group_size=8192)
    assert not fp8.rounded(exact), "one scale for all k multiplies the sums"
    assert fp8.rounded(dataclasses.replace(exact, group_size=64))


def test_a_cpu_does_not_round() -> None:
    q, _ = CASE.every_code()
    x, w = on_device(products.random(1).standard_normal((20, 256)), "bfloat16"), jax_splitk.prepack(q)
    np.testing.assert_array_equal(product(x, w), jax_splitk.quantized_matmul(x, w))
    np.testing.assert_array_equal(product(x, q), jax_splitk.quantized_matmul(x, q))


def test_derivatives_are_those_of_the_exact_product() -> None:
    """The product of the primal alone may be rounded."""
    q, _ = CASE.every_code()
    w, x = jax_splitk.prepack(q), jnp.ones((20, 256), jnp.bfloat16)

    def of(function: Any) -> list[str]:
        jaxpr = jax.make_jaxpr(function)(x)
        calls = [call_of(eqn) for eqn in walk(jaxpr.jaxpr) if eqn.primitive.name.startswith("quantized_matmul")]
        return [call.options.compute_dtype for call in calls]

    f = lambda x: product(x, w)  # noqa: E731
    assert of(f) == [E4M3]
    assert of(lambda x: jax.jvp(f, (x,), (x,))) == [E4M3, None]
    assert of(lambda x: jax.vjp(f, x)[1](jnp.ones((20, 128), jnp.bfloat16))) == [E4M3, None]
    with_epilogue = lambda x: product(x, w, activation="silu", bias=jnp.ones(128, jnp.bfloat16))  # noqa: E731
    assert of(with_epilogue) == [E4M3]
    assert of(jax.vmap(lambda x: f(x[None]))) == [E4M3]


def test_scan_export_and_parts_of_a_mesh_keep_it() -> None:
    """Lowered for CUDA, each has a custom call whose problem may be rounded."""
    w = jax_splitk.prepack(jax_splitk.quantize(jnp.ones((256, 256)), "int4", group_size=64))
    x = jnp.ones((1024, 256), jnp.bfloat16)
    mesh = jax.make_mesh((2,), ("rows",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    spec = P("rows", None)
    functions = {
        "scan": lambda x: jax.lax.scan(lambda x, _: (product(x, w), None), x, None, length=2)[0],
        "remat": jax.checkpoint(lambda x: product(x, w)),
        "shard_map": jax.shard_map(lambda x: product(x, w), mesh=mesh, in_specs=spec, out_specs=spec),
    }
    for name, function in functions.items():
        decisions = jax_splitk.explain(function, x, platform="cuda").decisions
        assert {d.problem.compute_dtype for d in decisions} == {E4M3}, name
        check = export.DisabledSafetyCheck.custom_call(LAUNCH_TARGET)
        exported = export.export(jax.jit(function), platforms=["cuda"], disabled_checks=[check])(x)
        assert exported.mlir_module().count(f"@{LAUNCH_TARGET}") == 1, name


def test_axes_in_any_order() -> None:
    w = jax_splitk.prepack(jax_splitk.quantize(jnp.ones((64, 128)), "int4", group_size=64))
    x = jnp.ones((4, 64), jnp.bfloat16)
    for function in (
        lambda x: jax_splitk.quantized_einsum("bk,kn->bn", x, w, compute_dtype=E4M3),
        lambda x: jax_splitk.quantized_dot_general(x, w, (((1,), (0,)), ((), ())), compute_dtype=E4M3),
    ):
        (call,) = [call_of(eqn) for eqn in walk(jax.make_jaxpr(function)(x).jaxpr) if "quantized" in eqn.primitive.name]
        assert call.options.compute_dtype == E4M3


def test_a_block_of_code_may_ask_for_it() -> None:
    """For every product in it, also those of layers and `x @ w`; a function is traced again in such a block."""
    w = jax_splitk.prepack(jax_splitk.quantize(jnp.ones((64, 128)), "int4", group_size=64))
    x, traced = jnp.ones((4, 64), jnp.bfloat16), []

    @jax.jit
    def f(x: jax.Array) -> jax.Array:
        traced.append(1)
        return x @ w

    def asked() -> list[str | None]:
        return [
            call_of(e).options.compute_dtype
            for e in walk(jax.make_jaxpr(f)(x).jaxpr)
            if "quantized" in str(e.primitive)
        ]

    assert asked() == [None]
    with jax_splitk.options(quantized_compute_dtype=jnp.float8_e4m3fn):
        assert asked() == [E4M3]
        with jax_splitk.options(implementation="xla"):
            assert asked() == [E4M3]
        (decision,) = jax_splitk.explain(f, x, platform="cuda").decisions
        assert decision.problem.compute_dtype == E4M3
        grad = jax.make_jaxpr(jax.grad(lambda x: (x @ w).astype(jnp.float32).sum()))(x)
        dtypes = [call_of(e).options.compute_dtype for e in walk(grad.jaxpr) if "quantized_matmul" in str(e.primitive)]
        assert sorted(dtypes, key=str) == [None, E4M3]
    assert asked() == [None]
    assert len(traced) == 3
    refused = pytest.raises(TypeError, match=r"quantized_compute_dtype=.*float16.*; accepted: float8_e4m3fn")
    with refused, jax_splitk.options(quantized_compute_dtype=jnp.float16):
        pass


def test_other_dtypes_are_refused() -> None:
    w = jax_splitk.prepack(jax_splitk.quantize(jnp.ones((64, 128)), "int4", group_size=64))
    with pytest.raises(TypeError, match=r"compute_dtype=.*bfloat16.*; accepted: float8_e4m3fn"):
        jax_splitk.quantized_matmul(jnp.ones((4, 64), jnp.bfloat16), w, compute_dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="compute_dtype='bfloat16'; accepted: 'none', 'float8_e4m3fn'"):
        dataclasses.replace(problem(1), compute_dtype="bfloat16").validate()


def test_what_was_stored_before_keeps_its_key() -> None:
    """The field came later: problems without it have the fields, the entries' names and the table's rows of before."""
    plain, in_e4m3 = problem(8, "none"), problem(8)
    assert "compute_dtype" not in stored_fields(plain)
    assert stored_fields(in_e4m3)["compute_dtype"] == E4M3
    for each in (plain, in_e4m3):
        fields = problem_as_dict(each)
        assert problem_from_dict(fields.pop("op"), fields) == each
    assert '"compute_dtype"' not in key_for(plain, DEFAULT_CUDA)._text
    assert key_for(plain, DEFAULT_CUDA).file != key_for(in_e4m3, DEFAULT_CUDA).file
    assert str(plain) != str(in_e4m3)
    assert plain.brief != in_e4m3.brief
