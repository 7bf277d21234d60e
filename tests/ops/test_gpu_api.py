"""The public API on a GPU, as users call it: transformations, products, tuning, export, scratch memory."""

import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax import export, lax
from jax import numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_splitk
from jax_splitk import kernels
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.quantized import PackedWeight, prepack
from jax_splitk.runtime import compiler
from jax_splitk.runtime.plan import LAUNCH_TARGET, DevicePlan
from jax_splitk.tuning import store, watch
from jax_splitk.tuning.choice import XLA
from jax_splitk.tuning.search import BY_EVENTS
from tests import float64, products, tuning_cache
from tests.convolutions import NHWC, Conv
from tests.on_gpu import error
from tests.problems import seeded
from tests.products import E4M3

pytestmark = pytest.mark.gpu

KERNELS, TARGET, PLATFORM = "cutlass", LAUNCH_TARGET, "cuda"
DENSE = Conv((12, 10), (3, 3), 2, (16, 24))
CONVOLUTIONS = {
    "dense": DENSE,
    "strides": Conv((13, 11), (3, 3), 3, (64, 72), strides=(2, 2)),
    "stem": Conv((20, 20), (7, 7), 2, (3, 32), strides=(2, 2)),
    "grouped": Conv((10, 9), (3, 3), 2, (32, 32), groups=8),
    "depthwise": Conv((12, 12), (3, 3), 3, (32, 32), groups=32),
    "one_dimension": Conv((60,), (5,), 3, (24, 40), ("NWC", "WIO", "NWC"), rhs_dilation=(2,)),
    "three_dimensions": Conv((5, 6, 4), (2, 3, 3), 2, (16, 24), ("NDHWC", "DHWIO", "NDHWC")),
    "default_numbers": Conv((9, 8), (3, 2), 4, (16, 24), None),
    "lhs_dilation": Conv((9, 8), (3, 2), 4, (6, 10), NHWC, padding=((1, 2), (0, 1)), lhs_dilation=(2, 3)),
    "batch_groups": Conv((12, 10), (3, 3), 4, (16, 32), batch_groups=2),
    "no_spatial_dimensions": Conv((), (), 64, (16, 24), ("NC", "IO", "NC")),
}
PRODUCTS = [products.Case(rows, 512, 320) for rows in (1, 16, 64, 300)]
PRODUCTS += [products.Case(rows, 512, 320, x_dtype=E4M3) for rows in (16, 300)]
FORWARD, BACKWARD = PRODUCTS[1], products.Case(16, 320, 512)  # a product, and that with the transposed weight


@pytest.fixture(autouse=True)
def without_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost model decides, the same every time."""
    monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", "off")


def gradients(conv: Conv, lhs: jax.Array, rhs: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The gradients of a bfloat16 convolution with a float32 master weight, with respect to both operands."""
    loss = lambda x, w: (conv.ours(x, w, compute_dtype=jnp.bfloat16).astype(jnp.float32) * g).sum()  # noqa: E731
    return jax.grad(loss, (0, 1))(lhs, rhs)


def wgrad(conv: Conv, lhs: jax.Array, g: jax.Array, **options: Any) -> jax.Array:
    return conv.wgrad(lhs, g, preferred_element_type=jnp.float32, **options)


def weights(case: products.Case) -> tuple[PackedWeight, np.ndarray]:
    """A packed weight, and its values in float64; products with small integers are exact."""
    q, values = products.exact_weight(case, seed=3)
    return prepack(q), values


def abstract(*shapes: tuple[int, ...], dtype: str = "bfloat16") -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


