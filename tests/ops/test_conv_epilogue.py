"""Convolutions with a bias, an activation and a residual: values, gradients, decisions, lowering, division, errors."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_splitk
from jax_splitk.kernels.contraction import im2col
from jax_splitk.problems.conv_epilogue import ConvEpilogueProblem
from jax_splitk.runtime import compiler, toolchain
from jax_splitk.runtime.plan import LAUNCH_TARGET
from jax_splitk.runtime.source import Source
from jax_splitk.runtime.target import DEFAULT_CUDA
from jax_splitk.tuning.key import key_for, problem_as_dict, problem_from_dict
from jax_splitk.tuning.options import Options
from jax_splitk.tuning.select import select
from tests.convolutions import NHWC, Conv
from tests.problems import differentiated, generator, on_device

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="these are the CPU's paths")

ACTIVATIONS: dict[Any, Callable[[jax.Array], jax.Array]] = {
    None: lambda x: x,
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "gelu_exact": lambda x: jax.nn.gelu(x, approximate=False),
    "silu": jax.nn.silu,
}
NCHW = Conv(dimension_numbers=None, strides=(2, 1))
DENSE = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": NHWC}


def types(*shapes: tuple[int, ...], dtype: Any = jnp.bfloat16) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def on_cuda(function: Callable[..., Any], *operands: Any) -> str:
    return jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


def in_lax(conv: Conv, activation: Any, last: bool, dtype: Any) -> Callable[..., jax.Array]:
    features = 1 if conv.dimension_numbers is None else 3

    def function(x: jax.Array, w: jax.Array, bias: jax.Array, residual: jax.Array) -> jax.Array:
        x, w, bias, residual = (z.astype(dtype) for z in (x, w, bias, residual))
        sums = conv.lax(x, w) + bias.reshape([bias.size if i == features else 1 for i in range(4)])
        return ACTIVATIONS[activation](sums + residual) if last else ACTIVATIONS[activation](sums) + residual

    return function


@pytest.mark.parametrize(("activation", "last", "conv", "dtype"), [
    (None, False, Conv(), "bfloat16"), ("relu", True, NCHW, "float32"), ("gelu", False, NCHW, "bfloat16"),
    ("gelu_exact", True, Conv(batch_groups=2), "float32"),
    ("silu", False, Conv(lhs_dilation=(2, 1), padding=((1, 1), (0, 1))), "float32"),
])  # fmt: skip
def test_values_and_gradients_are_float64s(activation: Any, last: bool, conv: Conv, dtype: str) -> None:
    """Each cotangent has its operand's dtype. The bias stays float32."""
    x, w, residual = conv.normals(generator(200), dtype)
    w = on_device(np.asarray(w, np.float32) / 4, dtype)
    bias = on_device(generator(201).standard_normal(conv.channels[1]), jnp.float32)
    cotangent = on_device(generator(202).standard_normal(conv.g_shape), dtype)
    epilogue = {"activation": activation, "activation_last": last}
    ours = lambda x, w, b, r: conv.ours(x, w, bias=b, residual=r, **epilogue)  # noqa: E731
    operands = (x, w, bias, residual)
    with jax.enable_x64(True):
        wide = np.asarray(cotangent, np.float64)
        exact, gradients = differentiated(in_lax(conv, activation, last, jnp.float64), operands, wide)
        wanted = [np.asarray(z, np.float64) for z in (exact, *gradients)]
    out, gradients = differentiated(ours, operands, cotangent)
    got = (out, *gradients)
    assert [z.dtype for z in got] == [out.dtype, *(z.dtype for z in operands)] and out.dtype == dtype
    # Several roundings to the result's dtype: XLA computes all of it.
    tolerance = 1e-5 if dtype == "float32" else 3 * 2**-8
    for one, other in zip((*got, jax.jit(ours)(*operands)), (*wanted, wanted[0]), strict=True):
        assert np.linalg.norm(np.asarray(one, np.float64) - other) <= tolerance * np.linalg.norm(other)


