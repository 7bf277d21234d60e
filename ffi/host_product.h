// Split products on XLA's threads, for every operation: out[row, column] = sum over k of a[row, k] b[k,
// column] in float32, for each group. Each group has columns of its own. An operation defines how to load a
// and b.
//
// A task is (split of k, block of rows, tile of columns). A task adds along its split, in its thread's slot
// of the workspace. With several splits, tasks write partial results to the workspace, and a second parallel
// phase adds them in the order of the splits. The order of additions depends only on the operation and
// `splits`, never on the threads, so results are bitwise repeatable.
//
// One float32 cannot hold a long sum: beyond 2^24 it no longer grows by ones. So a long split is summed in
// runs of kRun products. The sums of runs, and the partial results, are added with compensation for rounding
// (`Total`). The error of a sum is then that of one run, however long the sum is.
#pragma once

#include <cmath>
#include <cstring>
#include <string>

#include "host_threads.h"
#include "text.h"

namespace jax_splitk {

// Constants of the workspace formula; jax_splitk/kernels/base/host.py has the same.
constexpr int64_t kAlign = 64;     // bytes
constexpr int64_t kMaxSlots = 64;  // most threads that work on one call
constexpr int64_t kMaxSplits = 256;
constexpr int64_t kRun = 512;  // most products in one float32 of a long sum; a multiple of every grain
constexpr int64_t kTileColumns = 64;
constexpr int64_t kChunk = 24;  // rows of a that are loaded at a time

constexpr int64_t kRowsAtOnce = 6;         // in registers
constexpr int64_t kSumChunk = 16384;       // elements of the result per task of the second phase
constexpr int64_t kSerialFlops = 1000000;  // with less work, waking a thread costs more than it gains

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows of a as they lie in memory.
struct Rows {
  const float* data;
  int64_t row_stride, k_stride;
};

// The part of a row's sums that belongs to the result, and the result's row.
struct Kept {
  int64_t row, column, columns;
};

// The work of a task: `rows` rows of a from `row` on and `columns` columns of b from `column` on, both of a
// group, summed over k from `begin` to `end`. `to` is where its columns of row 0 belong; those of row i, as
// Keep has it, lie i * stride floats further on.
struct Piece {
  int64_t group, row, rows, column, columns, begin, end;
  float* to;
  int64_t stride;
};

// The product and its division into tasks. An operation derives from it and has, both const,
//   void LoadTile(group, column, columns, k, depth, float* tile):
//     fills tile[depth][kTileColumns] with b from (k, column of the group) on;
//   Rows LoadRows(group, row, rows, k, depth, float* chunk):
//     returns where a lies from (row, k) on. This may be chunk[depth][kChunk], which LoadRows then fills.
// It may have a Keep and a PieceOf of its own.
struct Product {
  // Whether `depth` is the same with every config, so that the order of additions may depend on it.
  static constexpr bool kFixedDepth = false;

  int64_t rows, k, columns, groups;  // rows of a and columns of b in each group
  int64_t span;  // parts of a group's rows and columns; rows multiply only columns of the same part
  int64_t splits;
  int64_t grain;        // splits begin at multiples of grain
  int64_t depth;        // elements of k that are loaded at a time
  int64_t row_block;    // rows in a task
  int64_t more_blocks;  // blocks of rows beyond those of `rows`, if each of several parts ends in its own
  float* out;           // [rows / span][groups * columns]
  float* workspace;     // if there are several splits, their partial results; then the slots

  int64_t size() const { return rows / span * groups * columns; }
  int64_t column_tiles() const { return CeilDiv(columns, kTileColumns); }
  int64_t row_blocks() const { return CeilDiv(rows, row_block) + more_blocks; }
  int64_t tasks() const { return splits * row_blocks() * groups * column_tiles(); }
  int64_t slots() const { return std::min(tasks(), kMaxSlots); }
  bool in_runs() const { return k > kRun * splits; }
  // In floats.
  int64_t partial_size() const { return splits == 1 ? 0 : CeilDiv(size(), 16) * 16; }
  int64_t slot_size() const {
    const int64_t sums = CeilDiv(std::min(row_block, rows), kRowsAtOnce) * kRowsAtOnce;
    return depth * (kTileColumns + kChunk) + (in_runs() ? 3 : 1) * sums * kTileColumns;
  }

