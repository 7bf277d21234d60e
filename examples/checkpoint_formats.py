"""Writes weights as the libraries of quantized checkpoints do: a folder with config.json and a safetensors file.

Each function of `WRITERS` takes a float weight [k, features], and returns its tensors by the ends of their names, and
the description for config.json.
"""

import json

import jax
import numpy as np
from jax import numpy as jnp

from jax_splitk import quantize
from jax_splitk.quantized.formats import FORMATS, nearest, to_codes

GROUP = 64
SAFETENSORS = {"uint8": "U8", "int32": "I32", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32"}
SAFETENSORS |= {"float8_e4m3fn": "F8_E4M3"}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# The table that bitsandbytes writes.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def save(folder, tensors, description):
    """A folder as Hugging Face's libraries write it."""
    header, bodies, end = {}, [], 0
    for name, tensor in tensors.items():
        array = np.asarray(tensor, order="C")
        start, end = end, end + array.nbytes
        header[name] = {"dtype": SAFETENSORS[array.dtype.name], "shape": array.shape, "data_offsets": [start, end]}
        bodies.append(array.tobytes())
    text = json.dumps(header).encode()
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"".join(bodies))
    config = {"model_type": "llama"} | ({"quantization_config": description} if description else {})
    (folder / "config.json").write_text(json.dumps(config))


def words(codes, order=tuple(range(8))):
    """Eight codes along the last axis in an int32, from its low bits up, in this order."""
    eight = np.asarray(codes, np.uint32).reshape(*codes.shape[:-1], -1, 8)[..., list(order)]
    return np.sum(eight << np.arange(0, 32, 4, dtype=np.uint32), axis=-1, dtype=np.uint32).view(np.int32)


def octets(codes):
    """Two codes along the last axis in a byte, the first in its low half."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)


def codes_of(qtype, elements):
    return np.asarray(to_codes(FORMATS[qtype], elements))


def asymmetric(weight):
    """Codes, zero points and scales of uint4."""
    q = quantize(weight, "uint4", group_size=GROUP, symmetric=False, scale_dtype=jnp.float16)
    return codes_of("uint4", q.qvalue), np.asarray(q.zero_point).astype(np.uint32), np.asarray(q.scale)


def gptq(weight):
    codes, zeros, scale = asymmetric(weight)
    order = np.arange(len(codes), dtype=np.int32) // GROUP
    tensors = {".qweight": words(codes.T).T, ".qzeros": words(zeros), ".scales": scale, ".g_idx": order}
    description = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
    return tensors, description | {"checkpoint_format": "gptq_v2"}


def awq(weight):
    codes, zeros, scale = asymmetric(weight)
    tensors = {".qweight": words(codes, AWQ_ORDER), ".qzeros": words(zeros, AWQ_ORDER), ".scales": scale}
    return tensors, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}


def compressed(form, **weights):
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "symmetric": True, **weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": []}


def compressed_tensors(weight):
    q = quantize(weight, "int4", group_size=GROUP, scale_dtype=jnp.bfloat16)
    codes = codes_of("int4", q.qvalue).T
    tensors = {".weight_packed": words(codes), ".weight_scale": q.scale.T}
    tensors[".weight_shape"] = np.array(codes.shape, np.int64)
    return tensors, compressed("pack-quantized", type="int", strategy="group", group_size=GROUP)


def bitsandbytes(weight):
    q = quantize(weight, "nf4", group_size=GROUP, scale_dtype=jnp.float32)
    codes = codes_of("nf4", q.qvalue).T
    state = {"quant_type": "nf4", "blocksize": GROUP, "dtype": "bfloat16", "shape": codes.shape}
    tensors = {
        ".weight": octets(codes.reshape(-1, 2)[:, ::-1]),  # the first element in the high half
        ".weight.absmax": np.asarray(q.scale).T.ravel(),
        ".weight.quant_map": np.array(NF4, np.float32),
        ".weight.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }
    return tensors, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def in_groups(weight, size):
    """The transposed weight in groups of `size`, [features, groups, size], and the largest magnitude of each."""
    groups = np.asarray(weight, np.float32).T
    groups = groups.reshape(len(groups), -1, size)
    return groups, np.abs(groups).max(axis=-1)


def e2m1(groups, scale):
    """Bytes of e2m1 elements [features, k / 2]."""
    elements = nearest(FORMATS["float4_e2m1fn"], jnp.asarray(groups / scale[..., None]))
    return octets(codes_of("float4_e2m1fn", elements).reshape(len(groups), -1))


def mxfp4(weight):
    groups, most = in_groups(weight, 32)
    exponent = np.floor(np.log2(np.maximum(most, 2.0**-100))) - 2  # e2m1's largest exponent is 2
    tensors = {".weight_packed": e2m1(groups, 2.0**exponent), ".weight_scale": (exponent + 127).astype(np.uint8)}
    return tensors, compressed("mxfp4-pack-quantized", type="float", strategy="group", group_size=32)


def nvfp4(weight):
    groups, most = in_groups(weight, 16)
    whole = np.float32(448 * 6 / most.max())  # by which readers divide
    scale = np.maximum(most * whole / 6, 2.0**-6).astype(jnp.float8_e4m3fn)
    tensors = {".weight_packed": e2m1(groups, scale.astype(np.float32) / whole), ".weight_scale": scale}
    tensors[".weight_global_scale"] = np.array([whole])
    return tensors, compressed("nvfp4-pack-quantized", type="float", strategy="tensor_group", group_size=16)


def fp8(weight):
    """DeepSeek's blocks of 128 x 128."""
    rows = np.asarray(weight, np.float32).T
    blocks = [[np.abs(rows[i : i + 128, j : j + 128]).max() for j in range(0, rows.shape[1], 128)]
              for i in range(0, len(rows), 128)]  # fmt: skip
    scale = np.array(blocks, np.float32) / 448
    spread = scale.repeat(128, axis=0)[: len(rows)].repeat(128, axis=1)[:, : rows.shape[1]]
    tensors = {".weight": (rows / spread).astype(jnp.float8_e4m3fn), ".weight_scale_inv": scale}
    description = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    return tensors, description | {"activation_scheme": "dynamic"}


def bfloat16(weight):
    return {".weight": jax.device_get(weight.T.astype(jnp.bfloat16))}, None


WRITERS = {
    "bfloat16": bfloat16,
    "GPTQ": gptq,
    "AWQ": awq,
    "compressed-tensors int4": compressed_tensors,
    "bitsandbytes nf4": bitsandbytes,
    "MXFP4": mxfp4,
    "NVFP4": nvfp4,
    "fp8 in blocks": fp8,
}