def test_the_kernel_of_the_convolution_computes_the_epilogue() -> None:
    """The decision is that of the convolution alone, from the same entry; the lowered kernel has all operands."""
    x, w, residual = types((32, 28, 28, 128), (3, 3, 128, 128), (32, 28, 28, 128))
    (bias,) = types((128,), dtype=jnp.float32)

    def layer(x: Any, w: Any, bias: Any = None, residual: Any = None, activation: Any = None) -> jax.Array:
        epilogue = {"bias": bias, "activation": activation, "residual": residual}
        return jax_splitk.conv_fprop(x, w, **DENSE, **epilogue, implementation="cutlass")

    whole = functools.partial(layer, activation="relu")
    (alone,) = jax_splitk.explain(layer, x, w, platform="cuda").decisions
    (fused,) = jax_splitk.explain(whole, x, w, bias, residual, platform="cuda").decisions
    assert isinstance(fused.problem, ConvEpilogueProblem) and fused.problem.convolution == alone.problem
    assert (fused.family, fused.config, fused.ours_us) == ("fprop_im2col", alone.config, alone.ours_us)
    assert fused.problem.epilogue == "bias in float32, relu, residual in bfloat16"
    assert key_for(fused.problem, DEFAULT_CUDA) == key_for(alone.problem, DEFAULT_CUDA)
    fields = problem_as_dict(fused.problem)
    assert problem_from_dict(fields.pop("op"), fields) == alone.problem
    of_epilogue = sum(z.size * z.dtype.itemsize for z in (bias, residual))
    assert fused.problem.bytes_moved - alone.problem.bytes_moved == of_epilogue
    assert jax_splitk.cost(whole, x, w, bias, residual).bytes_accessed == fused.problem.bytes_moved
    text = on_cuda(whole, x, w, bias, residual)
    assert text.count(LAUNCH_TARGET) == 1 and "maximum" not in text and "add" not in text
    gradient = jax.grad(lambda *operands: whole(*operands).astype(jnp.float32).sum(), (0, 1, 2, 3))
    found = jax_splitk.explain(gradient, x, w, bias, residual, platform="cuda").decisions
    assert {d.problem.op for d in found} == {"conv_fprop", "conv_dgrad", "conv_wgrad"}
    assert not [d for d in found if isinstance(d.problem, ConvEpilogueProblem)]
    linear = jax.grad(lambda *operands: layer(*operands).astype(jnp.float32).sum(), (0, 1, 2, 3))
    found = jax_splitk.explain(linear, x, w, bias, residual, platform="cuda").decisions
    assert [d.problem.epilogue for d in found if isinstance(d.problem, ConvEpilogueProblem)] == [
        "bias in float32, residual in bfloat16"
    ]


def test_other_kernels_leave_the_epilogue_to_xla() -> None:
    """A depthwise convolution, a float32 residual of a persistent thread block, and a transposed convolution."""
    (bias,) = types((64,))
    for arguments, shapes, residual_dtype, config in (
        ({"feature_group_count": 64}, ((8, 28, 28, 64), (3, 3, 1, 64)), "bfloat16", None),
        ({}, ((8, 28, 28, 64), (3, 3, 64, 64)), "float32", im2col.Config(128, 64, 4, workers=49)),
        ({"lhs_dilation": (2, 2)}, ((8, 14, 14, 64), (2, 2, 64, 64)), "bfloat16", None),
    ):
        x, w = types(*shapes)
        given: dict[str, Any] = {**DENSE, "padding": ((1, 1), (1, 1)), **arguments}

        def layer(x: Any, w: Any, bias: Any, residual: Any, given: Any = given, config: Any = config) -> jax.Array:
            options = {"implementation": "cutlass"} if config is None else {"config": config}
            return jax_splitk.conv_fprop(x, w, **given, bias=bias, activation="relu", residual=residual, **options)

        out = jax.eval_shape(lambda x, w, given=given: lax.conv_general_dilated(x, w, **given), x, w)
        (residual,) = types(out.shape, dtype=residual_dtype)
        (decision,) = jax_splitk.explain(layer, x, w, bias, residual, platform="cuda").decisions
        assert decision.family is not None and not isinstance(decision.problem, ConvEpilogueProblem)
        text = on_cuda(layer, x, w, bias, residual)
        assert text.count(LAUNCH_TARGET) == 1 and "stablehlo.add" in text


