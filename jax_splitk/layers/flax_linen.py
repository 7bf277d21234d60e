"""Packed weights in Flax linen: models run on them unchanged.

Examples:
  >>> from flax import linen
  >>> from jax_splitk.layers import flax_linen
  >>> model, x = linen.Dense(128), jnp.ones((2, 64))
  >>> variables = model.init(jax.random.key(0), x)
  >>> packed = flax_linen.quantize(model, variables, jax_splitk.QuantizationRule("kernel", "int4"), x)
  >>> with flax_linen.intercept():
  ...     y = model.apply(packed, x)
  >>> y.shape
  (2, 128)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from flax import linen

from jax_splitk.layers import products
from jax_splitk.layers.products import Axes
from jax_splitk.quantized.array import is_weight
from jax_splitk.quantized.params import QuantizationRule, path_of, quantized, rules_of

_Record = Callable[[str, Axes], None]


@contextmanager
def intercept() -> Iterator[None]:
    """A context manager and decorator: inside, linen's Dense, DenseGeneral and Einsum multiply by packed kernels.

    A layer whose kernel is a PackedWeight or a QuantizedArray computes the product with it, with the layer's dtypes and
    bias. In layers of your own, `self.param` returns a quantized weight as it is, without a check of its shape. Call
    `x @ w` or `jax_splitk.quantized_einsum` there, or open `jax_splitk.intercept()` as well, in which `jnp.einsum` and
    the like take quantized weights. All else is as outside, Embed and its `attend`, too.

    It acts while the model is traced, under linen's lifted transformations, too. A scan or vmap over layers has the
    layers' axis first (`variable_axes={"params": 0}`). A layer's own `dot_general` is not used with a packed kernel.

    Raises:
      TypeError, ValueError: as `quantized_dot_general` and `quantized_einsum`, where a layer does not contract the axes
        that the weight was packed for.
    """
    with linen.intercept_methods(_multiply):
        yield


def quantize(
    model: linen.Module,
    variables: Mapping[str, Any],
    rules: QuantizationRule | Sequence[QuantizationRule],
    *args: Any,
    **kwargs: Any,
) -> dict[str, Any]:
    """Quantizes and packs the kernels of a model's Dense, DenseGeneral and Einsum layers.

    The model is traced, not run, to learn which axes each layer contracts and how many layers are stacked.

    Args:
      model: a linen module.
      variables: what `model.apply` takes: {"params": ...}. Arrays or jax.ShapeDtypeStruct. Boxes, such as
        nn.Partitioned, are removed.
      rules: as in `jax_splitk.quantize_params`. A rule without an axis applies to these layers' kernels only, whose
        axes and stack are known. One with an axis applies to any parameter, such as those of your own layers.
      *args: of `model.apply`; arrays may be jax.ShapeDtypeStruct.
      **kwargs: of `model.apply`, such as `rngs` and `method`.

    Returns:
      The variables, with a PackedWeight for each kernel that a rule quantizes.

    Raises:
      ValueError, TypeError: as `jax_splitk.quantize_params`.
    """
    variables = linen.meta.unbox(dict(variables))
    axes = axes_of(model, variables, *args, **kwargs)
    flat, tree = jax.tree_util.tree_flatten_with_path(variables["params"], is_leaf=is_weight)
    leaves = {path_of(keys): leaf for keys, leaf in flat}
    found = rules_of(list(leaves), rules, axes)
    known = {path: axes[path].completed(found[path], path, leaves[path].ndim) for path in found if path in axes}
    full = {**found, **known}
    packed = [quantized(path, leaf, full.get(path)) for path, leaf in leaves.items()]
    return {**variables, "params": jax.tree.unflatten(tree, packed)}


def axes_of(model: linen.Module, variables: Mapping[str, Any], *args: Any, **kwargs: Any) -> dict[str, Axes]:
    """How each Dense, DenseGeneral and Einsum of the model uses its kernel, by the kernel's path in the parameters."""
    found: dict[str, Axes] = {}
    leaves, tree = jax.tree.flatten((args, kwargs))
    arrays = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]

    def run(variables: Any, given: list[Any]) -> Any:
        rest = iter(given)
        merged = [next(rest) if array else leaf for leaf, array in zip(leaves, arrays, strict=True)]
        own_args, own_kwargs = jax.tree.unflatten(tree, merged)
        with linen.intercept_methods(_recording(found.__setitem__)):
            return model.apply(variables, *own_args, **{"mutable": True, **own_kwargs})

    jax.eval_shape(run, variables, [leaf for leaf, array in zip(leaves, arrays, strict=True) if array])
    return found


