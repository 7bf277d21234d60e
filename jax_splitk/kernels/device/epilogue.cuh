// What is made of a product's sums before they are stored: activation(sum + bias) + residual, in fp32.
//
// Macros: EPILOGUE (undefined: nothing), BIAS (0: none, 1: one of each row, 2: one of each column), BIAS_TYPE
// and RESIDUAL_TYPE (numbers of output.cuh; of a residual NONE where there is none), ACTIVATION (0: none, 1:
// relu, 2: gelu by tanh, 3: gelu by erf, 4: silu). Nothing is read of a bias or residual that is not there.

#include "device/output.cuh"

#if EPILOGUE
using Bias = TypeOf<BIAS_TYPE>::type;
using Residual = TypeOf<RESIDUAL_TYPE>::type;

// NaN stays NaN.
__device__ inline float activated(float x) {
  if constexpr (ACTIVATION == 1) return x < 0.f ? 0.f : x;
  if constexpr (ACTIVATION == 2) return 0.5f * x * (1.f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
  if constexpr (ACTIVATION == 3) return 0.5f * x * erfcf(-0.7071067812f * x);
  if constexpr (ACTIVATION == 4) return x / (1.f + expf(-x));
  return x;
}

struct Epilogue {
  const Bias* bias;
  const Residual* residual;

  // Stores what becomes of neighbours in a row, at `to` in the result.
  template <int N>
  __device__ void store(const Output* result, Output* to, int row, int column, const float (&sums)[N]) const {
    float v[N];
    Vec<Bias, N> b = {};
    Vec<Residual, N> r = {};
    if constexpr (BIAS == 1) b.v[0] = bias[row];
    if constexpr (BIAS == 2) b = *reinterpret_cast<const Vec<Bias, N>*>(bias + column);
    if constexpr (RESIDUAL_TYPE >= 0)
      r = *reinterpret_cast<const Vec<Residual, N>*>(residual + (to - result));
#pragma unroll
    for (int i = 0; i < N; ++i) {
      v[i] = BIAS == 0 ? sums[i] : sums[i] + float(b.v[BIAS == 1 ? 0 : i]);
      v[i] = activated(v[i]);
      if constexpr (RESIDUAL_TYPE >= 0) v[i] += float(r.v[i]);
    }
    store_values(to, v);
  }
};
#define EPILOGUE_PARAMETERS , const Bias *bias, const Residual *residual
#define EPILOGUE_OF_PARAMETERS \
  Epilogue { bias, residual }
#else
struct Epilogue {
  template <int N>
  __device__ void store(const Output*, Output* to, int, int, const float (&sums)[N]) const {
    store_values(to, sums);
  }
};
#define EPILOGUE_PARAMETERS
#define EPILOGUE_OF_PARAMETERS \
  Epilogue {}
#endif
