"""Shardings of packed weights by the weight's own axes, on eight simulated devices."""

import contextlib
import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen, nnx
from flax.linen.spmd import logical_to_mesh, logical_to_mesh_sharding
from jax import numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_splitk
from jax_splitk import PackedWeight, prepack, quantize, quantized_matmul, shardings, unpack
from jax_splitk.quantized.formats import QType
from tests.exhaustive import crossed, thinned
from tests.problems import generator, on_device

pytestmark = [
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="these are the CPU's paths"),
    pytest.mark.skipif(jax.device_count() < 8, reason="needs several devices"),
]
wide = functools.partial(quantized_matmul, preferred_element_type="float32")


def mesh_of(kind: Any = AxisType.Auto, **axes: int) -> jax.sharding.Mesh:
    devices = jax.devices()[: np.prod(list(axes.values()))]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes), devices=devices)


def integers(*shape: int) -> jax.Array:
    return on_device(generator(151).integers(-3, 4, shape), jnp.bfloat16)


@functools.cache
def weight(
    *shape: int, axis: Any = None, stack: int = 0, group: int | None = 64, dtype: QType = "int4", **options: Any
) -> PackedWeight:
    """A weight of small integers times powers of two, so that its products are exact in float32."""
    values = on_device(generator(152).integers(-7, 8, shape), jnp.float32)
    shards = options.pop("shards", None)
    q = quantize(values, dtype, group_size=group, axis=axis, **options)
    scale = on_device(np.exp2(generator(153).integers(-2, 3, q.scale.shape)), jnp.float32)
    return prepack(dataclasses.replace(q, scale=scale), axis=axis, stack=stack, shards=shards)


def later(*shape: int, **options: Any) -> Callable[[], PackedWeight]:
    """A weight that only the test makes: every process of a run reads the parameters of all tests."""
    return functools.partial(weight, *shape, **options)


def specs_of(w: PackedWeight, *spec: Any, **axes: int) -> tuple[P, P]:
    found = shardings(w, NamedSharding(mesh_of(**axes), P(*spec)) if axes else P(*spec))
    assert jax.tree.structure(found) == jax.tree.structure(w)
    leaves = found.words, found.scale
    return tuple(leaf.spec if axes else leaf for leaf in leaves)  # pyright: ignore[reportReturnType]


# ---- from the weight's axes to the arrays' ---------------------------------------------------------------------------


@pytest.mark.parametrize(("w", "spec", "words", "scale"), [
    (later(512, 512), (None, "tp"), ("tp", None), ("tp", None)),
    (later(512, 512), ("tp", None), (None, "tp"), (None, "tp")),
    (later(512, 512), ("tp",), (None, "tp"), (None, "tp")),
    (later(512, 512), (("dp", "tp"), None), (None, ("dp", "tp")), (None, ("dp", "tp"))),
    (later(512, 512), ("dp", "tp"), ("tp", "dp"), ("tp", "dp")),
    (later(512, 512), (), (None, None), (None, None)),
    (later(512, 512, group=None), ("tp", None), (None, "tp"), (None, None)),
    (later(4, 512, 512, axis=1, stack=1), ("dp", None, "tp"), ("dp", "tp", None), ("dp", "tp", None)),
    (later(512, 4, 128, axis=0), (None, "tp", None), ("tp", None), ("tp", None)),
    (later(4, 128, 512, axis=(0, 1)), ("tp", None, None), (None, "tp"), (None, "tp")),
    (later(512, 256, axis=1), ("tp", None), ("tp", None), ("tp", None)),
    (later(1, 256, 256, axis=(0, 1)), (None, "tp"), (None, "tp"), (None, "tp")),
    (later(512, 512), (P.UNCONSTRAINED, "tp"), ("tp", P.UNCONSTRAINED), ("tp", P.UNCONSTRAINED)),
])  # fmt: skip
def test_axes(w: Callable[[], PackedWeight], spec: Any, words: Any, scale: Any) -> None:
    assert specs_of(w(), *spec) == (P(*words), P(*scale))
    assert specs_of(w(), *spec, dp=2, tp=4) == (P(*words), P(*scale))


