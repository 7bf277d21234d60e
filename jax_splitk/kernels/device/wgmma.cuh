// WGMMA: 64 rows by N columns, with A in shared memory or in registers.

#include <cute/arch/mma_sm90_gmma.hpp>
// Numbers of columns that the first header lacks.
#if TILE_N > 32 && (TILE_N % 32 || TILE_N == 160 || TILE_N == 224)
#include <cute/arch/mma_sm90_gmma_ext.hpp>
#endif

namespace GMMA = cute::SM90::GMMA;

// CuTe's atom of so many columns, a macro's value; `kind` is the rest of its name.
#define WGMMA_(columns, kind) GMMA::MMA_64x##columns##kind
#define WGMMA(columns, kind) WGMMA_(columns, kind)
// The one of 16-bit elements: half where the macro ELEMENT is 2 (output.cuh), else bfloat16.
#if ELEMENT == 2
#define WGMMA_16(columns, kind) WGMMA(columns, x16_F32F16F16_##kind)
#else
#define WGMMA_16(columns, kind) WGMMA(columns, x16_F32BF16BF16_##kind)
#endif

template <int... I>
struct Indices {};
template <int N, int... I>
struct MakeIndices : MakeIndices<N - 1, N - 1, I...> {};
template <int... I>
struct MakeIndices<0, I...> {
  using type = Indices<I...>;
};

template <class Atom, int N, int... I>
__device__ __forceinline__ void wgmma(uint64_t a, uint64_t b, float (&acc)[N], GMMA::ScaleOut scale,
                                      Indices<I...>) {
  Atom::fma(a, b, acc[I]..., scale);
}

template <class Atom, int N, int... I>
__device__ __forceinline__ void wgmma(const uint32_t (&a)[4], uint64_t b, float (&acc)[N],
                                      GMMA::ScaleOut scale, Indices<I...>) {
  Atom::fma(a[0], a[1], a[2], a[3], b, acc[I]..., scale);
}

// acc += a * b, or acc = a * b; N elements of each of 128 threads. Of a lane l of warp w of the warpgroup
// element 4*j + 2*h + e is row 16*w + l/4 + 8*h and column 8*j + 2*(l%4) + e.
template <class Atom, class A, int N>
__device__ __forceinline__ void wgmma(const A& a, uint64_t b, float (&acc)[N], GMMA::ScaleOut scale) {
  wgmma<Atom>(a, b, acc, scale, typename MakeIndices<N>::type{});
}

// Keeps the compiler from moving registers while products that write or read them are under way.
template <class T>
__device__ __forceinline__ void fence(T& value) {
  cute::warpgroup_fence_operand(value);
}

template <class T, int N>
__device__ __forceinline__ void fence(T (&values)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) fence(values[i]);
}

// Issues the products of `multiply` as one batch. Until the batch has retired, nobody may touch the registers
// that it reads or writes, nor what it reads in shared memory. `registers` are those that the compiler must
// not move. Functions that issue batches are __forceinline__: ptxas serializes products that are under way
// across a call.
template <class Multiply, class... Registers>
__device__ __forceinline__ void batch(const Multiply& multiply, Registers&... registers) {
  (fence(registers), ...);
  cute::warpgroup_arrive();
  multiply();
  cute::warpgroup_commit_batch();
}

// Waits until all of the warpgroup's batches but the last PENDING have retired. `registers` are those of the
// batches that may be used then.
template <int PENDING, class... Registers>
__device__ __forceinline__ void wait_batches(Registers&... registers) {
  cute::warpgroup_wait<PENDING>();
  (fence(registers), ...);
}

// How rows in shared memory are swizzled, in a descriptor's numbers.
enum class Swizzle : uint32_t { NONE, B128, B64, B32 };

// Descriptor of an operand in shared memory. MN-major under the 128-byte swizzle: 64-element blocks along MN
// are `leading` bytes apart, groups of 8 rows along k are `stride` bytes apart.
__device__ inline uint64_t operand(uint32_t address, int leading, int stride = 8 * 128,
                                   Swizzle swizzle = Swizzle::B128) {
  const uint32_t low = (address >> 4 & 0x3fff) | (leading >> 4 & 0x3fff) << 16;
  const uint32_t high = (stride >> 4 & 0x3fff) | uint32_t(swizzle) << 30;
  return uint64_t(high) << 32 | low;
}
