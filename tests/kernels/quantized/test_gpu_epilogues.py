"""Epilogues of products with packed weights on a GPU: exactness, accuracy, repeatability, and the layers of a model."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import jax_splitk
from jax_splitk.kernels.quantized import fp8, stream, tiled, tiles
from jax_splitk.quantized import prepack
from jax_splitk.runtime import compiler, execute
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import float64, on_gpu, poison, products
from tests.products import (
    E4M3,
    GATED,
    HALF,
    Case,
    error,
    exact_epilogue,
    exact_norm,
    exact_weight,
    integers,
    normalized,
    operands,
    with_epilogue,
)

pytestmark = pytest.mark.gpu

FAMILIES = (stream.FAMILY, tiled.FAMILY, fp8.FAMILY)
BF16 = {"bias": "bfloat16", "residual": "bfloat16"}
EXACT = [
    *(Case(rows, 512, 1040, activation="swiglu", **BF16) for rows in (1, 7, 33, 64, 200)),
    *(Case(rows, 320, 144, activation="geglu", bias="float32", residual="float32") for rows in (3, 50, 130)),
    *(Case(rows, 256, 2064, "float4_e2m1fn", 32, None, "float8_e8m0fnu", activation="swigluoai", bias="bfloat16")
      for rows in (2, 16, 90)),
    Case(5, 333, 77, "int4", 333, activation="relu", bias="float16", residual="float32", **HALF),
    Case(40, 333, 77, "int4", 333, activation="silu", bias="float32", **HALF), Case(9, 256, 72, residual="bfloat16"),
    Case(20, 384, 136, "uint4", 64, "own", activation="gelu_exact", bias="bfloat16", residual="bfloat16"),
    Case(70, 384, 272, "nf4", 64, activation="swiglu", bias="float32", out_dtype="float32"),
    Case(6, 208, 144, "float4_e2m1fn", 16, None, E4M3, channel=True, activation="geglu", bias="bfloat16"),
    Case(12, 512, 1040, x_dtype=E4M3, activation="swiglu", **BF16),
    Case(70, 512, 1040, "uint4", 64, x_dtype=E4M3, activation="swiglu", **BF16),
    Case(150, 384, 300, E4M3, 128, None, "float32", E4M3, activation="relu", bias="float32", residual="bfloat16"),
    *(Case(rows, 512, 1040, norm="bfloat16", activation="swiglu", **BF16) for rows in (1, 7, 16, 32)),
    *(Case(rows, 4096, 6144, norm="bfloat16") for rows in (1, 16)),
    Case(5, 256, 77, "int4", 256, norm="bfloat16", bias="float16", residual="float32"),
    Case(20, 1024, 136, "uint4", 64, "own", norm="bfloat16", activation="relu", bias="bfloat16"),
    Case(6, 256, 144, "float4_e2m1fn", 16, None, E4M3, channel=True, norm="one"),
]  # fmt: skip
LONG = [
    Case(rows, 4096, 7168, activation=activation, **BF16)
    for rows, activation in itertools.product((4, 64, 256), ("swiglu", "geglu", "swigluoai", "silu", "gelu"))
] + [
    Case(rows, 4096, 7168, norm="bfloat16", epsilon=1e-5, activation="swiglu", bias="bfloat16", residual="bfloat16")
    for rows in (1, 9, 30)
]
FEW, SEVERAL = 1, 3  # configs of a family
RANDOM = 40  # random problems


def random_run(seed: int) -> tuple[Case, Any, Any]:
    """A case, and one of the configs of a family that serves."""
    rng = products.random(seed, 8)
    given = products.random_epilogue(rng)
    found = configs(given, SEVERAL)
    return given, *found[int(rng.integers(len(found)))]


def cut_tiles(family: Any, p: Any) -> Iterator[Any]:
    """Small tiles with their blocks in few ranges, whose sums are added from the workspace, and in clusters."""
    plain = family.Config(128, 32 if p.rows <= 32 else 64, 3, 5)
    yield products.without_idle(p, plain)
    for splits in (2, 3):
        yield tiles.split_tiles(p, plain, splits)


def configs(given: Case, count: int) -> list[tuple[Any, Any]]:
    """Pairs of a family that serves and a config: its best candidates of each code, and special ones."""
    p, found = given.problem, []
    for family in FAMILIES:
        if family.problem_refusal(p) is not None:
            continue
        best: dict[Any, Any] = {}
        for config in family.candidates(p, DEFAULT_CUDA):
            best.setdefault(family.source(p, config), config)
        more = [] if family is stream.FAMILY else list(cut_tiles(family, p))
        legal = [config for config in more if family.refusal(p, config) is None]
        found += [(family, config) for config in dict.fromkeys([*list(best.values())[:count], *legal])]
    return found


def device_code() -> set[compiler.Source]:
    return {
        family.source(given.problem, config)
        for cases, count in ((EXACT, SEVERAL), (LONG, FEW))
        for given in cases
        for family, config in configs(given, count)
    } | {family.source(given.problem, config) for given, family, config in map(random_run, range(RANDOM))}


def arguments(given: Case, x: Any, packed: Any, after: list[Any]) -> tuple[jax.Array, ...]:
    return *operands(packed, x, given.x_dtype), *map(jnp.asarray, after)


@pytest.mark.parametrize("given", EXACT, ids=lambda given: str(given.problem))
def test_exact_on_integers(given: Case) -> None:
    given_operands, exact, out_dtype = exact_operands(given)
    expected = float64.rounded(exact, out_dtype)
    for family, config in configs(given, SEVERAL):
        call = poison.function(on_gpu.plan(family, given.problem, config), given.problem)
        out = np.asarray(call(*given_operands))
        np.testing.assert_array_equal(out, expected, err_msg=f"{family} {config}")


@pytest.mark.parametrize("seed", range(RANDOM))
def test_random_problems_are_exact_on_integers(seed: int) -> None:
    given, family, config = random_run(seed)
    given_operands, exact, out_dtype = exact_operands(given)
    call = poison.function(on_gpu.plan(family, given.problem, config), given.problem)
    out, expected = np.asarray(call(*given_operands)), float64.rounded(exact, out_dtype)
    if given.activation in GATED and given.residual != "none" and out_dtype == "float32":
        # A product of gate and up may have more bits than float32, and may be rounded before the residual is added.
        residual = np.asarray(given_operands[-1 - len(given.problem.norm_operands)], np.float64)
        twice = float64.rounded(np.float64(np.float32(exact - residual)) + residual, out_dtype)
        expected = np.where(out == twice, twice, expected)
    np.testing.assert_array_equal(out, expected, err_msg=f"{given} {family} {config}")


def exact_operands(given: Case) -> tuple[tuple[jax.Array, ...], np.ndarray, str]:
    """All operands, the exact result, and its dtype."""
    q, weight = exact_weight(given, 2, given.operand)
    x, scale, multiplied = exact_norm(given, 3)
    after, exact = exact_epilogue(given, multiplied @ weight, 4)
    return arguments(given, x, prepack(q), [*after, *scale]), exact, given.out_dtype


def drawn(given: Case) -> tuple[Any, np.ndarray, list[np.ndarray]]:
    """A weight, its values, and normally distributed operands of the epilogue and of the normalization."""
    q, weight = given.every_code(given.operand)
    rng = products.random(5)
    scale = 1 / (np.linalg.norm(weight, axis=0).mean() + 1e-30)
    q = dataclasses.replace(q, scale=(q.scale.astype(jnp.float32) * scale).astype(q.scale.dtype))
    ratio = np.repeat(np.asarray(q.scale, np.float64), given.group_size, axis=0)
    values = products.elements(q, given.operand) * ratio
    p: Any = given.problem
    types = (*p.epilogue_operands, *p.norm_operands)
    return prepack(q), values, [rng.normal(size=shape).astype(jnp.dtype(dtype)) for shape, dtype in types]


@pytest.mark.parametrize("given", LONG, ids=lambda given: str(given.problem))
def test_accurate_and_bitwise_the_same(given: Case) -> None:
    """The error is at most twice that of the product in float32 with the rounded weight, rounded once at the end."""
    packed, weight, after = drawn(given)
    x = products.normal(given)
    wide = [z.astype(np.float64) for z in after]
    wide, scale = (wide, []) if given.norm in ("none", "one") else (wide[:-1], wide[-1:])
    multiplied = normalized(given, x, *scale)
    exact = with_epilogue(given, multiplied @ weight, *wide)
    theirs = error(jnp.asarray(exact.astype(np.float32)).astype(given.out_dtype), exact)
    rounded, x_rounded = (
        np.asarray(jnp.asarray(array.astype(np.float32)).astype(given.x_dtype)).astype(np.float64)
        for array in (weight, multiplied)
    )
    theirs += error(with_epilogue(given, x_rounded @ rounded, *wide), exact)
    given_operands = arguments(given, x, packed, after)
    for family, config in configs(given, FEW):
        custom_call = on_gpu.plan(family, given.problem, config).custom_call()
        call = jax.jit(lambda *args, c=custom_call: execute.call(c, given.problem, *args))
        mine = error(call(*given_operands), exact)
        assert mine <= 2 * theirs, (family, config, mine, theirs)
        on_gpu.check_repeats(call, *given_operands)


def test_nan_reaches_only_what_depends_on_it() -> None:
    """NaN in x and in the gate's bias; a gate or up of infinity does not become a number."""
    given = Case(9, 320, 144, activation="swigluoai", bias="float32", residual="bfloat16")
    q, weight = exact_weight(given, 4, given.operand)
    x, packed = integers(given, 2, 5), prepack(q)
    after, exact = exact_epilogue(given, x @ weight, 6)
    expected = float64.rounded(exact, given.out_dtype).astype(np.float32)
    spoiled, bias = x.copy(), after[0].copy()
    spoiled[3, 100] = np.nan
    bias[1, 17] = np.nan
    for family, config in configs(given, SEVERAL):
        call = poison.function(on_gpu.plan(family, given.problem, config), given.problem)
        out = np.asarray(call(*arguments(given, spoiled, packed, [bias, after[1]]))).astype(np.float32)
        wrong = np.zeros(out.shape, bool)
        wrong[3], wrong[:, 17] = True, True
        assert np.isnan(out[wrong]).all(), config
        np.testing.assert_array_equal(out[~wrong], expected[~wrong], err_msg=str(config))


