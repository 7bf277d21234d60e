"""The public convolutions on the CPU: over several devices, their lowering, export and memory."""

import dataclasses
import functools
import itertools
import re
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
from jax_splitk import _ffi
from jax_splitk.kernels.cpu import wgrad as wgrad_host
from jax_splitk.ops import lowering
from jax_splitk.runtime.plan import HOST_WGRAD_TARGET as HOST
from jax_splitk.runtime.plan import LAUNCH_TARGET
from tests import cubin
from tests.convolutions import NHWC, PLAIN, Conv
from tests.problems import generator

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="these are the CPU's paths")


# ---- several devices -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "implementation", "ours"), [((4,), None, True), ((4,), "host", True), ((2, 2), None, False)]
)
def test_shard_map_runs_the_kernel_if_all_axes_are_manual(
    shape: tuple[int, ...], implementation: str | None, ours: bool
) -> None:
    conv = dataclasses.replace(PLAIN, batch=8)
    lhs, _, g = conv.integers(generator(40))
    grid = jax.make_mesh(shape, ("data", "model")[: len(shape)], axis_types=(AxisType.Auto,) * len(shape))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=grid, in_specs=(P("data"), P("data")), out_specs=P(), axis_names={"data"})
    def wgrad(lhs: jax.Array, g: jax.Array) -> jax.Array:
        return lax.psum(conv.wgrad(lhs, g, implementation=implementation), "data")

    assert (HOST in wgrad.lower(lhs, g).as_text()) is ours
    np.testing.assert_array_equal(wgrad(lhs, g), conv.lax_wgrad(lhs, g))


# ---- lowering, export, memory --------------------------------------------------------------------------------------


def test_export_for_the_cpu_runs_after_a_round_trip() -> None:
    lhs, rhs, g = PLAIN.integers(generator(50))
    step = jax.jit(jax.grad(lambda w, x: (PLAIN.ours(x, w, implementation="host") * g).sum()))
    check = export.DisabledSafetyCheck.custom_call(HOST)
    exported = export.export(step, platforms=["cpu"], disabled_checks=[check])(rhs, lhs)
    again = round_trip(exported)
    assert HOST in again.mlir_module()
    np.testing.assert_array_equal(again.call(rhs, lhs), PLAIN.lax_wgrad(lhs, g))
    with pytest.raises(ValueError, match=HOST):
        export.export(step, platforms=["cpu"])(rhs, lhs)


@pytest.mark.parametrize(("conv", "height"), [
    (PLAIN, "h"),
    (Conv(padding=((2, 1), (0, 1)), groups=2), "h"),
    (Conv(padding="VALID", rhs_dilation=(2, 1)), "h"),
    (Conv(padding=((1, 1), (1, 1)), lhs_dilation=(2, 1), strides=(2, 1)), "h"),
    (Conv((10, 8), (3, 3), strides=(2, 2)), "2*h"),
    (Conv((10, 8), (3, 3), strides=(2, 1), padding="VALID"), "2*h"),
], ids=str)  # fmt: skip
def test_export_of_gradients_with_symbolic_sizes(conv: Conv, height: str) -> None:
    lhs, rhs, _ = conv.integers(generator(52))
    shape = export.symbolic_shape(f"b, {height}, 8, 6", constraints=["h >= 5"])

    def gradients(layer: Callable[..., jax.Array]) -> Callable[..., Any]:
        return jax.jit(jax.grad(lambda x, w: (layer(x, w) ** 2).sum(), (0, 1)))

    exported = export.export(gradients(conv.ours))(jax.ShapeDtypeStruct(shape, lhs.dtype), rhs)
    for ours, theirs in zip(exported.call(lhs, rhs), gradients(conv.lax)(lhs, rhs), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_export_of_wgrad_with_symbolic_sizes() -> None:
    lhs, _, g = PLAIN.integers(generator(53), jnp.bfloat16)
    scope = export.SymbolicScope()
    symbolic = [
        jax.ShapeDtypeStruct(export.symbolic_shape(f"b, h, w, {channels}", scope=scope), jnp.bfloat16)
        for channels in PLAIN.channels
    ]
    wgrad = functools.partial(PLAIN.wgrad, preferred_element_type="float32")
    out = export.export(jax.jit(wgrad))(*symbolic).call(lhs, g)
    np.testing.assert_array_equal(out, PLAIN.lax_wgrad(lhs.astype(jnp.float32), g.astype(jnp.float32)))
    strided = dataclasses.replace(PLAIN, strides=(2, 1))
    with pytest.raises(ValueError, match=r"padding='SAME' of an input of symbolic sizes \(h, w\) at strides \(2, 1\)"):
        export.export(jax.jit(strided.wgrad))(*symbolic)


def round_trip(exported: export.Exported) -> export.Exported:
    pytest.importorskip("flatbuffers", reason="jax serialises with flatbuffers")
    return export.deserialize(exported.serialize())


HOPPER = Conv((6, 10), (3, 3), 2, (16, 24))


def hopper_lowered(platform: str = "cuda") -> str:
    lhs, g = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (HOPPER.lhs_shape, HOPPER.g_shape))
    wgrad = jax.jit(functools.partial(HOPPER.wgrad, preferred_element_type="float32"))
    return wgrad.trace(lhs, g).lower(lowering_platforms=(platform,)).as_text()


