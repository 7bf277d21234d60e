// Split-k convolution weight gradients on the CPU: the XLA FFI handler of target
// jax_splitk_host_conv_wgrad_v1.
#ifndef JAX_SPLITK_HOST_WGRAD_H_
#define JAX_SPLITK_HOST_WGRAD_H_

#include "xla/ffi/api/ffi.h"

namespace jax_splitk {

// Tells the handler which Fortran-ABI sgemm to call (scipy.linalg.cython_blas.__pyx_capi__['sgemm']). Must
// come before the first call of the handler; thread-safe.
void SetSgemm(void* fn);

}  // namespace jax_splitk

// Execute-only and stateless, as XLA:CPU wants it. Arguments lhs, g; results dW, workspace; attributes
// window_strides, padding, lhs_dilation, rhs_dilation (int64 arrays), feature_group_count, splits, block
// (int64).
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxSplitkHostWgrad);

#endif  // JAX_SPLITK_HOST_WGRAD_H_
