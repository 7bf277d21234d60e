// The second phase of a split reduction on the host, for every operation.
#ifndef JAX_SPLITK_HOST_REDUCE_H_
#define JAX_SPLITK_HOST_REDUCE_H_

#include <algorithm>
#include <cstdint>

#include "host_types.h"

namespace jax_splitk {

// The second phase: out[begin:end] = sum of the partials, in split order, in the result's type. `Call` has
// `out`, `splits` and `Partial(split)`.
template <typename T, typename Call>
void SumPartials(const Call& call, int64_t begin, int64_t end) {
  constexpr int64_t kStep = 256;
  T* out = static_cast<T*>(call.out);
  for (int64_t at = begin; at < end; at += kStep) {
    const int64_t count = std::min(kStep, end - at);
    float sum[kStep];
    std::copy_n(call.Partial(0) + at, count, sum);
    for (int64_t split = 1; split < call.splits; ++split) {
      const float* partial = call.Partial(split) + at;
      for (int64_t i = 0; i < count; ++i) sum[i] += partial[i];
    }
    for (int64_t i = 0; i < count; ++i) FromFloat(sum[i], out + at + i);
  }
}

}  // namespace jax_splitk

#endif  // JAX_SPLITK_HOST_REDUCE_H_
