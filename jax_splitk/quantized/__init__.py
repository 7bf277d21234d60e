"""Weights of few bits: quantization and the layout of the kernels.

The product, `jax_splitk.quantized_matmul`, is in the module `matmul`, which is not imported here: kernels import this
package, and the product is what selects among them.
"""

from jax_splitk.quantized.array import QuantizedArray as QuantizedArray
from jax_splitk.quantized.array import dequantize as dequantize
from jax_splitk.quantized.array import quantize as quantize
from jax_splitk.quantized.packing import PackedWeight as PackedWeight
from jax_splitk.quantized.packing import prepack as prepack
from jax_splitk.quantized.packing import unpack as unpack
