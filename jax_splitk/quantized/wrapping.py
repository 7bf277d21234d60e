"""The base of weights that hold another weight."""

import dataclasses
from typing import Any, ClassVar

import jax
from jax import export
from jax.typing import DTypeLike

from jax_splitk.quantized.array import Weight


class WrappingWeight(Weight):
    """A weight that holds another one, `weight`, and says more about it.

    A subclass is a frozen dataclass of arrays and weights, which `register` makes a pytree. Its `key` is the name of
    `weight` in a tree's paths, and so in files.
    """

    key: ClassVar[str]
    weight: Any

    @property
    def static(self) -> dict[str, Any]:
        """What the arrays do not say, by name."""
        return {**self.weight.static, self.key: True}

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the weight that it holds."""
        return self.weight.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves."""
        return self.weight.nbytes

    def astype(self: Any, dtype: DTypeLike) -> Any:
        """The weight with scales, and floating zero points, of this dtype: bfloat16, float16 or float32."""
        return dataclasses.replace(self, weight=self.weight.astype(dtype))


def register(kind: type[Any]) -> None:
    """Makes a subclass of `WrappingWeight` a pytree, which `jax.export` can store."""
    names = [field.name for field in dataclasses.fields(kind)]
    keys = [jax.tree_util.GetAttrKey(kind.key if name == "weight" else name) for name in names]

    def flatten(w: Any) -> tuple[tuple[Any, ...], None]:
        return tuple(getattr(w, name) for name in names), None

    def flatten_with_keys(w: Any) -> Any:
        return tuple(zip(keys, flatten(w)[0], strict=True)), None

    jax.tree_util.register_pytree_with_keys(kind, flatten_with_keys, lambda _, leaves: kind(*leaves), flatten)
    export.register_pytree_node_serialization(
        kind,
        serialized_name=f"jax_splitk.{kind.__name__}",
        serialize_auxdata=lambda _: b"",
        deserialize_auxdata=lambda _: None,
    )
