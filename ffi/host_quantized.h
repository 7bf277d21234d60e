// Products of a float activation and a packed quantized weight on the CPU: the XLA FFI handler of target
// jax_splitk_host_quantized_matmul_v1.
#ifndef JAX_SPLITK_HOST_QUANTIZED_H_
#define JAX_SPLITK_HOST_QUANTIZED_H_

#include "xla/ffi/api/ffi.h"

// Execute-only and stateless, as XLA:CPU wants it. Arguments x [rows, k], words, scale and, for weights that
// have them, zero points in the order of jax_splitk/quantized/packing.py; results out [rows, features],
// workspace; attributes qtype (string), group_size, splits, row_block (int64).
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxSplitkHostQuantizedMatmul);

#endif  // JAX_SPLITK_HOST_QUANTIZED_H_
