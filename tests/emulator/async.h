// Stands for kernels/device/async.cuh: the same functions.

inline void* __cvta_shared_to_generic(uint32_t address) { return emulator::pointer(address); }
inline uint8_t* shared_pointer(uint32_t address) { return static_cast<uint8_t*>(emulator::pointer(address)); }
inline uint32_t shared_address(const void* p) { return emulator::address(p); }
inline uint32_t aligned_address(const void* p) { return (shared_address(p) + 1023) & ~1023u; }

// ---- barriers in shared memory -------------------------------------------------------------------------------------

struct Barrier {
  static void init(uint64_t* at, uint32_t arrivals) {
    *reinterpret_cast<emulator::Barrier*>(at) = {0, 0, arrivals, arrivals};
  }
  static void wait(const uint64_t* at, uint32_t phase) {
    emulator::wait_phase(emulator::barrier(emulator::address(at)), phase, "mbarrier");
  }
  static bool is_complete(const uint64_t* at, uint32_t phase) {
    return emulator::barrier(emulator::address(at)).phase != (phase & 1);
  }
  static void arrive(const uint64_t* at) { emulator::barrier(emulator::address(at)).arrive(); }
  static void arrive(const uint64_t* at, uint32_t block) {
    emulator::barrier(emulator::in_block(emulator::address(at), block)).arrive();
  }
  static void arrive_and_expect_tx(const uint64_t* at, uint32_t bytes) {
    emulator::barrier(emulator::address(at)).expect(bytes);
    arrive(at);
  }
  static void arrive_after_copies(const uint64_t* at) {
    emulator::do_copies();
    arrive(at);
  }
};

inline void fence_barrier_init() {}
inline void wait(uint32_t barrier, uint32_t phase) {
  emulator::wait_phase(emulator::barrier(barrier), phase, "mbarrier");
}
template <bool REMOTE = false>
inline void arrive_if(bool condition, uint32_t barrier) {
  if (condition) emulator::barrier(barrier).arrive();
}

// ---- threads of a block, and of a cluster --------------------------------------------------------------------------

inline void named_sync(int threads, int barrier) { emulator::sync(100 + barrier, threads, "named_sync"); }
inline void named_arrive(int, int barrier) { emulator::arrive(100 + barrier); }
template <int THREADS, int BARRIER>
inline void sync_threads() {
  emulator::sync(100 + BARRIER, THREADS, "sync_threads");
}

inline uint32_t elect_one() { return emulator::lane() == 0; }
inline uint32_t block_rank_in_cluster() { return emulator::block_rank(); }
inline uint32_t set_block_rank(uint32_t address, uint32_t rank) { return emulator::in_block(address, rank); }

inline void cluster_arrive() { emulator::cluster_arrive(); }
inline void cluster_arrive_relaxed() { cluster_arrive(); }
inline void cluster_wait() { emulator::cluster_wait(); }
template <int REGISTERS>
void raise_registers() {}
template <int REGISTERS>
void lower_registers() {}

// ---- copies by threads ---------------------------------------------------------------------------------------------

template <int BYTES>
inline void copy_async(uint32_t to, const void* from, int bytes, SITE) {
  emulator::count("cp.async from global", BYTES, from, site, bytes > 0);
  emulator::count("cp.async to shared", BYTES, to, site);
  emulator::copy_async(to, from, bytes, BYTES);
}
inline void commit_copies() { emulator::commit_copies(); }
template <int PENDING>
inline void wait_copies() {
  emulator::wait_copies(PENDING);
}

// ---- copies by TMA -------------------------------------------------------------------------------------------------

struct alignas(64) TensorMap {
  uint64_t opaque[16];
};
enum Eviction : uint64_t { EVICT_NORMAL, EVICT_FIRST, EVICT_LAST };
inline void fence_async_shared() { emulator::fence_shared(); }
inline void loads_done() { fence_async_shared(); }

inline void copy_bulk(uint32_t to, const void* from, int bytes, uint32_t barrier, uint64_t) {
  emulator::copy_bulk(to, from, bytes, emulator::barrier(barrier));
}
inline void copy_bulk(void* to, const void* from, int32_t bytes, uint64_t* full) {
  if (bytes % 16 || reinterpret_cast<uintptr_t>(from) % 16) emulator::fail("a bulk copy that is not of whole 16 bytes");
  emulator::copy_bulk(emulator::address(to), from, bytes, emulator::barrier(emulator::address(full)));
}

template <class... At>
void load_tile(const void* map, uint64_t* full, uint64_t, void* to, At... at) {
  const int32_t place[] = {int32_t(at)...};
  emulator::load_box(map, sizeof...(At), full, emulator::own_mask(), to, place);
}
template <class... At>
void store_tile(const void* map, const void* from, At... at) {
  const int32_t place[] = {int32_t(at)...};
  emulator::store_box(map, sizeof...(At), from, place);
}
template <class... At>
void store_tile_hinted(const void* map, const void* from, uint64_t, At... at) {
  store_tile(map, from, at...);
}
template <int PENDING = 0>
inline void wait_stores_read() {
  emulator::wait_stores_read(PENDING);
}
template <class... At>
void load_tile_multicast(const void* map, uint64_t* full, uint16_t mask, uint64_t, void* to, At... at) {
  const int32_t place[] = {int32_t(at)...};
  emulator::load_box(map, sizeof...(At), full, mask, to, place);
}
// Coordinates of a window's origin, the channel's first, then offsets within it.
template <class... At>
void load_im2col(const void* map, uint64_t* full, void* to, At... numbers) {
  constexpr int RANK = sizeof...(At) / 2 + 1;
  const int32_t place[] = {int32_t(numbers)...};
  emulator::load_window(map, RANK, full, to, place, place + RANK);
}