@pytest.mark.parametrize("rows", [1, 16, 300])
@pytest.mark.parametrize("activation", ["swiglu", "geglu", "swigluoai"])
def test_layers_of_a_model(rows: int, activation: Any) -> None:
    """An MLP with both epilogues, in a scan over stacked layers. Values and gradients are as near to those in float32
    as with separate products, and each layer has a product less."""
    k, hidden, layers = 1024, 2816, 3
    keys = iter(jax.random.split(jax.random.key(0), 9))

    def pack(*shape: int) -> Any:
        w = jax.random.normal(next(keys), (layers, *shape), jnp.bfloat16) / shape[0] ** 0.5
        return prepack(jax.vmap(lambda w: jax_splitk.quantize(w, "int4", group_size=64))(w), stack=1, axis=1)

    gate, up, down = pack(k, hidden), pack(k, hidden), pack(hidden, k)
    both = jax_splitk.join_gate_up(gate, up)
    x = jax.random.normal(next(keys), (rows, k), jnp.bfloat16)

    def fused(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        y = jax_splitk.quantized_matmul(x, w[0], activation=activation)
        return jax_splitk.quantized_matmul(y, w[1], residual=x), None

    def apart(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        a, b = ((x @ each).astype(jnp.float32) for each in w[:2])
        if activation == "swigluoai":
            a, b = jnp.minimum(a, 7), jnp.clip(b, -7, 7)
            y = a * jax.nn.sigmoid(1.702 * a) * (b + 1)
        else:
            y = (jax.nn.silu(a) if activation == "swiglu" else jax.nn.gelu(a)) * b
        return x + y.astype(x.dtype) @ w[2], None

    def run(layer: Any, x: jax.Array, w: Any) -> jax.Array:
        return jax.lax.scan(layer, x, w)[0].astype(jnp.float32)

    def results(layer: Any, x: jax.Array, w: Any) -> list[np.ndarray]:
        """The value and the gradient of x."""
        value = jax.jit(lambda x, w: run(layer, x, w))
        grad = jax.jit(jax.grad(lambda x, w: jnp.sum(jnp.sin(run(layer, x, w)))))
        return [np.asarray(each(x, w), np.float64) for each in (value, grad)]

    weights = {fused: (both, down), apart: (gate, up, down)}
    with jax.default_matmul_precision("highest"):
        arrays = tuple(jax.jit(jax.vmap(lambda w: jax_splitk.dequantize(jax_splitk.unpack(w), jnp.float32)))(w)
                       for w in weights[apart])  # fmt: skip
        exact = results(apart, x.astype(jnp.float32), arrays)
    ours, theirs = (results(layer, x, w) for layer, w in weights.items())
    for mine, other, wanted in zip(ours, theirs, exact, strict=True):
        assert error(mine, wanted) <= 1.5 * error(other, wanted) < 0.1
    calls = [
        jax.jit(lambda x, w, layer=layer: run(layer, x, w)).lower(x, w).compile().as_text().count("jax_splitk_launch")
        for layer, w in weights.items()
    ]
    assert 0 < calls[0] < calls[1]
