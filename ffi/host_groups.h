// Products of which each group of neighbouring rows has a matrix of its own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "host_product.h"

namespace jax_splitk {

struct Range {
  int64_t begin, end;
};

// A block of rows of one group.
struct Block {
  int64_t group;
  Range rows;
};

// The rows of `count` groups from `first` on: none overlaps another or ends behind row m, whatever the sizes.
inline std::vector<Range> RowsOfGroups(const int32_t* sizes, int64_t total, int64_t first, int64_t count,
                                       int64_t m) {
  std::vector<Range> found(count, Range{0, 0});
  int64_t begin = 0;
  for (int64_t i = 0; i < total; ++i) {
    const int64_t end = std::min(m, begin + std::max<int64_t>(0, sizes[i]));
    if (i >= first && i - first < count) found[i - first] = {begin, end};
    begin = end;
  }
  return found;
}

// A product whose result has the rows of all groups; blocks of them are `blocks`.
struct GroupedRows : Product {
  std::vector<Range> of_group;
  std::vector<Block> blocks;

  // Finds the rows and their blocks.
  void FindRows(const int32_t* sizes, int64_t total, int64_t first, int64_t count) {
    of_group = RowsOfGroups(sizes, total, first, count, rows);
    for (int64_t group = 0; group < count; ++group)
      for (int64_t row = of_group[group].begin; row < of_group[group].end; row += row_block)
        blocks.push_back({group, {row, std::min(row + row_block, of_group[group].end)}});
  }

  JAX_SPLITK_INLINE Piece PieceOfRows(int64_t task) const {
    const int64_t column = task % column_tiles() * kTileColumns, rest = task / column_tiles();
    const int64_t block = rest % row_blocks(), split = rest / row_blocks();
    if (block >= static_cast<int64_t>(blocks.size())) return {};
    const Range own = blocks[block].rows;
    const int64_t grains = CeilDiv(k, grain), begin = split * grains / splits * grain;
    const int64_t end = std::min(k, (split + 1) * grains / splits * grain);
    return {blocks[block].group,
            own.begin,
            own.end - own.begin,
            column,
            std::min(kTileColumns, columns - column),
            begin,
            end,
            Partial(split) + column,
            columns};
  }

  double RowsOfAll() const {
    double found = 0;
    for (const Range& group : of_group) found += static_cast<double>(group.end - group.begin);
    return found;
  }

  // Sets to zero what belongs to no group, once all tasks have run.
  void ClearOtherRows() const {
    int64_t row = 0;
    const auto clear = [&](int64_t end) { std::fill(out + row * columns, out + end * columns, 0.0f); };
    for (const Range& group : of_group) {
      if (group.begin == group.end) continue;
      clear(group.begin);
      row = group.end;
    }
    clear(rows);
  }
};

}  // namespace jax_splitk
