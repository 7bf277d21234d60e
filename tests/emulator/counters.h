// What the warps' accesses to memory cost, beside what they would cost at best; only of runs that ask for it.
//
// An access of a warp is what its lanes do at the same place of the source, as often since the warp or the block last
// met. Of shared memory its cost is wavefronts: words that meet in one of 32 banks go one after the other, of 32 lanes
// with 4 bytes, 16 with 8 or 8 with 16 at a time (rows of matrices are 16 bytes). Of global memory it is lines of 128
// bytes. Copies by TMA, what WGMMA reads and plain C++ accesses are not counted.

#include <cstdint>

namespace emulator {

struct Site {  // of the call of a function that has it as its last argument
  const char* function;
  int line;
};
#define SITE emulator::Site site = {__builtin_FUNCTION(), __builtin_LINE()}

class Counter;  // of a block

// The running thread's access; `active`: whether the thread takes part in what it has come to.
void count(const char* kind, int bytes, const void* at, const Site& site, bool active = true);
void count(const char* kind, int bytes, uint32_t address, const Site& site);
// Of the addresses of all lanes, in the first words.
void count_matrices(const char* kind, int count, const uint32_t (*words)[8], const Site& site);

}  // namespace emulator
