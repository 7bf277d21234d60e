"""Split-k convolution weight gradients and mixed-precision GEMMs for JAX on NVIDIA Hopper."""

from jax_splitk.ops.conv import conv_general_dilated as conv_general_dilated
from jax_splitk.ops.conv import conv_wgrad as conv_wgrad
from jax_splitk.ops.explain import explain as explain
from jax_splitk.ops.exporting import EXPORT_CHECKS as EXPORT_CHECKS
from jax_splitk.ops.quantized_matmul import quantized_matmul as quantized_matmul
from jax_splitk.ops.tune import tune as tune
from jax_splitk.ops.tune import tune_problems as tune_problems
from jax_splitk.quantized import PackedWeight as PackedWeight
from jax_splitk.quantized import QuantizedArray as QuantizedArray
from jax_splitk.quantized import dequantize as dequantize
from jax_splitk.quantized import prepack as prepack
from jax_splitk.quantized import quantize as quantize
from jax_splitk.quantized import unpack as unpack
from jax_splitk.runtime import registration as registration
from jax_splitk.tuning.decide import FrozenCacheMiss as FrozenCacheMiss
from jax_splitk.tuning.options import options as options
from jax_splitk.tuning.result import TuningResult as TuningResult

registration.register()