@pytest.mark.parametrize(("w", "spec", "match"), [
    (later(512, 512), (None, None, "tp"), r"at most 2 entries"),
    (later(4, 128, 512, axis=(0, 1)), (None, "tp"), r"axis 1 .*unless axes 0 before it are divided"),
    (later(512, 3, 64, axis=0), (None, None, "tp"), r"axis 2 .*unless axes 1"),
    (later(512, 480), (None, "tp"), r"features of .* in 4 parts; accepted: 1 .*with_shards\(\(1, 4\)\)"),
    (later(256, 64, group=128), ("tp", None), r"k of .* in 4 parts; accepted: 1, 2 "),
])  # fmt: skip
def test_axes_that_cannot_be_divided(w: Callable[[], PackedWeight], spec: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        specs_of(w(), *spec, dp=2, tp=4)


def test_an_inner_axis_after_single_elements() -> None:
    w = weight(4, 256, 64, axis=(0, 1))
    assert specs_of(w, "tp", "dp", dp=2, tp=4)[0] == P(None, ("tp", "dp"))


def test_a_mesh_in_the_context_gives_sizes() -> None:
    with jax.set_mesh(mesh_of(tp=4)), pytest.raises(ValueError, match="in 4 parts"):
        specs_of(weight(512, 480), None, "tp")


def test_trees() -> None:
    w, q = weight(128, 256), quantize(jnp.ones((128, 256)), "int4", group_size=64)
    tree = {"a": [w, jnp.ones(3)], "q": q}
    found = shardings(tree, {"a": [P(None, "tp"), P()], "q": P("tp", None)})
    assert (found["a"][0].words, found["a"][1]) == (P("tp", None), P())
    assert (found["q"].qvalue, found["q"].scale) == (P("tp", None), P("tp", None))
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    assert shardings({"a": w, "b": w}, P(None, "tp"))["b"].words == P("tp", None)
    abstract = jax.eval_shape(lambda: tree)
    assert jax.tree.leaves(shardings(abstract, P())) == jax.tree.leaves(shardings(tree, P()))
    mesh = mesh_of(tp=4)
    with pytest.raises(ValueError, match=r"2 groups, in 4 parts"):
        shardings(q, NamedSharding(mesh, P("tp")))
    with pytest.raises(ValueError, match="spec='tp'"):
        shardings(w, "tp")


def test_a_weight_in_another_order() -> None:
    w, mesh, x = weight(512, 512), mesh_of(tp=8), integers(6, 512)
    permuted = jax_splitk.PermutedWeight(w, jnp.arange(512)[::-1])
    for spec, words in ((P(None, "tp"), P("tp")), (P("tp", None), P(None, "tp"))):
        placed = jax.device_put(permuted, shardings(permuted, NamedSharding(mesh, spec)))
        assert placed.weight.words.sharding.is_equivalent_to(NamedSharding(mesh, words), 3)
        assert placed.order.sharding.is_fully_replicated
        np.testing.assert_array_equal(jax.jit(wide)(x, placed), wide(x[:, ::-1], w))


def test_shardings_where_jax_takes_them() -> None:
    w, mesh = weight(512, 512), mesh_of(tp=8)
    named = shardings(w, NamedSharding(mesh, P(None, "tp")))
    for placed in (
        jax.device_put(w, named),
        jax.jit(lambda w: w, in_shardings=(named,), out_shardings=named)(w),
        jax.jit(lambda w: jax.lax.with_sharding_constraint(w, named))(w),
    ):
        assert placed.words.sharding.is_equivalent_to(NamedSharding(mesh, P("tp")), 3)
        assert placed.words.addressable_shards[0].data.shape == (1, 8, 512)
        assert placed.shape == (512, 512)


# ---- a specification of the weight's axes for its arrays -------------------------------------------------------------


def uses(mesh: jax.sharding.Mesh, w: Any, spec: P) -> dict[str, Callable[[], Any]]:
    """Where JAX would put one specification on all arrays of a weight."""
    named = NamedSharding(mesh, spec)
    return {
        "device_put": lambda: jax.device_put(w, named),
        "in_shardings": lambda: jax.jit(lambda w: w, in_shardings=(named,))(w),
        "out_shardings": jax.jit(lambda: jax.tree.map(jnp.ones_like, w), out_shardings=named),
        "constraint": lambda: jax.jit(lambda w: jax.lax.with_sharding_constraint(w, named))(w),
        "shard_map": lambda: jax.shard_map(lambda w: w, mesh=mesh, in_specs=(spec,), out_specs=spec)(w),
    }


@pytest.mark.parametrize("use", uses(mesh_of(tp=1), None, P()))
def test_an_ambiguous_specification_is_refused(use: str) -> None:
    mesh, w = mesh_of(tp=8), weight(512, 512)
    for spec in (P(None, "tp"), P("tp", None), P("tp")):
        with pytest.raises(ValueError, match=r"rank"):
            uses(mesh, w, spec)[use]()
    assert uses(mesh, w, P())[use]().shape == w.shape
    stack = weight(8, 512, 512, axis=1, stack=1)
    with pytest.raises(ValueError, match=r"rank"):
        uses(mesh, stack, P(None, None, "tp"))[use]()
    placed = uses(mesh, stack, P("tp"))[use]()  # the stack is the same axis of the weight and of its arrays
    assert placed.words.addressable_shards[0].data.shape[0] == 1


def test_the_refusal_says_what_to_use() -> None:
    named = NamedSharding(mesh_of(tp=8), P(None, "tp"))
    with pytest.raises(ValueError, match=r"use-jax_splitk-shardings"):
        jax.jit(lambda w: w, in_shardings=(named,))(weight(512, 512))


class Dense(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = linen.with_partitioning(lambda _: weight(512, 512), (None, "columns"))
        return wide(x, self.param("kernel", init))


def test_logical_names_of_linen() -> None:
    """Column parallel stays column parallel; the names of the boxes for the arrays themselves are refused."""
    mesh, x, rules = mesh_of(tp=8), integers(6, 512), (("columns", "tp"),)
    boxed = Dense().init(jax.random.key(0), x)
    specs = logical_to_mesh(linen.get_partition_spec(boxed), rules)
    assert specs["params"]["kernel"] == P(None, "tp")
    params = linen.unbox(boxed)
    refused = logical_to_mesh_sharding(linen.get_partition_spec(boxed), mesh, rules)
    with pytest.raises(ValueError, match="rank"):
        jax.device_put(params, refused)
    for found in (shardings(params, refused), shardings(boxed, refused)):
        (kernel,) = jax.tree.leaves(found, is_leaf=lambda node: isinstance(node, PackedWeight))
        assert kernel.words.spec == P("tp", None)
    placed = jax.device_put(params, shardings(params, refused))
    apply = lambda params, x: Dense().apply(params, x)  # noqa: E731
    np.testing.assert_array_equal(jax.jit(apply)(placed, x), apply(params, x))
    assert exchanged(apply, placed, x) == set()
    (decision,) = jax_splitk.explain(apply, placed, x).decisions
    assert "w 512x64 " in str(decision.problem)


def test_metadata_of_nnx() -> None:
    mesh, w, x = mesh_of(tp=8), weight(512, 512), integers(6, 512)

    class Layer(nnx.Module):
        def __init__(self) -> None:
            self.kernel = nnx.Param(w, out_sharding=(None, "tp"))

        def __call__(self, x: jax.Array) -> jax.Array:
            return wide(x, self.kernel.get_value())

    with jax.set_mesh(mesh), pytest.raises(ValueError, match="rank"):
        Layer()  # which divides its parameters at once
    with nnx.use_eager_sharding(False):
        layer = Layer()
    graph, state = nnx.split(layer)
    specs = nnx.get_partition_spec(state)
    spec = jax.tree.leaves(specs, is_leaf=lambda node: isinstance(node, P))
    assert spec == [P(None, "tp")]
    named = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda node: isinstance(node, P))
    with pytest.raises(ValueError, match="rank"):
        jax.device_put(state, named)
    placed = jax.device_put(state, shardings(state, named))
    apply = lambda state, x: nnx.merge(graph, state)(x)  # noqa: E731
    np.testing.assert_array_equal(jax.jit(apply)(placed, x), wide(x, w))
    assert exchanged(apply, placed, x) == set()


# ---- products over devices -------------------------------------------------------------------------------------------

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")


def compiled(fn: Callable[..., Any], *args: Any) -> tuple[Any, set[str]]:
    """The results, and the collectives in the compiled program, as their names and the dtypes that they move."""
    program = jax.jit(fn).lower(*args).compile()
    found = re.findall(rf"= \(?(\w+)\[[^=]*? ({'|'.join(COLLECTIVES)})(?:-start)?\(", program.as_text() or "")
    return program(*args), {f"{name} {dtype}" for dtype, name in found}


def exchanged(fn: Callable[..., Any], *args: Any) -> set[str]:
    return compiled(fn, *args)[1]


@contextlib.contextmanager
def over(kind: str, **axes: int) -> Iterator[Callable[..., Any]]:
    """How to put an array, or a weight, on a mesh by its axes."""
    mesh = mesh_of(AxisType.Explicit if kind == "explicit" else AxisType.Auto, **axes)
    with jax.set_mesh(mesh) if kind == "explicit" else contextlib.nullcontext():
        yield lambda x, *spec: jax.device_put(jax.tree.map(np.asarray, x), shardings(x, NamedSharding(mesh, P(*spec))))


def moves_no_weight(found: set[str]) -> bool:
    return not any(name.endswith(("u32", "u8", "s8")) for name in found)


def loss(x: jax.Array, w: PackedWeight) -> jax.Array:
    return jnp.sum(jnp.square(wide(x, w)))


@jax.jit
def value_and_gradient(x: jax.Array, w: PackedWeight) -> tuple[jax.Array, jax.Array]:
    return wide(x, w), jax.grad(loss)(x, w)


def assert_near(gradient: jax.Array, expected: jax.Array) -> None:
    one, other = (np.asarray(each, np.float32) for each in (gradient, expected))
    np.testing.assert_allclose(one, other, atol=0.02 * float(abs(other).max()))


PRODUCTS = {
    "column": (later(512, 512), (), (None, "tp")),
    "column, per channel": (later(512, 512, group=None), (), (None, "tp")),
    "column, zero points": (later(512, 512, dtype="uint4", symmetric=False), (), (None, "tp")),
    "row": (later(512, 512), (None, "tp"), ("tp", None)),
    "row, per channel": (later(512, 512, group=None), (None, "tp"), ("tp", None)),
    "heads": (later(512, 8, 64, axis=0), (), (None, "tp", None)),
    "heads contracted": (later(8, 64, 512, axis=(0, 1)), (None, "tp"), ("tp",)),
    "experts": (later(8, 128, 192, axis=1, stack=1), ("tp",), ("tp",)),
    "experts in halves": (later(8, 128, 192, axis=1, stack=1), (("dp", "tp"),), (("dp", "tp"),)),
}


@pytest.mark.parametrize(("name", "kind"), crossed([*PRODUCTS], ["shardy", "explicit"]))
def test_products_over_devices(kind: str, name: str) -> None:
    given, x_spec, w_spec = PRODUCTS[name]
    w = given()
    x = integers(*w.stack, 6, *(w.dims[i] for i in w.contracted))
    axes = {"dp": 2, "tp": 4} if "halves" in name else {"tp": 8}
    expected = value_and_gradient(x, w)
    with over(kind, **axes) as put:
        args = put(x, *x_spec), put(w, *w_spec)
        out, found = compiled(wide, *args)
        np.testing.assert_array_equal(out, expected[0])
        assert found == ({"all-reduce f32"} if name.startswith("row") or "contracted" in name else set())
        gradient, found = compiled(jax.grad(loss), *args)
        assert moves_no_weight(found)
    assert_near(gradient, expected[1])


def test_experts_in_shard_map() -> None:
    w, x = weight(8, 128, 192, axis=1, stack=1), integers(8, 6, 128)
    mesh = mesh_of(ep=8)

    def each(x: jax.Array, w: PackedWeight) -> jax.Array:
        assert w.shape == (1, 128, 192)
        return wide(x, w)

    inside = jax.shard_map(each, mesh=mesh, in_specs=(P("ep"), shardings(w, P("ep"))), out_specs=P("ep"))
    np.testing.assert_array_equal(jax.jit(inside)(x, w), wide(x, w))
    assert not exchanged(inside, x, jax.device_put(w, shardings(w, NamedSharding(mesh, P("ep")))))


@pytest.mark.parametrize(("spec", "x_spec", "out_spec"), [
    ((None, "tp"), P(), P(None, "tp")), (("tp", None), P(None, "tp"), P()),
], ids=["column", "row"])  # fmt: skip
def test_shard_map_takes_the_specifications(spec: Any, x_spec: P, out_spec: P) -> None:
    w, x, mesh = weight(512, 512), integers(6, 512), mesh_of(tp=8)

    def each(x: jax.Array, w: PackedWeight) -> jax.Array:
        assert unpack(w).shape == ((512, 64) if spec[0] is None else (64, 512))
        return wide(x, w) if spec[0] is None else jax.lax.psum(wide(x, w), "tp")

    inside = jax.shard_map(each, mesh=mesh, in_specs=(x_spec, shardings(w, P(*spec))), out_specs=out_spec)
    np.testing.assert_array_equal(jax.jit(inside)(x, w), wide(x, w))


# ---- tiles of padding ------------------------------------------------------------------------------------------------


PADDED = (((320, 192), (2, 2)), ((320, 200), (4, 4)), ((192, 64), (1, 8)))
PADDED_KINDS = (
    {"group": 32}, {"group": None}, {"dtype": "uint4", "symmetric": False}, {"dtype": "nf4"},
    {"dtype": "int8", "group": 32}, {"dtype": "float8_e4m3fn"},
)  # fmt: skip


@pytest.mark.parametrize(
    ("options", "shape", "shards"),
    thinned(((kind, *PADDED[(i + j) % 3]) for i, kind in enumerate(PADDED_KINDS) for j in range(3)), 3),
)
def test_padding_changes_nothing_but_the_tiles(options: Any, shape: Any, shards: Any) -> None:
    plain, padded = weight(*shape, **options), weight(*shape, shards=shards, **options)
    assert (padded.shape, padded.matrix, padded.group_size) == (plain.shape, plain.matrix, plain.group_size)
    mt, kt, _ = padded.words.shape
    assert (kt % shards[0], mt % shards[1]) == (0, 0)
    assert padded.nbytes > plain.nbytes
    x, same = integers(4, shape[0]), np.testing.assert_array_equal
    if options.get("dtype") == "nf4":  # whose sums are rounded
        same = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-2)
    for one, other in zip(*(jax.tree.leaves(unpack(w)) for w in (padded, plain)), strict=True):
        np.testing.assert_array_equal(one, other)

    @jax.jit
    def results(w: PackedWeight) -> list[Any]:
        products = [wide(x, w)]
        if options.get("group"):
            products.append(wide(x[:, :64], w[:64]))
        if shape[1] > 64:
            products.append(wide(x, w[:, 64:]))
        gradient = jax.grad(lambda scale: loss(x, dataclasses.replace(w, scale=scale)))(w.scale)
        return [*products, unpack(dataclasses.replace(w, scale=gradient)).scale]

    for one, other in zip(results(padded), results(plain), strict=True):
        same(one, other)
    again = padded.with_shards(shards)
    assert again.words.shape == padded.words.shape


