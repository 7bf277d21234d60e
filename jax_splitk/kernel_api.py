"""The interface for kernels of your own: families, the parts of their plans, and the problems that they compute.

Everything else in `jax_splitk`'s folders is internal, and may change in any version.
"""

from jax_splitk.kernels import CudaFamily, Family, field_refusal, register
from jax_splitk.kernels.device.structs import Divisor, Struct
from jax_splitk.problems.conv_epilogue import ConvEpilogueProblem
from jax_splitk.problems.conv_passes import ConvDgradProblem, ConvFpropProblem
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.problems.dot_general import DotProblem
from jax_splitk.problems.quantized_epilogue import QuantizedEpilogueProblem
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.problems.quantized_ragged import QuantizedRaggedDotProblem
from jax_splitk.problems.quantized_ragged_epilogue import QuantizedRaggedEpilogueProblem
from jax_splitk.problems.quantized_transposed import QuantizedTransposedProblem
from jax_splitk.problems.ragged_dot import RaggedDotProblem
from jax_splitk.runtime.plan import Buffer, CustomCall, DevicePlan, Im2colMap, Launch, MapParam, Pointer, TiledMap
from jax_splitk.runtime.target import Target

__all__ = [
    "Buffer",
    "ConvDgradProblem",
    "ConvEpilogueProblem",
    "ConvFpropProblem",
    "ConvWgradProblem",
    "CudaFamily",
    "CustomCall",
    "DevicePlan",
    "Divisor",
    "DotProblem",
    "Family",
    "Im2colMap",
    "Launch",
    "MapParam",
    "Pointer",
    "QuantizedEpilogueProblem",
    "QuantizedMatmulProblem",
    "QuantizedRaggedDotProblem",
    "QuantizedRaggedEpilogueProblem",
    "QuantizedTransposedProblem",
    "RaggedDotProblem",
    "Struct",
    "Target",
    "TiledMap",
    "field_refusal",
    "register",
]
