"""The host's side of `epilogue.cuh`: macros and parameters of what follows a product or a convolution."""

from typing import TypeGuard

from jax_splitk.kernels.device.split_k import OUT_CODES
from jax_splitk.problems.conv_epilogue import ConvEpilogueProblem
from jax_splitk.problems.conv_wgrad import ConvProblem
from jax_splitk.problems.dot_general import DotProblem
from jax_splitk.runtime.plan import Param, Pointer

BIAS_CODES = {"none": 0, "m": 1, "n": 2}
ACTIVATION_CODES = {
    **{"none": 0, "relu": 1, "gelu": 2, "gelu_exact": 3, "silu": 4},
    **{"swiglu": 5, "geglu": 6, "swigluoai": 7},
}


def macros(bias: str, bias_dtype: str, activation: str, residual_dtype: str) -> dict[str, int]:
    """`bias`: over which dimension of the result, "m" or "n", or "none"."""
    return {
        "EPILOGUE": 1,
        "BIAS": BIAS_CODES[bias],
        "BIAS_TYPE": OUT_CODES.get(bias_dtype, 0),
        "ACTIVATION": ACTIVATION_CODES[activation],
        "RESIDUAL_TYPE": OUT_CODES.get(residual_dtype, -1),
    }


def epilogue_refusal(problem: DotProblem | ConvEpilogueProblem) -> str | None:
    """Why kernels cannot compute an epilogue of these dtypes; None if they can."""
    for name in ("bias_dtype", "residual_dtype"):
        if (dtype := getattr(problem, name)) not in ("none", *OUT_CODES):
            return f"{name} {dtype}; accepted: {', '.join(OUT_CODES)}"
    return None


def epilogue_macros(problem: DotProblem | ConvEpilogueProblem) -> dict[str, int]:
    """Macros of device/epilogue.cuh; none for a product without an epilogue."""
    if not problem.epilogue:
        return {}
    return macros(problem.bias, problem.bias_dtype, problem.activation, problem.residual_dtype)


def epilogue_params(problem: DotProblem | ConvEpilogueProblem) -> tuple[Param, ...]:
    """(bias, residual) of a kernel with an epilogue. A missing one is replaced by lhs, which is not read."""
    if not problem.epilogue:
        return ()
    bias, residual = problem.bias != "none", problem.residual_dtype != "none"
    return Pointer(2 * bias), Pointer((2 + bias) * residual)


# ---- convolutions ----------------------------------------------------------------------------------------------------


def conv_finishes(problem: ConvProblem) -> TypeGuard[ConvEpilogueProblem]:
    """Whether a problem has an epilogue of dtypes that kernels can compute."""
    return isinstance(problem, ConvEpilogueProblem) and epilogue_refusal(problem) is None


def order_macros(problem: ConvProblem) -> dict[str, int]:
    """The macro that says in which order an epilogue adds a residual; none for a convolution without one."""
    return {"ACTIVATION_LAST": int(problem.activation_last)} if isinstance(problem, ConvEpilogueProblem) else {}


def conv_macros(problem: ConvProblem) -> dict[str, int]:
    """Macros of device/epilogue.cuh; none for a convolution without an epilogue."""
    return epilogue_macros(problem) | order_macros(problem) if isinstance(problem, ConvEpilogueProblem) else {}


def conv_params(problem: ConvProblem) -> tuple[Param, ...]:
    """(bias, residual) of a convolution's kernel with an epilogue."""
    return epilogue_params(problem) if isinstance(problem, ConvEpilogueProblem) else ()
