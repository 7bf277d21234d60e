"""Safetensors files of trees with quantized weights.

A file that `save_file` wrote is a safetensors file that any reader opens. Each array of the tree is a tensor. A dtype
that the format lacks is stored as bytes; elements of 4 and 2 bits lie two and four a byte, the first in the low bits.
The header's metadata has JSON under the name "jax_splitk": what the bytes mean, and the tree's structure.
"""

import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.core import Tracer

from jax_splitk.quantized import description
from jax_splitk.quantized.permuted import KEY
from jax_splitk.quantized.state import arrays_of, as_like, built, is_quantized, named
from jax_splitk.runtime import disk
from jax_splitk.runtime.safetensors_file import DTYPES, CheckpointError, SafetensorsFile

_METADATA, _VERSION = "jax_splitk", 1
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_BITS = {"int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4}
_LONGEST = 10**6  # items of a sequence: a damaged file may ask for any number
_ALIGNMENT = 8  # bytes, of the first tensor


def save_file(tree: Any, path: str | os.PathLike[str]) -> None:
    """Writes a tree of arrays and quantized weights as one safetensors file, which says what its bytes mean.

    The file is written under another name and renamed, so that readers see all of it or nothing. Arrays are copied from
    their devices one at a time.

    Args:
      tree: a pytree of arrays and numbers of any dtype, PackedWeights, QuantizedArrays, PermutedWeights and
        JoinedWeights. The name of a tensor is the keys to it, joined with dots.
      path: the file, which is replaced if it exists.

    Raises:
      TypeError: a leaf that is no array, or of which this process holds only a part.
      ValueError: two arrays of the same name.
      OSError: the file cannot be written.

    Examples:
      >>> import tempfile
      >>> w = jax_splitk.prepack(jax_splitk.quantize(jnp.ones((128, 256)), "nf4", group_size=32))
      >>> path = tempfile.mkdtemp() + "/weights.safetensors"
      >>> jax_splitk.save_file({"layers": [{"up": w}]}, path)
      >>> jax_splitk.load_file(path)["layers"][0]["up"].qtype
      'nf4'
    """
    arrays: dict[str, Any] = {}
    leaves: dict[str, Any] = {}
    for name, (keys, leaf) in named(tree).items():
        leaves[name] = {"path": [_entry(key) for key in keys]}
        parts = {name: leaf}
        if is_quantized(leaf):
            leaves[name]["weight"] = leaf.static
            parts = {_joined(name, part): array for part, array in arrays_of(leaf).items()}
        for part, array in parts.items():
            if part in arrays:
                raise ValueError(f"a tree with two arrays of the name {part!r}; accepted: names that differ")
            if array is not None:
                arrays[part] = _checked(part, array)
    _write(pathlib.Path(path), arrays, leaves)


def load_file(path: str | os.PathLike[str], like: Any = None) -> Any:
    """Reads a safetensors file.

    Args:
      path: a file that `save_file` wrote, or any other safetensors file.
      like: None, or a tree with the expected structure: weights and arrays, or their shapes (jax.eval_shape). Arrays
        are put where the shardings of its leaves say, if they have any.

    Returns:
      Without `like` the tree that was saved, of dictionaries and lists: tuples become lists, other nodes dictionaries
      of their fields. A file of another writer is a dictionary of arrays by name. Arrays are JAX's; those of a dtype
      that JAX holds only with `jax_enable_x64` are NumPy's.

    Raises:
      ValueError: the file is damaged, or its weights have another layout version; with `like` also another name, type,
        group size, shape or dtype than that of `like`. The message names both.
      OSError: the file cannot be read.

    Examples:
      >>> import tempfile
      >>> path = tempfile.mkdtemp() + "/weights.safetensors"
      >>> jax_splitk.save_file({"layers": [{"norm": jnp.ones(4, jnp.int4)}]}, path)
      >>> jax_splitk.load_file(path)
      {'layers': [{'norm': Array([1, 1, 1, 1], dtype=int4)}]}
    """
    file = SafetensorsFile(os.fspath(path))
    try:
        tree = _tree(file)
    # NumPy parses the name of a dtype as Python's syntax.
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError, SyntaxError) as error:
        raise CheckpointError(f"{file.path}: damaged, or of another version of jax_splitk: {error}") from None
    if like is None:
        return jax.tree.map(lambda x: _placed(x, None), tree)
    return jax.tree.map(_placed, as_like(tree, like, file.path), like)


# ---- writing ---------------------------------------------------------------------------------------------------------


def _entry(key: Any) -> Any:
    """A key of a tree's path in JSON: a sequence's in a list, others as they are, or as text."""
    if isinstance(key, jax.tree_util.SequenceKey):
        return [key.idx]
    value = getattr(key, "key", getattr(key, "name", None))
    return value if type(value) is int else str(value)


def _joined(name: str, part: str) -> str:
    return f"{name}.{part}" if name else part


def _checked(name: str, leaf: Any) -> Any:
    """The leaf as an array that can be written. Raises TypeError if it cannot."""
    array = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    given = f"{name} of type {type(leaf).__name__} and dtype {array.dtype}"
    number = array.dtype == np.bool_ or jnp.issubdtype(array.dtype, jnp.number)
    if isinstance(array, Tracer) or not number:
        raise TypeError(f"{given}; accepted: arrays of numbers (jax.random.key_data makes one of a key)")
    if isinstance(array, jax.Array) and not (array.is_fully_addressable or array.is_fully_replicated):
        raise TypeError(f"{given}, held by several processes; accepted: arrays that this process holds (or use orbax)")
    return array


