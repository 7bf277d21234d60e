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
from jax_splitk.problems.conv_epilogue import ConvEpilogueProblem, with_epilogue
from jax_splitk.problems.conv_passes import ConvFpropProblem
from jax_splitk.runtime import compiler, execute
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests import conv_epilogues, every_kernel, float64, on_gpu, poison
from tests.dots import ACTIVATIONS
from tests.problems import conv_of, generator
from tests.random_problems import device_plan

pytestmark = pytest.mark.gpu

FAMILY = im2col.FPROP
EXACT = list(every_kernel.conv_epilogue_runs())
BF16 = {"bias_dtype": "bfloat16", "residual_dtype": "bfloat16"}
LAYERS = [
    conv_of(ConvFpropProblem, size, kernel, channels, out_dtype="bfloat16", **changes)
    for size, kernel, channels, changes in (
        ((14, 14), (3, 3), (128, 256), {"padding": 1, "batch": 8}),
        ((56, 56), (3, 3), (64, 64), {"padding": 1, "batch": 2, "stride": 2}),
        ((14, 14), (1, 1), (512, 256), {"batch": 8}),
        ((8, 14, 14), (3, 3, 3), (64, 72), {"padding": 1, "batch": 2}),
    )
]
CONFIGS = 4  # of a layer and an epilogue


def layer_runs() -> dict[ConvEpilogueProblem, list[Any]]:
    """Each layer with each activation, in both orders, and the first configs of each kind that compute it."""
    found: dict[Any, list[Any]] = {}
    for i, (p, activation) in enumerate(itertools.product(LAYERS, ACTIVATIONS)):
        whole: Any = with_epilogue(p, **BF16, activation=activation, activation_last=i % 2 == 1)
        candidates = reversed(FAMILY.candidates(p, DEFAULT_CUDA))
        kinds = {(c.workers > 0, c.swap, c.taps > 1, c.splits > 1): c for c in candidates}
        found[whole] = list(kinds.values())[:CONFIGS]
        assert all(FAMILY.finishes(whole, config) for config in found[whole])
    return found


def device_code() -> set[compiler.Source]:
    layers = (FAMILY.plan(p, config).source for p, configs in layer_runs().items() for config in configs)
    return {*(run.plan.source for run in EXACT), *layers}


def normals(p: ConvEpilogueProblem, salt: int) -> list[jax.Array]:
    rng = generator(salt)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32).astype(dtype) for shape, dtype in p.operand_types]


def run(p: ConvEpilogueProblem, config: Any) -> Any:
    call = device_plan(FAMILY, p, config).custom_call()
    return jax.jit(lambda *operands: execute.call(call, p, *operands))


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
    for number, (p, configs) in enumerate(layer_runs().items()):
        operands = normals(p, number)
        exact = conv_epilogues.exactly(p, *operands)
        theirs = on_gpu.error(plain(p)(*operands), exact)
        for config in configs:
            mine = on_gpu.error(on_gpu.check_repeats(run(p, config), *operands, times=10), exact)
            assert mine <= 2 * theirs, (str(p), config, mine, theirs)


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
