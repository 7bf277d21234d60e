"""The program that JAX lowers, as a lowering rule finds it."""

import functools
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import jax_splitk
from jax_splitk.ops import program
from jax_splitk.ops.equations import counted, walk
from jax_splitk.runtime import _compat
from jax_splitk.tuning import ahead
from jax_splitk.tuning.worth import Operation

pytestmark = pytest.mark.usefixtures("cache")

X, G = np.ones((8, 9, 8), np.float32), np.ones((8, 9, 8), np.float32)
wgrad = functools.partial(
    jax_splitk.conv_wgrad,
    rhs_shape=(3, 8, 8),
    window_strides=(1,),
    padding="SAME",
    dimension_numbers=("NWC", "WIO", "NWC"),
)


def begun(function: Any, *args: Any) -> list[list[Operation]]:
    """The operations of each program that a lowering for CUDA begins."""
    with mock.patch.object(ahead, "begin") as begin:
        jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",))
    return [call.args[0] for call in begin.call_args_list]


def test_a_program_is_found_with_its_first_operation() -> None:
    def step(x: Any, g: Any) -> Any:
        inner = jax.jit(lambda x: wgrad(x, g))
        looped = jax.lax.scan(lambda sums, _: (sums + wgrad(x[:4], g[:4]), None), inner(x) + inner(2 * x), length=5)
        return jax.lax.cond(x[0, 0, 0] > 0, lambda: wgrad(x[:2], g[:2]), lambda: looped[0])

    ((*operations,),) = begun(step, X, G)
    assert {operation.problem.batch: operation.times for operation in operations} == {8: 2, 4: 5, 2: 1}
    assert begun(lambda x: 2 * x, X) == []


def test_each_lowering_is_another_program() -> None:
    assert [len(operations) for x in (X, X[:4]) for operations in begun(wgrad, x, G[: len(x)])] == [1, 1]


def test_what_xla_must_compute_is_no_operation_to_prepare() -> None:
    mixed = lambda x, g: (wgrad(x, g), wgrad(x[:4], g[:4], implementation="xla"))  # noqa: E731
    ((operation,),) = begun(mixed, X, G)
    assert operation.problem.batch == 8


@pytest.mark.skipif(jax.device_count() < 2, reason="needs several devices")
def test_a_device_s_part_is_no_program() -> None:
    """XLA's partitioner asks for it while it compiles."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), "data")
    over = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    x, g = (jax.device_put(x, over) for x in (X, G))
    found: list[Any] = []
    with mock.patch.object(program, "lowered", lambda *_, **__: found.append(_compat.lowered_function())):
        lowered = jax.jit(wgrad).lower(x, g)
        assert [len(function.eqns) > 0 for function in found] == [True]
        lowered.compile()
    assert found[1:] == [None]


def test_turns_of_loops_multiply() -> None:
    def twice(x: Any) -> Any:
        body = lambda c, _: (jax.lax.scan(lambda c, _: (jnp.sin(c), None), c, length=3)[0], None)  # noqa: E731
        return jax.lax.scan(body, x, length=4)[0]

    jaxpr = jax.make_jaxpr(twice)(1.0).jaxpr
    times = {eqn.primitive.name: times for eqn, times in counted(jaxpr)}
    assert times["sin"] == 12
    assert [eqn.primitive.name for eqn in walk(jaxpr)].count("scan") == 2
