"""`jax_splitk.explain` says what is lowered."""

import functools
import re
from collections.abc import Sequence
from typing import Any

import jax
import pytest
from jax import lax
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

import jax_splitk
from jax_splitk import explain
from jax_splitk.kernels.base import xla
from jax_splitk.kernels.contraction import wgrad as im2col
from jax_splitk.kernels.cpu import wgrad as wgrad_host
from jax_splitk.ops import trace
from jax_splitk.ops.call import Primitive, call_of
from jax_splitk.ops.decision import Decision, Gain
from jax_splitk.ops.equations import walk
from jax_splitk.ops.explanation import Explanation
from jax_splitk.ops.lax_convolutions import passes
from jax_splitk.runtime.plan import HOST_WGRAD_TARGET
from jax_splitk.runtime.target import DEFAULT_CUDA, target_for
from jax_splitk.tuning import certainty
from jax_splitk.tuning.options import Options
from jax_splitk.tuning.select import select

NHWC = ("NHWC", "HWIO", "NHWC")
LHS = jax.ShapeDtypeStruct((8, 14, 14, 64), jnp.bfloat16)
RHS = jax.ShapeDtypeStruct((3, 3, 64, 64), jnp.bfloat16)
LARGE = jax.ShapeDtypeStruct((256, 60, 60, 64), jnp.bfloat16)  # which no table has
FIRST = jax.ShapeDtypeStruct((8, 14, 14, 3), jnp.bfloat16)
FIRST_RHS = jax.ShapeDtypeStruct((3, 3, 3, 64), jnp.bfloat16)

on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="about a machine without a GPU")


def layer(x: jax.Array, w: jax.Array, **options: Any) -> jax.Array:
    return jax_splitk.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC, **options)


def loss(w: jax.Array, x: jax.Array, **options: Any) -> jax.Array:
    return layer(x, w, **options).astype(jnp.float32).sum()


