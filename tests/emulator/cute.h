// CuTe's WGMMA.

namespace cute {

inline void warpgroup_arrive() {}
template <class T>
void warpgroup_fence_operand(T&) {}

inline void warpgroup_commit_batch() {
  ++emulator::self->fences;  // what products have in registers was loaded before they were issued
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
