// Shared memory's readers, and copies by tensor maps (memory.h).

namespace emulator {

struct Bytes {
  const uint8_t *from, *to;
};
std::vector<Bytes> buffers;  // of the plan

void check_buffers(const void* from, int bytes) {
  const uint8_t* at = static_cast<const uint8_t*>(from);
  for (const Bytes& buffer : buffers) {
    if (at >= buffer.from && at + bytes <= buffer.to) return;
  }
  fail("__ldg outside of the buffers");
}

Block& block_at(uint32_t address) {
  const uint32_t rank = address >> 24;
  Block& own = *self->block;
  if (rank > own.cluster->blocks.size()) fail("an address in a block that the cluster does not have");
  return rank == 0 ? own : own.cluster->blocks[rank - 1];
}
uint8_t* pointer(uint32_t address, size_t alignment) {
  if (address % alignment) {
    fail("shared memory at " + std::to_string(address) + ": not a multiple of " + std::to_string(alignment));
  }
  return block_at(address).window + (int64_t(address & OFFSET) - WINDOW_AT);
}
uint32_t address(const void* p) {
  const int64_t offset = static_cast<const uint8_t*>(p) - self->block->window + WINDOW_AT;
  if (offset <= 0 || offset > OFFSET) fail("a pointer that is not to shared memory");
  return offset;
}

void Barrier::advance() {
  if (pending == 0 && bytes == 0) phase ^= 1, pending = expected;
}
void Barrier::arrive() {
  if (pending == 0) fail("an arrival too many at a barrier");
  --pending;
  advance();
}
void Barrier::complete(int count) { bytes -= count, advance(); }
void wait_phase(Barrier& barrier, uint32_t phase, const char* what) {
  wait_until(what, [&barrier, phase] { return barrier.phase != (phase & 1); });
}

void fence_shared() { ++self->fences; }
void note_read(uint32_t address) {
  constexpr size_t PLACES = 1 << 14;
  std::vector<Reader>& readers = block_at(address).readers;
  const size_t at = ((address & OFFSET) - WINDOW_AT) / 16;
  if (readers.empty()) readers.resize(PLACES);
  if (at < PLACES) readers[at] = {self, self->fences};
}
void check_read(const Block& block, uint32_t to, int bytes) {
  for (size_t at = ((to & OFFSET) - WINDOW_AT) / 16, end = at + (bytes + 15) / 16; at < end; ++at) {
    if (at >= block.readers.size()) break;
    const Reader& reader = block.readers[at];
    if (reader.fiber && reader.fences == reader.fiber->fences) {
      fail("a copy to shared memory at " + std::to_string(to) + ", where thread " + std::to_string(reader.fiber->number) +
           " has read without a fence since (Pipeline::release_read)");
    }
  }
}

void copy_async(uint32_t to, const void* from, int bytes, int size) {
  uint8_t* target = pointer(to);
  self->copies.push_back([=] { std::memset(target, 0, size), std::memcpy(target, from, bytes); });
}
void commit_copies() {
  self->groups.push_back(std::move(self->copies));
  self->copies.clear();
}
void wait_copies(size_t pending) {
  auto& groups = self->groups;
  for (; groups.size() > pending; groups.erase(groups.begin())) {
    for (auto& copy : groups.front()) copy();
  }
}
void do_copies() {
  for (auto& copy : self->copies) copy();
  self->copies.clear();
}

void copy_bulk(uint32_t to, const void* from, int bytes, Barrier& barrier) {
  check_read(block_at(to), to, bytes);
  uint8_t* target = pointer(to);
  later([=, &barrier] { std::memcpy(target, from, bytes), barrier.complete(bytes); });
}
void store_async(uint32_t to, const float4& value, Barrier& barrier) {
  float4* target = pointer<float4>(to);
  later([=, &barrier] { *target = value, barrier.complete(sizeof(value)); });
}
void wait_stores_read(size_t pending) {
  std::deque<int>& stores = self->stores;
  stores.push_back(0);
  const auto last = stores.size() - 1 - std::min(pending, stores.size() - 1);
  wait_until("wait_stores_read", [&stores, last] {
    return std::all_of(stores.begin(), stores.begin() + last, [](int open) { return open == 0; });
  });
}

// A tensor map in the plan's words (runtime/plan.py), and the address of its buffer.
struct Map {
  bool im2col;
  bool tf32;
  int rank, item, channels, pixels, swizzle;
  int64_t dims[5], strides[5], steps[5], box[5], lower[3], upper[3];
  const uint8_t* from;