def test_lowering_for_cuda_needs_no_gpu() -> None:
    text = hopper_lowered()
    assert text.count(f"@{LAUNCH_TARGET}") == 1
    assert "stablehlo.convolution" not in text
    fields = r"tile_m=\d+, tile_n=\d+, stages=\d+, swap=(True|False), splits=\d+, whole_tiles=\d+"
    assert re.search(rf'config = "wgrad_im2col Config\({fields}\)"', text)
    # The custom call has a whole cubin with the named kernels.
    words = [int(n) for n in re.search(r"plan = dense<\[(.*?)\]>", text)[1].split(",")]
    kernels = re.search(r'kernels = "([\w,]+)"', text)[1]
    assert _ffi.check_plan(words, kernels)[0] == 4
    image = bytes.fromhex(re.search(r'code = dense<"0x(\w+)">', text)[1])
    assert set(kernels.split(",")) <= set(cubin.kernels(image))


def test_what_hopper_cannot_do_is_xlas_for_cuda() -> None:
    conv = dataclasses.replace(HOPPER, channels=(261, 174), groups=87)  # 3 input channels a group, 261 in all
    lhs, g = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (conv.lhs_shape, conv.g_shape))
    text = jax.jit(conv.wgrad).trace(lhs, g).lower(lowering_platforms=("cuda",)).as_text()
    assert LAUNCH_TARGET not in text
    assert "stablehlo.convolution" in text


def test_other_platforms_get_xla() -> None:
    text = hopper_lowered("tpu")
    assert "jax_splitk" not in text
    assert "stablehlo.convolution" in text


def test_workspace_is_in_memory_analysis() -> None:
    lhs, _, g = PLAIN.integers(generator(51))
    for splits in (8, 64):
        config = wgrad_host.Config(splits, 64)
        compiled = jax.jit(functools.partial(PLAIN.wgrad, config=config)).lower(lhs, g).compile()
        (decision,) = jax_splitk.explain(functools.partial(PLAIN.wgrad, config=config), lhs, g).decisions
        assert decision.workspace_bytes > splits * PLAIN.rhs_shape[-1] * 4
        temporary = compiled.memory_analysis().temp_size_in_bytes
        assert decision.workspace_bytes <= temporary < 2 * decision.workspace_bytes + 2**16


def test_first_parameters_are_laxs_in_laxs_order() -> None:
    lhs, rhs, _ = PLAIN.integers(generator(60))
    positional = (lhs, rhs, (2, 1), "VALID", None, (1, 2), NHWC, 1, 1, None, jnp.float32)
    np.testing.assert_array_equal(jax_splitk.conv_general_dilated(*positional), lax.conv_general_dilated(*positional))


def test_equal_calls_are_traced_to_one_compilation() -> None:
    lhs, _, g = Conv((4, 4), (2, 2), 1).integers(generator(61))
    conv = Conv((4, 4), (2, 2), 1)
    before = lowering.jitted.cache_info()
    for _, _ in itertools.product(range(2), range(2)):
        conv.wgrad(lhs, g)
    after = lowering.jitted.cache_info()
    assert (after.misses - before.misses, after.hits - before.hits) == (1, 3)
