// Rounding of float32 to tf32.

// To nearest, in the upper 19 bits that the tensor cores take. Not cvt.rna, which takes one instruction more
// and makes the largest floats infinite.
__device__ inline uint32_t tf32(uint32_t x) {
  constexpr float largest = 0x1.ffcp127f;  // of those that half a unit does not carry to infinity
  return fabsf(__uint_as_float(x)) <= largest ? x + 0x1000 : x;
}
