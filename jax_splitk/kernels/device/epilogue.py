"""The host's side of `epilogue.cuh`: macros of what follows a product."""

from jax_splitk.kernels.device.split_k import OUT_CODES

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
