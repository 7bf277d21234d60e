"""Names of operations in HLO and of their kernels, as a profile shows them."""

import re
from typing import Any

import jax
import pytest
from jax import numpy as jnp

import jax_splitk
from jax_splitk.kernels.contraction import patch
from jax_splitk.kernels.contraction import products as tma
from jax_splitk.runtime import compiler
from jax_splitk.runtime.target import DEFAULT_CUDA
from tests.convolutions import NHWC
from tests.every_kernel import RUNS
from tests.problems import conv, ones

INSTRUCTION = re.compile(r"^\s*(?:ROOT )?(\S+) = .*? ([\w-]+)\(.*metadata=\{op_name=\"([^\"]*)\"", re.MULTILINE)
# Pass, operation, and kernel family.
OURS = re.compile(r"(?:(\w+_gradient)\)*/)?jax_splitk\.(\w+)\)*/(?:\w*\(\)/)?(\w+)$")


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names do not depend on machine code."""
    monkeypatch.setattr(compiler, "compile_source", lambda source: compiler.Compiled(b"machine code", ""))
    monkeypatch.setattr(compiler, "compile_ahead", lambda sources: None)


def pack(w: jax.Array) -> jax_splitk.PackedWeight:
    return jax_splitk.prepack(jax_splitk.quantize(w, "int4", group_size=64))


W = ones((256, 2048), jnp.bfloat16)
SCALES = {"dense": (3, 3, 64, 64), "depthwise": (7, 7, 1, 64), "layer": (64, 64), "scale": (1, 512)}


def loss(weights: Any, x: jax.Array, head: Any) -> jax.Array:
    """A dense and a depthwise convolution, a dense layer with an activation, an int4 product, and an int8 product that
    trains its scales."""
    given: dict[str, Any] = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": NHWC}
    given["compute_dtype"] = jnp.bfloat16
    x = jax_splitk.conv_general_dilated(x, weights["dense"], **given)
    x = jax_splitk.conv_general_dilated(x, weights["depthwise"], **given, feature_group_count=64)
    rows = jax_splitk.matmul(x.reshape(-1, 64), weights["layer"], activation="gelu", compute_dtype="bfloat16")
    pooled = rows.astype(jnp.bfloat16).reshape(32, 4, -1, 64).mean(2).reshape(32, 256)
    frozen = jax_splitk.quantized_matmul(pooled, head)
    int8 = jax_splitk.QuantizedArray(jnp.ones((256, 512), jnp.int8), weights["scale"])
    trained = jax_splitk.quantized_matmul(pooled, int8)
    return jnp.sum(frozen.astype(jnp.float32) ** 2) + jnp.sum(trained.astype(jnp.float32) ** 2)


def instructions(platform: str) -> list[tuple[str, str, str]]:
    """(name, opcode, op_name) of the instructions of a training step in HLO, before XLA changes it."""
    weights = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SCALES.items()}
    x = jax.ShapeDtypeStruct((32, 28, 28, 64), jnp.bfloat16)
    traced = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).trace(weights, x, pack(W))
    return INSTRUCTION.findall(traced.lower(lowering_platforms=(platform,)).as_text("hlo", debug_info=True))


def test_hlo_names_every_operation_of_a_training_step() -> None:
    """The name has the pass, the operation, and the kernel, or lax's operation if XLA computes it."""
    found = instructions("cuda")
    calls = [(name.partition(".")[0], op_name) for name, opcode, op_name in found if opcode == "custom-call"]
    kernels = sorted(of for _, op_name in calls for of in OURS.findall(op_name))
    assert len(kernels) == len(calls)
    expected = [
        *[("", "conv_dgrad", "dgrad_")] * 2,
        *[("", "conv_fprop", "fprop_")] * 2,
        *[("", "conv_wgrad", "wgrad_")] * 2,
        ("", "quantized_matmul", "quantized_"),
        ("rhs_gradient", "dot_general", "dot_"),
        ("x_gradient", "quantized_matmul_transposed", "quantized_"),
    ]
    assert [(part, op, kernel.partition("_")[0] + "_") for part, op, kernel in kernels] == expected
    assert all(kernel.endswith("_int4") == op.startswith("quantized_matmul") for _, op, kernel in kernels)
    # The instruction's name in HLO, and in a profile, is the kernel's family.
    assert all(op_name.endswith(f"/{name}") for name, op_name in calls)
    products = [op_name for _, opcode, op_name in found if opcode in ("dot", "convolution")]
    by_xla = {(part, op) for op_name in products for part, op, _ in OURS.findall(op_name)}
    assert {("", "dot_general"), ("lhs_gradient", "dot_general")} <= by_xla
    assert {(part, "quantized_matmul") for part in ("", "scale_gradient")} <= by_xla
    assert ("x_gradient", "quantized_matmul_transposed") in by_xla
    assert all(OURS.search(op_name) for op_name in products), products


def test_hlo_names_what_is_laxs() -> None:
    """No family competes for these forward passes and input gradients on the platform, so they are lax's."""
    found = instructions("tpu")
    products = {
        (op, product) for _, _, op_name in found for _, op, product in OURS.findall(op_name) if "dilated" in product
    }
    assert products == {(op, "conv_general_dilated") for op in ("conv_fprop", "conv_dgrad", "conv_wgrad")}
    assert not [name for name, opcode, _ in found if opcode == "custom-call"]


def test_modules_say_where_an_operation_is() -> None:
    """The caller's scopes come first, and the name shows differentiation."""

    def named(w: jax.Array, x: jax.Array) -> jax.Array:
        with jax.named_scope("block"):
            y = jax_splitk.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    w, x = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((3, 3, 64, 64), (8, 56, 56, 64)))
    lowered = jax.jit(jax.grad(named)).trace(w, x).lower(lowering_platforms=("cuda",))
    text = lowered.as_text("hlo", debug_info=True)
    assert 'op_name="jit(named)/jvp(block)/jax_splitk.conv_fprop/' in text
    assert 'op_name="jit(named)/transpose(jvp(block))/jax_splitk.conv_wgrad/wgrad_im2col"' in text


def test_kernels_are_named_by_family_and_role() -> None:
    roles = {"", "_direct", "_partial", "_tail", "_prepare", "_factors", "_reduce", "_reduce_splits", "_reduce_tail"}
    roles |= {"_transpose"}
    for run in RUNS:
        name, plan = run.family.trace_name(run.problem), run.plan
        assert name.startswith(run.family.name)
        assert re.fullmatch(r"(fprop|dgrad|wgrad|dot|quantized|ragged)_\w{1,40}", name), name
        assert {launch.kernel.removeprefix(name) for launch in plan.launches} <= roles, plan.kernels()
        assert dict(plan.source.defines)["KERNEL(role)"] == f"{name}##role"
        assert plan.label.startswith(f"{run.family.name} ")


def test_a_familys_kernels_are_named_by_the_family_that_uses_them() -> None:
    problem, family = conv((8, 8), (2, 2), (16, 64), stride=2), patch.WGRAD
    plan = family.plan(problem, family.candidates(problem, DEFAULT_CUDA)[0])
    assert all(kernel.startswith("wgrad_patch") for kernel in plan.kernels())
    assert plan.label.startswith("wgrad_patch ")
    assert tma.FAMILY.traced_as == "dot_tma"
