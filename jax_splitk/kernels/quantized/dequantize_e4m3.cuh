// Packed weights to the e4m3 A registers of tensor-core products. Included after dequantize.cuh, of whose
// formats it serves int4, uint4, e2m1 and e4m3. Macros: FORMAT.
//
// Integers up to 15 are their own e4m3 bits: byte N is N * 2^-9, through the subnormal numbers and the first
// binade. A sign has to be a sign bit: codes with a bias would be exact too, but tensor cores keep only some
// 14 bits of a sum of e4m3 products, and the bias would use them up.
//
// A word of 4-bit codes is 16 k of two rows (jax_splitk/quantized/packing.py): the low nibbles are row g, the
// high ones row g + 8, and bytes 0 to 3 the k 2t, 2t + 8, 2t + 1, 2t + 9. The words of e4m3 weights, one for
// each of the rows, have their bytes in that same order and are A registers as they stand.

[[maybe_unused]] constexpr bool HAS_E4M3 =
    FORMAT == INT4 || FORMAT == UINT4 || FORMAT == E2M1 || FORMAT == E4M3;

// A weight's value is E4M3_FACTOR times its e4m3 byte's.
constexpr float E4M3_FACTOR = FORMAT == E4M3 ? 1.f : FORMAT == E2M1 ? 64.f : 512.f;

// Bytes whose low nibbles hold a code, and the same code's top bit at the byte's top: e4m3. The other bits of
// `codes` and `tops` may be anything.
__device__ inline uint32_t code_to_e4m3(uint32_t codes, uint32_t tops) {
  if constexpr (FORMAT == INT4) {  // q + 8
    return byte_distances(codes & 0x0f0f0f0fu, 0x08080808u) | (~tops & 0x80808080u);
  } else {
    return codes & 0x0f0f0f0fu;
  }
}

// A word of 4-bit codes to two registers of e4m3.
__device__ inline void decode_e4m3(uint32_t word, uint32_t& row_g, uint32_t& row_g8) {
  if constexpr (FORMAT ==
                E2M1) {  // its exponent and mantissa, which begin at bit 2: e4m3 at 2^-6 of the value
    row_g = (word << 2 & 0x1c1c1c1cu) | (word << 4 & 0x80808080u);
    row_g8 = (word >> 2 & 0x1c1c1c1cu) | (word & 0x80808080u);
  } else {
    row_g = code_to_e4m3(word, word << 4);
    row_g8 = code_to_e4m3(word >> 4, word);
  }
}
