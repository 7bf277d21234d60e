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
  static void arrive(const uint64_t* at) { emulator::barrier(emulator::address(at)).arrive(); }
  static void arrive(const uint64_t* at, uint32_t block) {
    emulator::barrier(emulator::in_block(emulator::address(at), block)).arrive();
  }
  static void arrive_and_expect_tx(const uint64_t* at, uint32_t bytes) {
    emulator::barrier(emulator::address(at)).expect(bytes);
    arrive(at);
  }
  static void arrive_after_copies(const uint64_t* at) {
    for (auto& copy : emulator::self->copies) copy();
    emulator::self->copies.clear();
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
inline void named_arrive(int, int barrier) { ++emulator::self->block->barriers[100 + barrier].arrived; }
template <int THREADS, int BARRIER>
inline void sync_threads() {
  emulator::sync(100 + BARRIER, THREADS, "sync_threads");
}

inline uint32_t elect_one() { return emulator::self->number % 32 == 0; }
inline uint32_t block_rank_in_cluster() { return emulator::self->block->rank; }
inline uint32_t set_block_rank(uint32_t address, uint32_t rank) { return emulator::in_block(address, rank); }

inline void cluster_arrive() {
  emulator::Meeting& meeting = emulator::self->block->cluster->meeting;
  emulator::self->cluster_since = meeting.generation;
  ++meeting.arrived;
}
inline void cluster_arrive_relaxed() { cluster_arrive(); }
inline void cluster_wait() {
  emulator::Cluster* cluster = emulator::self->block->cluster;
  const unsigned since = emulator::self->cluster_since;
  emulator::wait_until("cluster_wait", [=] { return cluster->meeting.is_over(since, cluster->live); });
}
template <int REGISTERS>
void raise_registers() {}
template <int REGISTERS>
void lower_registers() {}

// ---- copies by threads ---------------------------------------------------------------------------------------------

template <int BYTES>
inline void copy_async(uint32_t to, const void* from, int bytes, SITE) {
  emulator::count("cp.async from global", BYTES, from, site, bytes > 0);
  emulator::count("cp.async to shared", BYTES, to, site);
  uint8_t* target = emulator::pointer(to);
  emulator::self->copies.push_back([=] { std::memset(target, 0, BYTES), std::memcpy(target, from, bytes); });
}
inline void commit_copies() {
  emulator::self->groups.push_back(std::move(emulator::self->copies));
  emulator::self->copies.clear();
}
// What has not been waited for has not come.
template <int PENDING>
inline void wait_copies() {
  auto& groups = emulator::self->groups;
  for (; groups.size() > PENDING; groups.pop_front()) {
    for (auto& copy : groups.front()) copy();
  }
}

// ---- copies by TMA -------------------------------------------------------------------------------------------------

struct alignas(64) TensorMap {
  uint64_t opaque[16];
};
enum Eviction : uint64_t { EVICT_NORMAL, EVICT_FIRST, EVICT_LAST };
inline void fence_async_shared() { ++emulator::self->fences; }
inline void loads_done() { fence_async_shared(); }

inline void copy_bulk(uint32_t to, const void* from, int bytes, uint32_t barrier, uint64_t) {
  emulator::check_read(emulator::block_at(to), to, bytes);
  uint8_t* target = emulator::pointer(to);
  emulator::Barrier* counts = &emulator::barrier(barrier);
  emulator::later([=] { std::memcpy(target, from, bytes), counts->complete(bytes); });
}
inline void copy_bulk(void* to, const void* from, int32_t bytes, uint64_t* full) {
  emulator::Barrier* barrier = &emulator::barrier(emulator::address(full));
  if (bytes % 16 || reinterpret_cast<uintptr_t>(from) % 16) emulator::fail("a bulk copy that is not of whole 16 bytes");
  emulator::check_read(*emulator::self->block, emulator::address(to), bytes);
  emulator::later([=] { std::memcpy(to, from, bytes), barrier->complete(bytes); });
}

template <class... At>
void load_tile(const void* map, uint64_t* full, uint64_t, void* to, At... at) {
  emulator::load_box<sizeof...(At)>(map, full, emulator::own_mask(), to, at...);
}
template <class... At>
void store_tile(const void* map, const void* from, At... at) {
  emulator::store_box<sizeof...(At)>(map, from, at...);
}
template <int PENDING = 0>
inline void wait_stores_read() {
  std::deque<int>& stores = emulator::self->stores;
  stores.push_back(0);
  const auto last = stores.size() - 1 - std::min<size_t>(PENDING, stores.size() - 1);
  emulator::wait_until("wait_stores_read", [&stores, last] {
    return std::all_of(stores.begin(), stores.begin() + last, [](int open) { return open == 0; });
  });
}
template <class... At>
void load_tile_multicast(const void* map, uint64_t* full, uint16_t mask, uint64_t, void* to, At... at) {
  emulator::load_box<sizeof...(At)>(map, full, mask, to, at...);
}
// Coordinates of a window's origin, the channel's first, then offsets within it.
template <class... At>
void load_im2col(const void* map, uint64_t* full, void* to, At... numbers) {
  constexpr int RANK = sizeof...(At) / 2 + 1;
  const emulator::Map m(static_cast<const uint64_t*>(map));
  if (!m.im2col || m.rank != RANK) emulator::fail("a load of another kind than its tensor map");
  const std::array<int64_t, 10> at = {int64_t(int32_t(numbers))...};
  emulator::load_map(m, at[0], emulator::address(full), emulator::address(to), emulator::own_mask(),
                     [at](const emulator::Map& map, uint8_t* window, uint32_t to) {
                       map.load_im2col(window, to, at.data(), at.data() + RANK);
                     });
}
