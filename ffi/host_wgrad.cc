// The work of a weight gradient dW[m, k] = sum over rows of im2col(lhs)[row, m] * g[row, k] on XLA's threads.
//
// The rows (output pixels) are cut into `splits` parts and the columns m into slices; each (split, slice) is
// one task that walks its rows in blocks and adds into the split's own f32 partial dW in the workspace.

#include <atomic>
#include <string>

#include "host.h"
#include "host_direct.h"
#include "host_geometry.h"
#include "host_pack.h"
#include "host_split.h"

namespace jax_splitk {
namespace {

using Sgemm = void(char*, char*, int*, int*, int*, float*, float*, int*, float*, int*, float*, float*, int*);

std::atomic<void*> g_sgemm{nullptr};

// Of the workspace formula; jax_splitk/kernels/wgrad/host.py has the same.
constexpr int64_t kTile = 64;      // largest sgemm tile in m and in n
constexpr int64_t kChunk = 512;    // columns of g converted to f32 at a time
constexpr int64_t kTasks = 32;     // tasks to aim for
constexpr int64_t kHalfTasks = 8;  // the same for 16-bit inputs: every slice of a group converts its g anew
constexpr int64_t kMinBlock = 8, kMaxBlock = 4096;
// OpenBLAS wakes its own threads for m * n * k above this; concurrent calls would then wait for that one
// pool. Every call stays at or below it, so XLA's threads are the only ones.
constexpr int64_t kSgemmVolume = 65536 * 4;
// As gemm with one row or column is gemv there, which wakes them at m * n of 9216.
constexpr int64_t kSgemvVolume = 8192;
// Many groups (depthwise filters above all) with fewer output and input channels each are summed by a direct
// loop.
constexpr int64_t kMinGemmOut = 4, kMinGemmIn = 8;

// Everything one call's tasks need.
struct Call : SplitCall {
  Geometry geo;
  ffi::DataType in_type;
  int64_t block;
  const void *lhs, *g;
  Sgemm* sgemm;
  bool direct;        // direct loop, not sgemm
  int64_t cuts;       // column tiles of all groups
  int64_t tiles;      // of one group (sgemm) or of the whole result (direct)
  int64_t slices;     // parts that the cuts are distributed to
  int64_t lhs_bytes;  // of one slot: packed lhs, or the list of meetings
};

// How the work is cut and the size of everything in the workspace (twin: _layout in
// jax_splitk/kernels/wgrad/host.py).
void SetLayout(Call* call) {
  const Geometry& geo = call->geo;
  const bool f32_in = call->in_type == ffi::F32, in_place = call->splits == 1 && call->out_type == ffi::F32;
  const int64_t m = geo.gemm_m(), n = geo.group_out();
  call->direct = geo.groups > 1 && n < kMinGemmOut && geo.group_in() < kMinGemmIn;
  call->tiles = CeilDiv(call->direct ? geo.out_channels : m, kTile);
  call->cuts = call->direct ? call->tiles : call->tiles * geo.groups;
  call->slices =
      std::max<int64_t>(1, std::min(call->cuts, CeilDiv(f32_in ? kTasks : kHalfTasks, call->splits)));
  call->slots = std::min(call->splits * call->slices, kMaxSlots);
  call->partial_bytes = in_place ? 0 : AlignUp(4 * m * geo.out_channels);
  call->lhs_bytes = AlignUp(call->direct ? 16 * call->block : 4 * call->block * std::min(m, kTile));
  call->slot_bytes = call->lhs_bytes;
  if (!call->direct && !f32_in) call->slot_bytes += AlignUp(4 * call->block * std::min(n, kChunk));
}

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
  const int64_t m = geo.gemm_m(), n = geo.group_out(), ldc = geo.out_channels, tiles = call.tiles;
  const T *lhs = static_cast<const T*>(call.lhs), *g = static_cast<const T*>(call.g);
  float* packed_lhs = reinterpret_cast<float*>(slot);
  float* packed_g = reinterpret_cast<float*>(slot + call.lhs_bytes);
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

// One task: a slice of the columns over the rows of a split.
template <typename T>
JAX_SPLITK_INLINE void AddPartial(const Call& call, int64_t task, char* slot) {
  const int64_t split = task / call.slices, slice = task % call.slices, rows = call.geo.rows();
  const int64_t first = split * rows / call.splits, last = (split + 1) * rows / call.splits;
  const int64_t cut0 = slice * call.cuts / call.slices, cut1 = (slice + 1) * call.cuts / call.slices;
  float* partial = call.Partial(split);
  for (int64_t begin = first; begin < last; begin += call.block) {
    const int64_t end = std::min(begin + call.block, last);
    if (call.direct) {
      const int64_t l0 = cut0 * kTile, l1 = std::min(cut1 * kTile, call.geo.out_channels);
      DirectBlock<T>(call, l0, l1, begin, end, begin > first, slot, partial);
      continue;
    }
    for (int64_t cut = cut0; cut < cut1;) {
      const int64_t group = cut / call.tiles, base = group * call.tiles,
                    next = std::min(cut1, base + call.tiles);
      GemmBlock<T>(call, group, cut - base, next - base, begin, end, begin > first, slot, partial);
      cut = next;
    }
  }
}

void Run(ffi::ThreadPool& pool, const Call& call) {
  const int64_t size = call.geo.gemm_m() * call.geo.out_channels;
  auto* task = WithType<float, Bf16, F16>(
      call.in_type, [](auto zero) { return ForThisCpu<Call, AddPartial<decltype(zero)>>(); });
  RunSplits(pool, call, task, call.splits * call.slices, size,
            2.0 * size * call.geo.rows() / call.geo.groups);
}

std::string ConfigRefusal(const Call& call) {
  const int64_t rows = call.geo.rows(), block = call.block;
  const int64_t most = std::clamp<int64_t>(rows, 1, kMaxSplits);
  std::string why = SplitsRefusal(call, most, "a reduction of ", rows);
  if (why.empty() && (block < kMinBlock || block > kMaxBlock || block % kMinBlock != 0))
    return Text("block = ", block, " must be a multiple of ", kMinBlock, " within ", kMinBlock, "..",
                kMaxBlock);
  return why;
}

ffi::Error HostWgrad(ffi::ThreadPool pool, ffi::AnyBuffer lhs, ffi::AnyBuffer g,
                     ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> workspace,
                     Ints window_strides, Ints padding, Ints lhs_dilation, Ints rhs_dilation,
                     int64_t feature_group_count, int64_t splits, int64_t block) {
  Call call{};
  call.in_type = lhs.element_type();
  call.out_type = out->element_type();
  call.splits = splits;
  call.block = block;
  std::string why;
  if (!IsFloat(call.in_type) || g.element_type() != call.in_type || !IsFloat(call.out_type) ||
      workspace->element_type() != ffi::U8) {
    why = Text("element types lhs ", call.in_type, ", g ", g.element_type(), ", dW ", call.out_type,
               ", workspace ", workspace->element_type(),
               "; accepted: lhs and g of one of F32, BF16, F16, dW of one of these, workspace of U8");
  }
  if (why.empty()) {
    why = SetGeometry({lhs.dimensions(), g.dimensions(), out->dimensions(), window_strides, padding,
                       lhs_dilation, rhs_dilation, feature_group_count},
                      &call.geo);
  }
  if (why.empty()) why = ConfigRefusal(call);
  if (why.empty()) {
    SetLayout(&call);
    why = WorkspaceRefusal(call, *workspace);
  }
  if (!why.empty()) return ffi::Error::InvalidArgument("jax_splitk host wgrad: " + why);
  if (out->element_count() == 0) return ffi::Error::Success();
  if (call.geo.rows() == 0 || lhs.element_count() == 0) {
    std::memset(out->untyped_data(), 0, out->size_bytes());
    return ffi::Error::Success();
  }
  call.sgemm = reinterpret_cast<Sgemm*>(g_sgemm.load());
  if (call.sgemm == nullptr && !call.direct) {
    return ffi::Error(
        ffi::ErrorCode::kFailedPrecondition,
        "jax_splitk host wgrad: no sgemm is set; import jax_splitk does it from scipy.linalg.cython_blas");
  }
  call.lhs = lhs.untyped_data();
  call.g = g.untyped_data();
  call.SetResults(*out, *workspace);
  Run(pool, call);
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
