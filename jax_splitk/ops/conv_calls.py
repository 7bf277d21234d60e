"""The primitives of a convolution's three passes and their parameters.

A pass computes one of the arrays lhs, rhs and g from the other two, and its transposes are the other passes
(`conv_gradient`). `conv_fprop` is lax's convolution, `conv_dgrad` the gradient of its input, and `conv_wgrad` that of
its weight.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from jax_splitk.ops import partitioning
from jax_splitk.ops.call import MEMORY, Call, Primitive
from jax_splitk.ops.convolution import Convolution, integers, layout_hint, with_output
from jax_splitk.ops.folding import fold_into, unfold_from
from jax_splitk.ops.partitioning import Rule
from jax_splitk.problems import conv_reference
from jax_splitk.problems.conv_passes import ConvDgradProblem, ConvFpropProblem, canonical, is_transposed
from jax_splitk.problems.conv_reference import mirrored
from jax_splitk.problems.conv_wgrad import ConvProblem, ConvWgradProblem, Pairs
from jax_splitk.problems.operations import OPERATIONS
from jax_splitk.runtime import _compat, execute
from jax_splitk.runtime.arguments import RefusedValue, wider
from jax_splitk.runtime.plan import CustomCall
from jax_splitk.tuning.options import Options

conv_fprop_p = Primitive("conv_fprop")
conv_dgrad_p = Primitive("conv_dgrad")
conv_wgrad_p = Primitive("conv_wgrad")


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class ConvCall(Call):
    """One pass of a convolution.

    Attributes:
      convolution: the forward convolution's parameters.
      shape: shape of the result, if it is a gradient.
      out_sharding: sharding of the result on a mesh of explicit axes, if it is known.
      wgrad_options: options of the weight gradient that may follow; None for a weight gradient.
    """

    convolution: Convolution
    shape: tuple[Any, ...] | None = None
    out_sharding: Any = None
    wgrad_options: Options | None = None

    kind: ClassVar[type[ConvProblem]]

    def dtype(self, avals: Sequence[Any]) -> str:
        """Name of the dtype in which products are computed."""
        return avals[0].dtype.name

    def written(self, avals: Sequence[Any]) -> ConvProblem:
        """The problem as the caller wrote it, with dimensions and groups that kernels do not have."""
        shapes = (*(tuple(x.shape) for x in avals[:2]), self.shape)
        return _written(self.kind, self.convolution, shapes, self.dtype(avals), self.out_dtype)

    def problem(self, avals: Sequence[Any]) -> ConvProblem:
        return canonical(self.written(avals))

    def as_lax(self, avals: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        return avals, {**vars(self.convolution), "preferred_element_type": jnp.dtype(self.out_dtype)}

    def rule(self, avals: Sequence[Any]) -> Rule | str:
        """A pass is divided along the batch, channels or groups, and along pixels where windows do not overlap.
        Dimensions that the result lacks are summed over."""
        kind, problem, specs = self.kind, self.written(avals), self.convolution.dimension_numbers
        if problem.batch_group_count > 1:
            return "batch_group_count above 1"
        grouped = problem.feature_group_count > 1
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
        result = dims[kind.result]
        operands = (dims[kind.operands[0]], dims[kind.operands[1]])
        return Rule(operands, result, units, lambda parts: self._divided(result, parts))

    def _divided(self, dims: Sequence[str], parts: Mapping[str, int]) -> "ConvCall":
        """The call of one part, whose result has dimensions of these names."""
        groups = self.convolution.feature_group_count // parts.get("groups", 1)
        shape = self.shape and tuple(n // parts.get(name, 1) for n, name in zip(self.shape, dims, strict=True))
        convolution = dataclasses.replace(self.convolution, feature_group_count=groups)
        return dataclasses.replace(self, convolution=convolution, shape=shape, out_sharding=None)

    def with_kernel(self, problem: ConvProblem, out: Any, custom_call: CustomCall) -> Callable[..., jax.Array] | None:
        if self.kind is ConvWgradProblem and self._is_canonical(problem):
            return None
        return self.between_layouts(problem, out, lambda *operands: execute.call(custom_call, problem, *operands))

    def _is_canonical(self, problem: ConvProblem) -> bool:
        """Whether operands and result are in the layouts of their problem."""
        conv = self.convolution
        plain = all(order == tuple(range(len(order))) for order in orders_of(conv.dimension_numbers).values())
        same = conv.batch_group_count == 1 and not is_transposed(conv)
        return plain and same and len(conv.window_strides) == problem.rank

    def between_layouts(
        self, problem: ConvProblem, out: Any, function: Callable[..., jax.Array]
    ) -> Callable[..., jax.Array]:
        """A function of operands in the layouts of `problem`, which is canonical, for operands as they are written."""
        kind, orders = self.kind, orders_of(self.convolution.dimension_numbers)
        groups, transposed = self.convolution.batch_group_count, is_transposed(self.convolution)

        def canonical_operand(name: str, x: jax.Array) -> jax.Array:
            x = x.astype(problem.dtype).transpose(orders[name])
            if name == "lhs" and groups > 1:
                x = fold_into(x.reshape(groups, x.shape[0] // groups, *x.shape[1:]), 0, x.ndim - 1)
            if not transposed:
                return x.reshape(getattr(problem, f"{name}_shape"))
            if name == "rhs":
                return mirrored(x, problem.feature_group_count)
            return x.reshape(getattr(problem, "g_shape" if name == "lhs" else "lhs_shape"))

        def between(*operands: jax.Array) -> jax.Array:
            given = [canonical_operand(name, x) for name, x in zip(kind.operands, operands, strict=True)]
            order = orders[kind.result]
            if transposed and kind is ConvWgradProblem:  # lhs and g have changed places
                y = mirrored(function(*given[::-1]), problem.feature_group_count)
            else:
                y = function(*given)
            if kind.result == "lhs" and groups > 1:
                y = unfold_from(y, y.ndim - 1, groups)
                y = jnp.moveaxis(y, -2, 0).reshape(-1, *y.shape[1:-2], y.shape[-1])
            return y.reshape([out.shape[i] for i in order]).transpose([int(i) for i in np.argsort(order)])

        return between


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class ConvFprop(ConvCall):
    """The convolution of operands of any floating dtypes, which are converted to `compute_dtype`: so a cotangent has
    its operand's dtype without a conversion that is differentiated."""

    compute_dtype: str

    kind = ConvFpropProblem
    primitive = conv_fprop_p

    def dtype(self, avals: Sequence[Any]) -> str:
        return self.compute_dtype

    def type_of(self, *avals: Any) -> Any:
        lhs, rhs = (x.update(dtype=jnp.dtype(self.compute_dtype), weak_type=False) for x in avals)
        out_type, out_dtype = self.convolution.out_type, self.out_dtype
        if self.options.implied or self.out_sharding is not None:
            return out_type(lhs, rhs, out_dtype, self.out_sharding)
        # By explicit axes lax is strict where the rule decides.
        plain_lhs, plain_rhs = (_compat.like(x, x.shape, x.dtype) for x in (lhs, rhs))
        out = out_type(plain_lhs, plain_rhs, out_dtype, None)
        return partitioning.with_explicit_sharding(out, self, (lhs, rhs))

    def in_lax(self, problem: ConvProblem | None, out: Any) -> Callable[..., jax.Array]:
        sharding = self.out_sharding if problem is None else None

        def convolved(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            lhs, rhs = lhs.astype(self.compute_dtype), rhs.astype(self.compute_dtype)
            return self.convolution(lhs, rhs, self.out_dtype, sharding)

        return convolved


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class ConvDgrad(ConvCall):
    """The gradient of the input, as lax's own transpose rule makes it; bilinear in (g, rhs)."""

    kind = ConvDgradProblem
    primitive = conv_dgrad_p

    def type_of(self, *avals: Any) -> Any:
        g, rhs = avals
        out = self._plain_type(g, rhs, self.out_dtype)
        if self.out_sharding is not None:
            return out.update(sharding=self.out_sharding)
        return partitioning.with_explicit_sharding(out, self, avals)

    def _plain_type(self, g: Any, rhs: Any, dtype: Any) -> Any:
        """The result's type, not sharded by explicit axes."""
        return _compat.like(g if _compat.aval_vma(g) else rhs, self.shape or (), dtype)

    def in_lax(self, problem: ConvProblem | None, out: Any) -> Callable[..., jax.Array]:
        def transposed(g: jax.Array, rhs: jax.Array) -> jax.Array:
            of_g, of_rhs = jax.typeof(g), jax.typeof(rhs)
            lhs = self._plain_type(of_g, of_rhs, g.dtype)
            if problem is None and self.out_sharding is not None:
                lhs = lhs.update(sharding=self.out_sharding)
            found = self.convolution.transposed(g, lhs, rhs, _compat.explicit_sharding(of_g))
            return found.astype(self.out_dtype)

        if problem is None or problem.dtype == self.out_dtype or not _compat.is_known(*problem.input_spatial):
            return transposed
        run = functools.partial(OPERATIONS[problem.op].reference, problem)
        return self.between_layouts(problem, out, run)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class ConvWgrad(ConvCall):
    """The gradient of the weight; bilinear in (lhs, g)."""

    kind = ConvWgradProblem
    primitive = conv_wgrad_p

    def type_of(self, *avals: Any) -> Any:
        lhs, g = avals
        out = _compat.like(lhs if _compat.aval_vma(lhs) else g, self.shape or (), self.out_dtype)
        return partitioning.with_explicit_sharding(out, self, avals)

    def in_lax(self, problem: Any, out: Any) -> Callable[..., jax.Array]:
        specs = self.convolution.dimension_numbers

        def wgrad(lhs: jax.Array, g: jax.Array) -> jax.Array:
            written = cast(ConvWgradProblem, self.written((lhs, g)))
            return conv_reference.conv_wgrad(lhs, g, written, specs)

        return wgrad if _compat.is_known(*problem.input_spatial) else functools.partial(self._by_transpose, out)

    def _by_transpose(self, out: Any, lhs: jax.Array, g: jax.Array) -> jax.Array:
        """The primitive's value by lax's own rule, which knows symbolic sizes."""
        wide = wider(lhs.dtype, out.dtype)
        transpose = jax.linear_transpose(lambda rhs: self.convolution(lhs.astype(wide), rhs), out.update(dtype=wide))
        return transpose(g.astype(wide))[0].astype(out.dtype)


# ---- binding -------------------------------------------------------------------------------------------------------


def bind_wgrad(
    conv: Convolution, lhs: jax.Array, g: jax.Array, rhs_shape: Sequence[int], out_dtype: Any, options: Options
) -> jax.Array:
    """The weight gradient of a convolution; ValueError if the shapes do not belong together."""
    shape = integers("rhs_shape", rhs_shape, lhs.ndim, least=0)
    conv = with_output_of(conv, lhs.shape, shape, g.shape)
    return ConvWgrad(convolution=conv, shape=shape, out_dtype=jnp.dtype(out_dtype).name, options=options).bind(lhs, g)


def with_output_of(conv: Convolution, lhs_shape: Any, rhs_shape: Any, g_shape: Any) -> Convolution:
    """The convolution with its padding as pairs; ValueError if its output has another shape than g."""
    found, expected = with_output(conv, tuple(lhs_shape), tuple(rhs_shape))
    if tuple(g_shape) != expected:
        hint = layout_hint(conv, tuple(lhs_shape), tuple(rhs_shape), tuple(g_shape))
        raise RefusedValue(f"g has shape {tuple(g_shape)}; the convolution's output has {expected}{hint}")
    return found


# ---- the problem ---------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=MEMORY)
def _written(
    kind: type[ConvProblem], conv: Convolution, arrays: tuple[Any, Any, Any], dtype: str, out_dtype: str
) -> ConvProblem:
    """The problem of a pass whose arrays have these shapes: first the operands, then the result, or None for the
    output of the convolution."""
    shapes = dict(zip((*kind.operands, kind.result), arrays, strict=True))
    if shapes["g"] is None or isinstance(conv.padding, str):
        conv, output = with_output(conv, shapes["lhs"], shapes["rhs"])
        shapes["g"] = shapes["g"] or output
    # A symbolic dimension (jax.export) stays what it is.
    take = lambda name, spec: tuple([_compat.static_or_symbolic(shapes[name][i]) for i in spec])  # noqa: E731
    specs = conv.dimension_numbers
    batch, in_channels, *input_spatial = take("lhs", specs.lhs_spec)
    _, out_channels, *output_spatial = take("g", specs.out_spec)
    return kind(
        batch=batch,
        input_spatial=tuple(input_spatial),
        output_spatial=tuple(output_spatial),
        kernel_spatial=take("rhs", specs.rhs_spec[2:]),
        in_channels=in_channels,
        out_channels=out_channels,
        window_strides=conv.window_strides,
        padding=cast(Pairs, conv.padding),
        lhs_dilation=conv.lhs_dilation,
        rhs_dilation=conv.rhs_dilation,
        feature_group_count=conv.feature_group_count,
        batch_group_count=conv.batch_group_count,
        dtype=dtype,
        out_dtype=out_dtype,
        precision=conv.precision,
    )


def _is_pointwise(problem: ConvProblem, i: int) -> bool:
    """Whether output pixel p of a spatial dimension is made of input pixel p alone."""
    geometry = (problem.kernel_spatial, problem.window_strides, problem.lhs_dilation)
    return all(sizes[i] == 1 for sizes in geometry) and tuple(problem.padding[i]) == (0, 0)


def _ordered(spec: Sequence[int], *names: str) -> tuple[str, ...]:
    """Names in the order of lax's specification, first batch (or output) and features, by dimension."""
    of = dict(zip(spec, names, strict=True))
    return tuple(of[i] for i in range(len(spec)))


def orders_of(specs: lax.ConvDimensionNumbers) -> dict[str, tuple[int, ...]]:
    """The transposes of each array to its canonical order: N, spatial..., C, and HWIO of the weight."""
    orders = {name: (spec[0], *spec[2:], spec[1]) for name, spec in (("lhs", specs.lhs_spec), ("g", specs.out_spec))}
    return orders | {"rhs": (*specs.rhs_spec[2:], specs.rhs_spec[1], specs.rhs_spec[0])}
