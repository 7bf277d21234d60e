"""Safetensors files: the header is read, and the bytes of the tensors are mapped, not copied.

A file is: the header's length as a little-endian uint64, a header in JSON, the bytes of the tensors. The header gives
each tensor's dtype, shape, and where its bytes begin and end behind the header
(https://github.com/huggingface/safetensors).
"""

import dataclasses
import json
import math
import mmap
import os
from collections.abc import Iterable
from typing import Any

import numpy as np
from jax import numpy as jnp

_DTYPES = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E5M2": jnp.float8_e5m2,
    "F8_E8M0": jnp.float8_e8m0fnu,
    "U16": np.uint16,
    "I16": np.int16,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    "U32": np.uint32,
    "I32": np.int32,
    "F32": np.float32,
    "U64": np.uint64,
    "I64": np.int64,
    "F64": np.float64,
    "C64": np.complex64,
}
DTYPES = {name: np.dtype(dtype) for name, dtype in _DTYPES.items()}
_LONGEST_HEADER = 100_000_000  # bytes, the format's limit
_PAGE = mmap.ALLOCATIONGRANULARITY


class CheckpointError(ValueError):
    """A checkpoint's files are damaged, contradict each other, or hold a format that is not read."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a file; `start` and `stop` count the file's bytes."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFile:
    """A mapped file.

    Attributes:
      path: the file.
      tensors: its tensors by name, in the order of their bytes.
      metadata: what the writer says about the file, text by name.

    Raises:
      CheckpointError: the file is not a whole safetensors file; the message names it.
    """

    def __init__(self, path: str):
        self.path = path
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little") if size >= 8 else size
            if size < 8 or length > min(size - 8, _LONGEST_HEADER):
                raise self._error(f"a file of {size} bytes with a header of {length}", "a safetensors file")
            header, self.metadata = self._parsed(file.read(length))
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        named = {name: self._tensor(name, entry, 8 + length, size) for name, entry in header.items()}
        self.tensors = dict(sorted(named.items(), key=lambda item: item[1].start))
        end = 8 + length
        for name, tensor in self.tensors.items():
            if tensor.start < end:
                raise self._error(f"tensor {name!r} from byte {tensor.start}", f"{end}, where the one before ends")
            end = tensor.stop

    def array(self, name: str) -> np.ndarray:
        """A read-only view of the tensor in the mapped file."""
        tensor = self.tensors[name]
        if tensor.start == tensor.stop:
            return np.empty(tensor.shape, tensor.dtype)
        return np.ndarray(tensor.shape, tensor.dtype, self._map, tensor.start)

    def prefetch(self, names: Iterable[str]) -> None:
        """Tells the system that the tensors' bytes are needed soon."""
        self._advise(names, mmap.MADV_WILLNEED)

    def release(self, names: Iterable[str]) -> None:
        """Gives the tensors' pages back to the system. Views stay valid: what they need is mapped again."""
        self._advise(names, mmap.MADV_DONTNEED)

    def _advise(self, names: Iterable[str], advice: int) -> None:
        for tensor in map(self.tensors.__getitem__, names):
            start = tensor.start // _PAGE * _PAGE
            if tensor.stop > start:
                self._map.madvise(advice, start, tensor.stop - start)

    def _parsed(self, text: bytes) -> tuple[dict[str, Any], dict[str, str]]:
        def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            if len(found := dict(pairs)) < len(pairs):
                raise ValueError("a name twice")
            return found

        try:
            header = json.loads(text, object_pairs_hook=unique)
            metadata = header.pop("__metadata__", None) or {}
            if not all(isinstance(value, str) for value in metadata.values()):
                raise ValueError("__metadata__ that is not text")
        except (ValueError, AttributeError, TypeError, RecursionError) as error:
            raise self._error(f"a header that is not valid ({error})", "an object of JSON, each name once") from None
        return header, metadata

    def _tensor(self, name: str, entry: Any, begin: int, size: int) -> Tensor:
        dtype, shape, start, stop = self._fields(name, entry)
        if dtype not in DTYPES:
            raise self._error(f"tensor {name!r} of dtype {dtype}", ", ".join(DTYPES))
        expected = math.prod(shape) * DTYPES[dtype].itemsize
        if stop - start != expected or begin + stop > size:
            raise self._error(
                f"tensor {name!r}, {dtype} {shape}, in bytes {start} to {stop} of {size - begin}",
                f"{expected} bytes within the file",
            )
        return Tensor(DTYPES[dtype], shape, begin + start, begin + stop)

    def _fields(self, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
        """dtype, shape, and the first and the last byte."""
        try:
            dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            if isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in (*shape, start, stop)):
                return dtype, shape, start, stop
        except (KeyError, TypeError, ValueError):
            pass
        raise self._error(f"tensor {name!r} as {entry!r}", "dtype, shape and data_offsets")

    def _error(self, given: str, accepted: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {given}; accepted: {accepted}")
