"""A family for Hopper with a device source of its own (pointwise.cu): NVRTC compiles it, jax_splitk launches it."""

import dataclasses
import pathlib

from jax_splitk.kernel_api import ConvWgradProblem, CudaFamily, Launch, Pointer, Struct, Target, field_refusal

from . import problems

_TILE = 16  # size of a tile of dW, in both dimensions; pointwise.cu has the same


@dataclasses.dataclass(frozen=True)
class Config:
    """The part of a plan that the tuner may choose: how many pixels go through shared memory at a time."""

    rows: int


class PointwiseCuda(CudaFamily[ConvWgradProblem, Config]):
    name = "pointwise_cuda"
    ABI = 1
    # An absolute path: relative names are files of jax_splitk. The compiler looks for headers beside it, then in
    # jax_splitk/kernels.
    file = str(pathlib.Path(__file__).with_name("pointwise.cu"))

    def problem_refusal(self, problem: ConvWgradProblem) -> str | None:
        return problems.refusal(problem)

    def config_refusal(self, problem: ConvWgradProblem, config: Config) -> str | None:
        return field_refusal(config, rows=(16, 32, 64))

    def candidates(self, problem: ConvWgradProblem, target: Target) -> list[Config]:
        return [Config(rows) for rows in (16, 32, 64)]

    def neighbours(self, problem: ConvWgradProblem, config: Config, target: Target) -> list[Config]:
        return [Config(config.rows // 2), Config(config.rows * 2)]

    def estimate(self, problem: ConvWgradProblem, config: Config, target: Target) -> float:
        """Seconds: this kernel does not use the tensor cores. With tuning on, measurements decide."""
        return problem.flops / 1e12 + 1e-4 / config.rows

    def macros(self, problem: ConvWgradProblem, config: Config) -> dict[str, int]:
        return {"ROWS": config.rows}

    def launches(self, problem: ConvWgradProblem, config: Config) -> tuple[Launch, ...]:
        # `#include "structs.cuh"` gives the device code the same struct.
        sizes = {"channels": problem.in_channels, "out_channels": problem.out_channels}
        args = Struct("Args", {"pixels": problem.reduction_size, **sizes})
        grid = (-(-problem.in_channels // _TILE), -(-problem.out_channels // _TILE), 1)
        return (Launch("pointwise", grid, (_TILE * _TILE, 1, 1), (Pointer(0), Pointer(1), args, Pointer(2))),)


FAMILY = PointwiseCuda(Config)