def test_what_no_kernel_should_compute_is_xlas() -> None:
    """Families are asked about the convolution alone."""
    x, w, bias = types((64, 56, 56, 64), (1, 1, 64, 256), (256,))
    layer = functools.partial(jax_splitk.conv_fprop, **DENSE, activation="relu")
    (decision,) = jax_splitk.explain(lambda x, w, b: layer(x, w, bias=b), x, w, bias, platform="cuda").decisions
    assert decision.implementation == "xla" and "was not measured" in decision.why
    with pytest.raises(NotImplementedError, match="precision 'highest'"):
        on_cuda(
            lambda x, w: layer(x, w, implementation="cutlass", precision="highest"),
            *types((8, 9, 9, 64), (3, 3, 64, 64), dtype=jnp.float32),
        )


def test_what_xla_computes_is_what_lax_would_trace() -> None:
    """XLA fuses a bias and ReLU into its convolution only in the result's dtype."""
    x, w, bias = types((4, 14, 14, 16), (3, 3, 16, 24), (24,))
    layer = functools.partial(jax_splitk.conv_general_dilated, **DENSE)
    ours = lambda x, w, bias: layer(x, w, bias=bias, activation="relu", implementation="xla")  # noqa: E731
    for platform in ("cuda", "cpu"):
        text = jax.jit(ours).trace(x, w, bias).lower(lowering_platforms=(platform,)).as_text()
        assert text.count("stablehlo.convolution") == 1 and "f32" not in text.replace("FLOAT32", "")
        assert "stablehlo.convert" not in text and "custom_call" not in text


def test_on_the_cpu_the_convolution_has_a_kernel_and_xla_the_rest() -> None:
    conv = dataclasses.replace(Conv(), channels=(8, 8), groups=8)
    x, w, residual = conv.integers(generator(203))
    bias = on_device(generator(204).integers(-2, 3, 8), jnp.float32)
    given = {**conv.arguments, "bias": bias, "activation": "relu", "residual": residual, "implementation": "host"}
    ours = jax.jit(lambda x, w: jax_splitk.conv_fprop(x, w, **given))
    assert "jax_splitk_host" in ours.lower(x, w).as_text()
    wanted = jax.nn.relu(conv.lax(x, w) + bias) + residual
    np.testing.assert_array_equal(ours(x, w), wanted)
    (key, _), *others = jax_splitk.tune(ours, x, w, seconds=0.05)
    assert not others and not isinstance(key.problem, ConvEpilogueProblem)


