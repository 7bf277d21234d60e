// Two codes of NormalFloat4 are looked up at once, by the byte of both. A lane has a table of its own in its
// bank of shared memory, so that no look-up waits for another: entry i of lane l is word 32 * i + l. Included
// by stream.cu, whose constants it takes.

__device__ inline void fill_table(uint8_t* smem) {
  uint4* table = reinterpret_cast<uint4*>(smem + TABLE_AT);
#pragma unroll 1
  for (int entry = threadIdx.x; entry < 256; entry += CONSUMERS) {
    const Bytes bytes = normal_floats(entry);
    const uint32_t pair = __byte_perm(bytes.low, bytes.high, 0x5140);
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // eight lanes write to different banks
      table[entry * 8 + (i + threadIdx.x) % 8] = make_uint4(pair, pair, pair, pair);
    }
  }
  named_sync(CONSUMERS, 1);
}

// `table`: the lane's, in shared memory.
__device__ inline void look_up(uint32_t word, uint32_t table, uint32_t (&a)[4]) {
  // The codes of bytes 0 and 2, and of bytes 1 and 3, in two bytes for each row.
  constexpr uint32_t low = 0x0f0f0f0fu;
  const uint32_t row_g = (word & low) | (word >> 12 & ~low), row_g8 = (word >> 4 & low) | (word >> 16 & ~low);
  const auto second = [](uint32_t bytes) { return __byte_perm(bytes, 0, 0x4441); };
  a[0] = load_shared<uint32_t>(table + row_g % 256 * 128);
  a[1] = load_shared<uint32_t>(table + row_g8 % 256 * 128);
  a[2] = load_shared<uint32_t>(table + second(row_g) * 128);
  a[3] = load_shared<uint32_t>(table + second(row_g8) * 128);
}
