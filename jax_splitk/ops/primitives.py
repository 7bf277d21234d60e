"""The primitives of all operations, each with its rules."""

from jax_splitk.ops import (
    conv_calls,
    conv_epilogue,
    dot_calls,
    quantized_epilogue,
    quantized_primitive,
    quantized_ragged_call,
    quantized_ragged_epilogue,
    ragged_call,
)

PRIMITIVES = (
    conv_calls.conv_fprop_p,
    conv_epilogue.conv_epilogue_p,
    conv_calls.conv_dgrad_p,
    conv_calls.conv_wgrad_p,
    dot_calls.dot_general_p,
    quantized_primitive.quantized_matmul_p,
    quantized_epilogue.quantized_epilogue_p,
    quantized_ragged_call.quantized_ragged_dot_p,
    quantized_ragged_epilogue.quantized_ragged_epilogue_p,
    quantized_primitive.quantized_transposed_p,
    ragged_call.ragged_dot_p,
)
