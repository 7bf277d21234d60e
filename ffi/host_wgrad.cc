// The work of a weight gradient dW[m, k] = sum over rows of im2col(lhs)[row, m] * g[row, k] on XLA's threads.
//
// The rows (output pixels) are cut into `splits` parts and the columns m into slices; each (split, slice) is
// one task that walks its rows in blocks and adds into the split's own f32 partial dW in the workspace. A
// second parallel phase adds the partials in split order. What is added in which order depends on the
// configuration only, never on how many threads there are or which of them ran what, so results are bitwise
// repeatable.

#include "host_wgrad.h"

#include <atomic>
#include <string>

#include "host_check.h"
#include "host_direct.h"
#include "host_pack.h"
#include "host_parallel.h"
#include "host_reduce.h"

namespace jax_splitk {
namespace {

namespace ffi = xla::ffi;
using Sgemm = void(char*, char*, int*, int*, int*, float*, float*, int*, float*, int*, float*, float*, int*);

std::atomic<void*> g_sgemm{nullptr};

// The constants of the workspace formula; jax_splitk/kernels/wgrad_host.py has the same.
constexpr int64_t kTile = 64;      // largest sgemm tile in m and in n
constexpr int64_t kChunk = 512;    // columns of g converted to f32 at a time
constexpr int64_t kTasks = 32;     // tasks to aim for
constexpr int64_t kHalfTasks = 8;  // the same for 16-bit inputs: every slice of a group converts its g anew
constexpr int64_t kMaxSlots = 64;  // most threads that work on one call
constexpr int64_t kAlign = 64;     // bytes
constexpr int64_t kMaxSplits = 256;
constexpr int64_t kMinBlock = 8, kMaxBlock = 4096;
// OpenBLAS wakes its own threads for m * n * k above this; concurrent calls would then wait for that one
// pool. Every call stays at or below it, so XLA's threads are the only ones.
constexpr int64_t kSgemmVolume = 65536 * 4;
// As gemm with one row or column is gemv there, which wakes them at m * n of 9216.
constexpr int64_t kSgemvVolume = 8192;
// Many groups (depthwise filters above all) with fewer output and input channels each are summed by a direct
// loop.
constexpr int64_t kMinGemmOut = 4, kMinGemmIn = 8;
constexpr int64_t kSumChunk = 16384;       // elements of dW per task of the second phase
constexpr int64_t kSerialFlops = 1000000;  // below this, waking a thread costs more than it brings

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t AlignUp(int64_t bytes) { return CeilDiv(bytes, kAlign) * kAlign; }

// How the work is cut and where everything lies in the workspace (twin: wgrad_host._layout).
struct Layout {
  bool direct;            // direct loop, not sgemm
  int64_t pieces;         // column tiles of one group (sgemm) or of the whole result (direct)
  int64_t slices;         // parts that the columns are cut into
  int64_t slots;          // threads' own scratch areas
  int64_t partial_bytes;  // one split's partial dW; 0 if the single one is the result itself
  int64_t lhs_bytes;      // of one slot: packed lhs, or the list of meetings
  int64_t slot_bytes;
  int64_t total_bytes;
};

Layout MakeLayout(const Geometry& geo, bool f32_in, bool f32_out, int64_t splits, int64_t block) {
  const int64_t m = geo.gemm_m(), n = geo.group_out();
  Layout layout{};
  layout.direct = geo.groups > 1 && n < kMinGemmOut && geo.group_in() < kMinGemmIn;
  layout.pieces = CeilDiv(layout.direct ? geo.out_channels : m, kTile);
  const int64_t cuts = layout.direct ? layout.pieces : layout.pieces * geo.groups;
  layout.slices = std::max<int64_t>(1, std::min(cuts, CeilDiv(f32_in ? kTasks : kHalfTasks, splits)));
  layout.slots = std::min(splits * layout.slices, kMaxSlots);
  layout.partial_bytes = splits == 1 && f32_out ? 0 : AlignUp(4 * m * geo.out_channels);
  layout.lhs_bytes = AlignUp(layout.direct ? 16 * block : 4 * block * std::min(m, kTile));
  layout.slot_bytes = layout.lhs_bytes;
  if (!layout.direct && !f32_in) layout.slot_bytes += AlignUp(4 * block * std::min(n, kChunk));
  layout.total_bytes = kAlign + splits * layout.partial_bytes + layout.slots * layout.slot_bytes;
  return layout;
}

// Everything one call's tasks need.
struct Call {
  Geometry geo;
  Layout layout;
  int64_t splits, block;
  const void* lhs;
  const void* g;
  char* workspace;  // aligned
  void* out;
  Sgemm* sgemm;

