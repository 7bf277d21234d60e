"""qwix's post-training quantization and QLoRA with jax_splitk's kernels: providers for `qwix.quantize_model`.

Examples:
  >>> import qwix
  >>> from flax import nnx
  >>> from jax_splitk.layers import qwix as packed
  >>> rule = qwix.QuantizationRule(weight_qtype="int4", tile_size=32)
  >>> x = jnp.ones((2, 64), jnp.bfloat16)
  >>> model = qwix.quantize_model(nnx.Linear(64, 128, rngs=nnx.Rngs(0)), packed.PtqProvider([rule]), x)
  >>> type(model.kernel.array).__name__, model(x).shape
  ('PackedQArray', (2, 128))
"""

import contextlib
import contextvars
import dataclasses
import functools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import qwix
from flax import nnx, traverse_util
from flax.core import FrozenDict

from jax_splitk.layers import products
from jax_splitk.layers.products import Axes, axes_of_einsum
from jax_splitk.quantized import packed_weight
from jax_splitk.quantized.packed_weight import PackedWeight, prepack
from jax_splitk.runtime.arguments import wider

log = logging.getLogger("jax_splitk")


@packed_weight.register
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PackedQArray(PackedWeight):
    """A packed weight in the place of qwix's QArray."""

    @property
    def qvalue(self) -> Any:
        """The array whose box qwix gives to the weights of an adapter."""
        return self.words


class _Packing(qwix.PtqProvider):
    """What both providers do: pack weights as they are quantized, and multiply by them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._qarray_module = _Quantizer(self._qarray_module)  # pyright: ignore[reportAttributeAccessIssue]
        self._dot_general_fn = functools.partial(_dot_general, self._dot_general_fn)
        self._einsum_fn = functools.partial(_einsum, self._einsum_fn)

    def dot_general(self, lhs: Any, rhs: Any, dimension_numbers: Any, *args: Any, **kwargs: Any) -> Any:
        (_, contracted), (_, batch) = dimension_numbers
        axes = Axes(tuple(contracted), len(batch), rhs.ndim)
        with self._weight("dot_general", rhs, axes if tuple(batch) == tuple(range(len(batch))) else None):
            return super().dot_general(lhs, rhs, dimension_numbers, *args, **kwargs)

    def einsum(self, einsum_str: str, *operands: Any, **kwargs: Any) -> Any:
        try:
            axes = axes_of_einsum(einsum_str, "a weight")
        except ValueError:
            axes = None
        with self._weight("einsum", operands[-1], axes):
            return super().einsum(einsum_str, *operands, **kwargs)

    @contextlib.contextmanager
    def _weight(self, name: str, weight: Any, axes: Axes | None) -> Iterator[None]:
        """Packs this weight if it is quantized inside. qwix's integer products take weights as they are."""
        rule, _ = self._get_current_rule_and_op_id(name, only_rule=True)
        given = None if axes is None or rule is None or rule.act_qtype is not None else (weight, axes)
        token = _packing.set(given)
        try:
            yield
        except AssertionError as error:
            # qwix gives the names of the kernel's axes to the words and scales, which have other axes.
            if given is None or "spec" not in str(error):
                raise
            names = f"a kernel of shape {weight.shape} with sharding names"
            raise ValueError(f"{names}; accepted: a kernel without, or qwix's own provider") from error
        finally:
            _packing.reset(token)


class PtqProvider(_Packing):
    """`qwix.PtqProvider` whose weights are packed and multiplied by jax_splitk's kernels.

    Weights of `dot_general` and `einsum` are packed where they are quantized: as `qwix.quantize_model` runs an nnx
    model, or as a linen model is initialised. Their values are qwix's. Left to qwix are convolutions, rules that
    quantize activations, and weights of a format, tile size or axes that packing does not take; the log names these.

    Kernels with sharding names (`nn.with_partitioning`, `out_sharding` of nnx) are not accepted: qwix would give the
    names to the packed arrays, whose axes are others.

    Args:
      *args: as for `qwix.PtqProvider`.
      **kwargs: as for `qwix.PtqProvider`.
    """


class LoraProvider(_Packing, qwix.LoraProvider):
    """`qwix.LoraProvider` whose weights are packed, as with `PtqProvider`; gradients reach the adapters.

    Args:
      *args: as for `qwix.LoraProvider`.
      **kwargs: as for `qwix.LoraProvider`.
    """


