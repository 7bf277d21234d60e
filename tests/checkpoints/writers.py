"""Checkpoints by the published layout of each format, with the values that its library computes.

Nothing here uses the package's readers.
"""

import dataclasses
import json
import pathlib
import struct
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from tests.formats import NF4

BF16, E4M3 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
NAMES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64", "float16": "F16",
    "bfloat16": "BF16", "float32": "F32", "float64": "F64", "float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@dataclasses.dataclass
class Written:
    """A weight in a checkpoint.

    Attributes:
      tensors: its tensors by the ends of their names.
      config: the description of the quantization.
      expected: its values [k, n], or [experts, k, n], in the dtype in which the library computes them.
      name: the end of its name among the values.
      units: how far values may be from `expected`, in units in the last place.
    """

    tensors: dict[str, np.ndarray]
    config: dict[str, Any]
    expected: np.ndarray
    name: str = ".weight"
    units: int = 0


def safetensors(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a safetensors file."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    data = b""
    for name, array in tensors.items():
        body = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": NAMES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(body)],
        }
        data += body
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def write(
    folder: pathlib.Path, tensors: Mapping[str, np.ndarray], config: Mapping[str, Any] | None, file: str = "model"
) -> pathlib.Path:
    """A folder with one file, and config.json with this description of the quantization."""
    folder.mkdir(exist_ok=True)
    (folder / f"{file}.safetensors").write_bytes(safetensors(tensors))
    if config is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": dict(config)}))
    return folder


def save(folder: pathlib.Path, written: Written, stem: str = "layers.0.up") -> pathlib.Path:
    """`write` of one weight."""
    return write(folder, {stem + end: array for end, array in written.tensors.items()}, written.config)