def test_what_needs_no_padding_gets_none() -> None:
    w = weight(512, 256, group=128)
    for shards in ((1, 1), (4, 4), (2, 1)):
        assert w.with_shards(shards).words.shape == w.words.shape
    assert w.with_shards((8, 1)).words.shape == (4, 16, 512)  # whole groups of 128


def test_a_stack_is_padded() -> None:
    plain = weight(3, 320, 64, axis=1, stack=1)
    padded = weight(3, 320, 64, axis=1, stack=1, shards=(2, 1))
    assert padded.words.shape == (3, 1, 6, 512)
    x = integers(3, 4, 320)
    np.testing.assert_array_equal(wide(x, padded), wide(x, plain))
    np.testing.assert_array_equal(wide(x[1], padded[1]), wide(x[1], plain[1]))


@pytest.mark.parametrize("shards", [(0, 1), (1,), 4, (2.5, 1), (1, -2)])
def test_wrong_shards(shards: Any) -> None:
    with pytest.raises(ValueError, match=r"shards=.*accepted: two positive integers"):
        weight(128, 64, shards=shards)


@pytest.mark.parametrize(("devices", "kind", "by_k"), crossed([2, 4, 8], ["shardy", "explicit"], [True, False]))
def test_2880_over_devices(kind: str, devices: int, by_k: bool) -> None:
    shape, spec = ((2880, 128), ("tp", None)) if by_k else ((128, 2880), (None, "tp"))
    shards = (devices, 1) if by_k else (1, devices)
    plain, w = weight(*shape, group=32), weight(*shape, group=32, shards=shards)
    assert max(w.words.shape[:2]) == {2: 46, 4: 48, 8: 48}[devices]
    x = integers(6, shape[0])
    expected = value_and_gradient(x, plain)
    with over(kind, tp=devices) as put:
        if kind == "shardy":
            with pytest.raises(ValueError, match=rf"2880.*in {devices} parts; accepted: 1, 3, 5.*with_shards"):
                put(plain, *spec)
        args = put(x, *((None, "tp") if by_k else ())), put(w, *spec)
        out, found = compiled(wide, *args)
        np.testing.assert_array_equal(out, expected[0])
        assert moves_no_weight(found)
        (decision,) = jax_splitk.explain(wide, *args).decisions
        part = max(w.words.shape[:2]) * 64 // devices
        assert (f"w {part}x128" if by_k else f"w 128x{part}") in str(decision.problem)
        gradient, found = compiled(jax.grad(loss), *args)
        assert moves_no_weight(found)
    assert_near(gradient, expected[1])


