"""`ragged_dot` with a stack of quantized weights: results, gradients, transformations, lowering, several devices."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import export, lax
from jax import numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_splitk
from jax_splitk import ragged_dot
from jax_splitk.cli.defaults import with_defaults
from jax_splitk.problems.operations import OPERATIONS
from jax_splitk.problems.quantized_ragged import QuantizedRaggedDotProblem
from jax_splitk.quantized import PackedWeight, QuantizedArray, dequantize, prepack, quantize
from jax_splitk.runtime import compiler
from jax_splitk.runtime.plan import HOST_QUANTIZED_TARGET, HOST_RAGGED_TARGET, LAUNCH_TARGET
from jax_splitk.tuning.key import problem_as_dict, problem_from_dict
from tests import experts, products, ragged_dots
from tests.checkpoints import writers
from tests.exhaustive import crossed
from tests.ops.test_partitioning import KINDS, ONE_SUM, compiled, explained, partitioned
from tests.problems import generator, on_device, ones, together

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="these are the CPU's paths")

M, K, N, GROUPS = 40, 128, 136, 5
SIZES = np.array([3, 0, 17, 1, 9], np.int32)  # ten rows are in no group
FORMATS = ("int4", "uint4", "int8", "float8_e4m3fn", "float4_e2m1fn", "nf4")


def stack(qtype: str = "int4", group: int | None = 32, **options: Any) -> QuantizedArray:
    values = on_device(generator(470).standard_normal((GROUPS, K, N)), jnp.float32)
    return quantize(values, qtype, group_size=group, axis=1, **options)


def tokens(dtype: str = "float32", m: int = M) -> jax.Array:
    return on_device(generator(471).standard_normal((m, K)), dtype)


def exactly(x: Any, q: QuantizedArray, sizes: Any = SIZES, first: int = 0) -> np.ndarray:
    """The product in float64."""
    weight, x = np.asarray(dequantize(q), np.float64), np.asarray(x, np.float64)
    out = np.zeros((len(x), weight.shape[2]))
    for i, rows in enumerate(ragged_dots.group_rows(len(x), sizes, first, len(weight))):
        out[rows] = x[rows] @ weight[i]
    return out


def error(out: Any, exact: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(out, np.float64) - exact) / np.linalg.norm(exact))


# ---- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("qtype", "packed", "implementation"), crossed([*FORMATS], [True, False], [None, "xla"]))
def test_formats(qtype: str, packed: bool, implementation: Any) -> None:
    """The kernel takes packed weights; it is called with rows of every dtype, the others with each dtype once."""
    limits = (("float32", 1e-6), ("bfloat16", 2**-8), ("float16", 2**-11))
    turn = FORMATS.index(qtype) + packed
    for dtype, limit in limits if packed and implementation is None else limits[turn % 3 : turn % 3 + 1]:
        options = {"symmetric": False} if qtype == "uint4" else {}
        q = stack(qtype, None if qtype == "int8" else 32, **options)
        x = tokens(dtype)
        out = ragged_dot(x, prepack(q, stack=1) if packed else q, SIZES, implementation=implementation)
        assert out.dtype == x.dtype
        assert error(out, exactly(x, q)) < limit * (2 if dtype != "float32" else 1)  # the weight is rounded, too
        assert not np.asarray(out[30:]).any()


def test_float16_weights_beyond_its_range() -> None:
    """Each column of each weight is scaled by a power of two of its own."""
    q = stack(scale_dtype=jnp.float32)
    factors = 2.0 ** np.array([-8, 0, 5, 12, 19])  # weights up to 2e6
    q = dataclasses.replace(q, scale=q.scale * factors[:, None, None].astype(np.float32))
    x = tokens("float16") * 2**-10
    out, exact = ragged_dot(x, prepack(q, stack=1), SIZES, implementation="xla"), exactly(x, q)
    for rows in ragged_dots.group_rows(M, SIZES, 0, GROUPS):
        if rows.start < rows.stop:
            assert error(out[rows], exact[rows]) < 2**-10


def test_e4m3_rows() -> None:
    q, x = stack(), tokens("float8_e4m3fn")
    out = ragged_dot(x, prepack(q, stack=1), SIZES)
    assert out.dtype == jnp.bfloat16
    assert error(out, exactly(x.astype(jnp.float32), q)) < 2**-7


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("sizes", [[0] * 5, [0, 0, 0, 0, 40], [50, 0, 3, 0, 1], [-4, 20, -1, 30, 3]], ids=str)
def test_sizes(sizes: list[int], implementation: Any) -> None:
    q, x = stack(), tokens()
    out = ragged_dot(x, prepack(q, stack=1), jnp.array(sizes), implementation=implementation)
    np.testing.assert_allclose(out, exactly(x, q, sizes), rtol=2e-5, atol=2e-5)


def test_nothing_of_other_groups_reaches_a_result() -> None:
    """NaN in rows of no group, and in the scales of weights without rows: neither are read by the kernel."""
    q = stack()
    q = dataclasses.replace(q, scale=q.scale.at[1].set(jnp.nan))
    x = tokens("bfloat16").at[30:].set(jnp.nan)
    out = ragged_dot(x, prepack(q, stack=1), SIZES, preferred_element_type="float32", implementation="host")
    clean = exactly(x.at[30:].set(0), stack())
    np.testing.assert_allclose(out, clean, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_group_offset(implementation: Any) -> None:
    q, x, sizes = stack(), tokens(), np.array([2, 5, 3, 0, 17, 1, 9, 2], np.int32)
    for first in (-2, 0, 2, 3, 6):
        out = ragged_dot(x, prepack(q, stack=1), sizes, group_offset=jnp.array([first]), implementation=implementation)
        np.testing.assert_allclose(out, exactly(x, q, sizes, first), rtol=2e-5, atol=2e-5)


def test_padded_shards_and_few_rows() -> None:
    """A weight with tiles of padding, and no rows at all."""
    q, x = stack(), tokens()
    w = prepack(q, stack=1, shards=(1, 2))
    np.testing.assert_allclose(ragged_dot(x, w, SIZES), exactly(x, q), rtol=2e-5, atol=2e-5)
    assert ragged_dot(x[:0], w, SIZES).shape == (0, N)


def test_sizes_of_other_dtypes() -> None:
    q, x = prepack(stack(), stack=1), tokens()
    expected = ragged_dot(x, q, SIZES)
    for dtype in ("uint8", "int8", "int16", "uint32"):
        np.testing.assert_array_equal(ragged_dot(x, q, SIZES.astype(dtype)), expected)


def test_compute_dtype_rounds_the_rows() -> None:
    q, x = prepack(stack(), stack=1), tokens()
    out = ragged_dot(x, q, SIZES, compute_dtype=jnp.bfloat16)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, ragged_dot(x.astype("bfloat16"), q, SIZES, preferred_element_type="float32"))


def test_qwix_arrays() -> None:
    """qwix's QArray, and the leaf of its post-training quantization."""
    qwix = pytest.importorskip("qwix")
    values = on_device(generator(470).standard_normal((GROUPS, K, N)), jnp.float32)
    array = qwix.quantize(values, qtype=jnp.int4, channelwise_axes=(0, 2), tiled_axes={1: 32})
    out = ragged_dot(tokens(), array, SIZES)
    expected = lax.ragged_dot(tokens(), qwix.dequantize(array), SIZES, precision="highest")
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)
    packed = ragged_dot(tokens(), prepack(array, stack=1), SIZES)
    np.testing.assert_allclose(packed, expected, rtol=2e-5, atol=2e-5)


