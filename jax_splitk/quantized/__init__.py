"""Weights of few bits: quantization, the layout of the kernels, and the product with a float activation."""

from jax_splitk.quantized.array import QuantizedArray as QuantizedArray
from jax_splitk.quantized.array import dequantize as dequantize
from jax_splitk.quantized.array import quantize as quantize
from jax_splitk.quantized.matmul import quantized_matmul as quantized_matmul
from jax_splitk.quantized.packing import PackedWeight as PackedWeight
from jax_splitk.quantized.packing import prepack as prepack
from jax_splitk.quantized.packing import unpack as unpack