IMAGES = Conv((28, 28), (3, 3), 64, (64, 64))
# (a gradient and its dtype, or a product, the limit) where a kernel takes scratch memory, mostly more under a higher
# limit.
LIMITED: dict[str, tuple[Conv | products.Case, str, int]] = {
    "dense": (IMAGES, "bfloat16", 1 << 21),
    "float32": (IMAGES, "float32", 1 << 20),
    "float32_more": (IMAGES, "float32", 1 << 22),
    "stem": (Conv((64, 64), (7, 7), 16, (3, 64), strides=(2, 2)), "bfloat16", 1 << 22),
    "grouped": (dataclasses.replace(IMAGES, batch=16, groups=8), "bfloat16", 1 << 20),
    "depthwise": (dataclasses.replace(IMAGES, batch=16, groups=64), "bfloat16", 1 << 16),
    "zero_points": (products.Case(200, 1024, 320, "uint4", 64, "bfloat16", x_dtype=E4M3), E4M3, 1 << 21),
    "e4m3": (products.Case(1500, 4096, 2500, compute=E4M3), "bfloat16", 1 << 23),
}


def limited(name: str) -> tuple[Callable[..., jax.Array], list[Any]]:
    """The function, by our kernels within the limit, and its operands."""
    what, dtype, limit = LIMITED[name]
    if isinstance(what, Conv):
        function, operands = functools.partial(wgrad, what), abstract(what.lhs_shape, what.g_shape, dtype=dtype)
    else:
        operands = [*abstract((what.rows, what.k), dtype=dtype), weights(what)[0]]
        compute_dtype = None if what.compute == "none" else what.compute
        function = functools.partial(jax_splitk.quantized_matmul, compute_dtype=compute_dtype)

    def call(*arguments: Any) -> jax.Array:
        with jax_splitk.options(implementation=KERNELS, workspace_limit_bytes=limit):
            return function(*arguments)

    return call, operands


def calls() -> Iterator[tuple[Callable[..., Any], list[Any]]]:
    """Most of the tests lower these functions on these operands."""
    for conv in CONVOLUTIONS.values():
        yield functools.partial(wgrad, conv), abstract(conv.lhs_shape, conv.g_shape)
    for dtype in ("float16", "float32"):
        yield functools.partial(wgrad, DENSE), abstract(DENSE.lhs_shape, DENSE.g_shape, dtype=dtype)
    for case in (*PRODUCTS, BACKWARD):
        x = abstract((case.rows, case.k), dtype=case.x_dtype)
        yield jax_splitk.quantized_matmul, [*x, weights(case)[0]]
    yield from map(limited, LIMITED)


def chosen(function: Callable[..., Any], *operands: Any) -> list[tuple[Any, DevicePlan]]:
    """The decisions for a function that are our kernels', with their plans."""
    found = []
    for decision in jax_splitk.explain(function, *operands, platform=PLATFORM).decisions:
        for family in kernels.families(decision.problem.op, PLATFORM):
            if family.name == decision.family:
                found.append((decision, family.plan(decision.problem, decision.config)))
    return found


def device_code() -> set[compiler.Source]:
    return {plan.source for function, operands in calls() for _, plan in chosen(function, *operands)}


def run(function: Callable[..., Any], *operands: Any, launches: int | None = 1) -> Any:
    """The jitted function's result; its lowered module calls our kernels `launches` times (None: at least once)."""
    lowered = jax.jit(function).lower(*operands)
    count = lowered.as_text().count(f"@{TARGET}")
    assert count == launches or (launches is None and count > 0)
    return lowered.compile()(*operands)


def on_the_host(conv: Conv, lhs: jax.Array, g: jax.Array) -> np.ndarray:
    """lax's weight gradient of integers, which is exact in float32."""
    with jax.default_device(jax.devices("cpu")[0]):
        return np.asarray(conv.lax_wgrad(*(jnp.asarray(np.asarray(x, np.float32)) for x in (lhs, g))))


