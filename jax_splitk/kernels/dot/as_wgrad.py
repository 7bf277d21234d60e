"""Matrix products that are weight gradients: lhs [k, m] and rhs [k, n] are the operands of a 1x1 convolution over k
pixels, with m input and n output channels. So the families of weight gradients compute them too.
"""

import dataclasses
from typing import Any, ClassVar

from jax_splitk.kernels.dot import refusals
from jax_splitk.kernels.family import Family
from jax_splitk.kernels.wgrad import host, tf32
from jax_splitk.problems.conv_wgrad import ConvWgradProblem
from jax_splitk.problems.dot_general import DotProblem
from jax_splitk.runtime.plan import CustomCall, DevicePlan
from jax_splitk.runtime.target import Target


def _wgrad(problem: DotProblem) -> ConvWgradProblem:
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


class AsWgrad(Family[DotProblem, Any]):
    """A family of weight gradients, for those products."""

    inner: ClassVar[Family[ConvWgradProblem, Any]]

    def target_refusal(self, target: Target | None) -> str | None:
        return self.inner.target_refusal(target)

    def problem_refusal(self, problem: DotProblem) -> str | None:
        if (problem.batch, problem.lhs_order, problem.rhs_order) != (1, "bkm", "bkn"):
            given = f"batch {problem.batch}, lhs {problem.lhs_order} and rhs {problem.rhs_order}"
            return f"{given}; accepted: 1, bkm and bkn"
        if problem.epilogue:
            return f"{problem.epilogue}; accepted: the product alone"
        return self.inner.problem_refusal(_wgrad(problem))

    def config_refusal(self, problem: DotProblem, config: Any) -> str | None:
        return self.inner.config_refusal(_wgrad(problem), config)

    def unmeasured_refusal(self, problem: DotProblem) -> str | None:
        return self.inner.unmeasured_refusal(_wgrad(problem))

    def candidates(self, problem: DotProblem, target: Target) -> list[Any]:
        return list(self.inner.candidates(_wgrad(problem), target))

    def neighbours(self, problem: DotProblem, config: Any, target: Target) -> list[Any]:
        return list(self.inner.neighbours(_wgrad(problem), config, target))

    def estimate(self, problem: DotProblem, config: Any, target: Target) -> float:
        return self.inner.estimate(_wgrad(problem), config, target)

    def workspace_bytes(self, problem: DotProblem, config: Any) -> int:
        return self.inner.workspace_bytes(_wgrad(problem), config)

    def plan(self, problem: DotProblem, config: Any) -> DevicePlan | CustomCall:
        plan = self.inner.plan(_wgrad(problem), config)
        label = f"{self.name} {config}"
        return dataclasses.replace(plan, label=label) if isinstance(plan, DevicePlan) else plan


class Tf32(AsWgrad):
    """float32 on the tf32 tensor cores, which take operands with k contiguous only: wgrad_tf32 transposes them."""

    name = "dot_tf32"
    implementation = "cutlass"
    ABI = tf32.FAMILY.ABI
    inner = tf32.FAMILY

    def problem_refusal(self, problem: DotProblem) -> str | None:
        return super().problem_refusal(problem) or refusals.tf32(problem)


class Host(AsWgrad):
    """On the CPU."""

    name = "dot_host"
    implementation = "host"
    ABI = host.FAMILY.ABI
    inner = host.FAMILY


TF32 = Tf32(tf32.Config)
HOST = Host(host.Config)