  float* Partial(int64_t split) const {
    if (layout.partial_bytes == 0) return static_cast<float*>(out);
    return reinterpret_cast<float*>(workspace + split * layout.partial_bytes);
  }
  char* Slot(int64_t slot) const {
    return workspace + splits * layout.partial_bytes + slot * layout.slot_bytes;
  }
};

// c[m, n] (leading dimension ldc) (+)= sum over rows of a[row, m] * b[row, n]. Row-major c is column-major
// c^T = b^T a, which Fortran calls op(A) = b ("N") times op(B) = a^T ("T").
void Multiply(Sgemm* sgemm, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t m, int64_t n,
              int64_t rows, bool add, float* c, int64_t ldc) {
  const int64_t tiles = CeilDiv(n, kTile);
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t n0 = tile * n / tiles, n1 = (tile + 1) * n / tiles;
    const bool vector = m == 1 || n1 - n0 == 1;
    // Some gemv multiply what c held by beta = 0, which keeps a NaN: clear it instead.
    for (int64_t row = 0; vector && !add && row < m; ++row)
      std::fill(c + row * ldc + n0, c + row * ldc + n1, 0.0f);
    const int64_t step = (vector ? kSgemvVolume : kSgemmVolume) / (m * (n1 - n0));
    for (int64_t k = 0; k < rows; k += step) {
      char no = 'N', yes = 'T';
      int fm = static_cast<int>(n1 - n0), fn = static_cast<int>(m),
          fk = static_cast<int>(std::min(step, rows - k));
      int fa = static_cast<int>(ldb), fb = static_cast<int>(lda), fc = static_cast<int>(ldc);
      float one = 1.0f, beta = add || vector || k > 0 ? 1.0f : 0.0f;
      sgemm(&no, &yes, &fm, &fn, &fk, &one, const_cast<float*>(b + k * ldb + n0), &fa,
            const_cast<float*>(a + k * lda), &fb, &beta, c + n0, &fc);
    }
  }
}

// One block of rows of one group, for its column tiles [tile0, tile1).
template <typename T>
JAX_SPLITK_INLINE void GemmBlock(const Call& call, int64_t group, int64_t tile0, int64_t tile1, int64_t begin,
                                 int64_t end, bool add, char* slot, float* partial) {
  constexpr bool kFloat = std::is_same_v<T, float>;
  const Geometry& geo = call.geo;
  const int64_t m = geo.gemm_m(), n = geo.group_out(), ldc = geo.out_channels, tiles = call.layout.pieces;
  const T *lhs = static_cast<const T*>(call.lhs), *g = static_cast<const T*>(call.g);
  float* packed_lhs = reinterpret_cast<float*>(slot);
  float* packed_g = reinterpret_cast<float*>(slot + call.layout.lhs_bytes);
  const int64_t chunks = CeilDiv(n, kChunk);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int64_t n0 = group * n + chunk * n / chunks, n1 = group * n + (chunk + 1) * n / chunks;
    const float* b = packed_g;
    int64_t ldb = n1 - n0;
    if constexpr (kFloat) {  // g is already the matrix that sgemm wants
      b = g + begin * ldc + n0;
      ldb = ldc;
    } else {
      PackG(geo, g, n0, n1, begin, end, packed_g);
    }
    for (int64_t tile = tile0; tile < tile1; ++tile) {
      const int64_t m0 = tile * m / tiles, m1 = (tile + 1) * m / tiles;
      const float* a = packed_lhs;
      int64_t lda = m1 - m0;
      bool pack = true;
      if constexpr (kFloat) {
        if (geo.IsPlainProduct()) {
          a = lhs + begin * geo.in_channels + group * geo.group_in() + m0;
          lda = geo.in_channels;
          pack = false;
        }
      }
      if (pack) PackLhs(geo, lhs, group, m0, m1, begin, end, packed_lhs);
      Multiply(call.sgemm, a, lda, b, ldb, m1 - m0, n1 - n0, end - begin, add, partial + m0 * ldc + n0, ldc);
    }
  }
}

