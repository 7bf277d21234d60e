"""The `host` convolution and gradient of its input: a product of im2col(lhs) and the weight over XLA's CPU threads (see
ffi/host_conv.cc)."""

import dataclasses
import math
from typing import Any

import numpy as np

from jax_splitk.kernels.base import host
from jax_splitk.kernels.base.host import HostFamily, Product
from jax_splitk.kernels.base.passes import forward, of_both_passes
from jax_splitk.kernels.cpu import wgrad as wgrad_host
from jax_splitk.problems.conv_passes import ConvFpropProblem
from jax_splitk.problems.conv_wgrad import ConvProblem
from jax_splitk.runtime.plan import HOST_CONV_TARGET
from jax_splitk.runtime.target import Target

# ffi/host_conv.cc has the same.
_ROW_BLOCK = 96


@dataclasses.dataclass(frozen=True)
class Config:
    """The division of the work: `splits` partial sums of the reduction, `block` of its elements loaded at a time."""

    splits: int
    block: int


class ConvHost(HostFamily[ConvProblem, Config]):
    """A forward pass; the gradient of an input is the forward pass of another convolution with a mirrored weight.

    Products and sums are always float32, whatever `problem.precision` says.
    """

    ABI = 2
    handler = HOST_CONV_TARGET
    competes = False

    def problem_refusal(self, problem: ConvProblem) -> str | None:
        return wgrad_host.geometry_refusal(problem)

    def config_refusal(self, problem: ConvProblem, config: Config) -> str | None:
        return wgrad_host.cut_refusal(config, min(max(self.product(problem, config).k, 1), host.MAX_SPLITS))

    def why_xla_untuned(self, problem: ConvProblem) -> str | None:
        return "XLA:CPU is faster"

    def divisions(self, problem: ConvProblem, target: Target) -> list[Config]:
        return [Config(splits, block) for splits in (1, 4) for block in (64, 128, 256)]

    def product(self, problem: ConvProblem, config: Config) -> Product:
        p = forward(problem)
        rows = math.prod(p.g_shape[:-1])
        k, groups = p.taps * p.group_channels[0], p.feature_group_count
        return Product(rows, k, p.group_channels[1], groups, config.splits, config.block, _ROW_BLOCK)

    def attributes(self, problem: ConvProblem) -> dict[str, Any]:
        return {
            "geometry": wgrad_host.geometry_attribute(forward(problem)),
            "mirrored": np.int64(not isinstance(problem, ConvFpropProblem)),
        }


FPROP, DGRAD = of_both_passes(ConvHost, "host", Config)
