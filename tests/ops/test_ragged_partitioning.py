"""Grouped products over several simulated devices: tokens, experts, k and n over mesh axes."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_splitk
from benchmarks import experts
from tests.exhaustive import crossed
from tests.ops.test_partitioning import KINDS, ONE_SUM, compiled, explained, partitioned
from tests.problems import generator, on_device

pytestmark = [
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="these are the CPU's paths"),
    pytest.mark.skipif(jax.device_count() < 8, reason="needs several devices"),
]

CONTRACTION = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
# Eight groups of 64 rows: one is empty, some begin in one device's rows and end in another's, nine rows are in none.
SIZES = np.array([3, 0, 20, 1, 9, 2, 17, 3], np.int32)
BOTH = ("data", "model")


def _operands(*shapes: tuple[int, ...]) -> list[jax.Array]:
    rng = generator(460)
    return [on_device(rng.integers(-2, 3, shape), jnp.float32) for shape in shapes]


X, W, Y = _operands((64, 16), (8, 16, 32), (64, 32))


def forward(x: jax.Array, w: jax.Array, sizes: Any) -> jax.Array:
    return jax_splitk.ragged_dot(x, w, sizes)


def contraction(x: jax.Array, y: jax.Array, sizes: Any) -> jax.Array:
    return jax_splitk.ragged_dot_general(x, y, sizes, CONTRACTION)


@pytest.mark.parametrize(("kind", "x_spec", "w_spec", "out_spec", "local", "exchanged"), crossed(KINDS, [
    ((BOTH,), (), (BOTH,), "8x16x32 8 groups", {}),
    ((), ("model",), (), "64x16x32 2 of 8 groups", ONE_SUM),
    (("data",), ("model",), ("data",), "32x16x32 2 of 8 groups", ONE_SUM),
    ((None, "model"), (None, "model"), (), "64x4x32 8 groups", ONE_SUM),
    ((), (None, None, "model"), (None, "model"), "64x16x8 8 groups", {}),
    (("data",), (None, None, "model"), BOTH, "32x16x8 8 groups", {}),
    (("data", "model"), ("data", "model"), ("data",), "32x4x32 8 groups", {"all-gather": 1, "all-reduce": 1}),
]))  # fmt: skip
def test_forward(kind: str, x_spec: Any, w_spec: Any, out_spec: Any, local: str, exchanged: Any) -> None:
    with partitioned(kind) as put:
        placed = put(X, *x_spec), put(W, *w_spec), put(SIZES)
        out, found, ours = compiled(forward, *placed)
        shown, wanted = explained(forward, *placed), put(Y, *out_spec).sharding
    assert len(ours) == 1
    assert local in ours[0]
    assert found == exchanged
    assert out.sharding.is_equivalent_to(wanted, 2) or kind == "gspmd"
    assert shown == ours or kind == "gspmd"
    np.testing.assert_array_equal(out, forward(X, W, SIZES))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("x_spec", "y_spec", "local", "exchanged"), [
    ((BOTH,), (BOTH,), "8x16x32 8 groups", ONE_SUM),
    ((None, "model"), (), "64x4x32 8 groups", {}),
    (("data",), ("data", "model"), "32x16x8 8 groups", ONE_SUM),
])  # fmt: skip
def test_rhs_gradient(kind: str, x_spec: Any, y_spec: Any, local: str, exchanged: Any) -> None:
    with partitioned(kind) as put:
        out, found, ours = compiled(contraction, put(X, *x_spec), put(Y, *y_spec), put(SIZES))
    assert len(ours) == 1
    assert local in ours[0]
    assert found == exchanged
    np.testing.assert_array_equal(out, contraction(X, Y, SIZES))


def test_the_gradient_of_sharded_experts_is_sharded() -> None:
    with partitioned() as put:
        placed = put(X), put(Y), put(SIZES)
        wanted = put(W, "model").sharding
        out, found, ours = compiled(contraction, *placed, out_shardings=wanted)
    assert "64x16x32 2 of 8 groups" in ours[0]
    assert (found, out.sharding) == ({}, wanted)
    np.testing.assert_array_equal(out, contraction(X, Y, SIZES))


@pytest.mark.parametrize(("kind", "x_spec", "w_spec"), crossed(KINDS, [
    (("data",), ("model",)), ((BOTH,), ()), ((), ("model", None, "data")), (("data",), ("data", None, "model")),
]))  # fmt: skip
def test_gradients_equal_those_of_one_device(kind: str, x_spec: Any, w_spec: Any) -> None:
    def loss(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
        return jnp.sum(forward(x, w, sizes) ** 2)

    expected = jax.grad(loss, (0, 1))(X, W, SIZES)
    with partitioned(kind) as put:
        found = jax.jit(jax.grad(loss, (0, 1)))(put(X, *x_spec), put(W, *w_spec), put(SIZES))
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(one), other)


def test_an_offset_and_sizes_of_a_batch_are_divided() -> None:
    """A mapped axis over the devices, each with sizes of its own; and some experts of some."""
    xs, ws = _operands((8, 24, 16), (8, 4, 16, 32))
    sizes = np.asarray(generator(461).multinomial(20, [0.2] * 6, size=8), np.int32)
    some = jax.vmap(lambda x, w, sizes: jax_splitk.ragged_dot(x, w, sizes, group_offset=jnp.array([1])))
    with partitioned() as put:
        out, found, ours = compiled(some, put(xs, "data"), put(ws, "data", "model"), put(sizes, "data"))
    assert "24x16x32 1 of 6 groups" in ours[0]
    assert found == ONE_SUM
    np.testing.assert_array_equal(out, some(xs, ws, sizes))


def test_experts_of_each_device_in_shard_map() -> None:
    """Expert parallelism by hand: each device has two of the experts, and the tokens and sizes of all."""
    mesh = jax.make_mesh((4,), ("expert",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))

    def layer(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
        offset = 2 * lax.axis_index("expert")[None]
        return lax.psum(jax_splitk.ragged_dot(x, w, sizes, group_offset=offset), "expert")

    each = jax.shard_map(layer, mesh=mesh, in_specs=(P(), P("expert"), P()), out_specs=P())

    def loss(product: Any, x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(product(x, w, SIZES) ** 2)

    found = jax.jit(jax.value_and_grad(functools.partial(loss, each), (0, 1)))(X, W)
    expected = jax.value_and_grad(functools.partial(loss, forward), (0, 1))(X, W)
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_block_trains_with_its_experts_on_two_devices() -> None:
    """A mixture of experts trains some steps: with the experts divided inside `shard_map` its losses are those of one
    device, and each device multiplies with four of the eight experts in every pass. Sums of a device's cotangents are
    added in another order."""
    block = experts.Block(96, width=32, hidden=48, experts=8, chosen=2)
    one, two = (experts.trained(block, True, 10, devices) for devices in (1, 2))
    losses = np.array([one["losses"], two["losses"]])
    assert losses[0, -1] < 0.97 * losses[0, 0]
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-3)
    mesh = experts.mesh_of(2)
    weights = jax.jit(block.weights)(jax.random.key(0))
    with jax_splitk.intercept():
        step = functools.partial(block.step, mesh=mesh)
        decisions = jax_splitk.explain(step, weights, *jnp.ones((2, 96, 32))).decisions
    problems: list[Any] = [d.problem for d in decisions]
    assert {(p.mode, p.groups, p.total_groups) for p in problems} == {("forward", 4, 8), ("rhs_gradient", 4, 8)}
    assert sum(d.count for d in decisions) == 7  # the tokens have no gradient


@pytest.mark.parametrize("devices", ["0", "3", "1024"])
def test_experts_are_divided_evenly(devices: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        experts.main(["--tiny", "--devices", devices])
    assert f"--devices {devices}; accepted: a divisor of 8, at most 8" in capsys.readouterr().err