def _layer(context: Any) -> Callable[..., Any] | None:
    """The layer whose call this is. A lifted layer, such as nn.remat(nn.Dense), calls the plain one inside."""
    called = getattr(context.orig_method, "func", None)
    return next((layer for layer in _CALLS if called is layer.__call__.__wrapped__), None)


def _recording(record: _Record) -> Any:
    def interceptor(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        layer, module = _layer(context), context.module
        if layer is not None:
            path = "/".join((*module.path, "kernel"))
            record(path, _AXES[layer](module, path, *args, **kwargs))
        return call(*args, **kwargs)

    return interceptor


def _multiply(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    layer, module = _layer(context), context.module
    kernel = _weight(module, "kernel")
    if layer is not None and kernel is not None:
        return _CALLS[layer](module, kernel, *args, **kwargs)
    with _unchecked(module):
        return call(*args, **kwargs)


def _weight(module: Any, name: str) -> Any:
    """A module's parameter, if it is a quantized weight; else None."""
    if module.scope is None or not module.has_variable("params", name):
        return None
    value = linen.meta.unbox(module.get_variable("params", name))
    return value if is_weight(value) else None


@contextmanager
def _unchecked(module: Any) -> Iterator[None]:
    """The module's own `param` returns quantized weights as they are: linen would compare their leaves' shapes with
    those of the initial value."""
    if "param" in vars(module):  # a method that another one calls
        yield
        return
    plain = module.param

    def param(name: str, *args: Any, **kwargs: Any) -> Any:
        weight = _weight(module, name)
        return plain(name, *args, **kwargs) if weight is None else weight

    object.__setattr__(module, "param", param)
    try:
        yield
    finally:
        object.__delattr__(module, "param")


def _promoted(module: Any, inputs: Any, kernel: Any) -> tuple[Any, Any]:
    """Inputs and bias in the dtype in which the layer computes; the kernel counts with its scale's dtype."""
    bias = linen.meta.unbox(module.get_variable("params", "bias")) if module.use_bias else None
    inputs, _, bias = module.promote_dtype(inputs, products.stand_in(kernel), bias, dtype=module.dtype)
    return inputs, bias


def _dense(module: Any, kernel: Any, inputs: Any) -> jax.Array:
    inputs, bias = _promoted(module, inputs, kernel)
    y = products.dot_general(inputs, kernel, (((inputs.ndim - 1,), (0,)), ((), ())), module.precision)
    return y if bias is None else y + bias


def _dense_general(module: Any, kernel: Any, inputs: Any) -> jax.Array:
    inputs, bias = _promoted(module, inputs, kernel)
    axis, batch = (_axes(axes, inputs.ndim) for axes in (module.axis, module.batch_dims))
    contracted = tuple(range(len(batch), len(batch) + len(axis)))
    numbers = ((axis, contracted), (batch, tuple(range(len(batch)))))
    y = products.dot_general(inputs, kernel, numbers, module.precision)
    if bias is None:
        return y
    features = kernel.shape[len(batch) + len(axis) :]
    return y + bias.reshape(*kernel.shape[: len(batch)], *(1,) * (y.ndim - len(batch) - len(features)), *features)


def _einsum(module: Any, kernel: Any, inputs: Any, einsum_str: str | None = None) -> jax.Array:
    subscripts = _subscripts(module, einsum_str)
    inputs, bias = _promoted(module, inputs, kernel)
    y = products.einsum(
        subscripts,
        inputs,
        kernel,
        precision=module.precision,
        preferred_element_type=module.preferred_element_type,
    )
    return y if bias is None else y + bias.reshape(products.bias_shape(subscripts, kernel.shape, y.ndim))


def _axes(axes: int | Sequence[int], rank: int) -> tuple[int, ...]:
    """The axes as linen takes them: ascending."""
    return tuple(sorted(axis % rank for axis in ([axes] if isinstance(axes, int) else axes)))


def _subscripts(module: Any, einsum_str: str | None) -> str:
    return str(linen.merge_param("einsum_str", module.einsum_str, einsum_str)).replace(" ", "")


def _count(x: Any) -> int:
    return 1 if isinstance(x, int) else len(x)


_CALLS: dict[Any, Any] = {linen.Dense: _dense, linen.DenseGeneral: _dense_general, linen.Einsum: _einsum}
_AXES: dict[Any, Any] = {
    linen.Dense: lambda module, path, inputs: products.axes_of_general(1, 1),
    linen.DenseGeneral: lambda module, path, inputs: products.axes_of_general(
        _count(module.axis), _count(module.features), _count(module.batch_dims)
    ),
    linen.Einsum: lambda module, path, inputs, einsum_str=None: products.axes_of_einsum(
        _subscripts(module, einsum_str), path
    ),
}