  Kept Keep(int64_t row, int64_t columns) const { return {row, 0, columns}; }

  JAX_SPLITK_INLINE Piece PieceOf(int64_t task) const {
    const int64_t tiles = groups * column_tiles(), tile = task % tiles, rest = task / tiles;
    const int64_t group = tile / column_tiles(), column = tile % column_tiles() * kTileColumns;
    const int64_t row = rest % row_blocks() * row_block, split = rest / row_blocks();
    const int64_t grains = CeilDiv(k, grain), begin = split * grains / splits * grain;
    const int64_t end = std::min(k, (split + 1) * grains / splits * grain), stride = groups * columns;
    float* to = Partial(split) + group * columns + column;
    return {group,
            row,
            std::min(row_block, rows - row),
            column,
            std::min(kTileColumns, columns - column),
            begin,
            end,
            to,
            stride};
  }

  float* Partial(int64_t split) const { return splits == 1 ? out : workspace + split * partial_size(); }
  float* Slot(int64_t slot) const { return workspace + splits * partial_size() + slot * slot_size(); }
};

// Sets the results of a call. Returns what is wrong with the call; empty if it is right.
inline std::string SetResults(Product* p, float* out, ffi::Result<ffi::Buffer<ffi::U8>> workspace) {
  const int64_t most = std::clamp<int64_t>(CeilDiv(p->k, p->grain), 1, kMaxSplits);
  if (p->splits < 1 || p->splits > most) {
    return Text("splits = ", p->splits, " must lie within 1..", most, " for a reduction of ", p->k);
  }
  const int64_t given = static_cast<int64_t>(workspace->size_bytes());
  const int64_t expected = kAlign + 4 * (p->splits * p->partial_size() + p->slots() * p->slot_size());
  if (given != expected) {
    return Text("workspace has ", given, " bytes, expected ", expected, " for this configuration");
  }
  const auto base = reinterpret_cast<uintptr_t>(workspace->untyped_data());
  p->workspace = reinterpret_cast<float*>((base + kAlign - 1) / kAlign * kAlign);
  p->out = out;
  return "";
}

// sums[6][kTileColumns] += a[6][depth] * tile[depth][kTileColumns] for two vectors of columns, in k's order.
// With `apart` the products are added up before they are added to `sums`: two short chains of additions round
// less than a long one. Vectors are loaded and stored one by one: compilers keep an array in memory if memcpy
// touches it as a whole.
template <int lanes, bool apart>
JAX_SPLITK_INLINE void Multiply(const float* const (&a)[kRowsAtOnce], int64_t k_stride, const float* tile,
                                int64_t depth, float* sums) {
  using Floats = typename Vector<lanes>::Floats;
  Floats sum[kRowsAtOnce][2] = {}, b[2];
#pragma GCC unroll 12
  for (int i = 0; i < (apart ? 0 : 2 * kRowsAtOnce); ++i)
    std::memcpy(&sum[i / 2][i % 2], sums + i / 2 * kTileColumns + i % 2 * lanes, sizeof(Floats));
  for (int64_t k = 0; k < depth; ++k, tile += kTileColumns) {
    std::memcpy(&b[0], tile, sizeof(Floats));
    std::memcpy(&b[1], tile + lanes, sizeof(Floats));
#pragma GCC unroll 12
    for (int i = 0; i < 2 * kRowsAtOnce; ++i) sum[i / 2][i % 2] += a[i / 2][k * k_stride] * b[i % 2];
  }
#pragma GCC unroll 12
  for (int i = 0; i < 2 * kRowsAtOnce; ++i) {
    float* to = sums + i / 2 * kTileColumns + i % 2 * lanes;
    Floats total = sum[i / 2][i % 2], before;
    if (apart) {
      std::memcpy(&before, to, sizeof(Floats));
      total += before;
    }
    std::memcpy(to, &total, sizeof(Floats));
  }
}

// Sums in two floats each: the rounded sum, and the rest that rounding removed.
struct Total {
  float *sum, *rest;

  // Adds a term to each (Knuth's TwoSum, The Art of Computer Programming 2, 4.2.2).
  JAX_SPLITK_INLINE void Add(const float* terms, int64_t count) const {
    for (int64_t i = 0; i < count; ++i) {
      const float before = sum[i], after = before + terms[i], added = after - before;
      rest[i] += (before - (after - added)) + (terms[i] - added);
      sum[i] = after;
    }
  }

