"""Split-k convolution weight gradients and mixed-precision GEMMs for JAX on NVIDIA Hopper."""

import sys as _sys

# `python -m jax_splitk` imports this to find its __main__, which needs nothing of it for `--help`, and reloads it then.
# Python has "-m" for the program's name only while it looks for the module.
if not (_sys.argv[:1] == ["-m"] and "-m jax_splitk" in " ".join(_sys.orig_argv)):
    from jax_splitk.ops.conv import conv_general_dilated, conv_wgrad
    from jax_splitk.ops.cost import cost
    from jax_splitk.ops.dot_general import dot_general, matmul
    from jax_splitk.ops.explain import explain
    from jax_splitk.ops.exporting import EXPORT_CHECKS
    from jax_splitk.ops.intercept import intercept
    from jax_splitk.ops.quantized_matmul import quantized_matmul
    from jax_splitk.ops.tune import tune, tune_problems
    from jax_splitk.quantized import PackedWeight, QuantizedArray, dequantize, prepack, quantize, unpack
    from jax_splitk.runtime import registration as _registration
    from jax_splitk.tuning.decide import FrozenCacheMiss
    from jax_splitk.tuning.options import options
    from jax_splitk.tuning.result import TuningResult

    _registration.register()

__all__ = [
    "EXPORT_CHECKS",
    "FrozenCacheMiss",
    "PackedWeight",
    "QuantizedArray",
    "TuningResult",
    "conv_general_dilated",
    "conv_wgrad",
    "cost",
    "dequantize",
    "dot_general",
    "explain",
    "intercept",
    "matmul",
    "options",
    "prepack",
    "quantize",
    "quantized_matmul",
    "tune",
    "tune_problems",
    "unpack",
]


def __dir__() -> list[str]:
    """The public names; the submodules that Python adds when they are imported are not."""
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