# ---- errors ----------------------------------------------------------------------------------------------------------


@functools.cache
def ones_packed() -> PackedWeight:
    return prepack(quantize(ones((GROUPS, K, N)), "int4", group_size=32, axis=1), stack=1)


@pytest.mark.parametrize(("change", "kind", "message"), [
    ({"lhs": ones((4, 64))}, ValueError, r"lhs of shape \(4, 64\) .* accepted: \(m, 128\)"),
    ({"lhs": ones((2, 4, K))}, ValueError, r"lhs of shape \(2, 4, 128\)"),
    ({"lhs": ones((4, K), jnp.int32)}, TypeError, "lhs of dtype int32 with quantized experts"),
    ({"rhs": lambda: ones_packed()[0]}, ValueError, "accepted: .* as prepack"),
    ({"rhs": lambda: quantize(ones((K, N)), "int4", group_size=32)}, ValueError,
     r"rhs of shape \(128, 136\); accepted"),
    ({"rhs": lambda: prepack(quantize(ones((GROUPS, N, K)), "int4", group_size=32, axis=2), axis=2, stack=1)},
     ValueError, r"contracted \(1,\); accepted"),
    ({"rhs": lambda: jax_splitk.PermutedWeight(ones_packed(), jnp.zeros((GROUPS, K), jnp.int32))}, TypeError,
     "PermutedWeight"),
    ({"group_sizes": ones(4, jnp.int32)}, TypeError, r"group_sizes of shape \(4,\) with 5 quantized experts"),
    ({"group_sizes": ones((1, 5), jnp.int32)}, TypeError, r"group_sizes of shape \(1, 5\)"),
    ({"group_sizes": ones(5)}, TypeError, "group_sizes of dtype float32"),
    ({"group_sizes": ones(4, jnp.int32), "group_offset": on_device([0], "int32")}, TypeError,
     r"\(5,\), or more groups"),
    ({"group_offset": on_device([0], "float32")}, TypeError, "group_offset of dtype float32"),
    ({"out_sharding": P("x")}, NotImplementedError, "out_sharding=.* with quantized experts; accepted: None"),
    ({"preferred_element_type": "float64"}, TypeError, "preferred_element_type"),
    ({"compute_dtype": "int8"}, TypeError, "compute_dtype"),
    ({"implementation": "cublas"}, ValueError, "implementation='cublas'"),
    ({"rhs": stack, "implementation": "cutlass"}, NotImplementedError, "kernels take packed weights"),
    ({"implementation": "cutlass"}, NotImplementedError, "quantized_experts: runs on cuda, not cpu"),
])  # fmt: skip
def test_errors(change: dict[str, Any], kind: type[Exception], message: str) -> None:
    given = {"lhs": ones((M, K), jnp.bfloat16), "rhs": ones_packed, "group_sizes": jnp.asarray(SIZES), **change}
    arguments: Any = {name: value() if callable(value) else value for name, value in given.items()}
    with pytest.raises(kind, match=message):
        ragged_dot(**arguments)


