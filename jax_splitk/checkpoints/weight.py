"""Quantized weights of a checkpoint: where their parts are, and how a device makes arrays of them."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from jax_splitk.checkpoints.folder import Description, Tensors
from jax_splitk.quantized.array import GROUP_SIZES, QuantizedArray
from jax_splitk.quantized.packed_weight import PackedWeight, prepack
from jax_splitk.quantized.permuted import PermutedWeight
from jax_splitk.runtime.computation import one_computation
from jax_splitk.runtime.safetensors_file import CheckpointError


@dataclasses.dataclass(frozen=True)
class Parts:
    """The arrays of one weight in their mapped files, and what makes a QuantizedArray [k, features] of them.

    Attributes:
      build: a traceable function of `arrays` and `static`.
      arrays: its arrays.
      static: its other arguments, hashable.
      stacked: how many of the arrays, from the first on, have a leading axis that counts weights.
      order: x's features in the order of the rows, if that is not 0, 1, 2, ...
    """

    build: Callable[..., QuantizedArray]
    arrays: tuple[Any, ...]
    static: tuple[Any, ...] = ()
    stacked: int = 0
    order: np.ndarray | None = None

    def read(self, pack: bool) -> QuantizedArray | PackedWeight | PermutedWeight:
        """The weight on the default device, from one computation."""
        made = _made(self.build, self.static, self.stacked, pack, jax.device_put(self.arrays))
        return made if self.order is None else PermutedWeight(made, jax.device_put(self.order))


@one_computation(0, 1, 2, 3)
def _made(
    build: Callable[..., QuantizedArray], static: tuple[Any, ...], stacked: int, pack: bool, arrays: tuple[Any, ...]
) -> Any:
    def one(mapped: tuple[Any, ...]) -> Any:
        q = build(*mapped, *arrays[stacked:], *static)
        return packed(q) if pack else q

    # One weight of a stack after the other: unpacked elements take 4 bytes each.
    return jax.lax.map(one, arrays[:stacked]) if stacked else one(())


def packed(q: QuantizedArray) -> QuantizedArray | PackedWeight:
    """The packed weight; `q` itself if kernels do not take its groups."""
    k, groups = q.shape[0], q.scale.shape[0]
    return prepack(q) if groups == 1 or k // groups % min(GROUP_SIZES) == 0 else q


@dataclasses.dataclass(frozen=True)
class Stored:
    """A weight as a checkpoint stores it.

    Attributes:
      name: its name in the mapping that `load_checkpoint` returns.
      format: how it is stored, e.g. "gptq", "awq", "mxfp4"; "array" for one that is not quantized.
      shape: the shape of the value: [k, features] or [experts, k, features] if it is quantized.
      tensors: the names of its tensors in the files.
      bias: the name of the bias that a product with it adds; None if the checkpoint has none.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    tensors: tuple[str, ...]
    bias: str | None
    parts: Callable[[], Parts] | None = dataclasses.field(default=None, repr=False, compare=False)


class Module:
    """The tensors of one module (layer) of a checkpoint, by the ends of their names.

    Attributes:
      stem: what their names begin with, e.g. "model.layers.0.mlp.up_proj".
      about: what the checkpoint says about its quantization.
    """

    def __init__(self, stem: str, tensors: Tensors, about: Description):
        self.stem, self.about, self._tensors = stem, about, tensors

    def has(self, *ends: str) -> bool:
        """Whether it has all of these."""
        return all(self.stem + end in self._tensors for end in ends)

    def dtype(self, end: str) -> str:
        return self._tensors[self.stem + end].dtype.name

    def shape(self, end: str) -> tuple[int, ...]:
        return self._tensors[self.stem + end].shape

    def array(self, end: str) -> np.ndarray:
        """A read-only view of a tensor in its mapped file."""
        return self._tensors.array(self.stem + end)

    def stored(
        self,
        format: str,
        shape: Iterable[int],
        ends: Iterable[str],
        parts: Callable[[], Parts],
        *,
        end: str = ".weight",
        bias: str = ".bias",
    ) -> Stored:
        """The weight that is made of the tensors with these ends, those that it has."""
        tensors = tuple(self.stem + e for e in ends if self.has(e))
        stem = self.stem
        return Stored(stem + end, format, tuple(shape), tensors, stem + bias if self.has(bias) else None, parts)

    def require(self, *ends: str) -> None:
        """Raises CheckpointError unless it has all of these."""
        for end in ends:
            if not self.has(end):
                present = next(name for name in self._tensors if name.startswith(self.stem))
                raise CheckpointError(f"{present!r} without {self.stem + end!r}")

    def check(self, valid: bool, *ends: str, because: str) -> None:
        """Raises CheckpointError, with the dtypes and shapes of these tensors, unless `valid`."""
        if not valid:
            shown = ", ".join(f"{end[1:]} {self.dtype(end)}{list(self.shape(end))}" for end in ends if self.has(end))
            raise CheckpointError(f"{self.stem!r} with {shown}: {because}")

    def contradicts(self, found: str, *fields: str) -> CheckpointError:
        """The error that `found` is not what the checkpoint's description says."""
        return CheckpointError(f"{self.about.says(*fields)}, but {self.stem!r} {found}")

    def is_said(self, found: str, *methods: str) -> None:
        """Raises CheckpointError if the checkpoint says that it has another method than those that store `found`."""
        if self.about.method is not None and self.about.method not in methods:
            raise self.contradicts(f"is stored as {found}", "format", "checkpoint_format")
