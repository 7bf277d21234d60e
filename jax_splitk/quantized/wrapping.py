"""The base of weights that hold another weight."""

import dataclasses
from typing import Any, ClassVar

from jax.typing import DTypeLike

from jax_splitk.quantized.array import Weight


class WrappingWeight(Weight):
    """A weight that holds another one, `weight`, and says more about it.

    A subclass is a frozen dataclass and a pytree. Its `key` is the name of this kind in files.
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