@pytest.mark.parametrize("kept", ["both", "convolution", "none"])
def test_without_a_compiler_a_kept_kernel_serves(kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache may have the kernel of the convolution alone, which was tuned: XLA then computes the epilogue."""
    x, w = types((32, 28, 28, 128), (3, 3, 128, 128))
    layer = functools.partial(jax_splitk.conv_fprop, **DENSE, activation="relu")
    (decision,) = jax_splitk.explain(layer, x, w, platform="cuda").decisions
    problem = decision.problem
    assert isinstance(problem, ConvEpilogueProblem)

    def held(source: Source) -> object | None:
        return (
            object() if kept == "both" or (kept == "convolution" and "EPILOGUE" not in dict(source.defines)) else None
        )

    monkeypatch.setattr(toolchain, "unavailable", lambda: "no NVRTC")
    monkeypatch.setattr(compiler, "held", held)
    found = select(problem, DEFAULT_CUDA, Options(), final=True)
    assert (found.family is not None) == (kept != "none")
    assert kept == "none" or found.problem == (problem if kept == "both" else problem.convolution)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_divided_input_channels_are_summed_before_the_epilogue(kind: AxisType) -> None:
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))
    rng = generator(205)
    shapes = ((4, 6, 6, 8), (3, 3, 8, 16), (16,), (4, 6, 6, 16))
    plain = [on_device(rng.integers(-2, 3, shape), jnp.float32) for shape in shapes]

    def layer(x: jax.Array, w: jax.Array, bias: jax.Array, residual: jax.Array) -> jax.Array:
        epilogue = {"bias": bias, "activation": "relu", "residual": residual, "activation_last": True}
        return jax_splitk.conv_fprop(x, w, **DENSE, **epilogue, implementation="host")

    x, w, bias, residual = plain
    expected = jax.nn.relu(lax.conv_general_dilated(x, w, **DENSE) + bias + residual)
    with jax.set_mesh(mesh):
        for specs, summed in (
            ((P("data"), P(), P(), P("data")), False),
            ((P("data"), P(None, None, None, "model"), P("model"), P("data")), False),
            ((P("data", None, None, "model"), P(None, None, "model"), P(), P("data")), True),
        ):
            operands = [jax.device_put(z, NamedSharding(mesh, of)) for z, of in zip(plain, specs, strict=True)]
            compiled = jax.jit(layer).lower(*operands).compile()
            np.testing.assert_array_equal(compiled(*operands), expected)
            assert ("all-reduce" in (compiled.as_text() or "")) == summed
            (decision,) = jax_splitk.explain(jax.jit(layer), *operands).decisions
            assert decision.problem.batch == 2 and decision.family == "fprop_host"


def test_vmap_of_images_stays_one_convolution() -> None:
    x, w, bias, residual = types((8, 14, 14, 64), (3, 3, 64, 64), (64,), (8, 14, 14, 64))
    layer = functools.partial(jax_splitk.conv_fprop, **DENSE, implementation="cutlass", activation="relu")
    for axes, whole in (((0, None, None, None), True), ((0, None, None, 0), True), ((0, None, 0, None), False)):
        pairs = zip((x, w, bias, residual), axes, strict=True)
        mapped = [z if axis is None else types((3, *z.shape))[0] for z, axis in pairs]
        function = jax.vmap(lambda x, w, b, r: layer(x, w, bias=b, residual=r), axes)
        (decision,) = jax_splitk.explain(function, *mapped, platform="cuda").decisions
        assert decision.problem.batch == 24 and isinstance(decision.problem, ConvEpilogueProblem) == whole


@pytest.mark.parametrize(("changes", "error", "said"), [
    ({"bias": np.ones(3, np.float32)}, ValueError, r"bias of shape \(3,\); accepted: \(10,\)"),
    ({"bias": np.ones(10, np.int32)}, TypeError, "bias of dtype int32; accepted: bfloat16"),
    ({"activation": "tanh"}, ValueError, "activation='tanh'; accepted: None, 'relu', 'gelu', 'gelu_exact', 'silu'"),
    ({"residual": np.ones((4, 9, 8, 1), np.float32)}, ValueError,
     r"residual of shape \(4, 9, 8, 1\); accepted: \(4, 9, 8, 10\)"),
    ({"residual": np.ones((4, 9, 8, 10), bool)}, TypeError, "residual of dtype bool"),
])  # fmt: skip
def test_errors(changes: dict[str, Any], error: type[Exception], said: str) -> None:
    conv = Conv()
    x, w, _ = conv.integers(generator(206))
    for function in (jax_splitk.conv_general_dilated, jax_splitk.conv_fprop):
        with pytest.raises(error, match=said):
            function(x, w, **{**conv.arguments, **changes})
    with pytest.raises(TypeError, match="operands of int32; accepted: operands of bfloat16"):
        conv.ours(x.astype(jnp.int32), w.astype(jnp.int32), activation="relu")
