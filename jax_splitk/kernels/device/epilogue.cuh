// What is made of a product's sums before they are stored: activation(sum + bias) + residual, in fp32; with
// ACTIVATION_LAST (0) activation(sum + bias + residual).
//
// Macros: EPILOGUE (undefined: nothing), BIAS (0: none, 1: one of each row, 2: one of each column), BIAS_TYPE
// and RESIDUAL_TYPE (numbers of output.cuh; of a residual NONE where there is none), ACTIVATION (0: none, 1:
// relu, 2: gelu by tanh, 3: gelu by erf, 4: silu; from 5 on of gate and up: 5: swiglu, 6: geglu by tanh, 7:
// swigluoai). Nothing is read of a bias or residual that is not there.

#include "device/output.cuh"

#ifndef ACTIVATION_LAST
#define ACTIVATION_LAST 0
#endif

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

// With a gated activation the sums' columns are 8 of gate and 8 of up in turn, and the result has half as
// many.
[[maybe_unused]] constexpr bool GATED = ACTIVATION >= 5;

// x times the logistic function of y. The fast functions are exact enough for results of 16 bits. A quotient
// by more than 2^126 becomes 0.
[[maybe_unused]] __device__ inline float times_sigmoid(float x, float y) {
  if constexpr (OUT == FLOAT) return x / (1.f + expf(-y));
  return __fdividef(x, 1.f + __expf(-y));
}

[[maybe_unused]] __device__ inline float gated(float gate, float up) {
  if constexpr (ACTIVATION == 5) return times_sigmoid(gate, gate) * up;
  if constexpr (ACTIVATION == 6) {  // (1 + tanh(y)) / 2 is the logistic function of 2y
    return times_sigmoid(gate, 1.5957691216f * (gate + 0.044715f * gate * gate * gate)) * up;
  }
  gate = gate > 7.f ? 7.f : gate;
  up = up > 7.f ? 7.f : up < -7.f ? -7.f : up;
  return times_sigmoid(gate, 1.702f * gate) * (up + 1.f);
}

// Results of 16 bits do not show the error of the fast functions.
[[maybe_unused]] __device__ inline float activated_fast(float x) {
  if constexpr (ACTIVATION == 2) return times_sigmoid(x, 1.5957691216f * (x + 0.044715f * x * x * x));
  if constexpr (ACTIVATION == 4) return times_sigmoid(x, x);
  return activated(x);
}

// A result, from a sum with its bias and from the residual, which is not read where there is none.
template <float (*ACTIVATED)(float)>
__device__ inline float finished(float v, const Residual& residual) {
  if constexpr (!ACTIVATION_LAST) v = ACTIVATED(v);
  if constexpr (RESIDUAL_TYPE >= 0) v += float(residual);
  if constexpr (ACTIVATION_LAST) v = ACTIVATED(v);
  return v;
}

// Makes results of eight sums, in place. The residual, of 16 bits, comes in pairs.
[[maybe_unused]] __device__ inline void finish(const unsigned (&residual)[4], float (&v)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const auto& pair = reinterpret_cast<const Vec<Residual, 2>&>(residual[i / 2]);
    v[i] = finished<OUT == FLOAT ? activated : activated_fast>(v[i], pair.v[i % 2]);
  }
}

struct Epilogue {
  const Bias* bias;
  const Residual* residual;

  // The same epilogue from a column on.
  __device__ Epilogue from_column(int first) const { return {bias + first, residual + first}; }

  // The bias of N neighbouring columns, from an element of it on; zeros where there is none.
  template <int N>
  __device__ void load_bias(int at, float (&b)[N]) const {
    Vec<Bias, N> loaded = {};
    if constexpr (BIAS != 0) loaded = *reinterpret_cast<const Vec<Bias, N>*>(bias + at);
#pragma unroll
    for (int i = 0; i < N; ++i) b[i] = float(loaded.v[i]);
  }

  // Adds the residual to N neighbours of the result, from an element of it on.
  template <int N>
  __device__ void add_residual(size_t at, float (&v)[N]) const {
    if constexpr (RESIDUAL_TYPE >= 0) {
      const Vec<Residual, N> loaded = *reinterpret_cast<const Vec<Residual, N>*>(residual + at);
#pragma unroll
      for (int i = 0; i < N; ++i) v[i] += float(loaded.v[i]);
    }
  }

  // The residual of neighbours in a row, at `to` in the result; zeros where there is none.
  template <int N>
  __device__ Vec<Residual, N> load_residual(const Output* result, const Output* to) const {
    Vec<Residual, N> r = {};
    if constexpr (RESIDUAL_TYPE >= 0)
      r = *reinterpret_cast<const Vec<Residual, N>*>(residual + (to - result));
    return r;
  }

  // The result from a sum, without a residual.
  __device__ float finished_one(float sum, int column) const {
    float one[1];
    load_bias(column, one);
    return finished<OUT == FLOAT ? activated : activated_fast>(sum + one[0], Residual(0.f));
  }

  // Stores what becomes of neighbours in a row, at `to` in the result.
  template <int N>
  __device__ void store(const Output* result, Output* to, int row, int column, const float (&sums)[N]) const {
    store(load_residual<N>(result, to), to, row, column, sums);
  }

  template <int N>
  __device__ void store(const Vec<Residual, N>& r, Output* to, int row, int column,
                        const float (&sums)[N]) const {
    float v[N];
    Vec<Bias, N> b = {};
    if constexpr (BIAS == 1) b.v[0] = bias[row];
    if constexpr (BIAS == 2) b = *reinterpret_cast<const Vec<Bias, N>*>(bias + column);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      v[i] = BIAS == 0 ? sums[i] : sums[i] + float(b.v[BIAS == 1 ? 0 : i]);
      v[i] = finished<activated>(v[i], r.v[i]);
    }
    store_values(to, v);
  }
};

// Where results go, and what is made of them.
struct Destination {
  Output* out;
  Epilogue epilogue;
};

[[maybe_unused]] __device__ inline Output* result_of(const Destination& to) { return to.out; }

// The same destination with the bias from an element of it on.
[[maybe_unused]] __device__ inline Destination with_bias_at(Destination to, size_t first) {
  if constexpr (BIAS != 0) to.epilogue.bias += first;
  return to;
}

#define DESTINATION_OF_PARAMETERS \
  Destination {                   \
    out, { bias, residual }       \
  }
#define EPILOGUE_PARAMETERS , const Bias *bias, const Residual *residual
#define EPILOGUE_OF_PARAMETERS \
  Epilogue { bias, residual }
#else
[[maybe_unused]] constexpr bool GATED = false;

struct Epilogue {
  __device__ Epilogue from_column(int) const { return {}; }

  template <int N>
  __device__ void store(const Output*, Output* to, int, int, const float (&sums)[N]) const {
    store_values(to, sums);
  }
};
using Destination = Output*;  // no struct, which would change the machine code

[[maybe_unused]] __device__ inline Output* result_of(Destination to) { return to; }
[[maybe_unused]] __device__ inline Destination with_bias_at(Destination to, size_t) { return to; }

#define DESTINATION_OF_PARAMETERS out
#define EPILOGUE_PARAMETERS
#define EPILOGUE_OF_PARAMETERS \
  Epilogue {}
#endif
