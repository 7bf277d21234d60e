// What every kernel on WGMMA needs: descriptors of operands in shared memory, and accumulators as argument
// lists.

#include <cute/arch/mma_sm90_desc.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>

namespace GMMA = cute::SM90::GMMA;

template <int... I>
struct Indices {};
template <int N, int... I>
struct MakeIndices : MakeIndices<N - 1, N - 1, I...> {};
template <int... I>
struct MakeIndices<0, I...> {
  using type = Indices<I...>;
};

// The name of an instruction in CUTLASS, of which the middle is a macro.
#define PASTE_(a, b, c) a##b##c
#define PASTE(a, b, c) PASTE_(a, b, c)

// Keeps the compiler from moving accumulators and A's registers while products that use them are under way.
__device__ inline void fence(float& value) { cute::warpgroup_fence_operand(value); }
__device__ inline void fence(uint32_t& value) { cute::warpgroup_fence_operand(value); }
template <class T, int N>
__device__ inline void fence(T (&values)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) fence(values[i]);
}

__device__ inline void clear(float& sum) { sum = 0.f; }
template <class T, int N>
__device__ inline void clear(T (&sums)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) clear(sums[i]);
}

// acc += a * b, or acc = a * b, by an instruction of CUTLASS with A in registers. Products under way across a
// call are serialized, so what holds them is inlined.
template <class Instruction, int N, int... I>
__device__ __forceinline__ void wgmma(const uint32_t (&a)[4], uint64_t b, float (&acc)[N],
                                      GMMA::ScaleOut scale, Indices<I...>) {
  Instruction::fma(a[0], a[1], a[2], a[3], b, acc[I]..., scale);
}

template <class Instruction, int N>
__device__ __forceinline__ void wgmma(const uint32_t (&a)[4], uint64_t b, float (&acc)[N],
                                      GMMA::ScaleOut scale) {
  wgmma<Instruction>(a, b, acc, scale, typename MakeIndices<N>::type{});
}

// Descriptor of an MN-major operand under the 128-byte swizzle: 64-element blocks along MN are `block_bytes`
// apart (leading offset), groups of 8 rows along k are `group_bytes` apart (stride offset).
__device__ inline uint64_t operand(uint32_t smem_address, int block_bytes, int group_bytes = 8 * 128) {
  cute::GmmaDescriptor desc;
  desc.desc_ = 0;
  desc.bitfield.start_address_ = smem_address >> 4;
  desc.bitfield.leading_byte_offset_ = block_bytes >> 4;
  desc.bitfield.stride_byte_offset_ = group_bytes >> 4;
  desc.bitfield.layout_type_ = uint8_t(cute::SM90::GMMA::LayoutType::B128);
  return desc.desc_;
}