_packing: contextvars.ContextVar[tuple[Any, Axes] | None] = contextvars.ContextVar("packing", default=None)


class _Quantizer:
    """qwix's functions on arrays. `quantize` packs the weight of the current operation."""

    def __init__(self, functions: Any) -> None:
        self._functions = functions

    def __getattr__(self, name: str) -> Any:
        return getattr(self._functions, name)

    def quantize(self, array: Any, how: Any) -> Any:
        q, current = self._functions.quantize(array, how), _packing.get()
        return q if current is None or current[0] is not array else _packed(q, current[1])


def _packed(q: Any, axes: Axes) -> Any:
    try:
        w = prepack(q, axis=axes.contracted, stack=axes.batch)
    except (TypeError, ValueError) as error:
        log.info("qwix multiplies by a weight of shape %s that is not packed: %s", q.qvalue.shape, error)
        return q
    return PackedQArray(**{field.name: getattr(w, field.name) for field in dataclasses.fields(w)})


def _dot_general(otherwise: Any, lhs: Any, rhs: Any, dimension_numbers: Any, **kwargs: Any) -> Any:
    if not isinstance(rhs, PackedWeight):
        return otherwise(lhs, rhs, dimension_numbers, **kwargs)
    return products.dot_general(lhs, rhs, dimension_numbers, preferred_element_type=_result_type(lhs, rhs), **kwargs)


def _einsum(otherwise: Any, einsum_str: str, lhs: Any, rhs: Any) -> Any:
    if not isinstance(rhs, PackedWeight):
        return otherwise(einsum_str, lhs, rhs)
    return products.einsum(einsum_str, lhs, rhs, preferred_element_type=_result_type(lhs, rhs))


def _result_type(lhs: Any, rhs: PackedWeight) -> Any:
    """The dtype of the result as in qwix."""
    return wider(lhs.dtype, rhs.dtype)


def quantize_params(params: Any, abstract_quantized_params: Any) -> Any:
    """`qwix.quantize_params` for a model of one of these providers: quantizes weights of the plain model, and packs.

    It takes models with `nn.scan`, too: each layer of a stack is quantized like one layer alone.

    Args:
      params: the parameters of the model without quantization: nested dicts of arrays.
      abstract_quantized_params: those of the quantized model, such as
        `jax.eval_shape(quantized_model.init, key, x)["params"]`; of an nnx model the model itself.

    Returns:
      The parameters of the quantized model.

    Raises:
      TypeError, ValueError: as `qwix.quantize_params`.
    """
    packed, rest = {}, {}
    for path, array in traverse_util.flatten_dict(params).items():
        leaf = _at(abstract_quantized_params, path)
        if isinstance(getattr(leaf, "array", None), PackedWeight):
            packed[path] = leaf.replace(array=_quantized(array, leaf))
        else:
            rest[path] = array
    others = qwix.quantize_params(traverse_util.unflatten_dict(rest), abstract_quantized_params)
    if isinstance(abstract_quantized_params, nnx.Module):
        packed = traverse_util.flatten_dict(nnx.to_pure_dict(nnx.state(packed)))
    return traverse_util.unflatten_dict({**traverse_util.flatten_dict(others), **packed})


def _at(tree: Any, path: Sequence[Any]) -> Any:
    for key in path:
        mapping = isinstance(tree, dict | FrozenDict) or isinstance(key, int)
        tree = tree[key] if mapping and tree is not None else getattr(tree, str(key), None)
    return tree


def _quantized(array: Any, leaf: Any) -> Any:
    """The packed weight for an array, from the abstract leaf that says how each layer of the stack is quantized."""
    w = leaf.array
    layers = w.ndim - len(leaf.how.channelwise_axes) - len(w.contracted)
    batch = len(w.stack) - layers
    axes = Axes(tuple(axis + batch for axis in w.contracted), batch, w.ndim - layers)
    one = leaf.replace(array=jax.ShapeDtypeStruct(w.shape[layers:], array.dtype))

    def quantize(layer: jax.Array) -> Any:
        return _packed(qwix.quantize_params({"w": layer}, {"w": one})["w"].array, axes)

    for _ in range(layers):
        quantize = jax.vmap(quantize)
    return quantize(array.reshape(w.shape))
