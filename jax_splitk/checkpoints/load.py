"""`load_checkpoint`: the weights of a model's checkpoint by name."""

import collections
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, get_args

import jax
import numpy as np

from jax_splitk.checkpoints import awq, bitsandbytes, eight_bits, gptq, mxfp4, nvfp4, pack_quantized
from jax_splitk.checkpoints.folder import Description, Tensors, open_files
from jax_splitk.checkpoints.weight import Module, Stored
from jax_splitk.runtime.arguments import quoted, require
from jax_splitk.runtime.safetensors_file import CheckpointError
from jax_splitk.tuning import progress

_FORMATS = (gptq, awq, pack_quantized, mxfp4, nvfp4, bitsandbytes, eight_bits)
Method = Literal["gptq", "gptq_v2", "awq", "compressed-tensors", "bitsandbytes", "mxfp4", "modelopt", "fp8"]
# What `quant_method` may be in a checkpoint: these and a few more.
_METHODS = tuple(dict.fromkeys(method for module in _FORMATS for method in module.METHODS))
# The ends of the names of tensors that belong to quantized weights.
_PARTS = (
    *(".qweight", ".qzeros", ".scales", ".g_idx"),
    *(".weight_packed", ".weight_shape", ".weight_scale", ".weight_zero_point", ".weight_g_idx"),
    *(".weight_global_scale", ".weight_scale_2", ".weight_scale_inv"),
    *(".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"),
)
_QUANTIZED = ("uint8", "int8", "float8_e4m3fn", "float8_e5m2")