// One block of rows for output channels [l0, l1), every tap and channel of the group.
template <typename T>
JAX_SPLITK_INLINE void DirectBlock(const Call& call, int64_t l0, int64_t l1, int64_t begin, int64_t end,
                                   bool add, char* slot, float* partial) {
  Meeting* list = reinterpret_cast<Meeting*>(slot);
  const int64_t channels = call.geo.group_in();
  const T *lhs = static_cast<const T*>(call.lhs), *g = static_cast<const T*>(call.g);
  for (int64_t tap = 0; tap < call.geo.taps(); ++tap) {
    const int64_t count = ListMeetings(call.geo, tap, begin, end, list);
    for (int64_t ci = 0; ci < channels; ++ci) {
      float* row = partial + (tap * channels + ci) * call.geo.out_channels;
      if (!add) std::fill(row + l0, row + l1, 0.0f);
      Direct(call.geo, lhs + ci, g, list, count, l0, l1, row);
    }
  }
}

// One task of the first phase: slice `slice` of the columns over the rows of split `split`.
template <typename T>
JAX_SPLITK_INLINE void AddPartial(const Call& call, int64_t split, int64_t slice, char* slot) {
  const Layout& layout = call.layout;
  const int64_t rows = call.geo.rows(), first = split * rows / call.splits,
                last = (split + 1) * rows / call.splits;
  const int64_t cuts = layout.direct ? layout.pieces : layout.pieces * call.geo.groups;
  const int64_t cut0 = slice * cuts / layout.slices, cut1 = (slice + 1) * cuts / layout.slices;
  float* partial = call.Partial(split);
  for (int64_t begin = first; begin < last; begin += call.block) {
    const int64_t end = std::min(begin + call.block, last);
    if (layout.direct) {
      const int64_t l0 = cut0 * kTile, l1 = std::min(cut1 * kTile, call.geo.out_channels);
      DirectBlock<T>(call, l0, l1, begin, end, begin > first, slot, partial);
      continue;
    }
    for (int64_t cut = cut0; cut < cut1;) {
      const int64_t group = cut / layout.pieces, next = std::min(cut1, (group + 1) * layout.pieces);
      const int64_t base = group * layout.pieces;
      GemmBlock<T>(call, group, cut - base, next - base, begin, end, begin > first, slot, partial);
      cut = next;
    }
  }
}

template <typename T>
void AddPartialBaseline(const Call& call, int64_t split, int64_t slice, char* slot) {
  AddPartial<T>(call, split, slice, slot);
}

#if defined(__x86_64__)
// The same once more for the CPUs of the last decade. Which of the two runs depends on the machine only.
template <typename T>
__attribute__((target("avx2,fma"))) void AddPartialAvx2(const Call& call, int64_t split, int64_t slice,
                                                        char* slot) {
  AddPartial<T>(call, split, slice, slot);
}

template <typename T>
auto ChooseAddPartial() {
  static const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return avx2 ? AddPartialAvx2<T> : AddPartialBaseline<T>;
}
#else
template <typename T>
auto ChooseAddPartial() {
  return AddPartialBaseline<T>;
}
#endif

void Run(ffi::ThreadPool& pool, const Call& call, ffi::DataType in_type, ffi::DataType out_type) {
  const int64_t size = call.geo.gemm_m() * call.geo.out_channels;
  const bool serial = 2.0 * size * call.geo.rows() / call.geo.groups < kSerialFlops;
  const int64_t helpers = serial ? 0 : std::min(pool.num_threads(), call.layout.slots) - 1;
  const int64_t slices = call.layout.slices;
  auto* add = in_type == ffi::F32    ? ChooseAddPartial<float>()
              : in_type == ffi::BF16 ? ChooseAddPartial<Bf16>()
                                     : ChooseAddPartial<F16>();
  ParallelFor(pool, helpers, call.splits * slices,
              [&](int64_t task, int64_t slot) { add(call, task / slices, task % slices, call.Slot(slot)); });
  if (call.layout.partial_bytes == 0) return;
  ParallelFor(pool, size * call.splits < kSerialFlops / 8 ? 0 : helpers, CeilDiv(size, kSumChunk),
              [&](int64_t task, int64_t) {
                auto* sum = out_type == ffi::F32    ? SumPartials<float, Call>
                            : out_type == ffi::BF16 ? SumPartials<Bf16, Call>
                                                    : SumPartials<F16, Call>;
                sum(call, task * kSumChunk, std::min((task + 1) * kSumChunk, size));
              });
}

