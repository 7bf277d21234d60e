"""Products with the transpose of a packed weight on a GPU: exactness, decoding, accuracy, repeatability, NaN only where
it belongs, and the gradients of a training step."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import jax_splitk
from jax_splitk.kernels.quantized import tiles
from jax_splitk.kernels.quantized.transposed import FAMILY, Config
from jax_splitk.quantized import PackedWeight, prepack
from jax_splitk.runtime import compiler, execute
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import formats, on_gpu, poison
from tests.float64 import rounded
from tests.products import (
    E4M3,
    HALF,
    Case,
    as_float32_product,
    elements,
    error,
    exact_weight,
    few_and_single_ranges,
    integers,
    normal,
    operands,
)

pytestmark = pytest.mark.gpu

FEW, SEVERAL = 2, 5  # configs of a case


def case(rows: int, k: int, features: int, *weight: Any, **types: Any) -> Case:
    return Case(rows, k, features, *weight, **types, transposed=True)


# ---- configs -------------------------------------------------------------------------------------------------------


def cut_tiles(p: Any) -> Iterator[Config]:
    """Small tiles with their blocks in few ranges, in single ranges, and in splits, also with warpgroups that share
    k."""
    plain = Config(128, 32 if p.rows <= 32 else 64, 2, 0)
    shared = ((64, 64, 8), (128, 64, 5), (64, 32, 4), (128, 32, 3))
    yield from few_and_single_ranges(FAMILY, p, plain)
    apart = [Config(*tile, 0, k_warpgroups=2) for tile in shared]
    for config, splits in itertools.product((plain, *apart), (2, 3, 8)):
        yield tiles.split_tiles(p, config, splits)


def configs(given: Case, count: int, turn: int = 0) -> list[Config]:
    """`count` of the best candidates of each code and of special ones, starting at another one in each turn."""
    p = given.problem
    candidates: dict[Any, Config] = {}
    for config in FAMILY.candidates(p, DEFAULT_CUDA):
        candidates.setdefault(FAMILY.source(p, config), config)
    legal = [config for config in cut_tiles(p) if FAMILY.refusal(p, config) is None]
    found = list(dict.fromkeys([*list(candidates.values())[:5], *legal]))
    start = turn * count % len(found)
    return [*found[start:], *found[:start]][:count]


def product(given: Case, config: Config, packed: PackedWeight) -> Callable[[Any], np.ndarray]:
    """A function from x to the result, with poisoned buffers."""
    call = poison.function(on_gpu.plan(FAMILY, given.problem, config), given.problem)
    return lambda x: np.asarray(call(*operands(packed, x, given.x_dtype)))


# ---- cases ---------------------------------------------------------------------------------------------------------

EXACT = [
    case(1, 64, 1), case(8, 320, 136), case(3, 192, 72, "int4", 32), case(16, 1024, 700, "int4", 128),
    case(11, 333, 77, "int4", 333), case(32, 1000, 300, "int8", 1000), case(5, 256, 203, "uint4", 64, "bfloat16"),
    case(17, 190, 100, "uint4", 190, "own"), case(31, 384, 130, "int8", 32, "own", "float32"),
    case(9, 640, 520, E4M3, 128, None, "float16"), case(24, 448, 129, "nf4", 64),
    case(32, 96, 65, "float4_e2m1fn", 32), case(7, 128, 2432, "uint4", 128, "float32"), case(33, 576, 330),
    case(50, 768, 257, E4M3, 16), case(100, 333, 77, "int4", 333), case(257, 448, 129, "nf4", 64),
    case(300, 512, 640), case(64, 2048, 200), case(1000, 1088, 640), case(70, 4160, 4096), case(130, 64, 8200),
]  # fmt: skip
TYPES: tuple[dict[str, Any], ...] = (
    {}, {"scale_dtype": "float32"}, {**HALF, "scale_dtype": "float16"},
    {"x_dtype": "float16", "out_dtype": "bfloat16"},
)  # fmt: skip
EXACT = [
    dataclasses.replace(given, **TYPES[(index + step) % len(TYPES)]) for index, given in enumerate(EXACT)
    for step in (0, 2)
]  # fmt: skip
SUITE = [case(n, *shape) for n in (16, 1024) for shape in ((4096, 14336), (14336, 4096))]
DECODED = [
    case(200, 384, 200, qtype, group, zero, scale_dtype, **types)
    for (qtype, zero), (group, scale_dtype), types in itertools.product(formats.CASES, formats.GROUPS, ({}, HALF))
]
DECODED += [
    case(200, 384, 200, qtype, 16, None, scale_dtype, **types, channel=channel)
    for (qtype, scale_dtype), channel, types in itertools.product(
        (("float4_e2m1fn", E4M3), ("float4_e2m1fn", formats.E8M0), ("int4", "bfloat16")), (True, False), ({}, HALF)
    )
]
LONG = [
    case(16, 512, 8192), case(256, 512, 8192, "int8", 512), case(64, 512, 8192, "nf4", 64, None, "float32"),
    case(64, 512, 8192, "uint4", 128, "bfloat16"), case(16, 512, 8192, E4M3, 32, None, "float16", **HALF),
    case(300, 512, 14336, "uint4", 64, "float32", "float16", **HALF),
]  # fmt: skip
REPEATED = [case(16, 8192, 8192), case(300, 1000, 8192, "int8", 1000, "bfloat16", **HALF), case(64, 192, 2048)]
SPOILED = [case(8, 320, 136), case(33, 576, 330, "int8", 64, "own"), case(40, 333, 200, "int4", 333, **HALF)]

by_case = lambda found: pytest.mark.parametrize(  # noqa: E731
    ("turn", "given"), [pytest.param(turn, each, id=str(each.problem)) for turn, each in enumerate(found)]
)


def device_code() -> set[compiler.Source]:
    found = set()
    for cases, count in (
        (EXACT, SEVERAL),
        (SUITE, SEVERAL),
        (DECODED, 1),
        (LONG, FEW),
        (REPEATED, FEW),
        (SPOILED, FEW),
    ):
        for turn, given in enumerate(cases):
            found |= {FAMILY.source(given.problem, config) for config in configs(given, count, turn)}
    return found


# ---- tests ---------------------------------------------------------------------------------------------------------


@by_case([*EXACT, *SUITE])
def test_exact_on_integers(turn: int, given: Case) -> None:
    q, weight = exact_weight(given, 2, given.operand)
    x = integers(given, 2 if given.features < 4096 else 1, 3)
    exact = x.astype(np.float32) @ weight.T.astype(np.float32) if given in SUITE else x @ weight.T
    expected, packed = rounded(exact, given.out_dtype), prepack(q)
    for config in configs(given, SEVERAL, turn):
        np.testing.assert_array_equal(product(given, config, packed)(x), expected, err_msg=str(config))


@by_case(DECODED)
def test_one_hot_activations_give_the_weight_rounded_once(turn: int, given: Case) -> None:
    q, weight = given.every_code(given.operand)
    expected, packed = rounded(weight.T, given.x_dtype), prepack(q)
    for config in configs(given, 1, turn):
        out = product(given, config, packed)(np.eye(given.features))
        np.testing.assert_array_equal(out, expected, err_msg=str(config))


@pytest.mark.parametrize("sizes", [(1e-30,), (1e30,), (2.0**-24, 1.0, 65504.0)], ids=str)
@pytest.mark.parametrize("qtype", ["int4", "int8", "nf4", E4M3])
def test_float16_takes_scales_of_any_size(qtype: str, sizes: tuple[float, ...]) -> None:
    given = case(20, 256, 200, qtype, 64, None, "float32", x_dtype="float16", out_dtype="bfloat16")
    q, _ = given.every_code(given.operand)
    scale = np.abs(np.asarray(q.scale)) * np.asarray(sizes, np.float32)[np.arange(4) % len(sizes)][:, None]
    q = dataclasses.replace(q, scale=jnp.asarray(scale))
    weight = elements(q, given.operand) * np.repeat(scale.astype(np.float64), 64, axis=0)
    x = integers(given, 2, 6)
    for config in configs(given, FEW):
        out = product(given, config, prepack(q))(x).astype(np.float64)
        allowed = 2**-8 * np.abs(x @ weight.T) + 2**-11 * (np.abs(x) @ np.abs(weight.T))
        assert (np.abs(out - x @ weight.T) <= allowed).all(), config


@by_case(LONG)
def test_as_accurate_as_a_float32_product_with_the_rounded_weight(turn: int, given: Case) -> None:
    q, weight = given.every_code(given.operand)
    x = normal(given)
    exact = np.asarray(x.astype(jnp.float32), np.float64) @ weight.T
    theirs = error(as_float32_product(given, x, weight), exact)
    for config in configs(given, FEW, turn):
        mine = error(product(given, config, prepack(q))(x), exact)
        assert mine <= 2 * theirs, (config, mine, theirs)


@by_case(REPEATED)
def test_bitwise_the_same_over_100_runs(turn: int, given: Case) -> None:
    arguments = operands(prepack(given.every_code(given.operand)[0]), normal(given), given.x_dtype)
    for config in configs(given, FEW, turn):
        custom_call = on_gpu.plan(FAMILY, given.problem, config).custom_call()
        call = jax.jit(lambda *args, c=custom_call: execute.call(c, given.problem, *args))
        on_gpu.check_repeats(call, *arguments)


@by_case(SPOILED)
def test_nan_reaches_only_what_depends_on_it(turn: int, given: Case) -> None:
    """In x it reaches its row. In a scale it reaches the k of its group."""
    q, weight = exact_weight(given, 4, given.operand)
    x = integers(given, 2, 5)
    expected = rounded(x @ weight.T, given.out_dtype).astype(np.float32)
    spoiled = x.copy()
    spoiled[3, given.features // 2] = np.nan
    rows, in_group = np.arange(given.rows) != 3, np.arange(given.k) < given.group_size
    packed = prepack(dataclasses.replace(q, scale=q.scale.at[0, given.features // 3].set(jnp.nan)))
    for config in configs(given, FEW, turn):
        call = product(given, config, prepack(q))
        out = call(spoiled).astype(np.float32)
        np.testing.assert_array_equal(out[rows], expected[rows], err_msg=str(config))
        assert np.isnan(out[3]).all(), config
        # The same buffers of shared memory, now without NaN.
        np.testing.assert_array_equal(call(x).astype(np.float32), expected, err_msg=str(config))
        out = product(given, config, packed)(x).astype(np.float32)
        np.testing.assert_array_equal(out[:, ~in_group], expected[:, ~in_group], err_msg=str(config))
        assert np.isnan(out[:, in_group]).all(), config


def test_gradients_of_a_training_step_are_those_of_the_dequantized_weight() -> None:
    """Also of a scan over a stack of weights, by the kernel and by XLA."""
    rows, k, features = 256, 1024, 2048
    keys = jax.random.split(jax.random.key(0), 3)

    def pack(key: jax.Array, shape: tuple[int, int]) -> PackedWeight:
        w = jax.random.normal(key, shape, jnp.bfloat16) / shape[0] ** 0.5
        return prepack(jax_splitk.quantize(w, "int4", group_size=64))

    stack = [jax.vmap(lambda key, shape=shape: pack(key, shape))(keys) for shape in ((k, features), (features, k))]
    x = jax.random.normal(jax.random.key(1), (rows, k), jnp.bfloat16)

    def loss(x: jax.Array, implementation: Any) -> jax.Array:
        def layer(x: jax.Array, pair: Any) -> tuple[jax.Array, None]:
            for w in pair:
                x = jax_splitk.quantized_matmul(x, w, implementation=implementation)
            return x, None

        return jnp.sum(jnp.sin(jax.lax.scan(layer, x, tuple(stack))[0].astype(jnp.float32)))

    ours, by_xla = (jax.jit(jax.grad(lambda x, i=i: loss(x, i)))(x) for i in ("cutlass", "xla"))
    a, b = (np.asarray(each.astype(jnp.float32), np.float64) for each in (ours, by_xla))
    assert np.linalg.norm(a - b) <= 0.02 * np.linalg.norm(b)