  explicit Map(const uint64_t* opaque) : from(reinterpret_cast<const uint8_t*>(opaque[1])) {
    const int64_t* w = reinterpret_cast<const int64_t*>(opaque[0]);
    im2col = *w++;
    ++w;  // the buffer
    constexpr int ITEMS[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4};
    tf32 = *w == 11;
    item = ITEMS[*w++];
    rank = *w++;
    for (int i = 0; i < rank; ++i) dims[i] = *w++;
    strides[0] = item;
    for (int i = 1; i < rank; ++i) strides[i] = *w++;
    for (int i = 0; i < rank; ++i) steps[i] = *w++;
    if (im2col) {
      for (int i = 0; i < rank - 2; ++i) lower[i] = *w++;
      for (int i = 0; i < rank - 2; ++i) upper[i] = *w++;
      channels = *w++, pixels = *w++;
    } else {
      for (int i = 0; i < rank; ++i) box[i] = *w++;
    }
    swizzle = *w;
    for (int i = 1; i < rank; ++i) {
      if (strides[i] % 16) fail("a tensor map's stride that is not a multiple of 16 bytes");
    }
    const int64_t inner = (im2col ? channels : box[0]) * item;
    if (inner % 16) fail("a tensor map's box of rows that are not multiples of 16 bytes");
    if (swizzle != 0 && inner > 16 << swizzle) fail("a tensor map's box of rows longer than the swizzle");
  }

  // The address of an element, null outside of the tensor. Addresses wrap at 2**64.
  const uint8_t* element(const int64_t* at) const {
    uint64_t place = reinterpret_cast<uint64_t>(from);
    for (int i = 0; i < rank; ++i) {
      if (at[i] < 0 || at[i] >= dims[i]) return nullptr;
      place += uint64_t(at[i]) * uint64_t(strides[i]);
    }
    return reinterpret_cast<const uint8_t*>(place);
  }

  // An element's bytes, zeros outside of the tensor.
  void copy(const int64_t* at, uint8_t* window, uint32_t to) const {
    const uint8_t* source = element(at);
    uint8_t* target = window + (int64_t(emulator::swizzle(to, swizzle)) - WINDOW_AT);
    if (source) std::memcpy(target, source, item);
    else std::memset(target, 0, item);
    if (tf32) round_to_tf32(target);
  }

