"""Flax nnx: `quantize` packs a model's weights in place; layers of packed weights; `make_interceptable` lets
`jax_splitk.intercept` route a model's layers.

Examples:
  >>> from flax import nnx
  >>> from jax_splitk.layers import flax_nnx
  >>> model = nnx.Linear(64, 128, rngs=nnx.Rngs(0))
  >>> flax_nnx.quantize(model, jax_splitk.QuantizationRule("kernel", "int4"))
  >>> model(jnp.ones((2, 64))).shape
  (2, 128)
"""

import dataclasses
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flax import nnx
from jax import lax
from jax import numpy as jnp
from jax.typing import DTypeLike

from jax_splitk.layers import products
from jax_splitk.layers.products import Axes
from jax_splitk.quantized.array import QuantizedArray, is_weight
from jax_splitk.quantized.packed_weight import PackedWeight
from jax_splitk.quantized.params import QuantizationRule, quantized, rules_of
from jax_splitk.quantized.permuted import PermutedWeight

for _kind in (PackedWeight, QuantizedArray, PermutedWeight):
    nnx.register_data_type(_kind)  # as attributes of modules they are data, as arrays are


class PackedKernel(nnx.Variable[Any]):
    """A variable that holds a quantized weight. It is no `nnx.Param`, so that gradients and optimizers of `nnx.Param`
    leave it alone."""


def quantize(model: nnx.Module, rules: QuantizationRule | Sequence[QuantizationRule]) -> None:
    """Quantizes and packs the kernels of a model's Linear, LinearGeneral and Einsum layers, in place.

    The layers stay the same objects of the same classes, with the same attributes and paths. Each kernel becomes a
    `PackedKernel`. `nnx.split`, `merge`, `state`, `jit`, `vmap` and `scan` take the model as before. A stack of layers,
    as `nnx.vmap` makes it for `nnx.scan`, becomes a stack of packed weights. A layer's own `dot_general` or `einsum_op`
    is replaced.

    Args:
      model: an nnx module; abstract, as `nnx.eval_shape` makes it, it stays so.
      rules: as in `jax_splitk.quantize_params`, for paths such as "layers/0/attention/query/kernel". A rule without an
        axis applies to these layers' kernels only, whose axes and stack are known. One with an axis applies to any
        `nnx.Param`. Layers of your own then multiply by a quantized weight: call `x @ w` or
        `jax_splitk.quantized_einsum` there, or open `jax_splitk.intercept()`, in which `jnp.einsum` and the like take
        quantized weights.

    Raises:
      ValueError, TypeError: as `jax_splitk.quantize_params`; the model is unchanged. An Einsum without `einsum_str`
        needs an axis in its rule.
    """
    params = dict(_params(model))
    kernels = {path for path, (module, name) in params.items() if isinstance(module, _LAYERS) and name == "kernel"}
    packed: dict[int, PackedKernel] = {}  # modules may share a variable
    changes = []
    for path, rule in rules_of(list(params), rules, kernels).items():
        module, name = params[path]
        param = getattr(module, name)
        if rule.dtype is None:
            continue
        value = param.get_raw_value()
        own = rule if rule.axis is not None else _axes_of(module, path).completed(rule, path, len(value.shape))
        if id(param) not in packed:
            packed[id(param)] = PackedKernel(quantized(path, value, own))
        changes.append((path, packed[id(param)]))
    for path, kernel in changes:
        module, name = params[path]
        if path in kernels:
            set_kernel(module, kernel)
        else:
            setattr(module, name, kernel)


def set_kernel(layer: nnx.Linear | nnx.LinearGeneral | nnx.Einsum, kernel: Any) -> None:
    """Gives a layer a quantized kernel, for instance one of a checkpoint.

    Args:
      layer: an `nnx.Linear`, `nnx.LinearGeneral` or `nnx.Einsum`. It keeps its class, bias and dtypes.
      kernel: a PackedWeight, or a stack of them for a stack of layers; or a variable that holds it.

    Raises:
      TypeError: `layer` is none of these layers, or `kernel` is not quantized.
      ValueError: a kernel of another shape than the layer's.

    Examples:
      >>> layer = nnx.Linear(64, 128, rngs=nnx.Rngs(0))
      >>> w = jax_splitk.prepack(jax_splitk.quantize(layer.kernel[...], "nf4", group_size=32))
      >>> flax_nnx.set_kernel(layer, w)
      >>> layer(jnp.ones((2, 64))).shape
      (2, 128)
    """
    if not isinstance(layer, _LAYERS):
        accepted = ", ".join(f"nnx.{kind.__name__}" for kind in _LAYERS)
        raise TypeError(f"layer of type {type(layer).__name__}; accepted: {accepted}")
    if not is_weight(kernel):
        raise TypeError(f"kernel of type {type(kernel).__name__}; accepted: PackedWeight (jax_splitk.prepack makes it)")
    shape = tuple(layer.kernel.get_raw_value().shape)
    if tuple(kernel.shape) != shape:
        raise ValueError(f"kernel of shape {tuple(kernel.shape)}; accepted: {shape}")
    change: Any = layer
    change.kernel = kernel if isinstance(kernel, nnx.Variable) else PackedKernel(kernel)
    if not isinstance(layer.promote_dtype, _Promotion):
        change.promote_dtype = _Promotion(layer.promote_dtype)
    if isinstance(layer, nnx.Einsum):
        change.einsum_op = products.einsum
    else:
        change.dot_general = products.dot_general
    if isinstance(layer, nnx.LinearGeneral):
        change.dot_general_cls = None


