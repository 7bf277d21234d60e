// The parts of CuTe and CUTLASS that the kernels use: barriers, TMA, WGMMA, clusters.

namespace cutlass::arch {

struct ClusterBarrier {
  static void init(uint64_t* at, uint32_t arrivals) {
    *reinterpret_cast<emulator::Barrier*>(at) = {0, 0, arrivals, arrivals};
  }
  static void wait(const uint64_t* at, uint32_t phase) {
    emulator::wait_phase(emulator::barrier(emulator::address(at)), phase, "mbarrier");
  }
  static void arrive(const uint64_t* at) { emulator::barrier(emulator::address(at)).arrive(); }
  static void arrive(const uint64_t* at, uint32_t block, uint32_t condition) {
    if (condition) emulator::barrier(emulator::in_block(emulator::address(at), block)).arrive();
  }
};

struct ClusterTransactionBarrier : ClusterBarrier {
  static void expect_transaction(const uint64_t* at, uint32_t bytes) {
    emulator::barrier(emulator::address(at)).expect(bytes);
  }
  static void arrive_and_expect_tx(const uint64_t* at, uint32_t bytes) {
    expect_transaction(at, bytes);
    arrive(at);
  }
};

struct NamedBarrier {
  static void sync(int threads, int barrier) { emulator::sync(100 + barrier, threads, "NamedBarrier"); }
  static void arrive(int threads, int barrier) { ++emulator::self->block->barriers[100 + barrier].arrived; }
};

inline void fence_barrier_init() {}
inline void fence_view_async_shared() {}
inline void cpasync_barrier_arrive_noinc(const uint64_t* at) {
  for (auto& copy : emulator::self->copies) copy();
  emulator::self->copies.clear();
  ClusterBarrier::arrive(at);
}
template <int REGISTERS>
void warpgroup_reg_alloc() {}
template <int REGISTERS>
void warpgroup_reg_dealloc() {}

}  // namespace cutlass::arch

