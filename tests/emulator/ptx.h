// Stands for kernels/device/ptx.cuh: the same functions.

template <bool CONDITION, class A, class B>
using conditional_t = std::conditional_t<CONDITION, A, B>;

namespace emulator {

// Words of the 8x8 matrices of 16-bit elements that the lanes' addresses name, COUNT of them.
template <bool TRANS, int COUNT>
void load_matrices(uint32_t address, uint32_t (&v)[COUNT], const Site& site) {
  const int lane = emulator::lane();
  const auto addresses = exchange(~0u, {address}, "ldmatrix");
  if (lane == 0) count_matrices("ldmatrix.shared", COUNT, addresses, site);
  if (lane < 8 * COUNT) note_read(address);
  for (int i = 0; i < COUNT; ++i) {
    uint32_t halves[2];
    for (int e = 0; e < 2; ++e) {
      const int k = 2 * (lane % 4) + e, row = TRANS ? k : lane / 4, column = TRANS ? lane / 4 : k;
      halves[e] = *pointer<uint16_t>(addresses[8 * i + row][0] + 2 * column);
    }
    v[i] = halves[1] << 16 | halves[0];
  }
}

// COUNT matrices.
template <bool TRANS, int COUNT>
void store_matrices(uint32_t address, const uint32_t (&v)[COUNT], const Site& site) {
  const int lane = emulator::lane();
  const auto given = exchange(~0u, {address, v[0], v[1], v[COUNT - 2], v[COUNT - 1]}, "stmatrix");
  if (lane == 0) count_matrices("stmatrix.shared", COUNT, given, site);
  // Each lane stores the row at its address.
  for (int column = 0; column < 8 && lane < 8 * COUNT; ++column) {
    const int row = lane % 8, matrix = lane / 8;
    const int r = TRANS ? column : row, c = TRANS ? row : column;
    *pointer<uint16_t>(address + 2 * column) = given[r * 4 + c / 2][1 + matrix] >> 16 * (c % 2);
  }
  __syncwarp();
}

template <class Half, class Operation>
uint32_t halves(uint32_t a, uint32_t b, uint32_t c, const Operation& operation) {
  uint32_t out = 0;
  for (int i = 0; i < 32; i += 16) {
    const auto half = [i](uint32_t word) { return float(bits_as<Half>(uint16_t(word >> i))); };
    const float x = operation(half(a), half(b), half(c));
    if constexpr (std::is_same_v<Half, __nv_bfloat16>) out |= uint32_t(rounded_to_bf16(x)) << i;
    else out |= uint32_t(rounded_to_half(x)) << i;
  }
  return out;
}

}  // namespace emulator

template <class T>
inline T load_shared(uint32_t address, SITE) {
  emulator::count("ld.shared", sizeof(T), address, site);
  emulator::note_read(address);
  return *emulator::pointer<T>(address);
}
template <class T>
inline void store_shared(uint32_t address, const T& v, SITE) {
  emulator::count("st.shared", sizeof(T), address, site);
  if (address % sizeof(T)) emulator::fail("a store to shared memory that is not aligned");
  std::memcpy(emulator::pointer(address), &v, sizeof(T));
}
inline void store_async(uint32_t address, const float4& v, uint32_t barrier) {
  emulator::store_async(address, v, emulator::barrier(barrier));
}
inline float4 load_cluster(uint32_t address, int block) {
  return *emulator::pointer<float4>(emulator::in_block(address, block));
}

inline void load_matrices(uint32_t address, uint32_t (&v)[4], SITE) { emulator::load_matrices<false>(address, v, site); }
inline void load_matrices(uint32_t address, uint32_t& v0, uint32_t& v1, SITE) {
  uint32_t v[2];
  emulator::load_matrices<false>(address, v, site);
  v0 = v[0], v1 = v[1];
}
inline void load_matrices_trans(uint32_t address, uint32_t& v0, uint32_t& v1, uint32_t& v2, uint32_t& v3, SITE) {
  uint32_t v[4];
  emulator::load_matrices<true>(address, v, site);
  v0 = v[0], v1 = v[1], v2 = v[2], v3 = v[3];
}
inline void load_matrices_trans(uint32_t address, uint32_t& v0, uint32_t& v1, SITE) {
  uint32_t v[2];
  emulator::load_matrices<true>(address, v, site);
  v0 = v[0], v1 = v[1];
}
inline void store_matrices(uint32_t address, const uint32_t (&v)[4], SITE) { emulator::store_matrices<false>(address, v, site); }
inline void store_matrices(uint32_t address, uint32_t v0, uint32_t v1, SITE) {
  const uint32_t v[] = {v0, v1};
  emulator::store_matrices<false>(address, v, site);
}
inline void store_matrices_trans(uint32_t address, const uint32_t (&v)[4], SITE) {
  emulator::store_matrices<true>(address, v, site);
}
inline uint32_t transposed_matrix(uint32_t v) {
  const int lane = emulator::lane(), row = lane / 4, column = lane % 4 * 2;
  const auto given = emulator::exchange(~0u, {v}, "movmatrix");
  const auto at = [&](int r, int c) { return given[r * 4 + c / 2][0] >> 16 * (c % 2) & 0xffff; };
  return at(column, row) | at(column + 1, row) << 16;
}
namespace emulator {
// d += a * b for 16xK and Kx8 elements, by a warp. For every 8 of K a lane has two registers of a and one of b.
template <class Element, int K>
void mma(float (&d)[4], const uint32_t (&a)[K / 4], const uint32_t (&b)[K / 8]) {
  const int lane = emulator::lane();
  const auto given = exchange(~0u, {a[0], a[1], a[K / 4 - 2], a[K / 4 - 1], b[0], b[K / 8 - 1]}, "mma");
  const auto half = [](uint32_t word, int i) { return float(bits_as<Element>(uint16_t(word >> 16 * i))); };
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = 2 * (lane % 4) + i % 2;
    float sum = 0;
    for (int k = 0; k < K; ++k) {
      const uint32_t* of_a = given[row % 8 * 4 + k % 8 / 2];
      const uint32_t* of_b = given[column * 4 + k % 8 / 2];
      sum += half(of_a[row / 8 + k / 8 * 2], k % 2) * half(of_b[4 + k / 8], k % 2);
    }
    d[i] += sum;
  }
}
}  // namespace emulator