def words(elements: np.ndarray, bits: int, axis: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """int32 words: position i of a word has bits i * bits on, and holds the element order[i] of those that share it."""
    elements, count = np.moveaxis(elements, axis, -1), 32 // bits
    whole = np.pad(elements, [(0, 0)] * (elements.ndim - 1) + [(0, -elements.shape[-1] % count)])
    parts = whole.astype(np.uint32).reshape(*elements.shape[:-1], -1, count)[..., order or range(count)]
    packed = np.bitwise_or.reduce(parts << np.arange(0, 32, bits, dtype=np.uint32), -1)
    return np.moveaxis(packed.view(np.int32), -1, axis)


def product(elements: np.ndarray, scale: np.ndarray, dtype: Any) -> np.ndarray:
    """The product in float64, rounded once."""
    return (elements * scale.astype(np.float64)).astype(dtype)


def scales(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any = np.float16) -> np.ndarray:
    return (rng.uniform(0.5, 2, shape) / 64).astype(dtype)


def codes_around(rng: np.random.Generator, zeros: np.ndarray, shape: tuple[int, ...], bits: int) -> np.ndarray:
    """Unsigned elements of a weight whose mean is near 0."""
    wide = 2.0 ** (bits - 4)
    return np.clip(np.rint(zeros + 2 * wide * rng.standard_normal(shape)), 0, 2**bits - 1).astype(np.int64)


def gptq(
    rng: np.random.Generator, k: int, n: int, group: int, *, bits: int = 4, version: int = 1, symmetric: bool = False,
    act_order: bool = False, dtype: Any = np.float16, g_idx: bool = True,
) -> Written:  # fmt: skip
    size = k if group == -1 else group
    groups, middle = -(-k // size), 2 ** (bits - 1)
    low = 1 if version == 1 else 0
    spread = middle // 2
    zeros = rng.integers(middle - spread, middle + spread + 1, (groups, n))
    zeros[0, :2] = low, low + 2**bits - 1
    if symmetric:
        zeros[:] = middle
    index = np.arange(k) // size
    if act_order:
        index = rng.permutation(index)
    scale = scales(rng, (groups, n), dtype)
    codes = codes_around(rng, zeros[index], (k, n), bits)
    expected = product(codes - zeros[index], scale[index], dtype)
    tensors = {
        ".qweight": words(codes, bits, 0),
        ".qzeros": words(zeros - (1 if version == 1 else 0), bits, 1),
        ".scales": scale,
    }
    if g_idx:
        tensors[".g_idx"] = index.astype(np.int32)
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order, "sym": symmetric}
    config["checkpoint_format"] = "gptq" if version == 1 else "gptq_v2"
    return Written(tensors, config, expected)


def awq(rng: np.random.Generator, k: int, n: int, group: int, *, symmetric: bool = False) -> Written:
    zeros = np.full((k // group, n), 8) if symmetric else rng.integers(0, 16, (k // group, n))
    codes = rng.integers(0, 16, (k, n))
    scale = scales(rng, (k // group, n))
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    expected = product(codes - zeros.repeat(group, 0), scale.repeat(group, 0), np.float16)
    tensors = {".qweight": words(codes, 4, 1, order), ".qzeros": words(zeros, 4, 1, order), ".scales": scale}
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Written(tensors, config, expected)


def pack_quantized(
    rng: np.random.Generator, k: int, n: int, group: int | None, *, bits: int = 4, zeros: str | None = None,
    act_order: bool = False, dtype: Any = BF16,
) -> Written:  # fmt: skip
    """`zeros`: None, "packed" or "int8" (as older versions have them). `group` None: one scale for each n."""
    size = k if group is None else group
    groups, half = -(-k // size), 2 ** (bits - 1)
    codes = rng.integers(-half, half, (n, k))
    zero = rng.integers(-half, half, (n, groups)) if zeros else np.zeros((n, groups), np.int64)
    scale = scales(rng, (n, groups), dtype)
    index = np.arange(k) // size
    if act_order:
        index = rng.permutation(index)
    expected = product((codes - zero[:, index]).T, scale[:, index].T, dtype)
    tensors = {
        ".weight_packed": words(codes + half, bits, 1),
        ".weight_scale": scale,
        ".weight_shape": np.array([n, k], np.int64),
    }
    if zeros == "packed":
        tensors[".weight_zero_point"] = words(zero + half, bits, 0)
    elif zeros == "int8":
        tensors[".weight_zero_point"] = zero.astype(np.int8)
    if act_order:
        tensors[".weight_g_idx"] = index.astype(np.int32)
    strategy = {"strategy": "channel" if group is None else "group", "group_size": group}
    weights = {"num_bits": bits, "type": "int", "symmetric": not zeros, **strategy}
    return Written(tensors, compressed("pack-quantized", weights), expected)


def compressed(form: str, weights: Mapping[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": dict(weights)}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": []}


def stacked(each: list[Written]) -> Written:
    """Experts along a leading dimension."""
    tensors = {end: np.stack([one.tensors[end] for one in each]) for end in each[0].tensors}
    if ".weight_shape" in tensors:
        tensors[".weight_shape"] = np.array([len(each), *each[0].tensors[".weight_shape"]], np.int64)
    return Written(tensors, each[0].config, np.stack([one.expected for one in each]))


def nf4(
    rng: np.random.Generator, k: int, n: int, *, block: int = 64, nested: bool = False, storage: Any = np.uint8
) -> Written:
    codes = rng.integers(0, 16, n * k)
    count = -(-n * k // block)
    tensors = {}
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": [n, k]}
    if nested:
        levels = rng.integers(0, 256, count).astype(np.uint8)
        table = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
        outer = rng.uniform(0.01, 0.05, -(-count // 256)).astype(np.float32)
        offset = 0.07324218
        absmax = table[levels] * outer.repeat(256)[:count] + np.float32(offset)
        tensors |= {".weight.absmax": levels, ".weight.nested_absmax": outer, ".weight.nested_quant_map": table}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    else:
        absmax = rng.uniform(0.01, 0.2, count).astype(np.float32)
        tensors[".weight.absmax"] = absmax
    high, low = np.pad(codes, (0, n * k % 2)).reshape(-1, 2).T
    packed = (high << 4 | low).astype(np.uint8)
    table = np.array(NF4, np.float32)
    expected = (table[codes] * absmax.repeat(block)[: n * k]).reshape(n, k).T
    tensors[".weight"] = packed[:, None].view(np.uint8) if storage == np.uint8 else packed.view(storage)[:, None]
    tensors[".weight.quant_map"] = table
    tensors[".weight.quant_state.bitsandbytes__nf4"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    return Written(tensors, config, expected)


def bytes_of(codes: np.ndarray) -> np.ndarray:
    """4-bit elements [..., k], two a byte, the first in the low half."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)


def mxfp4(
    rng: np.random.Generator, experts: int, k: int, n: int, *, exponents: tuple[int, int] = (110, 135)
) -> Written:
    """gpt-oss's experts."""
    codes = rng.integers(0, 16, (experts, n, k))
    scale = rng.integers(*exponents, (experts, n, k // 32)).astype(np.uint8)
    powers = np.exp2(scale.astype(np.float64) - 127).repeat(32, -1)
    expected = product(E2M1[codes], powers, BF16).swapaxes(1, 2)
    blocks = bytes_of(codes).reshape(experts, n, k // 32, 16)
    return Written({"_blocks": blocks, "_scales": scale}, {"quant_method": "mxfp4"}, expected, "")


def nvfp4(rng: np.random.Generator, k: int, n: int, *, library: str) -> Written:
    """`library`: "compressed-tensors" or "modelopt"."""
    codes = rng.integers(0, 16, (n, k))
    scale = rng.uniform(0.1, 448, (n, k // 16)).astype(E4M3)
    divides = library == "compressed-tensors"
    whole = np.float32(rng.uniform(2000, 9000) if divides else rng.uniform(1e-4, 5e-4))
    each = scale.astype(np.float32).repeat(16, 1)
    expected = (E2M1[codes] * (each / whole if divides else each * whole)).T
    if divides:
        tensors = {".weight_packed": bytes_of(codes), ".weight_scale": scale, ".weight_global_scale": whole[None]}
        weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
        # A product with a reciprocal.
        return Written(tensors, compressed("nvfp4-pack-quantized", weights), expected, units=2)
    tensors = {".weight": bytes_of(codes), ".weight_scale": scale, ".weight_scale_2": np.array(whole)}
    return Written(tensors, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, expected)


def fp8_blocks(rng: np.random.Generator, k: int, n: int, block: tuple[int, int] = (128, 128)) -> Written:
    weight = rng.standard_normal((n, k)).astype(E4M3)
    scale = rng.uniform(0.01, 0.1, (-(-n // block[0]), -(-k // block[1]))).astype(np.float32)
    each = scale.repeat(block[0], 0).repeat(block[1], 1)[:n, :k]
    expected = (weight.astype(np.float32) * each).T
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block), "activation_scheme": "dynamic"}
    return Written({".weight": weight, ".weight_scale_inv": scale}, config, expected)


def fp8_compressed_blocks(rng: np.random.Generator, k: int, n: int) -> Written:
    """compressed-tensors' float-quantized in blocks of 16 x 32, which older versions describe so."""
    written = fp8_blocks(rng, k, n, (16, 32))
    written.tensors[".weight_scale"] = written.tensors.pop(".weight_scale_inv")
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "16x32"}
    return Written(written.tensors, compressed("float-quantized", weights), written.expected)


def fp8(rng: np.random.Generator, k: int, n: int, *, shape: tuple[int, ...]) -> Written:
    """compressed-tensors' float-quantized; `shape` of the scales: (n, 1), (1,) or ()."""
    weight = rng.standard_normal((n, k)).astype(E4M3)
    scale = scales(rng, shape, BF16)
    expected = product(weight.astype(np.float64), scale, BF16).T
    weights = {"num_bits": 8, "type": "float", "symmetric": True}
    return Written({".weight": weight, ".weight_scale": scale}, compressed("float-quantized", weights), expected)


def int8(rng: np.random.Generator, k: int, n: int, *, zeros: bool = False) -> Written:
    weight = rng.integers(-128, 128, (n, k)).astype(np.int8)
    scale = scales(rng, (n, 1), np.float32)
    zero = rng.integers(-128, 128, (n, 1)).astype(np.int8) if zeros else np.zeros((n, 1), np.int8)
    expected = ((weight - zero.astype(np.float32)) * scale).T
    tensors = {".weight": weight, ".weight_scale": scale, ".weight_zero_point": zero}
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": not zeros}
    return Written(tensors, compressed("int-quantized", weights), expected)