namespace cute {

template <bool CONDITION, class A, class B>
using conditional_t = std::conditional_t<CONDITION, A, B>;

namespace TMA {
enum class CacheHintSm90 : uint64_t { EVICT_NORMAL, EVICT_FIRST, EVICT_LAST };
}

inline uint32_t cast_smem_ptr_to_uint(const void* p) { return emulator::address(p); }
inline uint32_t elect_one_sync() { return emulator::self->number % 32 == 0; }
inline uint32_t block_rank_in_cluster() { return emulator::self->block->rank; }
inline uint32_t set_block_rank(uint32_t address, uint32_t rank) { return emulator::in_block(address, rank); }

inline void cluster_arrive() {
  emulator::Meeting& meeting = emulator::self->block->cluster->meeting;
  emulator::self->cluster_since = meeting.generation;
  ++meeting.arrived;
}
inline void cluster_arrive_relaxed() { cluster_arrive(); }
inline void cluster_wait() {
  emulator::Cluster* cluster = emulator::self->block->cluster;
  const unsigned since = emulator::self->cluster_since;
  emulator::wait_until("cluster_wait", [=] { return cluster->meeting.is_over(since, cluster->live); });
}
inline void cluster_sync() { cluster_arrive(), cluster_wait(); }

// With or without a cache hint.
template <int RANK>
struct TmaLoad {
  template <class... At, class = std::enable_if_t<sizeof...(At) == RANK>>
  static void copy(const void* map, uint64_t* full, uint64_t, void* to, At... at) {
    emulator::load_box<RANK>(map, full, emulator::own_mask(), to, at...);
  }
};
using SM90_TMA_LOAD_2D = TmaLoad<2>;
using SM90_TMA_LOAD_3D = TmaLoad<3>;
using SM90_TMA_LOAD_4D = TmaLoad<4>;
using SM90_TMA_LOAD_5D = TmaLoad<5>;

template <int RANK>
struct TmaLoadMulticast {
  template <class... At>
  static void copy(const void* map, uint64_t* full, uint16_t mask, uint64_t, void* to, At... at) {
    static_assert(sizeof...(At) == RANK);
    emulator::load_box<RANK>(map, full, mask, to, at...);
  }
};
using SM90_TMA_LOAD_MULTICAST_2D = TmaLoadMulticast<2>;

// Coordinates of a window's origin, the channel's first, then offsets within it.
template <int RANK>
struct TmaLoadIm2col {
  template <class... At>
  static void copy(const void* map, uint64_t* full, void* to, At... numbers) {
    static_assert(sizeof...(At) == RANK + RANK - 2);
    const emulator::Map m(static_cast<const uint64_t*>(map));
    if (!m.im2col || m.rank != RANK) emulator::fail("a load of another kind than its tensor map");
    const std::array<int64_t, 10> at = {int64_t(int32_t(numbers))...};
    emulator::load_map(m, at[0], emulator::address(full), emulator::address(to), emulator::own_mask(),
                       [at](const emulator::Map& map, uint8_t* window, uint32_t to) {
                         map.load_im2col(window, to, at.data(), at.data() + RANK);
                       });
  }
};
using SM90_TMA_LOAD_IM2COL_3D = TmaLoadIm2col<3>;
using SM90_TMA_LOAD_IM2COL_4D = TmaLoadIm2col<4>;
using SM90_TMA_LOAD_IM2COL_5D = TmaLoadIm2col<5>;

struct SM90_BULK_COPY_G2S {
  static void copy(const void* from, uint64_t* full, void* to, int32_t bytes) {
    emulator::Barrier* barrier = &emulator::barrier(emulator::address(full));
    if (bytes % 16 || reinterpret_cast<uintptr_t>(from) % 16) emulator::fail("a bulk copy that is not of whole 16 bytes");
    emulator::later([=] { std::memcpy(to, from, bytes), barrier->complete(bytes); });
  }
};

// d = a * b + c of 16x16 and 16x8 elements, by a warp.
template <class Element>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const float (&c)[4]) {
  const int lane = emulator::self->number % 32;
  const auto given = emulator::exchange(~0u, {a[0], a[1], a[2], a[3], b[0], b[1]}, "mma");
  const auto half = [](uint32_t word, int i) { return float(bits_as<Element>(uint16_t(word >> 16 * i))); };
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = 2 * (lane % 4) + i % 2;
    float sum = 0;
    for (int k = 0; k < 16; ++k) {
      const uint32_t* of_a = given[row % 8 * 4 + k % 8 / 2];
      const uint32_t* of_b = given[column * 4 + k % 8 / 2];
      sum += half(of_a[row / 8 + k / 8 * 2], k % 2) * half(of_b[4 + k / 8], k % 2);
    }
    d[i] = sum + c[i];
  }
}

template <class Element>
struct Mma16x8x16 {
  static void fma(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                  uint32_t b0, uint32_t b1, float c0, float c1, float c2, float c3) {
    float d[4];
    mma_m16n8k16<Element>(d, {a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3});
    d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];
  }
};
using SM80_16x8x16_F32BF16BF16F32_TN = Mma16x8x16<__nv_bfloat16>;
using SM80_16x8x16_F32F16F16F32_TN = Mma16x8x16<__half>;

// ---- WGMMA -------------------------------------------------------------------------------------------------

union GmmaDescriptor {
  uint64_t desc_;
  struct {
    uint16_t start_address_ : 14, : 2;
    uint16_t leading_byte_offset_ : 14, : 2;
    uint16_t stride_byte_offset_ : 14, : 2;
    uint8_t : 1, base_offset_ : 3, : 4;
    uint8_t : 6, layout_type_ : 2;
  } bitfield;
};
static_assert(sizeof(GmmaDescriptor) == 8);

inline void warpgroup_arrive() {}
template <class T>
void warpgroup_fence_operand(T&) {}

