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

// Keeps the compiler from moving accumulators while products that write them are under way.
template <int N>
__device__ inline void fence(float (&acc)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) cute::warpgroup_fence_operand(acc[i]);
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
