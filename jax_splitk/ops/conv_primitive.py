"""The `conv_wgrad` primitive: its type, its transformation rules and its lowering.

It is bilinear in (lhs, g); its transposes are convolutions that lax already has.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching

from jax_splitk.ops import lowering, partitioning
from jax_splitk.ops.convolution import Convolution, grouped, integers, with_output
from jax_splitk.ops.folding import fold_into, unfold_from
from jax_splitk.ops.partitioning import Rule
from jax_splitk.problems import conv_reference
from jax_splitk.problems.conv_wgrad import ConvWgradProblem, Pairs
from jax_splitk.runtime import _compat, execute
from jax_splitk.runtime.arguments import wider
from jax_splitk.runtime.plan import CustomCall
from jax_splitk.tuning.options import Options

conv_wgrad_p = core.Primitive("conv_wgrad")


def bind_wgrad(
    conv: Convolution, lhs: jax.Array, g: jax.Array, rhs_shape: Sequence[int], out_dtype: Any, options: Options
) -> jax.Array:
    """The weight gradient of a convolution; ValueError where the shapes do not belong together."""
    shape = integers("rhs_shape", rhs_shape, lhs.ndim, least=0)
    conv, expected = with_output(conv, lhs.shape, shape)
    if tuple(g.shape) != expected:
        raise ValueError(f"g has shape {tuple(g.shape)}; the convolution's output has {expected}")
    lhs, g = _compat.vary_alike((lhs, g))
    out_dtype = jnp.dtype(out_dtype).name
    return conv_wgrad_p.bind(lhs, g, rhs_shape=shape, convolution=conv, out_dtype=out_dtype, options=options)


def _as_written(lhs: Any, g: Any, params: dict[str, Any]) -> ConvWgradProblem:
    """The problem of an equation, from its operands or their types, and its parameters."""
    conv = params["convolution"]
    specs = conv.dimension_numbers
    # A symbolic dimension (jax.export) stays what it is.
    take = lambda shape, spec: tuple(_compat.static_or_symbolic(shape[i]) for i in spec)  # noqa: E731
    batch, in_channels, *input_spatial = take(lhs.shape, specs.lhs_spec)
    _, out_channels, *output_spatial = take(g.shape, specs.out_spec)
    _, _, *kernel_spatial = take(params["rhs_shape"], specs.rhs_spec)
    return ConvWgradProblem(
        batch=batch,
        input_spatial=tuple(input_spatial),
        output_spatial=tuple(output_spatial),
        kernel_spatial=tuple(kernel_spatial),
        in_channels=in_channels,
        out_channels=out_channels,
        window_strides=conv.window_strides,
        padding=cast(Pairs, conv.padding),  # in an equation they are known
        lhs_dilation=conv.lhs_dilation,
        rhs_dilation=conv.rhs_dilation,
        feature_group_count=conv.feature_group_count,
        batch_group_count=conv.batch_group_count,
        dtype=jnp.dtype(lhs.dtype).name,
        out_dtype=params["out_dtype"],
        precision=conv.precision,
    )


def _problem_of(avals: Sequence[Any], params: dict[str, Any]) -> ConvWgradProblem:
    lhs, g = avals
    return canonical(_as_written(lhs, g, params))


def canonical(problem: ConvWgradProblem) -> ConvWgradProblem:
    """With at least one spatial dimension, and batch groups as feature groups."""
    if problem.rank == 0:
        windows = dict.fromkeys(("window_strides", "lhs_dilation", "rhs_dilation"), (1,))
        pixels = dict.fromkeys(("input_spatial", "output_spatial", "kernel_spatial"), (1,))
        problem = dataclasses.replace(problem, padding=((0, 0),), **windows, **pixels)
    groups = problem.batch_group_count
    if groups == 1:
        return problem
    batch, channels = problem.batch // groups, problem.in_channels * groups
    return dataclasses.replace(
        problem, batch=batch, in_channels=channels, feature_group_count=groups, batch_group_count=1
    )


def _rule_of(avals: Sequence[Any], params: dict[str, Any]) -> Rule | str:
    """How a weight gradient is divided: it is a sum over the batch, and over pixels where windows do not overlap."""
    lhs, g = avals
    problem = _as_written(lhs, g, params)
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
    return Rule(
        operands=(
            _ordered(specs.lhs_spec, "batch", c, *spatial("input")),
            _ordered(specs.out_spec, "batch", k, *spatial("output")),
        ),
        result=_ordered(
            specs.rhs_spec, k, "group_channels" if grouped else c, *(f"tap{i}" for i in range(len(pixels)))
        ),
        units=units,
        divided=_divided,
    )


def _is_pointwise(problem: ConvWgradProblem, i: int) -> bool:
    """Whether output pixel p of a spatial dimension is made of input pixel p alone."""
    geometry = (problem.kernel_spatial, problem.window_strides, problem.lhs_dilation)
    return all(sizes[i] == 1 for sizes in geometry) and tuple(problem.padding[i]) == (0, 0)


def _ordered(spec: Sequence[int], *names: str) -> tuple[str, ...]:
    """Names in the order of lax's specification, first batch (or output) and features, by dimension."""
    of = dict(zip(spec, names, strict=True))
    return tuple(of[i] for i in range(len(spec)))


