"""Grouped products with packed weights on a GPU: exact on integers for random problems, configs and group sizes;
against float64; NaN, repeats, and gradients."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import jax_splitk
from jax_splitk.kernels.quantized.experts import FAMILY, Config, split_tiles
from jax_splitk.problems.quantized_ragged import QuantizedRaggedDotProblem
from jax_splitk.quantized import dequantize, prepack, quantize
from jax_splitk.runtime import compiler, execute
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import experts, formats, products, ragged_dots
from tests.problems import seeded

pytestmark = pytest.mark.gpu

BATCHES, EACH = 8, 12
SIZES = ((8, 128, 4096, 7168, "int4", 128), (32, 4, 2880, 5760, "float4_e2m1fn", 32), (32, 64, 2880, 2880, "nf4", 64))


def random_problem(rng: np.random.Generator) -> QuantizedRaggedDotProblem:
    """Small to medium; some with many groups, some with a group_offset."""
    groups = int(rng.choice([1, 2, 3, 8, 33, 70]))
    m, n = int(2 ** rng.uniform(0, 10)), int(2 ** rng.uniform(5, 10))
    group = int(rng.choice([16, 32, 64, 128, 0]))
    k = int(2 ** rng.uniform(6, 11)) if group == 0 else group * int(rng.integers(1, 12))
    qtype = str(rng.choice(list(formats.BITS)))
    zero = rng.choice([None, "own", "bfloat16"]) if qtype in formats.INTEGERS else None
    byte = ({"scale_dtype": formats.E8M0}, {"scale_dtype": experts.E4M3, "channel": True})
    types: Any = (*products.TYPES, {"x_dtype": experts.E4M3}, *byte)[rng.integers(len(products.TYPES) + 3)]
    total = groups + int(rng.integers(1, 9)) if groups < 64 and rng.random() < 0.3 else 0
    return experts.problem(groups, products.Case(m, k, n, qtype, group or k, zero, **types), total)


def some_config(rng: np.random.Generator, p: QuantizedRaggedDotProblem) -> Config:
    """A candidate, with any number of thread blocks."""
    found = FAMILY.candidates(p, DEFAULT_CUDA)
    config = found[rng.integers(len(found))]
    if config.splits == 1 and rng.random() < 0.5:
        config = dataclasses.replace(config, blocks=int(rng.integers(1, 600)))
    return config


def function(p: QuantizedRaggedDotProblem, config: Config) -> Any:
    call = FAMILY.plan(p, config).custom_call()
    return jax.jit(lambda *operands: execute.call(call, p, *operands))


@pytest.mark.parametrize("batch", range(BATCHES))
def test_exact_on_integers(batch: int) -> None:
    """Rows of no group and scales of weights without rows are NaN. A result is the same each time."""
    with seeded(480 + batch) as rng:
        drawn = [random_problem(rng) for _ in range(EACH)]
        runs = [(p, some_config(rng, p)) for p in drawn]
        compiler.compile_sources(FAMILY.source(p, config) for p, config in runs)
        for p, config in runs:
            assert FAMILY.refusal(p, config) is None, f"{FAMILY.refusal(p, config)}: {p} {config}"
            for seed in range(3):
                operands, exact = experts.exact(p, seed)
                run = function(p, config)
                placed = [jnp.asarray(x) for x in operands]
                out = np.asarray(run(*placed))
                np.testing.assert_array_equal(out, exact, err_msg=f"{p} {config} {operands[-1 - p.has_offset :]}")
                assert out.tobytes() == np.asarray(run(*placed)).tobytes()


@pytest.mark.parametrize("layer", SIZES, ids=str)
def test_layers(layer: tuple[int, int, int, int, str, int]) -> None:
    """Normally distributed operands of whole layers, by every candidate, against float64; bit for bit each time."""
    groups, m, k, n, qtype, group = layer
    p = experts.problem(groups, products.Case(m, k, n, qtype, group))
    values = jax.random.normal(jax.random.key(1), (groups, k, n), jnp.float32)
    q = quantize(values, qtype, group_size=group, axis=1, scale_dtype=jnp.bfloat16)
    w, x = prepack(q, stack=1), jax.random.normal(jax.random.key(2), (m, k), jnp.bfloat16)
    sizes = np.random.default_rng(3).multinomial(m, np.full(groups, 1 / groups)).astype(np.int32)
    exact = np.zeros((m, n))
    for i, rows in enumerate(ragged_dots.group_rows(m, sizes, 0, groups)):
        if rows.start < rows.stop:
            one = dequantize(jax.tree.map(lambda leaf, i=i: leaf[i], q))
            exact[rows] = np.asarray(x[rows], np.float64) @ np.asarray(one, np.float64)
    found = FAMILY.candidates(p, DEFAULT_CUDA)
    compiler.compile_sources(FAMILY.source(p, config) for config in found)
    for config in found:
        run = functools.partial(function(p, config), x, w.words, w.scale, jnp.asarray(sizes))
        out = np.asarray(run())
        assert products.error(out, exact) < 2**-8, config
        assert all(out.tobytes() == np.asarray(run()).tobytes() for _ in range(5)), config


def test_clusters_of_every_size() -> None:
    p = experts.problem(5, products.Case(70, 4096, 200))
    for splits in (2, 3, 4, 5, 6, 8):
        for tile in (Config(64, 16, 8, 0), Config(128, 32, 8, 0), Config(64, 64, 6, 0, k_warpgroups=2)):
            config = split_tiles(p, tile, splits)
            if FAMILY.refusal(p, config) is None:
                operands, exact = experts.exact(p, splits)
                np.testing.assert_array_equal(np.asarray(function(p, config)(*map(jnp.asarray, operands))), exact)


def test_gradients_and_scan_on_the_device() -> None:
    """The public function: the forward pass by our kernel, inside a scan, and the gradient of the rows."""
    layers, groups, m, k = 3, 8, 64, 512
    values = jax.random.normal(jax.random.key(4), (layers, groups, k, k), jnp.float32) / 16
    q = quantize(values, "int4", group_size=64, axis=2, scale_dtype=jnp.bfloat16)
    w, dense = prepack(q, axis=2, stack=2), dequantize(q).astype(jnp.bfloat16)
    x = jax.random.normal(jax.random.key(5), (m, k), jnp.bfloat16)
    sizes = jnp.array([3, 0, 20, 1, 9, 2, 17, 3], jnp.int32)

    def loss(x: jax.Array, w: Any) -> jax.Array:
        out, _ = jax.lax.scan(lambda x, w: (jax_splitk.ragged_dot(x, w, sizes), None), x, w)
        return jnp.mean(out.astype(jnp.float32) ** 2)

    for packed, plain in zip(*(jax.jit(jax.value_and_grad(loss))(x, each) for each in (w, dense)), strict=True):
        assert products.error(packed, np.asarray(plain, np.float64)) < 2e-2
    decision = jax_splitk.explain(loss, x, w).decisions[0]
    assert decision.implementation == "cutlass"
