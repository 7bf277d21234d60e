"""The primitives of a convolution's three passes, and what they share: each computes one of the arrays lhs, rhs and g
from the other two, and its transposes are the other passes.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from jax_splitk.ops import checkpointing, conv_batching, lowering, taylor
from jax_splitk.ops.convolution import Convolution, integers, layout_hint, with_output
from jax_splitk.ops.folding import fold_into, unfold_from
from jax_splitk.ops.partitioning import Rule
from jax_splitk.problems.conv_passes import ConvFpropProblem, canonical, is_transposed
from jax_splitk.problems.conv_reference import mirrored
from jax_splitk.problems.conv_wgrad import ConvProblem, ConvWgradProblem, Pairs
from jax_splitk.runtime import _compat, execute
from jax_splitk.runtime.arguments import RefusedValue
from jax_splitk.runtime.plan import CustomCall
from jax_splitk.tuning.options import Options

conv_fprop_p = lowering.Primitive("conv_fprop")
conv_dgrad_p = lowering.Primitive("conv_dgrad")
conv_wgrad_p = lowering.Primitive("conv_wgrad")


def bind_fprop(
    lhs: jax.Array,
    rhs: jax.Array,
    conv: Convolution,
    compute_dtype: Any,
    out_dtype: Any,
    out_sharding: Any,
    options: Options,
    wgrad_options: Options,
) -> jax.Array:
    """The convolution of operands that are converted to `compute_dtype`. `wgrad_options`: of the weight gradient."""
    return conv_fprop_p.bind(
        *_compat.vary_alike((lhs, rhs)),
        convolution=conv,
        compute_dtype=jnp.dtype(compute_dtype).name,
        out_dtype=jnp.dtype(out_dtype).name,
        out_sharding=out_sharding,
        options=options,
        wgrad_options=wgrad_options,
    )


def bind_dgrad(
    conv: Convolution,
    g: jax.Array,
    rhs: jax.Array,
    lhs_shape: Sequence[int],
    out_dtype: Any,
    out_sharding: Any,
    options: Options,
    wgrad_options: Options,
) -> jax.Array:
    """The input gradient of a convolution. `out_sharding`: the result's on a mesh of explicit axes, if it is known."""
    return conv_dgrad_p.bind(
        *_compat.vary_alike((g, rhs)),
        lhs_shape=tuple(lhs_shape),
        convolution=conv,
        out_dtype=jnp.dtype(out_dtype).name,
        out_sharding=out_sharding,
        options=options,
        wgrad_options=wgrad_options,
    )


def bind_wgrad(
    conv: Convolution, lhs: jax.Array, g: jax.Array, rhs_shape: Sequence[int], out_dtype: Any, options: Options
) -> jax.Array:
    """The weight gradient of a convolution; ValueError where the shapes do not belong together."""
    shape = integers("rhs_shape", rhs_shape, lhs.ndim, least=0)
    conv = with_output_of(conv, lhs.shape, shape, g.shape)
    lhs, g = _compat.vary_alike((lhs, g))
    out_dtype = jnp.dtype(out_dtype).name
    return conv_wgrad_p.bind(lhs, g, rhs_shape=shape, convolution=conv, out_dtype=out_dtype, options=options)


def with_output_of(conv: Convolution, lhs_shape: Any, rhs_shape: Any, g_shape: Any) -> Convolution:
    """The convolution with its padding as pairs; ValueError where its output has another shape than g."""
    found, expected = with_output(conv, lhs_shape, rhs_shape)
    if tuple(g_shape) != expected:
        hint = layout_hint(conv, tuple(lhs_shape), tuple(rhs_shape), tuple(g_shape))
        raise RefusedValue(f"g has shape {tuple(g_shape)}; the convolution's output has {expected}{hint}")
    return found


# ---- the problem ---------------------------------------------------------------------------------------------------


