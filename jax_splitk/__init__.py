"""Convolutions, their gradients and products with quantized weights for JAX on NVIDIA Hopper."""

import sys as _sys

if _sys.version_info < (3, 11):  # noqa: UP036 - someone may try a checkout with an older Python
    raise ImportError("jax_splitk needs Python 3.11 or later, this is %d.%d.%d" % _sys.version_info[:3])  # noqa: UP031

__version__ = "0.1.0"

# `python -m jax_splitk` and `jax-splitk` import this module to find __main__. For `--help`, __main__ needs nothing of
# it, and otherwise reloads it. While Python looks for the module of -m, argv[0] is "-m", and the module's name precedes
# the other arguments.
_argv = _sys.argv or [""]
_module = _sys.orig_argv[-len(_argv)].removeprefix("-m") if _argv[0] == "-m" else None
_script = _argv[0].rpartition("/")[2] == "jax-splitk" and "jax_splitk.__main__" not in _sys.modules
if _module != "jax_splitk" and not _script:
    from jax_splitk.runtime import requirements as _requirements

    _requirements.check(__version__)

    from jax_splitk.checkpoints.load import Checkpoint, load_checkpoint
    from jax_splitk.ops.chained import chained
    from jax_splitk.ops.conv import conv_dgrad, conv_fprop, conv_general_dilated, conv_wgrad
    from jax_splitk.ops.cost import cost
    from jax_splitk.ops.dot_general import dot_general, matmul
    from jax_splitk.ops.explain import explain
    from jax_splitk.ops.exporting import EXPORT_CHECKS
    from jax_splitk.ops.intercept import intercept
    from jax_splitk.ops.quantized_einsum import quantized_dot_general, quantized_einsum
    from jax_splitk.ops.quantized_matmul import quantized_matmul
    from jax_splitk.ops.ragged_dot import ragged_dot, ragged_dot_general
    from jax_splitk.ops.tune import tune, tune_problems
    from jax_splitk.quantized import (
        JoinedWeight,
        PackedWeight,
        PermutedWeight,
        QuantizedArray,
        dequantize,
        join_gate_up,
        prepack,
        quantize,
        unpack,
    )
    from jax_splitk.quantized.files import load_file, save_file
    from jax_splitk.quantized.flax_serialization import register_flax_serialization
    from jax_splitk.quantized.params import QuantizationReport, QuantizationRule, quantization_report, quantize_params
    from jax_splitk.quantized.partition import combine, partition
    from jax_splitk.quantized.sharding import shardings
    from jax_splitk.quantized.state import from_state, to_state
    from jax_splitk.runtime import registration as _registration
    from jax_splitk.runtime.safetensors_file import CheckpointError
    from jax_splitk.tuning.decide import FrozenCacheMiss
    from jax_splitk.tuning.options import options
    from jax_splitk.tuning.result import TuningResult

    _registration.register()

__all__ = [
    "EXPORT_CHECKS",
    "Checkpoint",
    "CheckpointError",
    "FrozenCacheMiss",
    "JoinedWeight",
    "PackedWeight",
    "PermutedWeight",
    "QuantizationReport",
    "QuantizationRule",
    "QuantizedArray",
    "TuningResult",
    "chained",
    "combine",
    "conv_dgrad",
    "conv_fprop",
    "conv_general_dilated",
    "conv_wgrad",
    "cost",
    "dequantize",
    "dot_general",
    "explain",
    "from_state",
    "intercept",
    "join_gate_up",
    "load_checkpoint",
    "load_file",
    "matmul",
    "options",
    "partition",
    "prepack",
    "quantization_report",
    "quantize",
    "quantize_params",
    "quantized_dot_general",
    "quantized_einsum",
    "quantized_matmul",
    "ragged_dot",
    "ragged_dot_general",
    "register_flax_serialization",
    "save_file",
    "shardings",
    "to_state",
    "tune",
    "tune_problems",
    "unpack",
]


def __dir__() -> list[str]:
    """The public names, without the submodules that Python adds when they are imported."""
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
