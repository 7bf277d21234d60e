"""Weights of 4 or 8 bits: quantization and the kernels' layout. The product is in `jax_splitk.ops`."""

from jax_splitk.quantized.array import QuantizedArray, dequantize, quantize
from jax_splitk.quantized.joined import JoinedWeight, join_gate_up
from jax_splitk.quantized.packed_weight import PackedWeight, prepack, unpack
from jax_splitk.quantized.permuted import PermutedWeight

__all__ = [
    "JoinedWeight",
    "PackedWeight",
    "PermutedWeight",
    "QuantizedArray",
    "dequantize",
    "join_gate_up",
    "prepack",
    "quantize",
    "unpack",
]
