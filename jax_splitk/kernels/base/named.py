"""Names of kernels for products with a quantized weight."""

from typing import Any

from jax_splitk.kernels.base.family import Family
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem


class NamedByFormat(Family[QuantizedMatmulProblem, Any]):
    """A family whose kernels have the weight's format in their names: `quantized_stream_int4`."""

    def trace_name(self, problem: QuantizedMatmulProblem) -> str:
        return f"{super().trace_name(problem)}_{problem.qtype}"
