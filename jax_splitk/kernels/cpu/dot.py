"""Matrix products that are weight gradients: lhs [k, m] and rhs [k, n] are the operands of a 1x1 convolution over k
pixels, with m input and n output channels. So the families of weight gradients compute them too.
"""

from typing import Any

from jax_splitk.kernels.base.family import Translated
from jax_splitk.kernels.cpu import wgrad as host
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.problems.dot_general import DotProblem


class AsWgrad(Translated[DotProblem, Any]):
    """A family of weight gradients that computes such products."""

    def translated(self, problem: DotProblem) -> ConvWgradProblem:
        return ConvWgradProblem(
            batch=1,
            input_spatial=(problem.k,),
            output_spatial=(problem.k,),
            kernel_spatial=(1,),
            in_channels=problem.m,
            out_channels=problem.n,
            window_strides=(1,),
            padding=((0, 0),),
            lhs_dilation=(1,),
            rhs_dilation=(1,),
            feature_group_count=1,
            dtype=problem.dtype,
            out_dtype=problem.out_dtype,
            precision=problem.precision,
        )

    def problem_refusal(self, problem: DotProblem) -> str | None:
        if (problem.batch, problem.lhs_order, problem.rhs_order) != (1, "bkm", "bkn"):
            given = f"batch {problem.batch}, lhs {problem.lhs_order} and rhs {problem.rhs_order}"
            return f"{given}; accepted: 1, bkm and bkn"
        if problem.epilogue:
            return f"{problem.epilogue}; accepted: the product alone"
        return super().problem_refusal(problem)

    def why_xla_untuned(self, problem: DotProblem) -> str | None:
        return self.inner.why_xla_untuned(self.translated(problem))


HOST = AsWgrad(host.FAMILY, "dot_host")