  // The rest is NaN if a sum is infinite, or if a step of TwoSum overflowed.
  JAX_SPLITK_INLINE void Store(float* to, int64_t count) const {
    for (int64_t i = 0; i < count; ++i) {
      const float both = sum[i] + rest[i];
      to[i] = std::isfinite(both) ? both : sum[i];
    }
  }
};

template <int lanes, typename Operation>
JAX_SPLITK_INLINE void RunTask(const Operation& p, int64_t task, float* slot) {
  const Piece piece = p.PieceOf(task);
  const int64_t rows = piece.rows, columns = piece.columns, end = piece.end;
  float *tile = slot, *chunk = tile + p.depth * kTileColumns, *sums = chunk + p.depth * kChunk;
  const int64_t size = rows * kTileColumns, padded = CeilDiv(rows, kRowsAtOnce) * kRowsAtOnce * kTileColumns;
  const Total total = {sums + padded, sums + 2 * padded};
  if (p.in_runs()) std::fill_n(total.sum, 2 * padded, 0.0f);
  std::fill_n(sums, size, 0.0f);
  const int64_t longest = p.in_runs() ? kRun : p.k;
  int64_t left = longest;  // of the run
  for (int64_t k = piece.begin, depth; k < end; k += depth) {
    if (left == 0) {
      total.Add(sums, size);
      std::fill_n(sums, size, 0.0f);
      left = longest;
    }
    depth = std::min({p.depth, end - k, left});
    left -= depth;
    p.LoadTile(piece.group, piece.column, columns, k, depth, tile);
    for (int64_t first = 0; first < rows; first += kChunk) {
      const int64_t count = std::min(kChunk, rows - first);
      const Rows a = p.LoadRows(piece.group, piece.row + first, count, k, depth, chunk);
      for (int64_t row = 0; row < count; row += kRowsAtOnce) {
        const float* each[kRowsAtOnce];  // beyond the end the last row again, for sums that nobody reads
        for (int64_t i = 0; i < kRowsAtOnce; ++i)
          each[i] = a.data + std::min(row + i, count - 1) * a.row_stride;
        for (int64_t f = 0; f < columns; f += 2 * lanes)
          Multiply<lanes, Operation::kFixedDepth>(each, a.k_stride, tile + f, depth,
                                                  sums + (first + row) * kTileColumns + f);
      }
    }
  }
  if (p.in_runs()) {
    total.Add(sums, size);
    total.Store(sums, size);
  }
  for (int64_t row = 0; row < rows; ++row) {
    const Kept kept = p.Keep(piece.row + row, columns);
    std::copy_n(sums + row * kTileColumns + kept.column, kept.columns,
                piece.to + kept.row * piece.stride + kept.column);
  }
}

// out[begin:end] = sum of the partial results, in split order.
inline void SumPartials(const Product& p, int64_t begin, int64_t end) {
  constexpr int64_t kAtOnce = 256;
  float sum[kAtOnce], rest[kAtOnce];
  for (; begin < end; begin += kAtOnce) {
    const int64_t count = std::min(kAtOnce, end - begin);
    std::copy_n(p.Partial(0) + begin, count, sum);
    std::fill_n(rest, count, 0.0f);
    for (int64_t split = 1; split < p.splits; ++split) Total{sum, rest}.Add(p.Partial(split) + begin, count);
    Total{sum, rest}.Store(p.out + begin, count);
  }
}

// Runs both phases of an operation whose results are set. `flops` is the work of the operation.
template <typename Operation>
void Run(ffi::ThreadPool& pool, const Operation& operation, double flops) {
  const Product& p = operation;
  auto* task = ForThisCpu<Operation>();
  const int64_t helpers = flops < kSerialFlops ? 0 : std::min(pool.num_threads(), p.slots()) - 1;
  ParallelFor(pool, helpers, p.tasks(), [&](int64_t i, int64_t slot) { task(operation, i, p.Slot(slot)); });
  if (p.splits == 1) return;
  ParallelFor(
      pool, p.size() * p.splits < kSerialFlops / 8 ? 0 : helpers, CeilDiv(p.size(), kSumChunk),
      [&](int64_t i, int64_t) { SumPartials(p, i * kSumChunk, std::min((i + 1) * kSumChunk, p.size())); });
}

}  // namespace jax_splitk