def squared(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.square(layer(x, w).astype(jnp.float32)).sum()


def counts(fn: Any, *args: Any, platform: str = "cuda", op: str = "conv_wgrad") -> list[tuple[str, int]]:
    found = explain(fn, *args, platform=platform).decisions
    return [(str(d.problem), d.count) for d in found if d.problem.op == op]


def wgrad(lhs: jax.Array, g: jax.Array) -> jax.Array:
    return jax_splitk.conv_wgrad(lhs, g, RHS.shape, (1, 1), "SAME", dimension_numbers=NHWC)


def wgrads(found: Sequence[Decision]) -> list[Decision]:
    return [d for d in found if d.problem.op == "conv_wgrad"]


PROBLEM_TEXT = "conv_wgrad bfloat16->bfloat16 lhs 8x14x14x64 g 8x14x14x64 kernel 3x3 stride 1x1"
PART_TEXT = PROBLEM_TEXT.replace("8x14", "2x14")  # of a device of 4
ONE = [(PROBLEM_TEXT, 1)]


@pytest.fixture
def large_passes_are_xlas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes large passes XLA's, whatever data the cost models were fitted to."""

    def faster_xla(candidate: Any, seconds: float, problem: Any, target: Any, doubted: bool = True) -> float | None:
        return seconds / 2 if problem.batch == LARGE.shape[0] and problem.op != "conv_wgrad" else None

    monkeypatch.setattr(certainty, "faster_xla", faster_xla)


def of_pass(op: str, text: str = PROBLEM_TEXT) -> str:
    return text.replace("conv_wgrad", op)


def test_each_pass_has_a_decision_where_kernels_compete() -> None:
    for fn, ops in (
        (loss, ["conv_fprop"]),
        (jax.grad(loss), ["conv_fprop", "conv_wgrad"]),
        (jax.grad(loss, 1), ["conv_fprop", "conv_dgrad"]),
        (jax.grad(loss, (0, 1)), ["conv_fprop", "conv_wgrad", "conv_dgrad"]),
    ):
        found = explain(fn, RHS, LHS, platform="cuda")
        assert sorted(str(d.problem) for d in found.decisions) == sorted(map(of_pass, ops))
        assert {d.implementation for d in found.decisions} == {"cutlass"}
        assert (found.unrouted, found.notes) == ((), ())


def test_where_no_kernel_competes_a_note_says_what_to_explain() -> None:
    found = explain(loss, RHS, LHS, platform="rocm")
    assert found.decisions == ()
    title, none, *note = str(found).splitlines()
    assert (title, none) == ("platform rocm", "no jax_splitk operations")
    assert note[0].startswith(
        "This function has 1 convolution that no kernel of jax_splitk would compute faster, and no"
    )
    of_input = explain(jax.grad(loss, 1), RHS, LHS, platform="rocm")
    assert (of_input.decisions, of_input.unrouted, len(of_input.notes)) == ((), (), 1)
    assert explain(jax.grad(loss), RHS, LHS, platform="rocm").notes == ()
    assert str(explain(jnp.sin, LHS, platform="tpu")) == "platform tpu\nno jax_splitk operations"


@on_cpu
@pytest.mark.usefixtures("large_passes_are_xlas")
def test_passes_that_xla_computes_faster_are_only_counted() -> None:
    step = jax.grad(lambda w, x: loss(w, layer(layer(x, w), w)))
    found = explain(step, RHS, LARGE, platform="cuda")
    assert [(d.problem.op, d.count) for d in found.decisions] == [("conv_wgrad", 3)]
    (note,) = found.notes
    assert note.startswith("5 more passes of convolutions (forward or input gradient): lax's, as XLA is faster")
    assert explain(functools.partial(loss, implementation="xla"), RHS, LARGE, platform="cuda").decisions == ()
    (named,) = explain(lambda w, x: jax_splitk.conv_fprop(x, w, (1, 1), "SAME", dimension_numbers=NHWC), RHS, LARGE,
                       platform="cuda").decisions  # fmt: skip
    assert (named.implementation, named.why[:27]) == ("xla", "the cost model predicts tha")


def test_found_in_all_that_holds_a_jaxpr() -> None:
    grad = jax.grad(loss)

    def scanned(w: jax.Array, x: jax.Array) -> jax.Array:
        return lax.scan(lambda w, _: (w - grad(w, x), None), w, None, 5)[0]

    def looped(w: jax.Array, x: jax.Array) -> jax.Array:
        return lax.while_loop(lambda w: w.sum() > 0, lambda w: w - grad(w, x), w)

    def branched(w: jax.Array, x: jax.Array) -> jax.Array:
        return lax.cond(w.sum() > 0, lambda: grad(w, x), lambda: w)

    jitted = (grad, jax.jit(grad), jax.jit(lambda w, x: 2 * jax.jit(grad)(w, x)))
    for fn in (*jitted, jax.grad(jax.checkpoint(loss)), scanned, looped, branched, jax.jit(jax.checkpoint(scanned))):
        assert counts(fn, RHS, LHS) == ONE


def test_found_in_shard_map_with_a_devices_part() -> None:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    fn = jax.shard_map(jax.grad(squared, (0, 1)), mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P("data")))
    for op in ("conv_fprop", "conv_dgrad", "conv_wgrad"):
        assert counts(fn, RHS, LHS, op=op) == [(of_pass(op, PART_TEXT), 1)]