bool IsFloat(ffi::DataType type) { return type == ffi::F32 || type == ffi::BF16 || type == ffi::F16; }

ffi::Error CheckTypes(ffi::DataType lhs, ffi::DataType g, ffi::DataType out, ffi::DataType workspace) {
  if (IsFloat(lhs) && g == lhs && IsFloat(out) && workspace == ffi::U8) return ffi::Error::Success();
  auto number = [](ffi::DataType type) { return std::to_string(static_cast<int>(type)); };
  return Invalid("element types (XLA numbers) lhs " + number(lhs) + ", g " + number(g) + ", dW " +
                 number(out) + ", workspace " + number(workspace) +
                 ": lhs and g must be the same of F32 11, BF16 16, F16 10, dW " +
                 "one of these, workspace U8 6");
}

ffi::Error CheckConfig(const Geometry& geo, int64_t splits, int64_t block) {
  const int64_t most = std::clamp<int64_t>(geo.rows(), 1, kMaxSplits);
  if (splits < 1 || splits > most) {
    return Invalid("splits = " + std::to_string(splits) + " must lie within 1.." + std::to_string(most) +
                   " for a reduction of " + std::to_string(geo.rows()));
  }
  if (block < kMinBlock || block > kMaxBlock || block % kMinBlock != 0) {
    return Invalid("block = " + std::to_string(block) + " must be a multiple of 8 within 8..4096");
  }
  return ffi::Error::Success();
}

ffi::Error HostWgrad(ffi::ThreadPool pool, ffi::AnyBuffer lhs, ffi::AnyBuffer g,
                     ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> workspace,
                     Ints window_strides, Ints padding, Ints lhs_dilation, Ints rhs_dilation,
                     int64_t feature_group_count, int64_t splits, int64_t block) {
  const ffi::DataType in_type = lhs.element_type(), out_type = out->element_type();
  Call call{};
  auto error = CheckTypes(in_type, g.element_type(), out_type, workspace->element_type());
  if (error.success()) {
    error = MakeGeometry({lhs.dimensions(), g.dimensions(), out->dimensions(), window_strides, padding,
                          lhs_dilation, rhs_dilation, feature_group_count},
                         &call.geo);
  }
  if (error.success()) error = CheckConfig(call.geo, splits, block);
  if (error.failure()) return error;
  call.layout = MakeLayout(call.geo, in_type == ffi::F32, out_type == ffi::F32, splits, block);
  const int64_t given = static_cast<int64_t>(workspace->size_bytes());
  if (given != call.layout.total_bytes) {
    return Invalid("workspace has " + std::to_string(given) + " bytes, expected " +
                   std::to_string(call.layout.total_bytes) + " for splits = " + std::to_string(splits) +
                   " and block = " + std::to_string(block));
  }
  if (out->element_count() == 0) return ffi::Error::Success();
  if (call.geo.rows() == 0 || lhs.element_count() == 0) {
    std::memset(out->untyped_data(), 0, out->size_bytes());
    return ffi::Error::Success();
  }
  call.sgemm = reinterpret_cast<Sgemm*>(g_sgemm.load());
  if (call.sgemm == nullptr && !call.layout.direct) {
    return ffi::Error(
        ffi::ErrorCode::kFailedPrecondition,
        "jax_splitk host wgrad: no sgemm is set; import jax_splitk does it from scipy.linalg.cython_blas");
  }
  call.splits = splits;
  call.block = block;
  call.lhs = lhs.untyped_data();
  call.g = g.untyped_data();
  call.out = out->untyped_data();
  const auto base = reinterpret_cast<uintptr_t>(workspace->untyped_data());
  call.workspace = static_cast<char*>(workspace->untyped_data()) + (kAlign - base % kAlign) % kAlign;
  Run(pool, call, in_type, out_type);
  return ffi::Error::Success();
}

}  // namespace

void SetSgemm(void* fn) { g_sgemm.store(fn); }

}  // namespace jax_splitk

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxSplitkHostWgrad, jax_splitk::HostWgrad,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<jax_splitk::Ints>("window_strides")
                                  .Attr<jax_splitk::Ints>("padding")
                                  .Attr<jax_splitk::Ints>("lhs_dilation")
                                  .Attr<jax_splitk::Ints>("rhs_dilation")
                                  .Attr<int64_t>("feature_group_count")
                                  .Attr<int64_t>("splits")
                                  .Attr<int64_t>("block"));
