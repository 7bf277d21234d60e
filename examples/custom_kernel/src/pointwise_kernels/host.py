"""A family for the CPU with an FFI handler of its own (handler.cc, bound with pybind11)."""

import dataclasses

import jax
import numpy as np

from jax_splitk.kernel_api import ConvWgradProblem, CustomCall, Family, Target, field_refusal

from . import _handler, problems

# The name of the custom call ends in the version of its attributes.
TARGET = "pointwise_kernels_host_v1"
jax.ffi.register_ffi_target(TARGET, _handler.pointwise(), platform="cpu")


@dataclasses.dataclass(frozen=True)
class Config:
    """The part of a plan that the tuner may choose: how many input channels are computed at a time."""

    block: int


class PointwiseHost(Family[ConvWgradProblem, Config]):
    """A family whose plan is a custom call: there is nothing to compile."""

    name = "pointwise_host"
    implementation = "host"
    ABI = 1

    def problem_refusal(self, problem: ConvWgradProblem) -> str | None:
        return problems.refusal(problem)

    def config_refusal(self, problem: ConvWgradProblem, config: Config) -> str | None:
        return field_refusal(config, block=range(1, 4097))

    def candidates(self, problem: ConvWgradProblem, target: Target) -> list[Config]:
        return [Config(8), Config(64)]

    def neighbours(self, problem: ConvWgradProblem, config: Config, target: Target) -> list[Config]:
        return [Config(config.block // 2), Config(config.block * 2)]

    def estimate(self, problem: ConvWgradProblem, config: Config, target: Target) -> float:
        """Seconds, on one thread."""
        return problem.flops / 4e9 + 1e-5 / config.block

    def plan(self, problem: ConvWgradProblem, config: Config) -> CustomCall:
        return CustomCall(TARGET, {"block": np.int64(config.block)}, workspace_bytes=0)


FAMILY = PointwiseHost(Config)