# ---- derivatives -----------------------------------------------------------------------------------------------------


def with_leaves(q: QuantizedArray, scale: jax.Array, zero_point: jax.Array | None) -> PackedWeight:
    return prepack(QuantizedArray(q.qvalue, scale, zero_point, q.qtype), stack=1)


def reference(q: QuantizedArray, x: jax.Array, scale: jax.Array, zero_point: Any = None) -> jax.Array:
    """The product in plain lax, of which JAX derives everything."""
    zeros = 0 if zero_point is None else jnp.repeat(zero_point, K // zero_point.shape[1], 1)
    weight = (q.qvalue.astype(jnp.float32) - zeros) * jnp.repeat(scale, K // scale.shape[1], 1)
    member = jax.nn.one_hot(np.repeat(np.arange(GROUPS + 1), np.append(SIZES, M - SIZES.sum())), GROUPS)
    return jnp.einsum("mg,mk,gkn->mn", member, x, weight, precision="highest")


@pytest.mark.parametrize("zeros", [False, True], ids=["", "zeros"])
def test_gradients(zeros: bool) -> None:
    """Gradients of rows, scales and floating zero points, and tangents, in float32."""
    q = stack("uint4" if zeros else "int4", scale_dtype=jnp.float32, symmetric=not zeros)
    floats = (q.scale, q.zero_point.astype(jnp.float32)) if zeros else (q.scale,)
    given, weights = (tokens(), *floats), generator(472).standard_normal((M, N))

    def ours(x: jax.Array, scale: jax.Array, zero_point: Any = None) -> jax.Array:
        return ragged_dot(x, with_leaves(q, scale, zero_point), SIZES)

    loss = lambda f, *a: jnp.sum(jnp.sin(f(*a)) * weights)  # noqa: E731
    arguments = tuple(range(len(given)))
    both = ours, functools.partial(reference, q)
    found, expected = together([jax.grad(functools.partial(loss, f), arguments) for f in both], *given)
    for one, other in zip(found, expected, strict=True):
        assert error(one, np.asarray(other, np.float64)) < 1e-4
    moved = tuple(jnp.ones_like(x) for x in given)
    one, other = together([lambda *given, f=f: jax.jvp(f, given, moved)[1] for f in both], *given)
    assert error(one, np.asarray(other, np.float64)) < 1e-5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_gradient_of_narrow_rows(dtype: str) -> None:
    """The gradient has the rows' dtype, zeros for rows of no group, and is that of the dequantized weight."""
    q, x = stack(), tokens(dtype)
    g = on_device(generator(473).standard_normal((M, N)), "bfloat16" if dtype == "float8_e4m3fn" else dtype)
    (dx,) = jax.jit(lambda x: jax.vjp(lambda x: ragged_dot(x, prepack(q, stack=1), SIZES), x)[1](g))(x)
    transposed = dataclasses.replace(q, qvalue=q.qvalue.swapaxes(1, 2), scale=q.scale.swapaxes(1, 2))
    assert dx.dtype == x.dtype
    assert error(dx, exactly(g, transposed)) < (2**-3 if dtype == "float8_e4m3fn" else 2**-7)
    assert not np.asarray(dx[30:], np.float32).any()


def test_second_derivatives() -> None:
    q = stack(scale_dtype=jnp.float32)

    def loss(f: Callable[..., jax.Array], x: jax.Array, scale: jax.Array) -> jax.Array:
        inner = jax.grad(lambda x: jnp.sum(jnp.sin(f(x, scale))))(x)
        return jnp.sum(inner**2)

    ours = lambda x, scale: ragged_dot(x, with_leaves(q, scale, None), SIZES)  # noqa: E731
    for i in range(2):
        gradients = [jax.grad(functools.partial(loss, f), i) for f in (ours, functools.partial(reference, q))]
        found, expected = together(gradients, tokens(), q.scale)
        assert error(found, np.asarray(expected, np.float64)) < 1e-3


def test_the_gradient_of_rows_is_a_grouped_product_without_a_transposed_copy() -> None:
    """The weights are dequantized, and multiplied in their order."""
    w, x = prepack(stack(), stack=1), tokens("bfloat16")
    function = jax.jit(jax.grad(lambda x: ragged_dot(x, w, SIZES).sum().astype(jnp.float32)))
    text = function.lower(x).as_text()
    assert text.count(f"@{HOST_RAGGED_TARGET}") == 1
    decisions = jax_splitk.explain(function, x).decisions
    problem: Any = decisions[-1].problem
    assert (problem.op, problem.rhs_order) == ("ragged_dot", "gnk")


# ---- transformations -------------------------------------------------------------------------------------------------


def test_vmap() -> None:
    """Mapped rows are one product of more rows; anything else is computed one after the other."""
    q, x = stack(), tokens()
    w, many = prepack(q, stack=1), jnp.stack([x, 2 * x, -x])
    out = jax.vmap(lambda x: ragged_dot(x, w, SIZES))(many)
    np.testing.assert_allclose(out, np.stack([exactly(x, q) for x in many]), rtol=2e-5, atol=5e-5)
    sizes = jnp.stack([SIZES, SIZES[::-1], 0 * SIZES])
    out = jax.vmap(lambda x, s: ragged_dot(x, w, s))(many, sizes)
    np.testing.assert_allclose(
        out, np.stack([exactly(x, q, s) for x, s in zip(many, sizes, strict=True)]), rtol=2e-5, atol=5e-5
    )
    weights = jax.tree.map(lambda *leaves: jnp.stack(leaves), w, w)
    out = jax.vmap(lambda w: ragged_dot(x, w, SIZES))(weights)
    np.testing.assert_allclose(out, np.stack([exactly(x, q)] * 2), rtol=2e-5, atol=2e-5)


def test_scan_over_layers() -> None:
    """Stacks [layers, experts, k, n] are indexed by a scan."""
    values = on_device(generator(474).standard_normal((3, GROUPS, K, K)), jnp.float32) / 16
    q = quantize(values, "int4", group_size=32, axis=2)
    w = prepack(q, axis=2, stack=2)

    def step(x: jax.Array, w: PackedWeight) -> tuple[jax.Array, None]:
        return ragged_dot(x, w, SIZES), None

    out, _ = jax.jit(lambda x, w: lax.scan(step, x, w))(tokens(), w)
    expected = np.asarray(tokens(), np.float64)
    for i in range(3):
        expected = exactly(expected, jax.tree.map(lambda leaf, i=i: leaf[i], q))
    assert error(out, expected) < 1e-5


def test_remat_saves_what_dots_saveable_saves() -> None:
    w, x = prepack(stack(), stack=1), tokens()
    loss = lambda x: jnp.sum(jnp.sin(ragged_dot(jnp.sin(x), w, SIZES)))  # noqa: E731
    saved = jax.checkpoint(loss, policy=jax.checkpoint_policies.dots_saveable)
    none = jax.checkpoint(loss, policy=jax.checkpoint_policies.nothing_saveable)
    counts = [str(jax.make_jaxpr(jax.grad(f))(x)).count("jax_splitk_quantized_ragged_dot") for f in (saved, none)]
    assert counts[0] + 1 == counts[1]
    for f in (saved, none):
        np.testing.assert_allclose(jax.grad(f)(x), jax.grad(loss)(x), rtol=1e-5, atol=1e-5)


def test_export() -> None:
    w = prepack(stack(), stack=1)
    function, x = jax.jit(lambda x, s: ragged_dot(x, w, s)), tokens("bfloat16")
    exported = export.export(function, platforms=["cpu", "cuda"], disabled_checks=jax_splitk.EXPORT_CHECKS)
    module = exported(x, jnp.asarray(SIZES)).mlir_module()
    for target in (HOST_QUANTIZED_TARGET, LAUNCH_TARGET):
        assert f"@{target}" in module


# ---- lowering --------------------------------------------------------------------------------------------------------


def calls(function: Any, *args: Any) -> int:
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text().count(f"@{LAUNCH_TARGET}")


def test_hopper_runs_one_call_forward_and_one_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward product is our kernel's, on the packed weights. The gradient of the rows dequantizes them, and is the
    grouped product's kernel."""
    monkeypatch.setattr(compiler, "compile_source", lambda source: compiler.Compiled(b"machine code", ""))
    monkeypatch.setenv("JAX_SPLITK_COMPILE_AHEAD", "off")
    w, x, sizes = prepack(stack(), stack=1), tokens("bfloat16"), jnp.asarray(SIZES)
    assert calls(ragged_dot, x, w, sizes) == 1
    assert calls(lambda x, w, s: ragged_dot(x, w, s, implementation="cutlass"), x, w, sizes) == 1
    assert calls(lambda x, w, s: jax.grad(lambda x: ragged_dot(x, w, s).sum())(x), x, w, sizes) == 1
    both = lambda x, w, s: jax.value_and_grad(lambda x: ragged_dot(x, w, s).sum())(x)  # noqa: E731
    assert calls(both, x, w, sizes) == 2
    decision = jax_splitk.explain(ragged_dot, x, w, sizes, platform="cuda").decisions[0]
    assert (decision.implementation, decision.problem.op) == ("cutlass", "quantized_ragged_dot")
    # Rows of float32 have no kernel of their own: the weights are dequantized, and the grouped product has one.
    assert calls(ragged_dot, x.astype(jnp.float32), w, sizes) == 1
    assert calls(lambda x, w, s: ragged_dot(x, w, s, implementation="xla"), x, w, sizes) == 0


def test_a_problem_survives_plain_data() -> None:
    p = experts.problem(4, products.Case(40, 256, 136, "uint4", 64, "bfloat16"), 9)
    fields = problem_as_dict(p)
    assert problem_from_dict(fields.pop("op"), fields) == p
    given = {"groups": 4, "m": 8, "k": 64, "n": 16, "qtype": "nf4", "group_size": 16}
    written = with_defaults("quantized_ragged_dot", given)
    expected = QuantizedRaggedDotProblem(4, 8, 64, 16, "bfloat16", "bfloat16", "nf4", 16, "bfloat16")
    assert problem_from_dict("quantized_ragged_dot", written) == expected
    with pytest.raises(ValueError, match="total_groups=3"):
        dataclasses.replace(p, total_groups=3).validate()
    with pytest.raises(ValueError, match="group_size=48"):
        dataclasses.replace(p, group_size=48).validate()


def test_the_tuner_measures_and_stores_a_decision(cache: pathlib.Path) -> None:
    """Results are checked for groups of three kinds of sizes, with the error that the table of nf4 brings. The next
    lowering finds the decision."""
    del cache
    w, x, sizes = prepack(stack("nf4"), stack=1), tokens("bfloat16"), jnp.asarray(SIZES)
    jax_splitk.tune(ragged_dot, x, w, sizes)
    decision = jax_splitk.explain(ragged_dot, x, w, sizes).decisions[0]
    assert decision.ours_us is not None and decision.xla_us is not None
    assert error(jax.jit(ragged_dot)(x, w, sizes), exactly(x, stack("nf4"))) < 2**-7
    p = experts.problem(4, products.Case(16, 128, 64, "nf4", out_dtype="float32"))
    assert OPERATIONS[p.op].operand_error(p) == 2**-8
    operands, reference = OPERATIONS[p.op].random_operands(p, 1), OPERATIONS[p.op].reference
    assert [(x.shape, x.dtype.name) for x in operands] == list(p.operand_types)
    check = OPERATIONS[p.op].check
    assert check is not None
    found, checked = together([functools.partial(f, p) for f in (reference, check)], *operands)
    np.testing.assert_allclose(found, checked, rtol=1e-5, atol=1e-5)


def test_work_counts_weights_that_have_rows() -> None:
    p = experts.problem(32, products.Case(4, 2880, 5760, "float4_e2m1fn", 32))
    weight = 2880 * 5760 // 2 + 2 * 90 * 5760
    assert p.bytes_moved == 4 * weight + 2 * 4 * (2880 + 5760) + 4 * 32
    assert p.flops == 2 * 4 * 2880 * 5760


# ---- several devices -------------------------------------------------------------------------------------------------

several = pytest.mark.skipif(jax.device_count() < 8, reason="needs several devices")
GROUPS_OF_8 = np.array([3, 0, 20, 1, 9, 2, 17, 3], np.int32)


def eight(n: int = 256, k: int = 512) -> PackedWeight:
    values = on_device(generator(475).integers(-7, 8, (8, k, n)), jnp.float32)
    return prepack(quantize(values, "int4", group_size=64, axis=1), stack=1)


def placed(put: Callable[..., Any], w: PackedWeight, *spec: Any) -> PackedWeight:
    return dataclasses.replace(w, words=put(w.words, *spec), scale=put(w.scale, *spec), guard=put(w.guard, *spec[:1]))


@several
@pytest.mark.parametrize(("kind", "x_spec", "w_spec", "local", "exchanged"), crossed(KINDS, [
    (("data",), (), "32x512x256 8 groups", {}),
    ((), ("model",), "64x512x256 2 of 8 groups", ONE_SUM),
    (("data",), ("model",), "32x512x256 2 of 8 groups", ONE_SUM),
    ((), (None, "model"), "64x512x64 8 groups", {}),
    ((None, "model"), (None, None, "model"), "64x128x256 8 groups", ONE_SUM),
]))  # fmt: skip
def test_divided_among_devices(kind: str, x_spec: Any, w_spec: Any, local: str, exchanged: Any) -> None:
    w, x = eight(), on_device(generator(476).integers(-2, 3, (64, 512)), jnp.bfloat16)
    product = functools.partial(ragged_dot, preferred_element_type="float32")
    expected = jax.jit(product)(x, w, GROUPS_OF_8)
    with partitioned(kind) as put:
        args = put(x, *x_spec), placed(put, w, *w_spec), put(GROUPS_OF_8)
        out, found, (problem,) = compiled(product, *args)
        shown = explained(product, *args)
    assert local in problem
    assert found == exchanged
    assert shown == [problem] or kind == "gspmd"
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-3)


@several
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_among_devices(kind: str) -> None:
    w, x = eight(), on_device(generator(477).integers(-2, 3, (64, 512)), jnp.float32)
    loss = lambda x, w, s: jnp.sum(ragged_dot(x, w, s) ** 2)  # noqa: E731
    expected = jax.jit(jax.grad(loss))(x, w, GROUPS_OF_8)
    with partitioned(kind) as put:
        found = jax.jit(jax.grad(loss))(put(x, "data"), placed(put, w, "model"), put(GROUPS_OF_8))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-2 * float(jnp.abs(expected).max()))


