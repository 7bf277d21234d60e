"""Names of kernels for products with a quantized weight."""

from typing import Any

from jax_splitk.kernels.base.family import Family


class NamedByFormat(Family[Any, Any]):
    """A family whose kernels have the weight's format in their names: `quantized_stream_int4`. Its problems have the
    field `qtype`."""

    def trace_name(self, problem: Any) -> str:
        return f"{super().trace_name(problem)}_{problem.qtype}"
