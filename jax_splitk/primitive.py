"""The `conv_wgrad` primitive: its type, its transformation rules and its lowering.

A primitive rather than an `ffi_call` at trace time, so that the decision is taken at lowering, where the platform and
the final (batched, per-shard) shapes are known. It is bilinear in (lhs, g); its transposes are convolutions that lax
already has.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from jax_splitk import _compat, execute, reference
from jax_splitk.problem import ConvWgradProblem
from jax_splitk.target import Target, target_for
from jax_splitk.tuning.options import Options
from jax_splitk.tuning.select import Choice, announce, select, xla

PLATFORMS = ("cpu", "cuda")

conv_wgrad_p = core.Primitive("conv_wgrad")


def problem_of(avals: Sequence[Any], params: dict[str, Any]) -> ConvWgradProblem:
    """The canonical problem of an equation, from the types of its operands (lhs, g) and its parameters."""
    lhs, g = avals
    specs, rhs_shape = params["dimension_numbers"], params["rhs_shape"]
    # A symbolic dimension (jax.export) stays what it is.
    take = lambda shape, spec: tuple(_compat.static_or_symbolic(shape[i]) for i in spec)  # noqa: E731
    batch, in_channels, *input_spatial = take(lhs.shape, specs.lhs_spec)
    _, out_channels, *output_spatial = take(g.shape, specs.out_spec)
    _, _, *kernel_spatial = take(rhs_shape, specs.rhs_spec)
    return ConvWgradProblem(
        batch=batch,
        input_spatial=tuple(input_spatial),
        output_spatial=tuple(output_spatial),
        kernel_spatial=tuple(kernel_spatial),
        in_channels=in_channels,
        out_channels=out_channels,
        window_strides=params["window_strides"],
        padding=params["padding"],
        lhs_dilation=params["lhs_dilation"],
        rhs_dilation=params["rhs_dilation"],
        feature_group_count=params["feature_group_count"],
        batch_group_count=params["batch_group_count"],
        dtype=jnp.dtype(lhs.dtype).name,
        out_dtype=params["out_dtype"],
        precision=params["precision"],
    )


def _abstract_eval(lhs: Any, g: Any, **params: Any) -> Any:
    return _compat.like(lhs if _compat.aval_vma(lhs) else g, params["rhs_shape"], params["out_dtype"])


conv_wgrad_p.def_abstract_eval(_abstract_eval)
conv_wgrad_p.def_impl(lambda lhs, g, **params: _jitted(**params)(lhs, g))


@functools.lru_cache(maxsize=1024)
def _jitted(**params: Any) -> Callable[..., jax.Array]:
    return jax.jit(functools.partial(conv_wgrad_p.bind, **params))


# ---- differentiation -----------------------------------------------------------------------------------------------


def _forward(lhs: jax.Array, rhs: jax.Array, params: dict[str, Any]) -> jax.Array:
    """The convolution whose weight gradient the primitive is."""
    return lax.conv_general_dilated(
        lhs,
        rhs,
        window_strides=params["window_strides"],
        padding=params["padding"],
        lhs_dilation=params["lhs_dilation"],
        rhs_dilation=params["rhs_dilation"],
        dimension_numbers=params["dimension_numbers"],
        feature_group_count=params["feature_group_count"],
        batch_group_count=params["batch_group_count"],
        precision=reference.lax_precision(params["precision"]),
    )


# The operand being solved for arrives as a placeholder that has only a type, `.aval`.


def _transpose_lhs(ct: jax.Array, lhs: Any, g: jax.Array, **params: Any) -> jax.Array:
    wide = jnp.promote_types(ct.dtype, g.dtype)
    transpose = jax.linear_transpose(lambda x: _forward(x, ct.astype(wide), params), lhs.aval.update(dtype=wide))
    return transpose(g.astype(wide))[0].astype(lhs.aval.dtype)


def _transpose_g(ct: jax.Array, lhs: jax.Array, g: Any, **params: Any) -> jax.Array:
    wide = jnp.promote_types(ct.dtype, lhs.dtype)
    return _forward(lhs.astype(wide), ct.astype(wide), params).astype(g.aval.dtype)


ad.defbilinear(conv_wgrad_p, _transpose_lhs, _transpose_g)


# ---- batching ------------------------------------------------------------------------------------------------------


def _fold_into(x: jax.Array, axis: int, into: int, groups: int) -> jax.Array:
    """Moves the batch `axis` into dimension `into` (counted without it), inside each of its feature groups."""
    x = jnp.moveaxis(x, axis, into)
    size, channels = x.shape[into], x.shape[into + 1]
    grouped = x.reshape(*x.shape[: into + 1], groups, channels // groups, *x.shape[into + 2 :])
    grouped = jnp.moveaxis(grouped, into, into + 1)
    return grouped.reshape(*x.shape[:into], size * channels, *x.shape[into + 2 :])


def _unfold_from(x: jax.Array, dim: int, size: int, groups: int) -> jax.Array:
    """Inverse of `_fold_into`; the batch comes out in front."""
    channels = x.shape[dim] // size
    split = x.reshape(*x.shape[:dim], groups, size, channels // groups, *x.shape[dim + 1 :])
    split = jnp.moveaxis(split, dim + 1, 0)
    return split.reshape(size, *x.shape[:dim], channels, *x.shape[dim + 1 :])


def _batch(args: Sequence[jax.Array], dims: Sequence[int | None], **params: Any) -> tuple[jax.Array, int]:
    """One batched operand widens the channels of a single product; two make a loop over products."""
    (lhs, g), (lhs_dim, g_dim) = args, dims
    specs, rhs_shape = params["dimension_numbers"], params["rhs_shape"]
    groups = params["feature_group_count"]
    one_sided = params["batch_group_count"] == 1 and params["options"].config is None
    if one_sided and lhs_dim is None and g_dim is not None:
        size, out_dim = g.shape[g_dim], specs.rhs_spec[0]
        folded = _fold_into(g, g_dim, specs.out_spec[1], groups)
        params["rhs_shape"] = tuple(n * size if i == out_dim else n for i, n in enumerate(rhs_shape))
        return _unfold_from(conv_wgrad_p.bind(lhs, folded, **params), out_dim, size, groups), 0
    if one_sided and g_dim is None and lhs_dim is not None:
        size, in_dim = lhs.shape[lhs_dim], specs.rhs_spec[1]
        folded = _fold_into(lhs, lhs_dim, specs.lhs_spec[1], groups)
        params["rhs_shape"] = tuple(n * size if i == in_dim else n for i, n in enumerate(rhs_shape))
        return _unfold_from(conv_wgrad_p.bind(folded, g, **params), in_dim, size, 1), 0
    size = lhs.shape[lhs_dim] if lhs_dim is not None else g.shape[g_dim or 0]
    lhs = batching.bdim_at_front(lhs, lhs_dim, size)
    g = batching.bdim_at_front(g, g_dim, size)
    return lax.map(lambda pair: conv_wgrad_p.bind(*pair, **params), (lhs, g)), 0


batching.primitive_batchers[conv_wgrad_p] = _batch


# ---- lowering ------------------------------------------------------------------------------------------------------


def choose(
    problem: ConvWgradProblem,
    target: Target,
    options: Options,
    *,
    partitioned: bool,
    measure: bool = False,
    final: bool = False,
) -> Choice:
    """`select`, except that code which XLA will partition by itself is left to XLA.

    A custom call is opaque to XLA's partitioner, which would gather its operands onto every device; inside shard_map
    each device's part is a problem of its own and this does not apply.
    """
    if not isinstance(problem.reduction_size, int):
        return xla(problem, "symbolic shapes")
    if partitioned and options.implementation != "xla":
        if options.implementation is not None or options.config is not None:
            raise NotImplementedError(
                f"{problem}: implementation={options.implementation!r} under automatic partitioning over several "
                "devices. Use jax.shard_map, or implementation=None (falls back to XLA)."
            )
        return xla(problem, "automatic partitioning over several devices; use jax.shard_map for a kernel on each")
    return select(problem, target, options, measure=measure, final=final)


def canonicalize(lhs: jax.Array, g: jax.Array, specs: lax.ConvDimensionNumbers) -> tuple[jax.Array, jax.Array]:
    """lhs and g as N, spatial..., C."""
    to_last = lambda spec: (spec[0], *spec[2:], spec[1])  # noqa: E731
    return lhs.transpose(to_last(specs.lhs_spec)), g.transpose(to_last(specs.out_spec))


def from_hwio(out: jax.Array, specs: lax.ConvDimensionNumbers) -> jax.Array:
    """Spatial..., I, O to the order of `rhs_spec`."""
    hwio = (*specs.rhs_spec[2:], specs.rhs_spec[1], specs.rhs_spec[0])
    return out.transpose(tuple(int(i) for i in np.argsort(hwio)))


def _lower(ctx: mlir.LoweringRuleContext, lhs: Any, g: Any, *, platform: str, **params: Any) -> Any:
    problem = problem_of(ctx.avals_in, params)
    target = target_for(platform)
    partitioned = _compat.is_automatically_partitioned(ctx)
    # Only what will run here can be measured here.
    measure = not partitioned and not _compat.is_export(ctx) and target.is_local
    choice = choose(problem, target, params["options"], partitioned=partitioned, measure=measure, final=True)
    announce(choice)
    specs = params["dimension_numbers"]
    if choice.family is None:
        sharding = _compat.explicit_sharding(ctx.avals_out[0])
        return mlir.lower_fun(lambda x, y: reference.conv_wgrad(x, y, problem, specs, sharding), False)(ctx, lhs, g)
    custom_call = choice.family.make_plan(problem, choice.config).custom_call()

    def with_kernel(lhs: jax.Array, g: jax.Array) -> jax.Array:
        return from_hwio(execute.call(custom_call, problem, *canonicalize(lhs, g, specs)), specs)

    return mlir.lower_fun(with_kernel, False)(ctx, lhs, g)


for _platform in PLATFORMS:
    mlir.register_lowering(conv_wgrad_p, functools.partial(_lower, platform=_platform), platform=_platform)
mlir.register_lowering(conv_wgrad_p, functools.partial(_lower, platform="other"))