@several
def test_experts_of_each_device_in_shard_map() -> None:
    """Expert parallelism by hand: each device has two of the experts, and the tokens and sizes of all."""
    mesh = jax.make_mesh((4,), ("expert",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))
    w, x = eight(), on_device(generator(478).integers(-2, 3, (64, 512)), jnp.float32)

    def layer(x: jax.Array, w: PackedWeight, sizes: jax.Array) -> jax.Array:
        offset = 2 * lax.axis_index("expert")[None]
        return lax.psum(ragged_dot(x, w, sizes, group_offset=offset), "expert")

    each = jax.shard_map(layer, mesh=mesh, in_specs=(P(), P("expert"), P()), out_specs=P())
    np.testing.assert_array_equal(jax.jit(each)(x, w, GROUPS_OF_8), ragged_dot(x, w, GROUPS_OF_8))
    loss = lambda product, x: jnp.sum(product(x, w, jnp.asarray(GROUPS_OF_8)) ** 2)  # noqa: E731
    found, expected = (jax.jit(jax.grad(functools.partial(loss, f)))(x) for f in (each, ragged_dot))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * float(jnp.abs(expected).max()))


# ---- a layer ---------------------------------------------------------------------------------------------------------


def test_a_layer_of_mxfp4_experts_is_that_of_its_dequantized_weights(tmp_path: pathlib.Path) -> None:
    """gpt-oss's layer in separate operations: experts as its checkpoint stores them, two for each token, gate and
    linear columns in turns, biases, and its gated activation."""
    experts_count, width, hidden, chosen = 4, 64, 96, 2
    rng = generator(479)
    files = {
        "up": writers.mxfp4(rng, experts_count, width, 2 * hidden, exponents=(120, 124)),
        "down": writers.mxfp4(rng, experts_count, hidden, width, exponents=(120, 124)),
    }
    for name, written in files.items():
        folder = tmp_path / name
        folder.mkdir()
        writers.save(folder, written, "experts")
    packed = {name: jax_splitk.load_checkpoint(tmp_path / name, pack=True)["experts"] for name in files}
    assert all(isinstance(w, PackedWeight) and w.stack == (experts_count,) for w in packed.values())
    dense = {name: jnp.asarray(written.expected) for name, written in files.items()}
    x = on_device(rng.standard_normal((9, width)), jnp.bfloat16)
    scores = on_device(rng.standard_normal((9, experts_count)), jnp.float32)
    bias = {name: on_device(rng.standard_normal(w.shape[::2]), jnp.bfloat16) for name, w in dense.items()}

    def layer(x: jax.Array, weights: dict[str, Any]) -> jax.Array:
        weight, expert = lax.top_k(jax.nn.softmax(scores), chosen)
        order = jnp.argsort(expert.reshape(-1))
        of_row, sizes = expert.reshape(-1)[order], jnp.bincount(expert.reshape(-1), length=experts_count)
        rows = x[order // chosen]
        both = ragged_dot(rows, weights["up"], sizes) + bias["up"][of_row]
        gate, linear = jnp.minimum(both[:, ::2], 7), jnp.clip(both[:, 1::2], -7, 7)
        inner = gate * jax.nn.sigmoid(1.702 * gate) * (linear + 1)
        out = ragged_dot(inner, weights["down"], sizes) + bias["down"][of_row]
        back = jnp.zeros_like(order).at[order].set(jnp.arange(order.size))
        return jnp.sum(out[back].reshape(*expert.shape, -1) * weight[..., None], 1)

    found, expected = (jax.jit(layer)(x, weights) for weights in (packed, dense))
    assert error(found, np.asarray(expected, np.float64)) < 5e-3
    gradient = jax.jit(lambda weights: jax.grad(lambda x: jnp.sum(layer(x, weights) ** 2))(x))
    assert error(gradient(packed), np.asarray(gradient(dense), np.float64)) < 2e-2