  // Rounds to nearest, ties to even; infinity and NaN stay.
  static void round_to_tf32(uint8_t* at) {
    uint32_t bits;
    std::memcpy(&bits, at, 4);
    if ((bits >> 23 & 255) != 255) bits = (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu;
    std::memcpy(at, &bits, 4);
  }

  int bytes() const {
    int64_t count = item;
    if (im2col) return count * channels * pixels;
    for (int i = 0; i < rank; ++i) count *= box[i];
    return count;
  }

  // Calls visit(place in the tensor, number of the element) for each element of a box.
  template <class Visit>
  void for_box(const int64_t* at, const Visit& visit) const {
    const int count = bytes() / item;
    for (int i = 0; i < count; ++i) {
      int64_t place[5];
      for (int d = 0, rest = i; d < rank; ++d) place[d] = at[d] + rest % box[d] * steps[d], rest /= box[d];
      visit(place, i);
    }
  }

  void load_tiled(uint8_t* window, uint32_t to, const int64_t* at) const {
    for_box(at, [&](const int64_t* place, int i) { copy(place, window, to + i * item); });
  }

  void store_tiled(const uint8_t* window, uint32_t from_shared, const int64_t* at) const {
    for_box(at, [&](const int64_t* place, int i) {
      const uint8_t* source = window + (int64_t(emulator::swizzle(from_shared + i * item, swizzle)) - WINDOW_AT);
      if (uint8_t* target = const_cast<uint8_t*>(element(place))) std::memcpy(target, source, item);
    });
  }

  // Visits from a window's origin on, through the bounding box of origins; `offsets` are within the window.
  void load_im2col(uint8_t* window, uint32_t to, const int64_t* at, const int64_t* offsets) const {
    int64_t origin[5];
    for (int d = 0; d < rank; ++d) origin[d] = at[d];
    for (int pixel = 0; pixel < pixels; ++pixel) {
      int64_t place[5];
      for (int d = 0; d < rank; ++d) place[d] = origin[d] + (d > 0 && d < rank - 1 ? offsets[d - 1] : 0);
      for (int c = 0; c < channels; ++c) {
        place[0] = at[0] + c;
        copy(place, window, to + (pixel * channels + c) * item);
      }
      int d = 1;
      for (; d < rank - 1; ++d) {
        origin[d] += steps[d];
        if (origin[d] < dims[d] + upper[d - 1]) break;
        origin[d] = lower[d - 1];
      }
      if (d == rank - 1) ++origin[d];
    }
  }
};

// Loads to the same place of each block of the mask. On a GPU, an innermost coordinate that is not at a multiple of 16
// bytes is an illegal instruction.
template <class Load>
void load_map(const Map& map, int64_t innermost, uint32_t full, uint32_t to, uint32_t mask, const Load& load) {
  if (to % (map.swizzle ? 128 : 16)) fail("a tensor map's load to " + std::to_string(to));
  if (innermost * map.item % 16) fail("a tensor map's load from element " + std::to_string(innermost));
  for (Block& block : self->block->cluster->blocks) {
    if (!(mask >> block.rank & 1)) continue;
    check_read(block, to, map.bytes());
    uint8_t* window = block.window;
    Barrier* barrier = reinterpret_cast<Barrier*>(window + (int64_t(full & OFFSET) - WINDOW_AT));
    later([=] { load(map, window, to & OFFSET), barrier->complete(map.bytes()); });
  }
}

std::array<int64_t, 5> place(const int32_t* at, int rank) {
  std::array<int64_t, 5> wide = {};
  std::copy(at, at + rank, wide.begin());
  return wide;
}

void store_box(const void* map, int rank, const void* from, const int32_t* coordinates) {
  const Map m(static_cast<const uint64_t*>(map));
  if (m.im2col || m.rank != rank) fail("a store of another rank than its tensor map");
  const std::array<int64_t, 5> at = place(coordinates, rank);
  // A GPU, too, reports an illegal instruction for this.
  if (std::any_of(at.begin(), at.end(), [](int64_t i) { return i < 0; })) fail("a store to a negative coordinate");
  const uint32_t source = address(from);
  if (source % (m.swizzle ? 128 : 16)) fail("a tensor map's store from " + std::to_string(source));
  const uint8_t* window = self->block->window;
  int* open = &self->stores.back();
  ++*open;
  later([=] { m.store_tiled(window, source & OFFSET, at.data()), --*open; });
}

void load_box(const void* map, int rank, uint64_t* full, uint32_t mask, const void* to, const int32_t* coordinates) {
  const Map m(static_cast<const uint64_t*>(map));
  if (m.im2col || m.rank != rank) fail("a load of another rank than its tensor map");
  const std::array<int64_t, 5> at = place(coordinates, rank);
  load_map(m, at[0], address(full), address(to), mask,
           [at](const Map& map, uint8_t* window, uint32_t to) { map.load_tiled(window, to, at.data()); });
}

void load_window(const void* map, int rank, uint64_t* full, const void* to, const int32_t* coordinates,
                 const int32_t* offsets) {
  const Map m(static_cast<const uint64_t*>(map));
  if (!m.im2col || m.rank != rank) fail("a load of another kind than its tensor map");
  const std::array<int64_t, 5> at = place(coordinates, rank), within = place(offsets, rank - 2);
  load_map(m, at[0], address(full), address(to), own_mask(),
           [at, within](const Map& map, uint8_t* window, uint32_t to) {
             map.load_im2col(window, to, at.data(), within.data());
           });
}

}  // namespace emulator