inline void warpgroup_commit_batch() {
  emulator::Warpgroup& group = emulator::self->block->warpgroups[emulator::self->number / 128];
  const int thread = emulator::self->number % 128;
  group.committed[thread].push_back(std::move(group.open[thread]));
  group.open[thread].clear();
  ++group.count[thread];
}

// A batch is multiplied when it is waited for, not before: what it reads must have stayed until then.
template <int PENDING>
void warpgroup_wait() {
  emulator::Warpgroup& group = emulator::self->block->warpgroups[emulator::self->number / 128];
  const size_t mine = group.count[emulator::self->number % 128];
  if (mine <= PENDING) return;
  const size_t target = mine - PENDING;
  emulator::wait_until("warpgroup_wait", [&] {
    return *std::min_element(group.count, group.count + 128) >= target;
  });
  for (; group.complete < target; ++group.complete) {
    const size_t products = group.committed[0].front().size();
    for (size_t i = 0; i < products; ++i) {
      emulator::Product* all[128];
      for (int thread = 0; thread < 128; ++thread) {
        auto& batch = group.committed[thread].front();
        if (batch.size() != products) emulator::fail("threads of a warpgroup with different WGMMAs");
        all[thread] = &batch[i];
      }
      all[0]->run(all);
    }
    for (auto& batches : group.committed) batches.pop_front();
  }
}

namespace SM90::GMMA {

enum class Major { K, MN };
enum class ScaleOut { Zero, One };
enum class ScaleIn { Neg = -1, One = 1 };
enum class LayoutType : uint8_t { INTERLEAVE, B128, B64, B32 };

struct Tf32 {
  uint32_t bits;
  operator float() const { return __uint_as_float(bits & ~0x1fffu); }
};

// The element of an operand in shared memory, by its descriptor.
template <class Element>
float element(uint64_t descriptor, Major major, int mn, int k) {
  const uint32_t start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4;
  const uint32_t stride = (descriptor >> 32 & 0x3fff) << 4, layout = descriptor >> 62;
  const int item = sizeof(Element), row_bytes = layout == 0 ? 16 : 256 >> layout;
  uint32_t at = start;
  if (major == Major::K) {
    at += mn / 8 * stride + mn % 8 * row_bytes;
    at += layout == 0 ? k * item / 16 * leading + k * item % 16 : k * item;
  } else {
    if (layout == 0) emulator::fail("an MN-major operand without a swizzle: not emulated");
    const int row = row_bytes / item;
    at += mn / row * leading + k / 8 * stride + k % 8 * row_bytes + mn % row * item;
  }
  at = emulator::swizzle(at, layout == 0 ? 0 : 4 - layout);
  return float(bits_as<Element>(*reinterpret_cast<const Element*>(emulator::self->block->window + at)));
}

template <int N, int K, class Element, bool REGISTERS, Major A, Major B>
struct Mma {
  static void multiply(emulator::Product* const* threads) {
    static thread_local float a[64][K], b[N][K];
    for (int n = 0; n < N; ++n)
      for (int k = 0; k < K; ++k) b[n][k] = element<Element>(threads[0]->b, B, n, k);
    for (int row = 0; row < 64; ++row)
      for (int k = 0; k < K; ++k) {
        if constexpr (REGISTERS) {  // lane l of warp w has rows l/4 and l/4 + 8 of its 16, 4 bytes at l%4 and 16 on
          constexpr int WORD = 4 / sizeof(Element);
          const int lane = row % 8 * 4 + k / WORD % 4, index = row % 16 / 8 + k / (4 * WORD) * 2;
          const uint32_t word = threads[row / 16 * 32 + lane]->registers[index];
          Element e[WORD];
          std::memcpy(e, &word, 4);
          a[row][k] = float(e[k % WORD]);
        } else {
          a[row][k] = element<Element>(threads[0]->a, A, row, k);
        }
      }
    for (int thread = 0; thread < 128; ++thread) {
      emulator::Product& product = *threads[thread];
      if (product.b != threads[0]->b || (!REGISTERS && product.a != threads[0]->a)) {
        emulator::fail("threads of a warpgroup with different descriptors");
      }
      for (int i = 0; i < N / 2; ++i) {
        const int row = thread / 32 * 16 + thread % 32 / 4 + i % 4 / 2 * 8, n = i / 4 * 8 + thread % 4 * 2 + i % 2;
        float sum = 0;
        for (int k = 0; k < K; ++k) sum += a[row][k] * b[n][k];
        product.sums[i] = (product.zero ? 0.f : product.sums[i]) + sum;
      }
    }
  }

