"""The primitives of all operations, each with its rules."""

from jax_splitk.ops import conv_dgrad, conv_fprop, conv_wgrad, dot_primitive, quantized_primitive, ragged_primitive

PRIMITIVES = (
    conv_fprop.conv_fprop_p,
    conv_dgrad.conv_dgrad_p,
    conv_wgrad.conv_wgrad_p,
    dot_primitive.dot_general_p,
    quantized_primitive.quantized_matmul_p,
    ragged_primitive.ragged_dot_p,
)