class Checkpoint(Mapping[str, Any]):
    """The weights of a checkpoint by name, a mapping that `load_checkpoint` makes.

    A weight is read when it is looked up, and again at the next look-up: nothing is kept. `read` reads several into a
    dict. A Checkpoint is no pytree; the dict is one.

    Attributes:
      stored: how each weight is stored: a mapping of names to objects with `name`, `format`, `shape`, `tensors` (the
        names of its tensors in the files) and `bias` (the name of the bias that belongs to it, or None).

    Examples:
      >>> import pathlib
      >>> header = b'{"norm.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
      >>> _ = pathlib.Path("w.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
      >>> checkpoint = jax_splitk.load_checkpoint("w.safetensors")
      >>> checkpoint, checkpoint.stored["norm.weight"].shape
      (Checkpoint(1 array, pack=False), (1,))
    """

    def __init__(self, tensors: Tensors, stored: Mapping[str, Stored], pack: bool):
        self._tensors, self._pack = tensors, pack
        self.stored = stored

    def __getitem__(self, name: str) -> Any:
        stored = self.stored[name]
        value = self._value(stored)
        if not isinstance(value, np.ndarray):
            # The host's memory holds the pages of one weight at a time.
            value = jax.block_until_ready(value)
            self._tensors.release(stored.tensors)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def __repr__(self) -> str:
        counts = collections.Counter(stored.format for stored in self.stored.values())
        return f"Checkpoint({', '.join(f'{count} {name}' for name, count in counts.items())}, pack={self._pack})"

    def read(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Reads weights, with a bar on a terminal (`JAX_SPLITK_PROGRESS=off`: none).

        Args:
          names: their names; None for all.

        Raises:
          KeyError: a name that the checkpoint does not have.
          CheckpointError: as `load_checkpoint`, for what only values show.
        """
        wanted = list(self.stored if names is None else names)
        sizes = {name: self._bytes(self.stored[name]) for name in wanted}
        bar = None
        if progress.shows_bar():
            from jax_splitk.tuning.bar import Bar  # noqa: PLC0415 - it imports tqdm

            bar = Bar(max(1, sum(sizes.values())), "reading weights")
        found = {}
        try:
            for name, following in zip(wanted, [*wanted[1:], None], strict=False):
                if following is not None:
                    self._tensors.prefetch(self.stored[following].tensors)
                found[name] = self[name]
                if bar is not None:
                    bar.set_postfix_str(name, refresh=False)
                    bar.update(sizes[name])
        finally:
            if bar is not None:
                bar.close()
        return found

    def _value(self, stored: Stored) -> Any:
        if stored.parts is not None:
            return stored.parts().read(self._pack)
        array = self._tensors.array(stored.name)
        # JAX has no 64 bits by default.
        return jax.device_put(array) if self._pack and array.dtype.itemsize <= 4 else array

    def _bytes(self, stored: Stored) -> int:
        found = (self._tensors[name] for name in stored.tensors)
        return sum(tensor.stop - tensor.start for tensor in found)


def load_checkpoint(path: str | os.PathLike[str], *, pack: bool = False, format: Method | None = None) -> Checkpoint:
    """Opens a model's checkpoint, quantized or not: a mapping of names to weights.

    Safetensors files are mapped, and their headers read. A weight is read when it is looked up (`checkpoint[name]`), or
    with others by `checkpoint.read()`, which returns a dict, a pytree. Reading needs little memory of the host: 4-bit
    elements go to the default device as they are in the file, and are unpacked there.

    A quantized weight has the name that it would have without quantization ("model.layers.0.mlp.up_proj.weight", for
    gpt-oss "model.layers.0.mlp.experts.gate_up_proj"), and the orientation of a Dense kernel, [k, features] or
    [experts, k, features], the transpose of a PyTorch weight. Biases and all that is not quantized are arrays as they
    are in the file; a weight of PyTorch's Linear is [features, k].

    | Format | Value | Equal to the values of |
    |---|---|---|
    | GPTQ, 4 or 8 bits, version 1 and 2 | int4 or int8; with zero points uint4 | AutoGPTQ, GPTQModel |
    | AWQ (gemm) | int4; with zero points uint4 | AutoAWQ |
    | compressed-tensors: pack-, int-, float- and mxfp8-quantized | int4, int8, float8_e4m3fn | compressed-tensors |
    | bitsandbytes nf4, also double quantized | nf4 | bitsandbytes |
    | MXFP4: gpt-oss, mxfp4-pack-quantized | float4_e2m1fn, groups of 32, scales of E8M0 | Transformers |
    | NVFP4: nvfp4-pack-quantized, ModelOpt | float4_e2m1fn, groups of 16, scales of e4m3 | either library |
    | fp8: blocks (DeepSeek), one scale a feature or a weight | float8_e4m3fn | either library |

    The values are equal bit for bit: `dequantize(weight, dtype)` rounds as the library does. One exception:
    compressed-tensors divides by NVFP4's global scale. Here its reciprocal is a factor, so a float32 value may be two
    units in the last place away.

    A product is `x @ weight`. Act-order (GPTQ's `desc_act`): the value is a PermutedWeight, which has the order of x's
    features.

    gpt-oss's `gate_up_proj` has the gates in even features and the linear parts in odd ones, as in the file;
    `join_gate_up` takes it with order="interleaved".

    Args:
      path: a folder as Hugging Face's libraries write it, with config.json and one or several safetensors files, or one
        such file. The files must not change while they are in use.
      pack: True puts every weight on the default device, and packs quantized ones (`jax_splitk.prepack`). Groups of
        more than 128 become groups of 128 of equal scale. A weight whose groups are no multiple of 16 stays a
        QuantizedArray. With False quantized weights are QuantizedArrays on the default device, others NumPy arrays in
        the mapped file.
      format: the quantization method, instead of what the files say: "gptq" (version 1), "gptq_v2", "awq",
        "compressed-tensors", "bitsandbytes", "mxfp4", "modelopt" or "fp8". GPTQ's zero points are then not compared
        with its versions.

    Returns:
      A Checkpoint.

    Raises:
      FileNotFoundError: no such folder or file, or a missing file of the index.
      CheckpointError (a ValueError): damaged files; a format that is not read; files that contradict themselves, which
        the message shows. Values are checked as well, when they are read: GPTQ's zero points that look like those of
        the other version, global scales of NVFP4 that look like the other library's or differ within a weight.

    Examples:
      >>> import pathlib
      >>> header = b'{"norm.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
      >>> _ = pathlib.Path("w.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
      >>> jax_splitk.load_checkpoint("w.safetensors")["norm.weight"].tolist()
      [0.0]
    """
    require(isinstance(pack, bool), f"pack={pack!r}", "True or False", TypeError)
    require(format is None or format in get_args(Method), f"format={format!r}", quoted(get_args(Method)))
    tensors, about = open_files(path)
    if format is not None:
        about = Description(format, {"quant_method": format}, "the argument format", asked=True)
    if about.method is not None and about.method not in _METHODS:
        raise CheckpointError(f"{about.says()}; accepted: {', '.join(_METHODS)}")
    return Checkpoint(tensors, _found(tensors, about), pack)


def _found(tensors: Tensors, about: Description) -> dict[str, Stored]:
    """All weights, in the order of their bytes."""
    found: dict[str, Stored] = {}
    used: dict[str, str] = {}
    for module, kind in _candidates(tensors, about):
        if (stored := kind.find(module)) is not None:
            if stored.name in found or (stored.name in tensors and stored.name not in stored.tensors):
                raise CheckpointError(f"{stored.name!r} is stored twice: {', '.join(stored.tensors)}, and otherwise")
            found[stored.name] = stored
            used |= dict.fromkeys(stored.tensors, stored.name)
    if about.method is not None and not found:
        raise CheckpointError(f"{about.says()}, but no tensor is quantized so")
    arrays = {}
    for name in tensors:
        if name not in used:
            _check_array(name, tensors, about)
            stem, dot, end = name.rpartition(".")
            bias = f"{stem}.bias" if end == "weight" and dot and f"{stem}.bias" in tensors else None
            arrays[name] = Stored(name, "array", tensors[name].shape, (name,), bias)
    place = {name: i for i, name in enumerate(tensors)}
    ordered = sorted((*found.values(), *arrays.values()), key=lambda stored: place[stored.tensors[0]])
    return {stored.name: stored for stored in ordered}


def _candidates(tensors: Tensors, about: Description) -> Iterator[tuple[Module, Any]]:
    """Modules with a tensor whose name ends as a format's tensors of elements do, and the format."""
    for name in tensors:
        for kind in _FORMATS:
            for key in kind.KEYS:
                if name.endswith(key):
                    yield Module(name.removesuffix(key), tensors, about), kind


def _check_array(name: str, tensors: Tensors, about: Description) -> None:
    """Raises CheckpointError for a tensor without a format that is a part of a quantized weight."""
    if about.method is not None and name.endswith(_PARTS):
        raise CheckpointError(f"{name!r} belongs to no weight of a format that is read")
    dtype = tensors[name].dtype.name
    if about.method is not None and name.endswith(".weight") and dtype in _QUANTIZED:
        raise CheckpointError(f"{name!r} is {dtype}{list(tensors[name].shape)}, without scales")
