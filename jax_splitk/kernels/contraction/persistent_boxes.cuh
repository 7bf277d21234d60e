// Which rows of a persistent kernel's tile are stored (contraction/persistent_stores.cuh), and where they are
// in shared memory.
//
// Where taps share pixels, a tile has rows between two lines of an image, which are not stored. The others
// come first in shared memory, so that they are neighbours there, too, and TMA stores them as boxes of
// RESULT_BOX rows. The last box overlaps the one before it. Each tile but the last one has at least as many
// rows that are stored.

#if PHASED && !THREAD_STORES
// The tile's first stored row in the output, how many it has, and their places in shared memory.
struct ResultRows {
  const Args& g;
  int w, first, count;  // w: the first row's place in its line

  __device__ ResultRows(const Args& g, const Tile& tile) : g(g) {
    int line = tile.m;
    w = take(line, g.pixels.w);
    first = line * g.out.w + min(w, g.out.w);
    int end = min(tile.m + PIXELS, g.m);
    const int end_w = take(end, g.pixels.w);
    count = end * g.out.w + min(end_w, g.out.w) - first;
  }

  __device__ int operator()(int row) const {
    int line = w + row;
    const int at = take(line, g.pixels.w);
    // The stored rows before this one.
    const int before = min(line * g.out.w + min(at, g.out.w) - min(w, g.out.w), count);
    const bool is_stored = at < g.out.w && before < count;
    return is_stored ? before : count + row - before;
  }
};
#else
struct ResultRows : OwnPlaces {
  static constexpr int count = PIXELS;
  int first;

  __device__ ResultRows(const Args&, const Tile& tile) : first(tile.m) {}
};
#endif

#if !THREAD_STORES
// Calls visit(where the box is, its first column and row in the output) for each box.
template <class Visit>
__device__ inline void for_result_boxes(const Args& g, const Tile& tile, uint32_t results,
                                        const Visit& visit) {
  const ResultRows rows(g, tile);
  for (int i = 0; i < COLUMN_BOXES && tile.n + i * 64 < g.n; ++i) {
    for (int begin = 0; begin < rows.count; begin += RESULT_BOX) {
      const int row = max(0, min(begin, rows.count - RESULT_BOX));
      visit(row_at(results, i, row), tile.n + i * 64, rows.first + row);
    }
  }
}
#endif