def _divided(params: dict[str, Any], parts: Mapping[str, int]) -> dict[str, Any]:
    """The parameters of one part."""
    conv, shape = params["convolution"], list(params["rhs_shape"])
    out_channels, in_channels, *_ = conv.dimension_numbers.rhs_spec
    groups = parts.get("groups", 1)
    shape[out_channels] //= parts.get("out_channels", groups)
    shape[in_channels] //= parts.get("in_channels", 1)
    conv = dataclasses.replace(conv, feature_group_count=conv.feature_group_count // groups)
    return {**params, "rhs_shape": tuple(shape), "convolution": conv}


def _abstract_eval(lhs: Any, g: Any, **params: Any) -> Any:
    out = _compat.like(lhs if _compat.aval_vma(lhs) else g, params["rhs_shape"], params["out_dtype"])
    return partitioning.with_explicit_sharding(out, _rule_of, (lhs, g), params)


# ---- differentiation -----------------------------------------------------------------------------------------------


# The operand being solved for arrives as a placeholder that has only a type, `.aval`.


def _transpose_lhs(ct: jax.Array, lhs: Any, g: jax.Array, **params: Any) -> jax.Array:
    wide = wider(ct.dtype, g.dtype)
    transpose = jax.linear_transpose(lambda x: params["convolution"](x, ct.astype(wide)), lhs.aval.update(dtype=wide))
    return transpose(g.astype(wide))[0].astype(lhs.aval.dtype)


def _transpose_g(ct: jax.Array, lhs: jax.Array, g: Any, **params: Any) -> jax.Array:
    wide = wider(ct.dtype, lhs.dtype)
    return params["convolution"](lhs.astype(wide), ct.astype(wide)).astype(g.aval.dtype)


def _transpose_rhs(lhs: jax.Array, g: jax.Array, out: Any, params: dict[str, Any]) -> jax.Array:
    """The primitive's value by lax's own rule, which knows symbolic sizes."""
    wide = wider(lhs.dtype, out.dtype)
    transpose = jax.linear_transpose(lambda rhs: params["convolution"](lhs.astype(wide), rhs), out.update(dtype=wide))
    return transpose(g.astype(wide))[0].astype(out.dtype)


ad.defbilinear(conv_wgrad_p, _transpose_lhs, _transpose_g)


# ---- batching ------------------------------------------------------------------------------------------------------


def _batch(args: Sequence[jax.Array], dims: Sequence[int | None], **params: Any) -> tuple[jax.Array, int]:
    """One product more: one mapped operand widens the channels, two become groups. A config is for the product that
    the caller sees, so it gets a loop."""
    (lhs, g), (lhs_dim, g_dim) = args, dims
    conv, rhs_shape, specs = params["convolution"], params["rhs_shape"], params["convolution"].dimension_numbers
    size = g.shape[g_dim] if g_dim is not None else lhs.shape[lhs_dim or 0]
    if size == 0:
        empty = jnp.zeros((0, *rhs_shape), params["out_dtype"])
        return _compat.vary_like(empty, lhs, g), 0
    if params["options"].config is not None:
        lhs, g = (batching.bdim_at_front(x, dim, size) for x, dim in zip(args, dims, strict=True))
        return lax.map(lambda pair: conv_wgrad_p.bind(*pair, **params), (lhs, g)), 0
    groups = conv.feature_group_count * conv.batch_group_count
    out_dim, in_dim = specs.rhs_spec[:2]
    if lhs_dim is None and g_dim is not None:
        g, widened = fold_into(g, g_dim, specs.out_spec[1], groups), out_dim
    elif lhs_dim is not None and g_dim is None:
        lhs, widened, groups = fold_into(lhs, lhs_dim, specs.lhs_spec[1], conv.feature_group_count), in_dim, 1
    else:
        conv, lhs = grouped(conv, lhs, lhs_dim or 0, size)
        g, widened, groups = fold_into(g, g_dim or 0, specs.out_spec[1]), out_dim, 1
    shape = tuple(n * size if i == widened else n for i, n in enumerate(rhs_shape))
    out = conv_wgrad_p.bind(lhs, g, **(params | {"convolution": conv, "rhs_shape": shape}))
    return unfold_from(out, widened, size, groups), widened


batching.primitive_batchers[conv_wgrad_p] = _batch


# ---- lowering ------------------------------------------------------------------------------------------------------


def _orders(specs: lax.ConvDimensionNumbers) -> tuple[tuple[int, ...], ...]:
    """The transposes of lhs and g to N, spatial..., C, and of the result from HWIO to the order of `rhs_spec`."""
    lhs, g = ((spec[0], *spec[2:], spec[1]) for spec in (specs.lhs_spec, specs.out_spec))
    hwio = (*specs.rhs_spec[2:], specs.rhs_spec[1], specs.rhs_spec[0])
    return lhs, g, tuple(int(i) for i in np.argsort(hwio))


def _with_xla(problem: ConvWgradProblem, params: dict[str, Any], out: Any) -> Callable[..., jax.Array]:
    if not _compat.is_known(*problem.input_spatial):
        return lambda lhs, g: _transpose_rhs(lhs, g, out, params)
    specs = params["convolution"].dimension_numbers
    return lambda lhs, g: conv_reference.conv_wgrad(lhs, g, _as_written(lhs, g, params), specs)


def _with_kernel(
    problem: ConvWgradProblem, params: dict[str, Any], out: Any, custom_call: CustomCall
) -> Callable[..., jax.Array] | None:
    conv = params["convolution"]
    lhs_order, g_order, out_order = orders = _orders(conv.dimension_numbers)
    groups = conv.batch_group_count
    if groups == 1 and out.ndim > 2 and all(order == tuple(range(len(order))) for order in orders):
        return None

    def between_transposes(lhs: jax.Array, g: jax.Array) -> jax.Array:
        lhs, g = lhs.transpose(lhs_order), g.transpose(g_order)
        if groups > 1:
            lhs = fold_into(lhs.reshape(groups, lhs.shape[0] // groups, *lhs.shape[1:]), 0, lhs.ndim - 1)
        dw = execute.call(custom_call, problem, lhs.reshape(problem.lhs_shape), g.reshape(problem.g_shape))
        return dw.reshape([out.shape[i] for i in np.argsort(out_order)]).transpose(out_order)

    return between_transposes


lowering.define(conv_wgrad_p, _abstract_eval, _problem_of, _with_xla, _with_kernel, _rule_of)