# ---- convolutions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_gradients_of_a_convolution(name: str) -> None:
    conv = CONVOLUTIONS[name]
    with seeded(60) as rng:
        lhs, rhs, g = conv.integers(rng)
        lhs = lhs.astype(jnp.bfloat16)
        d_lhs, d_rhs = run(functools.partial(gradients, conv), lhs, rhs, g, launches=None)
        assert (d_lhs.dtype, d_rhs.dtype) == (jnp.bfloat16, jnp.float32)
        np.testing.assert_array_equal(d_rhs, on_the_host(conv, lhs, g))
        wide = [x.astype(jnp.float32) for x in (lhs, rhs)]
        expected = jax.vjp(functools.partial(conv.lax, precision="highest"), *wide)[1](g)[0]
        assert error(d_lhs, np.asarray(expected, np.float64)) < 1e-2  # XLA's own, in bfloat16


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_our_kernels_on_request(dtype: str) -> None:
    with seeded(61) as rng:
        lhs, _, g = DENSE.integers(rng, dtype)
        with jax_splitk.options(implementation=KERNELS):
            np.testing.assert_array_equal(run(functools.partial(wgrad, DENSE), lhs, g), on_the_host(DENSE, lhs, g))


def test_a_request_that_no_kernel_serves_is_refused() -> None:
    conv = dataclasses.replace(DENSE, channels=(6, 600), groups=2)
    lhs, g = abstract(conv.lhs_shape, conv.g_shape)
    with jax_splitk.options(implementation=KERNELS), pytest.raises(NotImplementedError, match="feature_group_count 2"):
        jax.jit(functools.partial(wgrad, conv)).lower(lhs, g)


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)], ids=str)
def test_vmap(axes: tuple[int | None, int | None]) -> None:
    conv = dataclasses.replace(DENSE, channels=(16, 32))
    with seeded(62) as rng:
        draws = [conv.integers(rng, "bfloat16") for _ in range(3)]
        lhs, g = (
            [draw[i] if axis == 0 else draws[0][i] for draw in draws] for i, axis in zip((0, 2), axes, strict=True)
        )
        stacked = [jnp.stack(x) if axis == 0 else x[0] for x, axis in zip((lhs, g), axes, strict=True)]
        out = run(jax.vmap(functools.partial(wgrad, conv), axes), *stacked)
        np.testing.assert_array_equal(out, [on_the_host(conv, x, y) for x, y in zip(lhs, g, strict=True)])


def test_a_model_of_one_example_runs_the_batchs_kernel() -> None:
    conv = Conv((28, 28), (3, 3), 32, (64, 64))
    with seeded(65) as rng:
        lhs, rhs, g = conv.integers(rng, "bfloat16")
        layer = lambda lhs, rhs: jax.vmap(lambda image: conv.ours(image[None], rhs)[0])(lhs)  # noqa: E731
        problems = []
        for function in (layer, conv.ours):
            pullback = lambda rhs, f=function: jax.vjp(lambda w: f(lhs, w), rhs)[1](g)[0]  # noqa: E731
            problems.append([decision.problem for decision, _ in chosen(pullback, rhs)])
            out = run(pullback, rhs, launches=None)
            np.testing.assert_array_equal(out, jnp.asarray(on_the_host(conv, lhs, g), jnp.bfloat16))
        assert problems[0] == problems[1] and any(isinstance(p, ConvWgradProblem) for p in problems[0])


def test_scan_over_parts_of_a_batch() -> None:
    with seeded(63) as rng:
        draws = [DENSE.integers(rng, "bfloat16") for _ in range(4)]
        lhs, g = (jnp.stack([draw[i] for draw in draws]) for i in (0, 2))
        step = lambda total, xs: (total + wgrad(DENSE, *xs), None)  # noqa: E731
        out = run(lambda *xs: lax.scan(step, jnp.zeros(DENSE.rhs_shape), xs)[0], lhs, g)
        np.testing.assert_array_equal(out, sum(on_the_host(DENSE, x, y) for x, _, y in draws))