_LAYERS = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum)


def _params(model: nnx.Module) -> Iterator[tuple[str, tuple[Any, str]]]:
    """The modules and attributes that hold parameters, by path."""
    for path, module in nnx.iter_modules(model):
        for name, value in vars(module).items():
            if isinstance(value, nnx.Param | PackedKernel):
                yield "/".join(map(str, (*path, name))), (module, name)


def _axes_of(layer: Any, path: str) -> Axes:
    if isinstance(layer, nnx.Einsum):
        if layer.einsum_str is None:
            raise ValueError(
                f"{path} of an nnx.Einsum without einsum_str; accepted: one with it, or an axis in its rule"
            )
        return products.axes_of_einsum(layer.einsum_str, path)
    if isinstance(layer, nnx.LinearGeneral):
        return products.axes_of_general(len(layer.in_features), len(layer.out_features), len(layer.batch_axis))
    return products.axes_of_general(1, 1)


@dataclasses.dataclass(frozen=True)
class _Promotion:
    """A layer's `promote_dtype` that leaves a quantized kernel as it is; the kernel counts with its scale's dtype."""

    promote: Callable[..., Any]

    def __call__(self, args: Sequence[Any], /, *, dtype: Any = None, **kwargs: Any) -> tuple[Any, ...]:
        like = tuple(products.stand_in(arg) if is_weight(arg) else arg for arg in args)
        promoted = self.promote(like, dtype=dtype, **kwargs)
        return tuple(arg if is_weight(arg) else new for arg, new in zip(args, promoted, strict=True))


# ---- layers of packed weights --------------------------------------------------------------------------------------


class Linear(nnx.Linear):
    """`nnx.Linear` with a packed weight.

    Args:
      kernel: a PackedWeight [in_features, out_features].
      bias: [out_features], or None.
      dtype: the dtype of the computation; None: that of inputs, kernel's scales and bias together.

    Examples:
      >>> w = jax_splitk.prepack(jax_splitk.quantize(jnp.ones((64, 128)), "int4", group_size=64))
      >>> flax_nnx.Linear(w)(jnp.ones((2, 64), jnp.bfloat16)).shape
      (2, 128)
    """

    def __init__(self, kernel: PackedWeight, bias: Any = None, *, dtype: DTypeLike | None = None) -> None:
        _check_axes(kernel, ((0,),), 2)
        abstract = nnx.eval_shape(lambda: nnx.Linear(*kernel.shape, rngs=nnx.Rngs(0)))
        _become(self, abstract, kernel, bias, dtype)


class LinearGeneral(nnx.LinearGeneral):
    """`nnx.LinearGeneral` with a packed weight.

    Args:
      kernel: a PackedWeight [*batch, *in_features, *out_features]; its stack is the batch.
      bias: [*batch, *out_features], or None.
      axis: the axes of the inputs that are contracted; None: the last ones.
      dtype: as in `Linear`.

    Examples:
      >>> w = jax_splitk.quantize(jnp.ones((4, 32, 64)), "int4", group_size=32, axis=(0, 1))
      >>> w = jax_splitk.prepack(w, axis=(0, 1))
      >>> flax_nnx.LinearGeneral(w)(jnp.ones((2, 4, 32), jnp.bfloat16)).shape
      (2, 64)
    """

    def __init__(
        self,
        kernel: PackedWeight,
        bias: Any = None,
        *,
        axis: int | Sequence[int] | None = None,
        dtype: DTypeLike | None = None,
    ) -> None:
        inner, batch = len(kernel.contracted), len(kernel.stack)
        _check_axes(kernel, (tuple(range(inner)),), None)
        abstract = nnx.eval_shape(
            lambda: nnx.LinearGeneral(
                kernel.dims[:inner],
                kernel.dims[inner:],
                axis=tuple(range(-inner, 0)) if axis is None else axis,
                batch_axis=dict(enumerate(kernel.stack[:batch])),
                rngs=nnx.Rngs(0),
            )
        )
        _become(self, abstract, kernel, bias, dtype)


