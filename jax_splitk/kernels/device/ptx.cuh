// The PTX instructions that the kernels issue themselves, each under one name.
//
// What the constraints say decides the machine code, so it is the same for all callers. Volatile: the
// statement stays in its place among the others, and is neither merged nor dropped. "memory": accesses of
// plain C++ do not cross it. Addresses in shared memory are 32-bit. What runs beside the threads is in
// async.cuh, WGMMA is CuTe's.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cuda/std/cstdint>

template <bool CONDITION, class A, class B>
struct Conditional {
  using type = A;
};
template <class A, class B>
struct Conditional<false, A, B> {
  using type = B;
};
// A if the condition holds, else B.
template <bool CONDITION, class A, class B>
using conditional_t = typename Conditional<CONDITION, A, B>::type;

// ---- shared memory ---------------------------------------------------------------------------------------

// A T of 2, 4, 8 or 16 bytes.
template <class T>
__device__ inline T load_shared(uint32_t address) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
  if constexpr (sizeof(T) == 16) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return reinterpret_cast<const T&>(v);
  } else if constexpr (sizeof(T) == 8) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
    return reinterpret_cast<const T&>(v);
  } else if constexpr (sizeof(T) == 4) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return reinterpret_cast<const T&>(v);
  } else {
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
    return reinterpret_cast<const T&>(v);
  }
}

__device__ inline void store_shared(uint32_t address, uint16_t v) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(v) : "memory");
}

__device__ inline void store_shared(uint32_t address, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

// A sum of WGMMA's goes straight to memory: a move between registers of two types would serialize the
// products.
__device__ inline void store_shared(uint32_t address, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}

__device__ inline void store_shared(uint32_t address, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

__device__ inline void store_shared(uint32_t address, const float2& v) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(v.x), "f"(v.y) : "memory");
}

__device__ inline void store_shared(uint32_t address, const float4& v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v.x), "f"(v.y), "f"(v.z),
               "f"(v.w)
               : "memory");
}

// To another block of the cluster, whose barrier counts the 16 bytes. Both addresses are that block's.
__device__ inline void store_async(uint32_t address, const float4& v, uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(
          address),
      "r"(barrier), "r"(__float_as_uint(v.x)), "r"(__float_as_uint(v.y)), "r"(__float_as_uint(v.z)),
      "r"(__float_as_uint(v.w))
      : "memory");
}

// From the shared memory of a block of the cluster, where this block has the same address.
__device__ inline float4 load_cluster(uint32_t address, int block) {
  float4 v;
  asm volatile(
      "{ .reg .u32 there; mapa.shared::cluster.u32 there, %4, %5;"
      " ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there]; }"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
      : "r"(address), "r"(block)
      : "memory");
  return v;
}

// ---- matrices of 8x8 16-bit elements ---------------------------------------------------------------------

// Lanes 8*i to 8*i + 7 give the addresses of the rows of matrix i. A lane has of each matrix the elements of
// columns 2*(l%4) and the next in row l/4; transposed, rows and columns have changed places.
__device__ inline void load_matrices(uint32_t address, uint32_t (&v)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(address));
}

__device__ inline void load_matrices(uint32_t address, uint32_t& v0, uint32_t& v1) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(v0), "=r"(v1)
               : "r"(address));
}

__device__ inline void load_matrices_trans(uint32_t address, uint32_t& v0, uint32_t& v1, uint32_t& v2,
                                           uint32_t& v3) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v0), "=r"(v1), "=r"(v2), "=r"(v3)
               : "r"(address));
}

__device__ inline void load_matrices_trans(uint32_t address, uint32_t& v0, uint32_t& v1) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(v0), "=r"(v1)
               : "r"(address));
}

__device__ inline void store_matrices(uint32_t address, const uint32_t (&v)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v[0]),
               "r"(v[1]), "r"(v[2]), "r"(v[3])
               : "memory");
}

__device__ inline void store_matrices(uint32_t address, uint32_t v0, uint32_t v1) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(v0), "r"(v1)
               : "memory");
}

__device__ inline void store_matrices_trans(uint32_t address, const uint32_t (&v)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
               : "memory");
}

// The transpose of a matrix, of which each lane has the elements of columns 2*(l%4) and the next in row l/4.
__device__ inline uint32_t transposed_matrix(uint32_t v) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(v));
  return transposed;
}

// d += a * b of 16x16 and 16x8 elements.
template <class Element>
__device__ inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

#define MMA_M16N8K16(type)                                                   \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                 \
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                       \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
template <>
__device__ inline void mma_m16n8k16<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4],
                                                   const uint32_t (&b)[2]) {
  MMA_M16N8K16("bf16");
}
template <>
__device__ inline void mma_m16n8k16<__half>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  MMA_M16N8K16("f16");
}
#undef MMA_M16N8K16

// The same of 16x8 and 8x8 elements.
template <class Element>
__device__ inline void mma_m16n8k8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b);

#define MMA_M16N8K8(type)                                        \
  asm("mma.sync.aligned.m16n8k8.row.col.f32." type "." type      \
      ".f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};" \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])           \
      : "r"(a0), "r"(a1), "r"(b))
template <>
__device__ inline void mma_m16n8k8<__nv_bfloat16>(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  MMA_M16N8K8("bf16");
}
template <>
__device__ inline void mma_m16n8k8<__half>(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  MMA_M16N8K8("f16");
}
#undef MMA_M16N8K8

// ---- global memory ---------------------------------------------------------------------------------------

// Predicates, not branches, for which the compiler computes all of an address anew, or makes load, use and
// branch of every access.
__device__ inline void store_global_if(bool condition, float* to, float x) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; @p st.global.f32 [%0], %1; }" ::"l"(to), "f"(x),
               "r"(int(condition))
               : "memory");
}

