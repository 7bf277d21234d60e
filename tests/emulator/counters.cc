// Counts the costs of accesses (counters.h).

#include <set>
#include <tuple>

namespace emulator {

using Place = std::tuple<const char*, int, const char*, int>;  // function, line, kind of access, bytes of a lane

struct Access {
  uint64_t addresses[32];
  uint32_t lanes = 0;
};

struct Cost {
  long requests = 0, paid = 0, ideal = 0;

  void add_shared(int bytes, const Access& access) {
    const int together = bytes > 4 ? 128 / bytes : 32;
    requests += access.lanes != 0;
    for (int first = 0; first < 32; first += together) {
      std::set<uint64_t> words;
      for (int lane = first; lane < first + together; ++lane) {
        if (!(access.lanes >> lane & 1)) continue;
        for (int byte = 0; byte < bytes; byte += 4) words.insert((access.addresses[lane] + byte) / 4);
      }
      int banks[32] = {};
      for (uint64_t word : words) ++banks[word % 32];
      paid += *std::max_element(banks, banks + 32), ideal += !words.empty();
    }
  }

  void add_global(int bytes, const Access& access) {
    std::set<uint64_t> lines, parts;  // parts: as large as a lane's
    for (int lane = 0; lane < 32; ++lane) {
      if (!(access.lanes >> lane & 1)) continue;
      lines.insert(access.addresses[lane] / 128), parts.insert(access.addresses[lane] / bytes);
    }
    requests += access.lanes != 0, paid += lines.size(), ideal += (parts.size() * bytes + 127) / 128;
  }
};

bool counting = false;
std::map<Place, Cost> costs;  // accesses of all finished blocks

// A block's accesses, by the numbers of its threads.
class Counter {
  struct Thread {
    unsigned meetings = 0;
    std::map<Place, int> times;  // since the last one
  };
  std::map<int, Thread> threads;
  std::map<std::tuple<Place, int, unsigned, int>, Access> accesses;  // by warp, meetings and times

 public:
  ~Counter() {
    for (const auto& [key, access] : accesses) {
      const auto& [function, line, kind, bytes] = std::get<0>(key);
      Cost& cost = costs[std::get<0>(key)];
      std::string(kind).find("shared") == std::string::npos ? cost.add_global(bytes, access)
                                                            : cost.add_shared(bytes, access);
    }
  }

  void add(int number, const char* kind, int bytes, uint64_t address, bool active, const Site& site) {
    const Place place(site.function, site.line, kind, bytes);
    Thread& thread = threads[number];
    Access& access = accesses[{place, number / 32, thread.meetings, thread.times[place]++}];
    access.addresses[number % 32] = address, access.lanes |= unsigned(active) << number % 32;
  }
  void meet(int number) {
    Thread& thread = threads[number];
    ++thread.meetings, thread.times.clear();
  }
};

void count(const char* kind, int bytes, const void* at, const Site& site, bool active) {
  if (!counting) return;
  self->block->counter->add(self->number, kind, bytes, reinterpret_cast<uintptr_t>(at), active, site);
}
void count(const char* kind, int bytes, uint32_t address, const Site& site) {
  if (counting) self->block->counter->add(self->number, kind, bytes, address & OFFSET, true, site);
}
void count_matrices(const char* kind, int count, const uint32_t (*words)[8], const Site& site) {
  if (!counting) return;
  Access access;
  for (int lane = 0; lane < 8 * count; ++lane) access.addresses[lane] = words[lane][0], access.lanes |= 1u << lane;
  costs[{site.function, site.line, kind, 16}].add_shared(16, access);
}
void count_meeting() {
  if (counting) self->block->counter->meet(self->number);
}

// One line for each place: function, line, kind, bytes of a lane, requests, paid, ideal.
std::string counted() {
  std::string text;
  for (const auto& [place, cost] : costs) {
    const auto& [function, line, kind, bytes] = place;
    text += std::string(function) + '\t' + std::to_string(line) + '\t' + kind + '\t' + std::to_string(bytes);
    for (long value : {cost.requests, cost.paid, cost.ideal}) text += '\t' + std::to_string(value);
    text += '\n';
  }
  return text;
}

}  // namespace emulator