class Einsum(nnx.Einsum):
    """`nnx.Einsum` with a packed weight.

    Args:
      einsum_str: as in nnx.Einsum, or None if calls name it.
      kernel: a PackedWeight.
      bias: an array, or None.
      dtype: as in `Linear`.

    Examples:
      >>> w = jax_splitk.prepack(jax_splitk.quantize(jnp.ones((4, 64, 32)), "int4", group_size=64, axis=1), axis=1)
      >>> flax_nnx.Einsum("btd,ndh->btnh", w)(jnp.ones((2, 8, 64), jnp.bfloat16)).shape
      (2, 8, 4, 32)
    """

    def __init__(
        self, einsum_str: str | None, kernel: PackedWeight, bias: Any = None, *, dtype: DTypeLike | None = None
    ) -> None:
        of_bias = None if bias is None else jnp.shape(bias)
        abstract: Any = nnx.eval_shape(
            lambda: nnx.Einsum(einsum_str or "a,b->ab", kernel.shape, of_bias, rngs=nnx.Rngs(0))
        )
        abstract.einsum_str = einsum_str
        _become(self, abstract, kernel, bias, dtype)


def _check_axes(kernel: Any, accepted: Sequence[tuple[int, ...]], rank: int | None) -> None:
    if not isinstance(kernel, PackedWeight):
        raise TypeError(f"kernel of type {type(kernel).__name__}; accepted: PackedWeight (jax_splitk.prepack makes it)")
    if kernel.contracted not in accepted or rank not in (None, kernel.ndim):
        given = f"kernel of shape {kernel.shape} that contracts {kernel.contracted}"
        raise ValueError(
            f"{given}; accepted: {'the first axes' if rank is None else f'axis 0 of {rank}'}, then features"
        )


def _become(layer: Any, abstract: Any, kernel: Any, bias: Any, dtype: DTypeLike | None) -> None:
    """Gives a layer the attributes of an abstract one, with this kernel and bias."""
    for name, value in vars(abstract).items():
        if not name.startswith("_"):
            setattr(layer, name, value)
    layer.dtype = dtype
    set_kernel(layer, kernel)
    if hasattr(layer, "use_bias"):
        layer.use_bias = bias is not None
    else:
        layer.bias_shape = None if bias is None else jnp.shape(bias)
    layer.bias = nnx.data(None) if bias is None else nnx.Param(jnp.asarray(bias))


# ---- layers that intercept routes ------------------------------------------------------------------------------------


def make_interceptable(model: nnx.Module) -> None:
    """Lets `jax_splitk.intercept` route the convolutions and products of a model's layers, in place.

    Layers such as `nnx.Conv`, `Linear` and `Einsum` keep the function of lax that they were made with. `intercept`
    cannot replace that. Here they get a function that looks the one of lax up when it is called. Outside of
    `intercept` nothing changes. A function of your own in a layer stays.

    Args:
      model: an nnx module; also an abstract one, as `nnx.eval_shape` makes it.

    Raises:
      TypeError: `model` is no nnx module.

    Examples:
      >>> model = nnx.Sequential(nnx.Conv(8, 16, (3, 3), rngs=nnx.Rngs(0)), nnx.relu)
      >>> flax_nnx.make_interceptable(model)
      >>> with jax_splitk.intercept(compute_dtype=jnp.bfloat16):
      ...     gradient = nnx.grad(lambda model, x: jnp.sum(model(x)))(model, jnp.ones((2, 8, 8, 8)))
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(f"model of type {type(model).__name__}; accepted: nnx.Module")
    for _, module in nnx.iter_modules(model):
        for name, value in list(vars(module).items()):
            # In a block of intercept the attributes of lax are wrappers of its functions.
            if isinstance(value, types.FunctionType) and (late := _LATE.get(inspect.unwrap(value))) is not None:
                setattr(module, name, late)


def _conv_general_dilated(*args: Any, **kwargs: Any) -> Any:
    return lax.conv_general_dilated(*args, **kwargs)


def _dot_general(*args: Any, **kwargs: Any) -> Any:
    return lax.dot_general(*args, **kwargs)


def _einsum(*args: Any, **kwargs: Any) -> Any:
    return jnp.einsum(*args, **kwargs)


_LATE: dict[Any, Callable[..., Any]] = {
    inspect.unwrap(lax.conv_general_dilated): _conv_general_dilated,
    inspect.unwrap(lax.dot_general): _dot_general,
    inspect.unwrap(jnp.einsum): _einsum,
}
