"""Forward convolutions with epilogues on a GPU: exactness, accuracy, repeatability, and whole layers."""

import itertools
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp

import jax_splitk
from jax_splitk.kernels.contraction import im2col
from jax_splitk.kernels.gather import fprop as gather
from jax_splitk.kernels.grouped import passes as grouped
from jax_splitk.problems.conv_epilogue import ConvEpilogueProblem, with_epilogue
from jax_splitk.problems.conv_passes import ConvFpropProblem
from jax_splitk.runtime import compiler
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import conv_epilogues, every_kernel, float64, on_gpu, poison
from tests.dots import ACTIVATIONS
from tests.problems import conv_of, generator

pytestmark = pytest.mark.gpu

EXACT = list(every_kernel.conv_epilogue_runs())
BF16 = {"bias_dtype": "bfloat16", "residual_dtype": "bfloat16"}
LAYERS = [
    (family, conv_of(ConvFpropProblem, size, kernel, channels, out_dtype="bfloat16", **changes))
    for family, size, kernel, channels, changes in (
        (im2col.FPROP, (14, 14), (3, 3), (128, 256), {"padding": 1, "batch": 8}),
        (im2col.FPROP, (56, 56), (3, 3), (64, 64), {"padding": 1, "batch": 2, "stride": 2}),
        (im2col.FPROP, (14, 14), (1, 1), (512, 256), {"batch": 8}),
        (im2col.FPROP, (8, 14, 14), (3, 3, 3), (64, 72), {"padding": 1, "batch": 2}),
        (gather.FPROP, (64, 65), (7, 7), (3, 64), {"padding": 3, "batch": 4, "stride": 2}),
        (gather.FPROP, (14, 14), (3, 3), (37, 53), {"padding": 1, "batch": 8}),
        (grouped.FPROP, (28, 28), (3, 3), (256, 256), {"padding": 1, "batch": 8, "groups": 32}),
        (grouped.FPROP, (14, 15), (3, 3), (80, 80), {"padding": 1, "batch": 5, "groups": 10, "stride": 2}),
    )
]
CONFIGS = 4  # of a layer and an epilogue


def kind(config: Any) -> tuple[Any, ...]:
    if isinstance(config, im2col.Config):
        return config.workers > 0, config.swap, config.taps > 1, config.splits > 1
    return (config.tile_n,) if isinstance(config, gather.Config) else (config.units, config.strips)


def layer_runs() -> list[every_kernel.Run]:
    """Each layer with each activation, in both orders, and the first configs of each kind that compute it."""
    found = []
    for i, ((family, p), activation) in enumerate(itertools.product(LAYERS, ACTIVATIONS)):
        residual = {"residual_dtype": "none"} if family is grouped.FPROP else {"activation_last": i % 2 == 1}
        whole: Any = with_epilogue(p, **BF16 | residual, activation=activation)
        kinds = {kind(config): config for config in reversed(family.candidates(p, DEFAULT_CUDA))}
        found += [every_kernel.Run(family, whole, config) for config in list(kinds.values())[:CONFIGS]]
    assert all(run.family.finishes(run.problem, run.config) for run in found)
    return found


def device_code() -> set[compiler.Source]:
    return {run.plan.source for run in (*EXACT, *layer_runs())}


def normals(p: ConvEpilogueProblem, salt: int) -> list[jax.Array]:
    rng = generator(salt)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32).astype(dtype) for shape, dtype in p.operand_types]


@pytest.mark.parametrize("given", EXACT, ids=str)
def test_integers_are_exact_whatever_the_results_memory_held(given: every_kernel.Run) -> None:
    p = given.problem
    assert isinstance(p, ConvEpilogueProblem)
    operands = conv_epilogues.integers(p, generator(91))
    want = float64.rounded(conv_epilogues.exactly(p, *operands), p.out_dtype)
    out = poison.run(given.plan, p, *map(jnp.asarray, operands))
    np.testing.assert_array_equal(np.asarray(out), want)


def test_error_is_at_most_twice_xlas_and_runs_repeat() -> None:
    """XLA's epilogue is computed from the convolution in the result's dtype, as a user would write it."""
    for number, (p, runs) in enumerate(itertools.groupby(layer_runs(), lambda run: run.problem)):
        assert isinstance(p, ConvEpilogueProblem)
        operands = normals(p, number)
        exact = conv_epilogues.exactly(p, *operands)
        theirs = on_gpu.error(plain(p)(*operands), exact)
        for run in runs:
            mine = on_gpu.error(on_gpu.check_repeats(run.function(), *operands, times=10), exact)
            assert mine <= 2 * theirs, (str(p), run.config, mine, theirs)


def plain(p: ConvEpilogueProblem) -> Any:
    """The convolution and its epilogue in lax."""
    activations = {
        "none": lambda x: x, "relu": jax.nn.relu, "gelu": jax.nn.gelu, "silu": jax.nn.silu,
        "gelu_exact": lambda x: jax.nn.gelu(x, approximate=False),
    }  # fmt: skip
    activated, specs = activations[p.activation], {2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}

    def function(x: jax.Array, w: jax.Array, bias: jax.Array, residual: jax.Array | None = None) -> jax.Array:
        sums = lax.conv_general_dilated(
            x, w, p.window_strides, p.padding, dimension_numbers=specs[p.rank],
            feature_group_count=p.feature_group_count,
        ) + bias  # fmt: skip
        if residual is None:
            return activated(sums)
        return activated(sums + residual) if p.activation_last else activated(sums) + residual

    return jax.jit(function)


def test_a_layer_is_one_custom_call_and_its_gradients_are_laxs() -> None:
    rng = generator(92)
    shapes = ((16, 28, 28, 128), (3, 3, 128, 128), (128,), (16, 28, 28, 128))
    x, w, bias, residual = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes)
    w = w / 32
    given = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    config = im2col.Config(128, 128, 4, swap=True, workers=98)

    def ours(x: jax.Array, w: jax.Array, bias: jax.Array, residual: jax.Array, **more: Any) -> jax.Array:
        epilogue = {"bias": bias, "activation": "relu", "residual": residual, "activation_last": True}
        return jax_splitk.conv_fprop(x, w, **given, **epilogue, **more)

    def laxs(x: jax.Array, w: jax.Array, bias: jax.Array, residual: jax.Array) -> jax.Array:
        return jax.nn.relu(lax.conv_general_dilated(x, w, **given) + bias + residual)

    forward = jax.jit(lambda *operands: ours(*operands, config=config))
    text = forward.lower(x, w, bias, residual).compile().as_text() or ""
    assert text.count("jax_splitk_launch") == 1 and "fusion" not in text
    wanted = np.asarray(jax.jit(laxs)(x, w, bias, residual), np.float64)
    assert on_gpu.error(forward(x, w, bias, residual), wanted) < 2**-7

    def gradients(function: Any) -> Any:
        loss = lambda *operands: jnp.sum(function(*operands).astype(jnp.float32) ** 2)  # noqa: E731
        return jax.jit(jax.grad(loss, (0, 1, 2, 3)))(x, w, bias, residual)

    for one, other in zip(gradients(ours), gradients(laxs), strict=True):
        assert on_gpu.error(one, np.asarray(other, np.float64)) < 2**-6