  template <class... Rest>
  static void enqueue(emulator::Product product, float& first, Rest&&... rest) {
    static_assert(sizeof...(Rest) == N / 2);
    const ScaleOut scale = std::get<N / 2 - 1>(std::forward_as_tuple(rest...));
    product.sums = &first, product.zero = scale == ScaleOut::Zero, product.run = multiply;
    emulator::Warpgroup& group = emulator::self->block->warpgroups[emulator::self->number / 128];
    group.open[emulator::self->number % 128].push_back(product);
  }

  template <class... Sums>
  static void fma(uint64_t a, uint64_t b, Sums&&... sums) {
    static_assert(!REGISTERS);
    enqueue({a, b}, sums...);
  }
  template <class... Sums>
  static void fma(uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b, Sums&&... sums) {
    static_assert(REGISTERS);
    enqueue({0, b, {a0, a1, a2, a3}}, sums...);
  }
};

#define ATOMS(n)                                                                          \
  template <Major A, Major B>                                                             \
  using MMA_64x##n##x16_F32BF16BF16_SS = Mma<n, 16, __nv_bfloat16, false, A, B>;          \
  template <Major A, Major B>                                                             \
  using MMA_64x##n##x16_F32F16F16_SS = Mma<n, 16, __half, false, A, B>;                   \
  template <Major A, Major B>                                                             \
  using MMA_64x##n##x16_F32BF16BF16_RS = Mma<n, 16, __nv_bfloat16, true, A, B>;           \
  template <Major A, Major B>                                                             \
  using MMA_64x##n##x16_F32F16F16_RS = Mma<n, 16, __half, true, A, B>;                    \
  template <class = void>                                                                 \
  using MMA_64x##n##x8_F32TF32TF32_SS_TN = Mma<n, 8, Tf32, false, Major::K, Major::K>;    \
  template <class = void>                                                                 \
  using MMA_64x##n##x8_F32TF32TF32_RS_TN = Mma<n, 8, Tf32, true, Major::K, Major::K>;     \
  template <class = void>                                                                 \
  using MMA_64x##n##x32_F32E4M3E4M3_SS_TN = Mma<n, 32, __nv_fp8_e4m3, false, Major::K, Major::K>; \
  template <class = void>                                                                 \
  using MMA_64x##n##x32_F32E4M3E4M3_RS_TN = Mma<n, 32, __nv_fp8_e4m3, true, Major::K, Major::K>;
ATOMS(8) ATOMS(16) ATOMS(24) ATOMS(32) ATOMS(40) ATOMS(48) ATOMS(56) ATOMS(64)
ATOMS(72) ATOMS(80) ATOMS(88) ATOMS(96) ATOMS(104) ATOMS(112) ATOMS(120) ATOMS(128)
ATOMS(136) ATOMS(144) ATOMS(152) ATOMS(160) ATOMS(168) ATOMS(176) ATOMS(184) ATOMS(192)
ATOMS(200) ATOMS(208) ATOMS(216) ATOMS(224) ATOMS(232) ATOMS(240) ATOMS(248) ATOMS(256)
#undef ATOMS

}  // namespace SM90::GMMA
}  // namespace cute

inline void* __cvta_shared_to_generic(uint32_t address) { return emulator::pointer(address); }