def test_a_partitioned_program_shows_each_devices_part() -> None:
    """Shardings of arguments, of jit and inside the function determine the parts. Those of arrays that the function
    closes over count only for the rest."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = (jax.sharding.NamedSharding(mesh, spec) for spec in (P("data"), P()))
    lhs, rhs = LHS, RHS
    sharded = jax.ShapeDtypeStruct(lhs.shape, lhs.dtype, sharding=split)
    grad = jax.grad(loss)
    constrained = jax.jit(lambda w, x: grad(w, lax.with_sharding_constraint(x, split)))
    held = jax.device_put(jnp.ones(lhs.shape, lhs.dtype), split)
    part = [(PART_TEXT, 1)]
    for op in ("conv_fprop", "conv_dgrad", "conv_wgrad"):
        assert counts(jax.grad(squared, (0, 1)), rhs, sharded, op=op) == [(of_pass(op, PART_TEXT), 1)]
    for fn, args in (
        (grad, (rhs, sharded)),
        (jax.jit(grad), (rhs, held)),
        (jax.jit(grad, in_shardings=(whole, split)), (rhs, lhs)),
        (constrained, (rhs, lhs)),
    ):
        for platform in ("cpu", "cuda"):
            assert counts(fn, *args, platform=platform) == part
        assert HOST_WGRAD_TARGET not in jax.jit(fn).lower(*args).as_text()  # not yet: XLA comes to it
        assert HOST_WGRAD_TARGET in jax.jit(fn).lower(*args).compile().as_text()
    assert counts(lambda w: grad(w, held), rhs) == ONE
    assert HOST_WGRAD_TARGET in jax.jit(lambda w: grad(w, held)).lower(rhs).as_text()
    each = jax.shard_map(grad, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    both = jax.jit(lambda w, x: each(w, x) + grad(w, x))
    assert counts(both, rhs, sharded, platform="cpu") == [(part[0][0], 1), (part[0][0], 1)]
    ((key, _),) = jax_splitk.tune(grad, rhs, sharded, seconds=0.05).entries
    assert str(key.problem) == part[0][0]


def test_calls_of_one_function_are_counted_in_a_partitioned_program() -> None:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.ShapeDtypeStruct(LHS.shape, LHS.dtype, sharding=jax.sharding.NamedSharding(mesh, P("data")))
    one = jax.jit(layer)

    def net(w: jax.Array, x: jax.Array) -> jax.Array:
        x = one(one(x, w), w)
        return lax.scan(lambda x, _: (one(x, w), None), x, None, 5)[0].astype(jnp.float32).sum()

    assert counts(jax.grad(net), RHS, sharded) == [(PART_TEXT, 3)]
    for op, count in (("conv_fprop", 3), ("conv_dgrad", 2)):
        assert counts(jax.grad(net), RHS, sharded, op=op) == [(of_pass(op, PART_TEXT), count)]


@pytest.mark.parametrize("platform", ["tpu9", "", 3, pytest.param("gpu", id="a backend")])
def test_an_unknown_platform_is_refused(platform: Any) -> None:
    with pytest.raises(ValueError, match=r"platform=.*; accepted: None, 'cpu', 'cuda', 'rocm', 'tpu'"):
        explain(jax.grad(loss), RHS, LHS, platform=platform)


def test_vmap_shows_the_batched_problem() -> None:
    many = jax.ShapeDtypeStruct((5, *LHS.shape), LHS.dtype)
    assert counts(jax.vmap(wgrad, (None, 0)), LHS, many) == [(PROBLEM_TEXT.replace("g 8x14x14x64", "g 8x14x14x320"), 1)]
    of_each = PROBLEM_TEXT.replace("lhs 8x14x14x64 g 8x14x14x64", "lhs 8x14x14x320 g 8x14x14x320") + " groups 5"
    assert counts(jax.vmap(wgrad), many, many) == [(of_each, 1)]


def test_equal_operations_are_counted_and_others_listed_in_order() -> None:
    def net(ws: list[jax.Array], x: jax.Array) -> jax.Array:
        x = layer(x, ws[0])
        for w in ws[1:4]:
            x = layer(x, w)
        return layer(x, ws[4], workspace_limit_bytes=0).astype(jnp.float32).sum()

    found = explain(jax.grad(net), [FIRST_RHS, RHS, RHS, RHS, RHS], FIRST, platform="cuda").decisions
    # The first layer has another shape, the last one options of its own. Gradients come backwards.
    there, back = [(1, 3), (3, 64), (1, 64)], [(1, 64), (3, 64)]
    for op, expected in (("conv_fprop", there), ("conv_dgrad", back), ("conv_wgrad", [*back, (1, 3)])):
        assert [(d.count, d.problem.in_channels) for d in found if d.problem.op == op] == expected
    limited = wgrads(found)[0]
    assert limited.workspace_bytes == 0
    assert all(d.implementation == "cutlass" for d in found if d is not limited)


@on_cpu
def test_platforms_on_a_machine_without_a_gpu() -> None:
    decision = explain(jax.grad(loss), RHS, LHS, platform="cuda").decisions[-1]
    choice = select(decision.problem, DEFAULT_CUDA, Options())
    assert (decision.implementation, decision.family) == ("cutlass", choice.family.name)
    assert (decision.config, decision.splits, decision.why) == (choice.config, choice.config.splits, choice.why)
    assert decision.workspace_bytes == im2col.FAMILY.workspace_bytes(decision.problem, choice.config)
    found = explain(jax.grad(loss), RHS, LHS)
    assert found.platform == "cpu"
    choice = select(found.decisions[0].problem, target_for("cpu"), Options())
    assert (found.decisions[0].implementation, found.decisions[0].config) == ("host", choice.config)


@on_cpu
def test_what_is_explained_is_what_is_lowered() -> None:
    for options in ({}, {"implementation": "xla"}, {"config": wgrad_host.Config(3, 64)}):
        grad = jax.grad(functools.partial(loss, **options))
        (decision,) = explain(grad, RHS, LHS).decisions
        text = jax.jit(grad).lower(RHS, LHS).as_text()
        assert (decision.implementation == "host") == (HOST_WGRAD_TARGET in text)
        if decision.config is not None:
            assert f"splits = {decision.config.splits} : i64" in text
            assert f"tensor<{decision.workspace_bytes}xui8>" in text


def test_an_impossible_choice_is_shown_not_raised() -> None:
    grad = jax.grad(functools.partial(loss, implementation="host"))
    (decision,) = wgrads(explain(grad, RHS, LHS, platform="cuda").decisions)
    assert (decision.implementation, decision.family, decision.workspace_bytes) == ("none", None, 0)
    assert "wgrad_host: runs on cpu, not cuda" in decision.why
    config = wgrad_host.Config(10**6, 64)
    (decision,) = explain(jax.grad(functools.partial(loss, config=config)), RHS, LHS, platform="cpu").decisions
    assert (decision.implementation, decision.config) == ("none", config)
    assert "is not legal" in decision.why


def cells(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


def test_the_table_shows_times_and_a_verbose_one_every_field() -> None:
    found = explain(lambda *xs: (wgrad(*xs), wgrad(*xs)), LHS, LHS, platform="cuda")
    (d,) = found.decisions
    title, header, row, *_, total = str(found).splitlines()
    assert title.startswith("platform cuda: NVIDIA H")
    assert cells(header) == ["operation", "kernel", "us", "XLA us", "saved us", "because"]
    assert d.ours_us is not None
    assert d.xla_us is not None
    # Times are those of one operation, and what is saved is saved by both.
    times = [f"2 x ~{d.ours_us:.1f}", f"2 x ~{d.xla_us:.1f}", f"~{2 * (d.xla_us - d.ours_us):.1f}"]
    assert cells(row)[1:5] == [d.family, *times]
    size = f"{d.workspace_bytes / 2**20:.2f} MiB"
    saved = f"about {2 * (d.xla_us - d.ours_us):.1f} of {2 * d.xla_us:.1f} us saved"
    assert total == f"sum of 2 operations: {saved}"
    assert str(d.config) not in str(found)
    verbose = str(explain(lambda *xs: (wgrad(*xs), wgrad(*xs)), LHS, LHS, platform="cuda", verbose=True))
    for field in (f"2 x {d.problem}", f"{d.family} {d.config}", f"splits {d.splits}, workspace {size}", d.why):
        assert f"{field}\n" in verbose
    assert verbose.endswith(f"\n{total}")


def test_nothing_runs_and_keyword_arguments_pass() -> None:
    ran = []

    def fn(w: jax.Array, *, x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: ran.append(1))
        return jax.grad(loss)(w, x)

    assert len(wgrads(explain(fn, RHS, x=LHS, platform="cuda").decisions)) == 1
    assert ran == []


# ---- what is left to lax -------------------------------------------------------------------------------------------


def plain(w: jax.Array, x: jax.Array, **geometry: Any) -> jax.Array:
    arguments = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": NHWC, **geometry}
    return jnp.square(lax.conv_general_dilated(x, w, **arguments).astype(jnp.float32)).sum()


@on_cpu
def test_a_plain_convolution_is_listed_with_its_gain() -> None:
    x = jax.ShapeDtypeStruct((8, 56, 56, 64), jnp.bfloat16)  # which the shipped table has
    routed = jax_splitk.intercept()(plain)
    found = explain(jax.grad(plain), RHS, x, platform="cuda")
    (expected,) = wgrads(explain(jax.grad(routed), RHS, x, platform="cuda").decisions)
    assert (found.decisions, wgrads(found.unrouted)) == ((), [expected])
    us, xla_us = expected.ours_us, expected.xla_us
    assert us is not None
    assert xla_us is not None
    assert us < xla_us
    assert (expected.measured, expected.saved_us) == (True, xla_us - us)
    (row,) = [line for line in str(found).splitlines() if line.startswith("conv_wgrad")]
    assert row.split()[-5:] == [f"{us:.1f}", f"{xla_us:.1f}", f"{xla_us - us:.1f}", "shipped", "table"]
    assert str(found).count("jax_splitk.intercept()") == 1
    # Both ways in one function; what was not measured is predicted.
    both = explain(jax.grad(lambda w, x: plain(w, x) + loss(w, x), (0, 1)), RHS, LHS, platform="cuda")
    assert {d.problem.op for d in both.decisions} == {"conv_fprop", "conv_dgrad", "conv_wgrad"}
    assert set(both.unrouted) == set(both.decisions)
    for decision in both.unrouted:
        of_xla = xla.estimate(decision.problem, DEFAULT_CUDA)
        assert of_xla is not None
        assert (decision.measured, decision.xla_us) == (False, of_xla.seconds * 1e6)
    assert both.gain == both.gain_if_routed
    on_cpu = explain(jax.grad(plain), RHS, x, platform="cpu").unrouted[0]
    assert (on_cpu.xla_us, on_cpu.saved_us) in ((None, None), (None, 0.0))


GEOMETRIES: dict[str, dict[str, Any]] = {
    "same": {},
    "strided, and the padding leaves pixels over": {"window_strides": (2, 3), "padding": ((1, 1), (0, 2))},
    "dilated": {"rhs_dilation": (2, 1), "padding": "VALID", "precision": "highest"},
    "transposed": {"lhs_dilation": (2, 2), "padding": ((1, 2), (2, 2))},
    "groups": {"feature_group_count": 4},
    "batch groups": {"batch_group_count": 2},
    "channels first": {"dimension_numbers": ("NCHW", "OIHW", "NCHW")},
}


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("inside", [jax.jit, jax.checkpoint, None])
def test_the_problems_of_a_plain_convolution_are_the_routed_ones(name: str, inside: Any) -> None:
    geometry = GEOMETRIES[name]
    x, w = jnp.ones((4, 12, 13, 8)), jnp.ones((3, 2, 8 // geometry.get("feature_group_count", 1), 8))
    if name == "channels first":
        x, w = x.transpose(0, 3, 1, 2), w.transpose(3, 2, 0, 1)
    fn = functools.partial(plain, **geometry)
    fn = fn if inside is None else inside(fn)
    found = set(passes(list(walk(trace.traced(jax.grad(fn, (0, 1)), (w, x), {})))))
    with jax_splitk.intercept():
        routed = walk(trace.traced(jax.grad(fn, (0, 1)), (w, x), {}))
        expected = {
            call_of(eqn).problem([var.aval for var in eqn.invars])
            for eqn in routed
            if isinstance(eqn.primitive, Primitive)
        }
    assert found == expected
    assert len(found) == 3


def test_other_convolutions_are_not_listed() -> None:
    integers, weights = jnp.ones((1, 4, 4, 2), jnp.int8), jnp.ones((3, 3, 2, 2), jnp.int8)
    empty = jax.ShapeDtypeStruct((0, *LHS.shape[1:]), LHS.dtype)
    for fn, args in ((plain, (weights, integers)), (plain, (RHS, empty))):
        assert explain(fn, *args, platform="cuda").unrouted == ()
    for platform in ("rocm", "cpu"):  # where none competes
        for fn in (plain, jax.grad(plain, 1)):
            found = explain(fn, RHS, LHS, platform=platform)
            assert (found.decisions, found.unrouted, len(found.notes)) == ((), (), 1)


@on_cpu
@pytest.mark.usefixtures("large_passes_are_xlas")
def test_what_routing_would_leave_to_xla_is_not_listed() -> None:
    found = explain(jax.grad(plain, (0, 1)), RHS, LARGE, platform="cuda")
    assert [d.problem.op for d in found.unrouted] == ["conv_wgrad"]
    with jax_splitk.options(implementation="xla"):
        of_forward = explain(plain, RHS, LHS, platform="cuda")
    assert (of_forward.unrouted, len(of_forward.notes)) == ((), 1)


def dequantized(q: jax.Array, scale: jax.Array, zero: jax.Array | None = None) -> jax.Array:
    """[k, features] of bfloat16 from [k, features] and [groups, features]."""
    groups, features = scale.shape
    values = q.astype(jnp.float32).reshape(groups, -1, features)
    values = values if zero is None else values - zero[:, None].astype(jnp.float32)
    return (values * scale[:, None]).reshape(q.shape).astype(jnp.bfloat16)


@on_cpu
def test_plain_products_with_quantized_arguments_are_listed() -> None:
    x = jnp.ones((2, 8, 256), jnp.bfloat16)
    q, scale, zero = jnp.ones((256, 128), jnp.int4), jnp.ones((4, 128)), jnp.ones((4, 128), jnp.int4)
    a_group, a_channel = {"rows": 16, "qtype": "int4", "group_size": 64}, {"group_size": 256, "scale_dtype": "bfloat16"}
    by_output = lambda x, q, s: (x @ q.astype(x.dtype)) * s[0].astype(x.dtype)  # noqa: E731
    layers = lambda x, q, s: lax.scan(lambda x, w: (jnp.tile(x @ dequantized(*w), 2), None), x, (q, s))[0]  # noqa: E731
    weights = [jax_splitk.QuantizedArray(q, scale, zero_point, "int4") for zero_point in (None, zero)]
    library = lambda x, w: x @ jax_splitk.dequantize(w, jnp.bfloat16)  # noqa: E731
    cases: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...] = (
        (lambda x, q, s: x @ dequantized(q, s), (q, scale), a_group),
        *((library, (w,), a_group) for w in weights),
        (
            lambda x, q, s: x @ jax.jit(dequantized)(q, s),
            (q.astype(jnp.float8_e4m3fn), scale),
            {"qtype": "float8_e4m3fn"},
        ),
        (lambda x, q, s, z: x @ dequantized(q, s, z), (q, scale, zero), {**a_group, "zero_dtype": "float32"}),
        (by_output, (q.astype(jnp.int8), scale), a_channel),
        (layers, (jnp.stack([q, q]), jnp.stack([scale, scale])), a_group),
    )
    for fn, arguments, fields in cases:
        found = explain(jax.jit(fn), x, *arguments, platform="cuda")
        (decision,) = found.unrouted
        assert {name: getattr(decision.problem, name) for name in fields} == fields
        assert decision.implementation == "cutlass"
        assert "jax_splitk.quantized_matmul" in str(found)
    (decision,) = explain(lambda x: x.astype(jnp.float32) @ q.astype(jnp.float32), x, platform="cuda").unrouted
    assert (decision.implementation, decision.why[:19]) == ("none", "x_dtype='float32'; ")


def test_other_products_are_not_listed() -> None:
    x, q = jnp.ones((8, 256), jnp.bfloat16), jnp.ones((256, 128), jnp.int8)
    packed = jax_splitk.prepack(jax_splitk.quantize(jnp.ones((256, 128)), "int4", group_size=64))
    cases = (
        lambda: x.astype(jnp.int8) @ q,  # the tensor cores' own product
        lambda: x @ jnp.ones((256, 128), jnp.bfloat16).astype(jnp.float8_e4m3fn).astype(x.dtype),  # made each time
        lambda: x @ jnp.sin(q.astype(x.dtype)),
    )
    for fn in cases:
        assert explain(fn, platform="cuda").unrouted == ()
    found = explain(lambda: jax_splitk.quantized_matmul(x, packed), platform="cuda")
    assert (len(found.decisions), found.unrouted) == (1, ())


@on_cpu
def test_the_sum_of_a_step() -> None:
    x = jax.ShapeDtypeStruct((8, 56, 56, 64), jnp.bfloat16)
    double = jax.ShapeDtypeStruct(LHS.shape, jnp.float64)

    def total(fn: Any, *args: Any) -> tuple[str, Gain]:
        found = explain(fn, *args, platform="cuda")
        return str(found).splitlines()[-1].partition(": ")[2], found.gain

    (one,) = explain(wgrad, x, x, platform="cuda").decisions
    (two,) = explain(wgrad, LHS, LHS, platform="cuda").decisions
    assert (one.measured, two.measured) == (True, False)
    assert None not in (one.saved_us, one.xla_us, two.saved_us, two.xla_us)
    assert total(wgrad, x, x) == (
        f"{one.saved_us:.1f} of {one.xla_us:.1f} us saved",
        Gain(one.saved_us, one.xla_us, measured=True, known=1, unknown=0),
    )
    together = lambda x, other: (wgrad(x, x), wgrad(other, other))  # noqa: E731
    said, gain = total(together, x, LHS)
    assert gain == Gain(one.saved_us + two.saved_us, one.xla_us + two.xla_us, measured=False, known=2, unknown=0)
    assert said == f"about {gain.saved_us:.1f} of {gain.xla_us:.1f} us saved"
    with jax.enable_x64(True):  # XLA's alone: nothing is saved, and nothing is unknown
        assert total(together, x, double)[1].known == 1
    assert total(together, x, LHS)[1].saved_us == explain(together, x, LHS, platform="cuda").gain.saved_us


def test_what_is_not_known_is_counted() -> None:
    problem = explain(wgrad, LHS, LHS, platform="cuda").decisions[0].problem
    of = functools.partial(Decision, problem, "cutlass", "wgrad_im2col", None, 1, 0, "", "")
    said = str(Gain(273.4, 403.6, measured=False, known=4, unknown=3))
    assert said == "about 273 of 404 us saved; 3 operations not known"
    found = Explanation("cuda", "NVIDIA H200", True, (of(2, 4.0, 6.0, True), of(3, 4.0)))
    assert found.gain == Gain(4.0, 12.0, measured=True, known=2, unknown=3)
    assert str(found).endswith("sum of 5 operations: 4.0 of 12.0 us saved; 3 operations not known")
    assert "  3 x ~4.0" in str(found)
    alone = Explanation("cuda", "NVIDIA H200", False, (of(1, 4.0),))
    assert str(alone).splitlines()[0] == "platform cuda: NVIDIA H200"
    assert str(alone).endswith("sum of 1 operation: 1 operation not known")
