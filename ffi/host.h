// The XLA FFI handlers of the CPU kernels. They have no state and no stage but execution, as XLA:CPU
// requires. Floats are float32.
#pragma once

#include "xla/ffi/api/ffi.h"

// Convolution weight gradients, target jax_splitk_host_conv_wgrad_v3. Arguments lhs, g; results dW,
// workspace; attributes geometry (int64 array), splits, block (int64).
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxSplitkHostWgrad);

// Convolutions and gradients of their inputs, target jax_splitk_host_conv_v2. Arguments lhs, rhs; results
// out, workspace; attributes geometry (int64 array), mirrored, splits, block (int64).
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxSplitkHostConv);

// Products with a packed quantized weight, and grouped products with a stack of them, target
// jax_splitk_host_quantized_v5. Arguments x [rows, k], words, scale and, for weights that have them, zero
// points and channel scales in the order of jax_splitk/quantized/packing.py. Those of a stack have its
// dimension in front; group_sizes (int32) and maybe group_offset (one int32) follow. Results out [rows,
// features], workspace; attributes values (float32 array: the value of each code), has_zero, has_channel
// (bool), group_size, splits, row_block (int64).
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxSplitkHostQuantized);

// Grouped products, target jax_splitk_host_ragged_dot_v1. Arguments lhs [m, k], rhs, group_sizes (int32) and
// maybe group_offset (one int32), as RaggedDotProblem in jax_splitk/problems/ragged_dot.py has them; results
// out, workspace; attributes forward, transposed (bool), splits, row_block (int64).
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxSplitkHostRaggedDot);
