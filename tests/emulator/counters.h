// Costs of the warps' memory accesses, beside the least possible cost, in runs that ask for them.
//
// The lanes of a warp make one access together if they are at the same place of the source, and have been there equally
// often since the warp or the block last met. In shared memory the cost is in wavefronts: words that meet in one of 32
// banks go one after the other, for 32 lanes with 4 bytes, 16 with 8 or 8 with 16 at a time (rows of matrices are 16
// bytes). In global memory the cost is in lines of 128 bytes. TMA copies, reads by WGMMA and plain C++ accesses are not
// counted.

#include <cstdint>

namespace emulator {

struct Site {  // place of the call of a function that has it as its last argument
  const char* function;
  int line;
};
#define SITE emulator::Site site = {__builtin_FUNCTION(), __builtin_LINE()}

class Counter;  // of a block

// The running thread's access; `active`: whether the thread takes part in it.
void count(const char* kind, int bytes, const void* at, const Site& site, bool active = true);
void count(const char* kind, int bytes, uint32_t address, const Site& site);
// The addresses of all lanes are in the first words.
void count_matrices(const char* kind, int count, const uint32_t (*words)[8], const Site& site);

}  // namespace emulator