def as_written(kind: type[ConvProblem], avals: Sequence[Any], params: dict[str, Any]) -> ConvProblem:
    """The problem of an equation, from its operands or their types, and its parameters."""
    conv = params["convolution"]
    shapes = dict(zip(kind.operands, (x.shape for x in avals), strict=True))
    if kind is ConvFpropProblem:
        conv, shapes["g"] = with_output(conv, shapes["lhs"], shapes["rhs"])
    else:
        shapes[kind.result] = params[f"{kind.result}_shape"]
        if isinstance(conv.padding, str):
            conv, _ = with_output(conv, shapes["lhs"], shapes["rhs"])
    # A symbolic dimension (jax.export) stays what it is.
    take = lambda name, spec: tuple(_compat.static_or_symbolic(shapes[name][i]) for i in spec)  # noqa: E731
    specs = conv.dimension_numbers
    batch, in_channels, *input_spatial = take("lhs", specs.lhs_spec)
    _, out_channels, *output_spatial = take("g", specs.out_spec)
    _, _, *kernel_spatial = take("rhs", specs.rhs_spec)
    return kind(
        batch=batch,
        input_spatial=tuple(input_spatial),
        output_spatial=tuple(output_spatial),
        kernel_spatial=tuple(kernel_spatial),
        in_channels=in_channels,
        out_channels=out_channels,
        window_strides=conv.window_strides,
        padding=cast(Pairs, conv.padding),
        lhs_dilation=conv.lhs_dilation,
        rhs_dilation=conv.rhs_dilation,
        feature_group_count=conv.feature_group_count,
        batch_group_count=conv.batch_group_count,
        dtype=params.get("compute_dtype") or jnp.dtype(avals[0].dtype).name,
        out_dtype=params["out_dtype"],
        precision=conv.precision,
    )


# ---- partitioning --------------------------------------------------------------------------------------------------


def rule_of(kind: type[ConvProblem]) -> Callable[[Sequence[Any], dict[str, Any]], Rule | str]:
    """How a pass is divided: along the batch, channels or groups, and along pixels where windows do not overlap. What
    the result does not have is summed over."""

    def rule(avals: Sequence[Any], params: dict[str, Any]) -> Rule | str:
        problem = as_written(kind, avals, params)
        if problem.batch_group_count > 1:
            return "batch_group_count above 1"
        specs, grouped = params["convolution"].dimension_numbers, problem.feature_group_count > 1
        c, k = ("groups", "groups") if grouped else ("in_channels", "out_channels")
        pixels = [_is_pointwise(problem, i) for i in range(problem.rank)]
        spatial = lambda of: [f"pixels{i}" if pixels[i] else f"{of}_spatial{i}" for i in range(problem.rank)]  # noqa: E731
        units = {"batch": problem.batch, c: problem.in_channels, k: problem.out_channels}
        if grouped:
            units["groups"] = problem.feature_group_count
        units |= {f"pixels{i}": size for i, size in enumerate(problem.input_spatial) if pixels[i]}
        taps = (f"tap{i}" for i in range(problem.rank))
        dims = {
            "lhs": _ordered(specs.lhs_spec, "batch", c, *spatial("input")),
            "rhs": _ordered(specs.rhs_spec, k, "group_channels" if grouped else c, *taps),
            "g": _ordered(specs.out_spec, "batch", k, *spatial("output")),
        }
        operands = (dims[kind.operands[0]], dims[kind.operands[1]])
        return Rule(operands, dims[kind.result], units, lambda params, parts: _divided(kind, dims, params, parts))

    return rule


def _is_pointwise(problem: ConvProblem, i: int) -> bool:
    """Whether output pixel p of a spatial dimension is made of input pixel p alone."""
    geometry = (problem.kernel_spatial, problem.window_strides, problem.lhs_dilation)
    return all(sizes[i] == 1 for sizes in geometry) and tuple(problem.padding[i]) == (0, 0)


def _ordered(spec: Sequence[int], *names: str) -> tuple[str, ...]:
    """Names in the order of lax's specification, first batch (or output) and features, by dimension."""
    of = dict(zip(spec, names, strict=True))
    return tuple(of[i] for i in range(len(spec)))