def test_2880_in_shard_map_counts_the_padding() -> None:
    plain, w = weight(2880, 128, group=32), weight(2880, 128, group=32, shards=(8, 1))
    x, mesh = integers(6, 2880), mesh_of(tp=8)

    def each(x: jax.Array, w: PackedWeight) -> jax.Array:
        assert unpack(w).shape == (384, 128)
        return jax.lax.psum(wide(x, w), "tp")

    inside = jax.shard_map(each, mesh=mesh, in_specs=(P(None, "tp"), shardings(w, P("tp"))), out_specs=P())
    padded = jnp.pad(x, [(0, 0), (0, 3072 - 2880)])
    np.testing.assert_array_equal(jax.jit(inside)(padded, w), wide(x, plain))


def test_a_gather_of_a_weight_would_be_seen() -> None:
    mesh, w = mesh_of(tp=8), weight(512, 512)
    placed = jax.device_put(w, shardings(w, NamedSharding(mesh, P(None, "tp"))))
    whole = shardings(w, NamedSharding(mesh, P()))
    found = exchanged(lambda w: jax.lax.with_sharding_constraint(w, whole), placed)
    assert "all-gather u32" in found
    assert not moves_no_weight(found)


@pytest.mark.parametrize("kind", ["safetensors", "orbax"])
def test_files_are_read_onto_the_devices(kind: str, tmp_path: pathlib.Path) -> None:
    w, named = weight(512, 512), NamedSharding(mesh_of(tp=8), P(None, "tp"))
    like = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), w, shardings(w, named)
    )
    if kind == "safetensors":
        jax_splitk.save_file(jax.device_put(w, shardings(w, named)), tmp_path / "file")
        restored = jax_splitk.load_file(tmp_path / "file", like)
    else:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "file", jax.device_put(w, shardings(w, named)))
            checkpointer.wait_until_finished()
            restored = checkpointer.restore(tmp_path / "file", like)
    assert restored.words.sharding.is_equivalent_to(NamedSharding(named.mesh, P("tp")), 3)
    x = integers(6, 512)
    np.testing.assert_array_equal(wide(x, restored), wide(x, w))
