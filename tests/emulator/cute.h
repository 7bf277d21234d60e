// CuTe's WGMMA.

namespace emulator {

enum class Kind { BF16, F16, TF32, E4M3 };

// A product of 64xK by KxN elements. A may be in registers, and operands in memory may have M or N innermost.
struct Shape {
  int n, k;
  Kind kind;
  bool registers, a_mn, b_mn;
};

// A product of the running thread, in no batch yet. At `places` are the sums, one after the other, and ScaleOut.
void enqueue(uint64_t a, uint64_t b, const uint32_t* registers, const Shape& shape, const void* const* places);
void commit_batch();
// A batch is multiplied only when the kernel waits for it: its operands must stay until then.
void wait_batches(size_t pending);

}  // namespace emulator

namespace cute {

inline void warpgroup_arrive() {}
template <class T>
void warpgroup_fence_operand(T&) {}

inline void warpgroup_commit_batch() { emulator::commit_batch(); }
template <int PENDING>
void warpgroup_wait() {
  emulator::wait_batches(PENDING);
}

namespace SM90::GMMA {

enum class Major { K, MN };
enum class ScaleOut { Zero, One };
enum class ScaleIn { Neg = -1, One = 1 };

template <int N, int K, emulator::Kind KIND, bool REGISTERS, Major A, Major B>
struct Mma {
  static constexpr emulator::Shape SHAPE = {N, K, KIND, REGISTERS, A == Major::MN, B == Major::MN};

  template <class... Rest>
  static void fma(uint64_t a, uint64_t b, Rest&&... rest) {
    static_assert(!REGISTERS && sizeof...(Rest) == N / 2 + 1);
    const void* const places[] = {&rest...};
    emulator::enqueue(a, b, nullptr, SHAPE, places);
  }
  template <class... Rest>
  static void fma(uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b, Rest&&... rest) {
    static_assert(REGISTERS && sizeof...(Rest) == N / 2 + 1);
    const uint32_t registers[] = {a0, a1, a2, a3};
    const void* const places[] = {&rest...};
    emulator::enqueue(0, b, registers, SHAPE, places);
  }
};

#define ATOMS(n)                                                                          \
  template <Major A, Major B>                                                             \
  using MMA_64x##n##x16_F32BF16BF16_SS = Mma<n, 16, emulator::Kind::BF16, false, A, B>;          \
  template <Major A, Major B>                                                             \
  using MMA_64x##n##x16_F32F16F16_SS = Mma<n, 16, emulator::Kind::F16, false, A, B>;                   \
  template <Major A, Major B>                                                             \
  using MMA_64x##n##x16_F32BF16BF16_RS = Mma<n, 16, emulator::Kind::BF16, true, A, B>;           \
  template <Major A, Major B>                                                             \
  using MMA_64x##n##x16_F32F16F16_RS = Mma<n, 16, emulator::Kind::F16, true, A, B>;                    \
  template <class = void>                                                                 \
  using MMA_64x##n##x8_F32TF32TF32_SS_TN = Mma<n, 8, emulator::Kind::TF32, false, Major::K, Major::K>;    \
  template <class = void>                                                                 \
  using MMA_64x##n##x8_F32TF32TF32_RS_TN = Mma<n, 8, emulator::Kind::TF32, true, Major::K, Major::K>;     \
  template <class = void>                                                                 \
  using MMA_64x##n##x32_F32E4M3E4M3_SS_TN = Mma<n, 32, emulator::Kind::E4M3, false, Major::K, Major::K>; \
  template <class = void>                                                                 \
  using MMA_64x##n##x32_F32E4M3E4M3_RS_TN = Mma<n, 32, emulator::Kind::E4M3, true, Major::K, Major::K>;
ATOMS(8) ATOMS(16) ATOMS(24) ATOMS(32) ATOMS(40) ATOMS(48) ATOMS(56) ATOMS(64)
ATOMS(72) ATOMS(80) ATOMS(88) ATOMS(96) ATOMS(104) ATOMS(112) ATOMS(120) ATOMS(128)
ATOMS(136) ATOMS(144) ATOMS(152) ATOMS(160) ATOMS(168) ATOMS(176) ATOMS(184) ATOMS(192)
ATOMS(200) ATOMS(208) ATOMS(216) ATOMS(224) ATOMS(232) ATOMS(240) ATOMS(248) ATOMS(256)
#undef ATOMS

}  // namespace SM90::GMMA
}  // namespace cute