def _divided(
    kind: type[ConvProblem], dims: Mapping[str, Sequence[str]], params: dict[str, Any], parts: Mapping[str, int]
) -> dict[str, Any]:
    """The parameters of one part."""
    conv, shape = params["convolution"], f"{kind.result}_shape"
    groups = conv.feature_group_count // parts.get("groups", 1)
    changed: dict[str, Any] = {"convolution": dataclasses.replace(conv, feature_group_count=groups)}
    if shape in params:
        sizes = zip(params[shape], dims[kind.result], strict=True)
        changed[shape] = tuple(size // parts.get(name, 1) for size, name in sizes)
    if "out_sharding" in params:
        changed["out_sharding"] = None
    return params | changed


# ---- lowering ------------------------------------------------------------------------------------------------------


def _orders(specs: lax.ConvDimensionNumbers) -> dict[str, tuple[int, ...]]:
    """The transposes of each array to its canonical order: N, spatial..., C, and HWIO of the weight."""
    orders = {name: (spec[0], *spec[2:], spec[1]) for name, spec in (("lhs", specs.lhs_spec), ("g", specs.out_spec))}
    return orders | {"rhs": (*specs.rhs_spec[2:], specs.rhs_spec[1], specs.rhs_spec[0])}


def between_layouts(
    kind: type[ConvProblem], problem: ConvProblem, params: dict[str, Any], out: Any, function: Callable[..., jax.Array]
) -> Callable[..., jax.Array]:
    """A function of operands in the layouts of `problem`, which is canonical, for operands as they are written."""
    conv = params["convolution"]
    orders, groups = _orders(conv.dimension_numbers), conv.batch_group_count
    other = is_transposed(conv)

    def canonical_operand(name: str, x: jax.Array) -> jax.Array:
        x = x.astype(problem.dtype).transpose(orders[name])
        if name == "lhs" and groups > 1:
            x = fold_into(x.reshape(groups, x.shape[0] // groups, *x.shape[1:]), 0, x.ndim - 1)
        if not other:
            return x.reshape(getattr(problem, f"{name}_shape"))
        if name == "rhs":
            return mirrored(x, problem.feature_group_count)
        return x.reshape(getattr(problem, "g_shape" if name == "lhs" else "lhs_shape"))

    def between(*operands: jax.Array) -> jax.Array:
        given = [canonical_operand(name, x) for name, x in zip(kind.operands, operands, strict=True)]
        order = orders[kind.result]
        if other and kind is ConvWgradProblem:  # lhs and g have changed places
            y = mirrored(function(*given[::-1]), problem.feature_group_count)
        else:
            y = function(*given)
        if kind.result == "lhs" and groups > 1:
            y = unfold_from(y, y.ndim - 1, groups)
            y = jnp.moveaxis(y, -2, 0).reshape(-1, *y.shape[1:-2], y.shape[-1])
        return y.reshape([out.shape[i] for i in order]).transpose([int(i) for i in np.argsort(order)])

    return between


def define(
    primitive: lowering.Primitive,
    kind: type[ConvProblem],
    abstract_eval: Callable[..., Any],
    with_xla: Callable[[Any, dict[str, Any], Any], Callable[..., jax.Array]],
) -> None:
    """Gives the primitive of a pass its rules for vmap, checkpoint and jet, and what `lowering.define` gives."""

    def problem_of(avals: Sequence[Any], params: dict[str, Any]) -> ConvProblem:
        return canonical(as_written(kind, avals, params))

    def with_kernel(
        problem: ConvProblem, params: dict[str, Any], out: Any, custom_call: CustomCall
    ) -> Callable[..., jax.Array] | None:
        if kind is ConvWgradProblem and _is_canonical(problem, params["convolution"]):
            return None
        run = lambda *operands: execute.call(custom_call, problem, *operands)  # noqa: E731
        return between_layouts(kind, problem, params, out, run)

    conv_batching.define(primitive, kind)
    checkpointing.saved_as(primitive, lax.conv_general_dilated_p, _as_lax)
    taylor.define(primitive, taylor.bilinear(primitive))
    lowering.define(primitive, abstract_eval, problem_of, with_xla, with_kernel, rule_of(kind))


def _as_lax(avals: Sequence[Any], params: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """The operand types and the parameters of the forward convolution, as a policy of `jax.checkpoint` sees them."""
    conv = params["convolution"]
    fields = {field.name: getattr(conv, field.name) for field in dataclasses.fields(conv)}
    return avals, fields | {"preferred_element_type": jnp.dtype(params["out_dtype"])}


def _is_canonical(problem: ConvProblem, conv: Convolution) -> bool:
    """Whether operands and result are in the layouts of their problem."""
    plain = all(order == tuple(range(len(order))) for order in _orders(conv.dimension_numbers).values())
    as_it_is = conv.batch_group_count == 1 and not is_transposed(conv)
    return plain and as_it_is and len(conv.window_strides) == problem.rank