def test_a_network_in_scan_and_remat() -> None:
    """The reference is lax in bfloat16, from which only rounding differs."""
    conv = Conv((12, 10), (3, 3), 2, (32, 32))
    with seeded(64) as rng:
        lhs = jnp.asarray(rng.standard_normal(conv.lhs_shape), jnp.bfloat16)
        layers = jnp.asarray(rng.standard_normal((3, *conv.rhs_shape)) / 17, jnp.float32)

        def gradient(layer: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[..., jax.Array]:
            body = jax.checkpoint(lambda x, w: (jnp.tanh(layer(x, w)), None))
            return jax.grad(lambda w, x: (lax.scan(body, x, w)[0].astype(jnp.float32) ** 2).sum())

        layer = functools.partial(conv.ours, compute_dtype=jnp.bfloat16)
        ours = run(gradient(layer), layers, lhs, launches=None)
        theirs = jax.jit(gradient(lambda x, w: conv.lax(x, w.astype(jnp.bfloat16))))(layers, lhs)
        assert error(ours, np.asarray(theirs, np.float64)) < 3e-2


def test_a_data_parallel_step_in_shard_map() -> None:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    with seeded(65) as rng:
        lhs, rhs, g = DENSE.integers(rng, "bfloat16")
        rhs = rhs.astype(jnp.float32)

        @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())
        def step(rhs: jax.Array, lhs: jax.Array, g: jax.Array) -> jax.Array:
            loss = lambda w: lax.psum((DENSE.ours(lhs, w, compute_dtype=jnp.bfloat16) * g).sum(), "data")  # noqa: E731
            return jax.grad(loss)(rhs)

        np.testing.assert_array_equal(run(step, rhs, lhs, g), on_the_host(DENSE, lhs, g))


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs")
def test_a_data_parallel_step_under_plain_jit(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Each device's part is measured while XLA compiles the program."""
    monkeypatch.setenv("JAX_SPLITK_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("JAX_SPLITK_TUNE_BUDGET_S", "2")
    monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", "on_miss")
    conv = dataclasses.replace(DENSE, batch=2 * DENSE.batch)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    put = lambda x, *spec: jax.device_put(x, jax.sharding.NamedSharding(mesh, P(*spec)))  # noqa: E731
    with seeded(66) as rng, watch.state.watching() as watched:
        lhs, rhs, g = conv.integers(rng, "bfloat16")
        loss = lambda w, x, y: (conv.ours(x, w, compute_dtype=jnp.bfloat16) * y).sum()  # noqa: E731
        args = (put(rhs.astype(jnp.float32)), put(lhs, "data"), put(g, "data"))
        step: Any = jax.jit(jax.grad(loss)).lower(*args).compile()
        np.testing.assert_array_equal(step(*args), on_the_host(conv, lhs, g))
    (choice,) = watched.choices
    assert {key.problem for key in watched.measured} == {choice.problem}
    assert str(choice.problem).split()[3] == "x".join(map(str, DENSE.lhs_shape))
    text = step.as_text()
    assert (LAUNCH_TARGET in text) == (choice.candidate != XLA)
    assert "all-reduce" in text
    assert "all-gather" not in text


# ---- products with quantized weights -------------------------------------------------------------------------------


@pytest.mark.parametrize("case", PRODUCTS, ids=str)
def test_products_are_exact_on_integers(case: products.Case) -> None:
    packed, values = weights(case)
    x = products.integers(case, 1 if case.x_dtype == E4M3 else 2, seed=4)
    out = run(jax_splitk.quantized_matmul, jnp.asarray(x, case.x_dtype), packed)
    np.testing.assert_array_equal(out, float64.rounded(x @ values, case.out_dtype))


def test_the_cotangent_of_x_is_a_product_with_the_transposed_weight() -> None:
    packed, values = weights(FORWARD)
    x, g = products.integers(FORWARD, 2, seed=5), products.integers(BACKWARD, 2, seed=6)

    def both(x: jax.Array, g: jax.Array, packed: PackedWeight) -> tuple[jax.Array, jax.Array]:
        product = lambda x: jax_splitk.quantized_matmul(x, packed, implementation="cutlass")  # noqa: E731
        out, pullback = jax.vjp(product, x)
        return out, pullback(g)[0]

    out, dx = run(both, *(jnp.asarray(a, "bfloat16") for a in (x, g)), packed, launches=2)
    np.testing.assert_array_equal(out, float64.rounded(x @ values, "bfloat16"))
    np.testing.assert_array_equal(dx, float64.rounded(g @ values.T, "bfloat16"))


def test_the_cotangent_of_the_scales() -> None:
    packed, values = weights(FORWARD)
    x, g = products.integers(FORWARD, 2, seed=7), products.integers(BACKWARD, 2, seed=8)
    scale = packed.scale.astype(jnp.float32)

    def loss(scale: jax.Array, x: jax.Array) -> jax.Array:
        out = jax_splitk.quantized_matmul(x, dataclasses.replace(packed, scale=scale))
        return (out.astype(jnp.float32) * g).sum()

    def dequantized(scale: jax.Array, x: jax.Array) -> jax.Array:
        weight = jax_splitk.dequantize(jax_splitk.unpack(dataclasses.replace(packed, scale=scale)), jnp.float32)
        return (jnp.dot(x.astype(jnp.float32), weight, precision="highest") * g).sum()

    operands = scale, jnp.asarray(x, "bfloat16")
    np.testing.assert_array_equal(jax_splitk.dequantize(jax_splitk.unpack(packed), jnp.float32), values)
    found, expected = run(jax.grad(loss), *operands, launches=0), jax.grad(dequantized)(*operands)
    assert error(found, np.asarray(expected, np.float64)) < 1e-2


def test_vmap_over_weights() -> None:
    cases = [dataclasses.replace(FORWARD, rows=rows) for rows in (16, 16, 16)]
    drawn = [products.exact_weight(case, seed) for seed, case in enumerate(cases)]
    packed = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(prepack(q) for q, _ in drawn))
    x = np.stack([products.integers(case, 2, seed) for seed, case in enumerate(cases)])
    out = run(jax.vmap(jax_splitk.quantized_matmul), jnp.asarray(x, "bfloat16"), packed)
    expected = np.stack([each @ values for each, (_, values) in zip(x, drawn, strict=True)])
    np.testing.assert_array_equal(out, float64.rounded(expected, "bfloat16"))


# ---- tuning --------------------------------------------------------------------------------------------------------


def tunable(kind: str) -> tuple[Callable[..., jax.Array], tuple[Any, ...], np.ndarray]:
    """A new function, which jit has not seen, its operands and its result."""
    if kind == "product":
        packed, values = weights(FORWARD)
        x = products.integers(FORWARD, 2, seed=9)
        expected = float64.rounded(x @ values, "bfloat16")
        return lambda x: jax_splitk.quantized_matmul(x, packed), (jnp.asarray(x, "bfloat16"),), expected
    with seeded(66) as rng:
        lhs, _, g = DENSE.integers(rng, "bfloat16")
    return lambda lhs, g: wgrad(DENSE, lhs, g), (lhs, g), on_the_host(DENSE, lhs, g)


@pytest.mark.parametrize("kind", ["gradient", "product"])
def test_a_miss_is_measured_once(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    tuning_cache.isolate(monkeypatch, tmp_path)
    monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", "on_miss")
    monkeypatch.setenv("JAX_SPLITK_TUNE_BUDGET_S", "2")
    function, operands, expected = tunable(kind)
    with watch.state.watching() as first:
        np.testing.assert_array_equal(jax.jit(function)(*operands), expected)
    (key,) = first.measured
    found = store.lookup(key)
    assert found is not None
    measured = {m.candidate for m in found[0].measurements if m.us is not None}
    assert XLA in measured
    assert {candidate.family for candidate in measured} & set(kernels.families(key.problem.op, PLATFORM))
    monkeypatch.setenv("JAX_SPLITK_CACHE_MODE", "frozen")  # a miss would be an error
    function, operands, expected = tunable(kind)
    with watch.state.watching() as second:
        np.testing.assert_array_equal(jax.jit(function)(*operands), expected)
    assert not second.measured
    (choice,) = second.choices
    assert choice.why.startswith("user cache: ")
    assert (choice.family, choice.config) == (found[0].choice.family, found[0].choice.config)


@pytest.mark.parametrize("kind", ["gradient", "product"])
def test_a_tuning_result_decides(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    tuning_cache.isolate(monkeypatch, tmp_path)
    function, operands, expected = tunable(kind)
    tuned = jax_splitk.tune(function, *operands, seconds=2)
    (pair,) = tuned
    assert pair[1].metadata["times"] == BY_EVENTS, "not by the wall clock"
    carried = jax_splitk.TuningResult.loads(tuned.dumps())
    assert carried == tuned
    monkeypatch.setenv("JAX_SPLITK_CACHE_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("JAX_SPLITK_AUTOTUNE", "off")
    with watch.state.watching() as watched:
        with carried:
            np.testing.assert_array_equal(jax.jit(function)(*operands), expected)
        np.testing.assert_array_equal(jax.jit(function)(*operands), expected)
    inside, outside = watched.choices
    assert inside.why.startswith("the TuningResult in force: ")
    assert inside.config == pair[1].choice.config
    assert outside.why.startswith("the cost model's best ")
    assert not watched.measured


# ---- export --------------------------------------------------------------------------------------------------------


def test_an_exported_function_runs_without_a_compiler_or_a_cache(tmp_path: pathlib.Path) -> None:
    """It runs in a fresh process, and gives the same results, bit for bit."""
    pytest.importorskip("flatbuffers", reason="jax serialises with flatbuffers")
    packed, values = weights(FORWARD)
    x = products.integers(FORWARD, 2, seed=10)

    @jax.jit
    def both(lhs: jax.Array, g: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        lhs, g, x = (a.astype(jnp.bfloat16) for a in (lhs, g, x))
        y = jax_splitk.quantized_matmul(x, packed, implementation=KERNELS, preferred_element_type=jnp.float32)
        return wgrad(DENSE, lhs, g, implementation=KERNELS), y

    with seeded(67) as rng:
        lhs, _, g = DENSE.integers(rng)
    check = export.DisabledSafetyCheck.custom_call(TARGET)
    exported = export.export(both, platforms=[PLATFORM], disabled_checks=[check])(lhs, g, jnp.asarray(x, jnp.float32))
    assert exported.mlir_module().count(f"@{TARGET}") == 2
    (tmp_path / "exported").write_bytes(exported.serialize())
    np.savez(tmp_path / "inputs.npz", lhs=lhs, g=g, x=x.astype(np.float32))
    run_exported = str(pathlib.Path(__file__).parents[1] / "run_exported.py")
    # Another process has this GPU's memory, most of it.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_SPLITK_")}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    environment |= {"JAX_SPLITK_CACHE_DIR": str(tmp_path / "empty"), "JAX_SPLITK_CACHE_MODE": "frozen"}
    command = [sys.executable, run_exported, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [0, [PLATFORM], False]
    with np.load(tmp_path / "outputs.npz") as outputs:
        np.testing.assert_array_equal(outputs["arr_0"], on_the_host(DENSE, lhs, g))
        np.testing.assert_array_equal(outputs["arr_1"], (x @ values).astype(np.float32))


# ---- scratch memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LIMITED)
def test_scratch_memory_is_within_its_limit(name: str) -> None:
    function, operands = limited(name)
    ((decision, _),) = chosen(function, *operands)
    memory = jax.jit(function).lower(*operands).compile().memory_analysis()
    assert memory is not None
    assert 0 < decision.workspace_bytes <= memory.temp_size_in_bytes <= LIMITED[name][2]