template <class Element>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  emulator::mma<Element, 16>(d, a, b);
}
template <class Element>
void mma_m16n8k8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  emulator::mma<Element, 8>(d, {a0, a1}, {b});
}

inline void store_global_if(bool condition, float* to, float x, SITE) {
  emulator::count("st.global", 4, to, site, condition);
  if (condition) *to = x;
}
inline void store_global_if(bool condition, float* to, float x, float y, SITE) {
  emulator::count("st.global", 8, to, site, condition);
  if (condition) *reinterpret_cast<float2*>(to) = {x, y};
}
inline void store_global_below(void* to, const uint4& v, int row, int end, SITE) {
  emulator::count("st.global", 16, to, site, row < end);
  if (row < end) *static_cast<uint4*>(to) = v;
}
inline float4 load_l2_or_zero(bool condition, const float* from, SITE) {
  emulator::count("ld.global", 16, from, site, condition);
  if (!condition) return {};
  return *reinterpret_cast<const float4*>(from);
}
template <bool READ_ONLY>
inline void load_stream_or_zero(bool condition, const void* from, uint32_t (&v)[4], SITE) {
  std::memset(v, 0, 16);
  emulator::count("ld.global", 16, from, site, condition);
  if (condition) std::memcpy(v, from, 16);
}
inline void prefetch_l2(const void*) {}
inline void prefetch_tensor_map(const void*) {}
inline void discard_l2(const void* line) { std::memset(const_cast<void*>(line), 0xff, 128); }
inline void fence_async_global() {}

inline void fence_compiler() {}
inline void launch_dependent_grids() {}
inline void wait_on_dependent_grids() {}

template <class... T>
inline void pin(T&...) {}
inline int read_thread_index() { return threadIdx.x; }
inline void read_indices(int& thread, int& block) { thread = threadIdx.x, block = blockIdx.x; }

inline uint32_t middle_halves(uint32_t first, uint32_t second) { return first >> 16 | second << 16; }
inline uint32_t and_or(uint32_t a, uint32_t mask, uint32_t bits) { return (a & mask) | bits; }
inline uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  return emulator::halves<__nv_bfloat16>(a, b, c, [](float x, float y, float z) { return std::fma(x, y, z); });
}
inline uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  return emulator::halves<__half>(a, b, c, [](float x, float y, float z) { return std::fma(x, y, z); });
}
inline uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  return emulator::halves<__nv_bfloat16>(a, b, 0, [](float x, float y, float) { return x * y; });
}
inline uint32_t max_xorsign_abs_bf16x2(uint32_t a, uint32_t b) {
  return emulator::halves<__nv_bfloat16>(a, b, 0, [](float x, float y, float) {
    const float magnitude = std::fmax(std::fabs(x), std::fabs(y));
    return std::signbit(x) != std::signbit(y) ? -magnitude : magnitude;
  });
}
inline uint32_t to_bf16x2(float low, float high) {
  return uint32_t(rounded_to_bf16(high)) << 16 | rounded_to_bf16(low);
}
inline uint32_t truncate_to_bf16x2(float low, float high) {
  return (__float_as_uint(high) & 0xffff0000u) | __float_as_uint(low) >> 16;
}
inline uint32_t to_f16x2(float low, float high) {
  return uint32_t(rounded_to_half(high)) << 16 | rounded_to_half(low);
}
inline uint32_t f16x4_to_e4m3x4(uint32_t low, uint32_t high) {
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    const uint16_t bits = uint16_t((i < 2 ? low : high) >> i % 2 * 16);
    out |= uint32_t(rounded_to_e4m3(float(bits_as<__half>(bits)))) << 8 * i;
  }
  return out;
}
inline uint32_t e4m3x2_to_f16x2(uint16_t codes) {
  return uint32_t(bits_as<uint16_t>(__half(e4m3_to_float(codes >> 8)))) << 16 |
         bits_as<uint16_t>(__half(e4m3_to_float(codes & 255)));
}
inline uint32_t byte_distances(uint32_t a, uint32_t b) {
  uint32_t out = 0;
  for (int i = 0; i < 32; i += 8) out |= uint32_t(std::abs(int(a >> i & 255) - int(b >> i & 255))) << i;
  return out;
}
