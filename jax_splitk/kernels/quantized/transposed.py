"""Kernel family: products with the transpose of a packed quantized weight on Hopper (device code: quantized/tiled.cu,
with the macro TRANSPOSED).

It reads the words and scales that the forward product reads. Each warp scales the values of its words, rounds them to
x's dtype, and transposes them in registers (movmatrix) into the A operand of WGMMA, whose rows are then the weight's k.
Tiles, ranges, clusters and the order of additions are those of quantized_tiled.

float16 does not hold every weight. For x in float16 a small kernel first finds a power of two for each group of k, by
which the group's weights are divided; the sums are multiplied by it.
"""

import dataclasses
import math

from jax import numpy as jnp

from jax_splitk.kernels.base import cost_model
from jax_splitk.kernels.device.structs import Struct
from jax_splitk.kernels.quantized import tiles
from jax_splitk.kernels.quantized.dequantize import channel_pointers, has_channel_scale, has_zero
from jax_splitk.kernels.quantized.tiled import Tiled
from jax_splitk.problems.quantized_matmul import QuantizedMatmulProblem
from jax_splitk.quantized.formats import BYTE_SCALES
from jax_splitk.runtime import plan
from jax_splitk.runtime.target import Target

FACTORS_THREADS = 128
_FACTORS_ALIGNMENT = 256
# Instructions of a warp for 64 features and 16 k beside the decoding of the values: scaling and rounding by pairs of 16
# bits, or in float32 with a conversion, and 16 transpositions.
_PACKED, _IN_FLOATS = 44, 150


@dataclasses.dataclass(frozen=True)
class Config(tiles.Config):
    """How the tiles of a product with a transposed weight are computed: see `tiles.Config`. tile_m counts k, and a
    block of the pipeline holds 128 features."""


def packed_scales(problem: QuantizedMatmulProblem) -> bool:
    """Whether the product of two bfloat16 is the weight, rounded once (PACKED_SCALES in the device code)."""
    exact = problem.scale_dtype in ("bfloat16", *BYTE_SCALES) and problem.x_dtype == "bfloat16"
    return exact and not has_zero(problem) and not has_channel_scale(problem)


def has_factors(problem: QuantizedMatmulProblem) -> bool:
    """Whether weights are divided by factors of their groups (FACTORS in the device code)."""
    return problem.x_dtype == "float16"


def _factors_bytes(problem: QuantizedMatmulProblem) -> int:
    size = 4 * problem.groups if has_factors(problem) else 0
    return -(-size // _FACTORS_ALIGNMENT) * _FACTORS_ALIGNMENT


def _factor_args(problem: QuantizedMatmulProblem) -> Struct:
    return Struct("FactorArgs", {"feature_tiles": problem.feature_tiles, "groups": problem.groups})


class Transposed(Tiled):
    name = "quantized_transposed"
    ABI = 1

    x_dtypes = ("bfloat16", "float16")

    def loop_problem_refusal(self, problem: QuantizedMatmulProblem) -> str | None:
        """Where the dtypes of x and of the result differ, XLA multiplies in float32. The kernel rounds the weight to
        x's dtype, so it serves if rounding the result is an error as large."""
        if jnp.finfo(problem.out_dtype).nmant > jnp.finfo(problem.x_dtype).nmant:
            given = f"preferred_element_type {problem.out_dtype} of x and weights in {problem.x_dtype}"
            return f"{given}, to which weights are rounded; accepted: dtypes with no longer mantissas"
        return super().loop_problem_refusal(problem)

    # ---- search ----------------------------------------------------------------------------------------------------

    def prepared_bytes(self, problem: QuantizedMatmulProblem, config: tiles.Config) -> int:
        return super().prepared_bytes(problem, config) + _factors_bytes(problem)

    def prepared(self, problem: QuantizedMatmulProblem, config: tiles.Config) -> bool:
        return super().prepared(problem, config) or has_factors(problem)

    def block_work(self, problem: QuantizedMatmulProblem, config: tiles.Config) -> tuple[float, float, float]:
        tensor, issued, turns = super().block_work(problem, config)
        more = _PACKED if packed_scales(problem) else _IN_FLOATS
        return tensor, issued + config.m_warpgroups * 4 * 2 * more, turns

    def uncertainty(self, problem: QuantizedMatmulProblem, target: Target) -> float:
        """That of quantized_tiled, whose loop it shares, as long as no times of its own are recorded."""
        own = super().uncertainty(problem, target)
        return own if math.isfinite(own) else cost_model.uncertainty(Tiled.name, target)

    # ---- plan ------------------------------------------------------------------------------------------------------

    def loop_macros(self, problem: QuantizedMatmulProblem, config: tiles.Config) -> dict[str, int]:
        return {**super().loop_macros(problem, config), "TRANSPOSED": 1}

    def structs(self, problem: QuantizedMatmulProblem, config: tiles.Config) -> list[Struct]:
        return [*super().structs(problem, config), _factor_args(problem)]

    def prepare(self, problem: QuantizedMatmulProblem, config: tiles.Config, workspace: int) -> tiles.Prepared:
        """Factors lie behind the copy of x."""
        (zero, factors), launches = super().prepare(problem, config, workspace)
        if not has_factors(problem):
            return (zero, factors), launches
        finds = plan.Launch(
            kernel=self.kernel_name(problem, "_factors"),
            grid=(problem.groups, 1, 1),
            block=(FACTORS_THREADS, 1, 1),
            params=(_factor_args(problem), plan.Pointer(2), zero, factors, *channel_pointers(problem)),
        )
        return (zero, factors), (*launches, finds)


FAMILY = Transposed(Config)