def _write(path: pathlib.Path, arrays: Mapping[str, Any], leaves: Mapping[str, Any]) -> None:
    bytes_of = {name: _stored_bytes(array) for name, array in arrays.items()}
    dtypes = {name: [x.dtype.name, list(x.shape)] for name, x in arrays.items() if x.dtype not in _NAMES}
    about = {"version": _VERSION, "leaves": leaves, "dtypes": dtypes}
    header: dict[str, Any] = {"__metadata__": {_METADATA: json.dumps(about)}}
    start = 0
    # Readers map tensors: those of wide elements come first, so that all are aligned.
    order = sorted(arrays, key=lambda name: -arrays[name].dtype.itemsize)
    for name in order:
        array, stop = arrays[name], start + bytes_of[name]
        dtype, shape = (_NAMES[array.dtype], list(array.shape)) if name not in dtypes else ("U8", [bytes_of[name]])
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with disk.replacing(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(_stored(np.asarray(arrays[name])))
        file.flush()
        os.fsync(file.fileno())


def _stored_bytes(array: Any) -> int:
    return -(-array.size * _BITS.get(array.dtype.name, 8 * array.dtype.itemsize) // 8)


def _stored(array: np.ndarray) -> bytes:
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    bits = _BITS.get(array.dtype.name)
    if bits is None:
        return data.data  # pyright: ignore[reportReturnType] - a memoryview
    each = 8 // bits
    codes = np.pad(data & (2**bits - 1), (0, -data.size % each)).reshape(-1, each)
    return np.bitwise_or.reduce(codes << np.arange(0, 8, bits, dtype=np.uint8), axis=1).tobytes()


# ---- reading ---------------------------------------------------------------------------------------------------------


def _tree(file: SafetensorsFile) -> Any:
    """The tree in a file, of NumPy arrays, which are views of the file."""
    if _METADATA not in file.metadata:
        return {name: file.array(name) for name in file.tensors}
    about = json.loads(file.metadata[_METADATA])
    if about["version"] != _VERSION:
        raise ValueError(f"version {about['version']!r} of the metadata; accepted: {_VERSION}")
    arrays = {name: _array(file, name, about["dtypes"].get(name)) for name in file.tensors}
    found = [(entry["path"], _leaf(name, entry.get("weight"), arrays)) for name, entry in about["leaves"].items()]
    if arrays:
        raise ValueError(f"tensors {', '.join(arrays)} that belong to no leaf")
    return _nested(found)


def _array(file: SafetensorsFile, name: str, stored: Sequence[Any] | None) -> np.ndarray:
    data = file.array(name)
    if stored is None:
        return data
    dtype, shape = jnp.dtype(stored[0]), tuple(stored[1])
    if (bits := _BITS.get(dtype.name)) is None:
        return data.view(dtype).reshape(shape)
    codes = (data[:, None] >> np.arange(0, 8, bits, dtype=np.uint8)) & np.uint8(2**bits - 1)
    codes = codes.reshape(-1)[: int(np.prod(shape))].reshape(shape)
    if dtype.name.startswith("int"):
        sign = 1 << (bits - 1)
        return ((codes ^ sign).astype(np.int8) - sign).astype(dtype)
    return codes.astype(dtype) if dtype.name.startswith("uint") else codes.view(dtype)


def _leaf(name: str, static: dict[str, Any] | None, arrays: dict[str, np.ndarray]) -> Any:
    """A leaf of the tree; its arrays are taken out of `arrays`."""
    if static is None:
        return arrays.pop(name)
    static = {key: tuple(value) if isinstance(value, list) else value for key, value in static.items()}
    parts = {part: _joined(name, part) for part in (*description.leaf_names(static), *(["order"] * (KEY in static)))}
    try:
        return built(static, {part: arrays.pop(key) for part, key in parts.items() if key in arrays})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"weight {name!r}: {error}") from None


def _nested(found: Sequence[tuple[Sequence[Any], Any]]) -> Any:
    """The tree of leaves with these paths."""
    if [path for path, _ in found] == [[]]:
        return found[0][1]
    below: dict[Any, list[tuple[Sequence[Any], Any]]] = {}
    for path, leaf in found:
        below.setdefault(tuple(path[0]) if isinstance(path[0], list) else path[0], []).append((path[1:], leaf))
    nodes = {key: _nested(those) for key, those in below.items()}
    return list(_in_order(nodes)) if nodes and all(isinstance(key, tuple) for key in nodes) else nodes


def _in_order(nodes: Mapping[tuple[int], Any]) -> Iterator[Any]:
    """The items of a sequence; None in the place of items without leaves."""
    count = max(nodes)[0] + 1
    if count > _LONGEST:
        raise ValueError(f"a sequence of {count} items; accepted: at most {_LONGEST}")
    for i in range(count):
        yield nodes.get((i,))


def _placed(x: Any, like: Any) -> Any:
    """An array of JAX with a copy of the file's bytes, where `like` is, if it says where."""
    array = np.array(x)
    if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
        return array
    sharding = getattr(like, "sharding", None) if getattr(like, "committed", True) else None
    return jnp.asarray(array) if sharding is None else jax.device_put(array, sharding)
