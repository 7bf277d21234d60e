// Shared memory by 32-bit addresses, its barriers, and the copies of the tensor memory accelerator.
//
// An address is WINDOW_AT plus the offset in the block's window; the eight high bits, where they are not 0, are one more
// than the rank of the block in the cluster.

namespace emulator {

constexpr uint32_t WINDOW_AT = 1 << 23, OFFSET = (1 << 24) - 1;

uint8_t* pointer(uint32_t address, size_t alignment = 1);
template <class T>
T* pointer(uint32_t address) {
  return reinterpret_cast<T*>(pointer(address, sizeof(T)));
}
uint32_t address(const void* p);
// Records that this thread loads up to 16 bytes from there.
void note_read(uint32_t address);
// Loads may still be under way when their thread arrives at a barrier: only a fence keeps a copy behind them.
void fence_shared();
inline uint32_t in_block(uint32_t address, uint32_t rank) { return (address & OFFSET) | (rank + 1) << 24; }

// ---- barriers ----------------------------------------------------------------------------------------------

struct Barrier {
  int32_t bytes;  // announced bytes that have not arrived
  uint32_t phase : 1, expected : 15, pending : 16;

  void advance();
  void arrive();
  void expect(int count) { bytes += count; }
  void complete(int count);
};
static_assert(sizeof(Barrier) == 8);

inline Barrier& barrier(uint32_t address) { return *pointer<Barrier>(address); }

// Waits until the phase of that parity is complete. `what` names the wait in errors.
void wait_phase(Barrier& barrier, uint32_t phase, const char* what);

// ---- copies ------------------------------------------------------------------------------------------------

inline uint32_t swizzle(uint32_t address, int mode) {  // CUtensorMapSwizzle
  return mode == 0 ? address : address ^ ((address >> 7 & ((1 << mode) - 1)) << 4);
}

// A thread's copy of `bytes`; the rest of `size` becomes zeros. It happens when the thread waits for it, not before.
void copy_async(uint32_t to, const void* from, int bytes, int size);
void commit_copies();
void wait_copies(size_t pending);
void do_copies();  // commits all copies that are not committed

// A copy at a later moment, whose bytes the barrier counts.
void copy_bulk(uint32_t to, const void* from, int bytes, Barrier& barrier);
void store_async(uint32_t to, const float4& value, Barrier& barrier);
void wait_stores_read(size_t pending);

// Copies of a box by a tensor map, at a later moment. Loads go to the same place of each block of the mask, whose
// barriers count the bytes; a store is under way until `wait_stores_read` has waited for it.
void load_box(const void* map, int rank, uint64_t* full, uint32_t mask, const void* to, const int32_t* at);
void store_box(const void* map, int rank, const void* from, const int32_t* at);
// Copies from the origin of a window, the channel's coordinate first; `offsets` are within the window.
void load_window(const void* map, int rank, uint64_t* full, const void* to, const int32_t* at, const int32_t* offsets);

inline uint32_t own_mask() { return 1u << block_rank(); }

}  // namespace emulator
