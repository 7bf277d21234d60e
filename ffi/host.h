// The XLA FFI handlers of the CPU kernels. Execute-only and stateless, as XLA:CPU wants them.
#pragma once

#include "xla/ffi/api/ffi.h"

// Convolution weight gradients, target jax_splitk_host_conv_wgrad_v1. Arguments lhs, g; results dW,
// workspace; attributes window_strides, padding, lhs_dilation, rhs_dilation (int64 arrays),
// feature_group_count, splits, block (int64).
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxSplitkHostWgrad);

// Products of a float activation and a packed quantized weight, target jax_splitk_host_quantized_matmul_v1.
// Arguments x [rows, k], words, scale and, for weights that have them, zero points in the order of
// jax_splitk/quantized/packing.py; results out [rows, features], workspace; attributes qtype (string),
// group_size, splits, row_block (int64).
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxSplitkHostQuantizedMatmul);

namespace jax_splitk {

// Tells the weight gradient which Fortran-ABI sgemm to call (scipy.linalg.cython_blas.__pyx_capi__['sgemm']).
// Must come before its first call; thread-safe.
void SetSgemm(void* fn);

}  // namespace jax_splitk