__device__ inline void store_global_if(bool condition, float* to, float x, float y) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %3, 0; @p st.global.v2.f32 [%0], {%1, %2}; }" ::"l"(to),
               "f"(x), "f"(y), "r"(int(condition))
               : "memory");
}

// If the row is below `end`.
__device__ inline void store_global_below(void* to, const uint4& v, int row, int end) {
  asm volatile(
      "{ .reg .pred p; setp.lt.s32 p, %5, %6; @p st.global.v4.u32 [%0], {%1, %2, %3, %4}; }" ::"l"(to),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(row), "r"(end)
      : "memory");
}

// Loads of 16 bytes, zeros where the condition is false. From the L2: for what another grid writes while this
// one is already resident.
__device__ inline float4 load_l2_or_zero(bool condition, const float* from) {
  float4 v;
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;"
      " @p ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4]; }"
      : "=&f"(v.x), "=&f"(v.y), "=&f"(v.z), "=&f"(v.w)
      : "l"(from), "r"(int(condition)));
  return v;
}

// Read once, in a stream: not kept in the L1. READ_ONLY: by the read-only path.
template <bool READ_ONLY>
__device__ inline void load_stream_or_zero(bool condition, const void* from, uint32_t (&v)[4]) {
#define LOAD(path)                                                                      \
  asm volatile(                                                                         \
      "{ .reg .pred p; setp.ne.b32 p, %5, 0;"                                           \
      " mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;"                    \
      " @p ld.global" path ".L1::no_allocate.L2::256B.v4.b32 {%0, %1, %2, %3}, [%4]; }" \
      : "=&r"(v[0]), "=&r"(v[1]), "=&r"(v[2]), "=&r"(v[3])                              \
      : "l"(from), "r"(int(condition)))
  if constexpr (READ_ONLY) {
    LOAD(".nc");
  } else {
    LOAD("");
  }
#undef LOAD
}

__device__ inline void prefetch_l2(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

__device__ inline void prefetch_tensor_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Gives up a line of 128 bytes in the L2, which is not written to memory then.
__device__ inline void discard_l2(const void* line) {
  asm volatile("discard.global.L2 [%0], 128;" ::"l"(line) : "memory");
}

// What this thread has stored is visible to TMA.
__device__ inline void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// ---- order, and the next grid
// ------------------------------------------------------------------------------

// Plain accesses to memory stay on their side.
__device__ inline void fence_compiler() { asm volatile("" ::: "memory"); }

// Programmatic dependent launch.
__device__ inline void launch_dependent_grids() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ inline void wait_on_dependent_grids() { asm volatile("griddepcontrol.wait;"); }

// ---- registers -------------------------------------------------------------------------------------------

// The value is computed here, not where it is used, and is what the compiler knows nothing else about.
template <class T>
__device__ inline void pin(T& value) {
  asm volatile("" : "+r"(value));
}

// Both at the same place.
template <class T>
__device__ inline void pin(T& first, T& second) {
  asm volatile("" : "+r"(first), "+r"(second));
}

// Read again, not kept in a register.
__device__ inline int read_thread_index() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

__device__ inline void read_indices(int& thread, int& block) {
  asm volatile("mov.u32 %0, %%tid.x; mov.u32 %1, %%ctaid.x;" : "=r"(thread), "=r"(block));
}

// ---- arithmetic ------------------------------------------------------------------------------------------

// The upper half of `first` below the lower half of `second`. Volatile: in its place among the products.
__device__ inline uint32_t middle_halves(uint32_t first, uint32_t second) {
  uint32_t halves;
  asm volatile("shf.r.wrap.b32 %0, %1, %2, 16;" : "=r"(halves) : "r"(first), "r"(second));
  return halves;
}

// One instruction, where a compiler that sees two constants takes two.
__device__ inline uint32_t and_or(uint32_t a, uint32_t mask, uint32_t bits) {
  uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(a), "r"(mask), "r"(bits));
  return out;
}

__device__ inline uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t out;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}

__device__ inline uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t out;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}

__device__ inline uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  uint32_t out;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

// The larger magnitude, under the product of the signs. A NaN gives way to a number.
__device__ inline uint32_t max_xorsign_abs_bf16x2(uint32_t a, uint32_t b) {
  uint32_t out;
  asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

__device__ inline uint32_t to_bf16x2(float low, float high) {
  uint32_t out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

__device__ inline uint32_t truncate_to_bf16x2(float low, float high) {
  uint32_t out;
  asm("cvt.rz.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

__device__ inline uint32_t to_f16x2(float low, float high) {
  uint32_t out;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

// To the nearest, and at most the largest one.
__device__ inline uint32_t f16x4_to_e4m3x4(uint32_t low, uint32_t high) {
  uint32_t out;
  asm("{\n.reg .b16 l, h;\ncvt.rn.satfinite.e4m3x2.f16x2 l, %1;\ncvt.rn.satfinite.e4m3x2.f16x2 h, %2;\n"
      "mov.b32 %0, {l, h};\n}"
      : "=r"(out)
      : "r"(low), "r"(high));
  return out;
}

// Exact.
__device__ inline uint32_t e4m3x2_to_f16x2(uint16_t codes) {
  uint32_t out;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(out) : "h"(codes));
  return out;
}

// |a - b| of each byte, unsigned; one instruction.
__device__ inline uint32_t byte_distances(uint32_t a, uint32_t b) {
  uint32_t out;
  asm("vabsdiff4.u32.u32.u32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(0));
  return out;
}
