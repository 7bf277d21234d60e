// WGMMA's products (cute.h).

namespace emulator {

struct Tf32 {
  uint32_t bits;
  operator float() const { return __uint_as_float(bits & ~0x1fffu); }
};

// The element of an operand in shared memory, by its descriptor.
template <class Element>
float element(uint64_t descriptor, bool mn_innermost, int mn, int k) {
  const uint32_t start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4;
  const uint32_t stride = (descriptor >> 32 & 0x3fff) << 4, layout = descriptor >> 62;
  const int item = sizeof(Element), row_bytes = layout == 0 ? 16 : 256 >> layout;
  uint32_t at = start;
  if (!mn_innermost) {
    at += mn / 8 * stride + mn % 8 * row_bytes;
    at += layout == 0 ? k * item / 16 * leading + k * item % 16 : k * item;
  } else {
    if (layout == 0) fail("an MN-major operand without a swizzle: not emulated");
    const int row = row_bytes / item;
    at += mn / row * leading + k / 8 * stride + k % 8 * row_bytes + mn % row * item;
  }
  at = swizzle(at, layout == 0 ? 0 : 4 - layout);
  return float(bits_as<Element>(*reinterpret_cast<const Element*>(self->block->window + at)));
}

template <class Element>
void multiply(Product* const* threads, const Shape& shape) {
  constexpr int K = 32 / sizeof(Element), WORD = 4 / sizeof(Element);
  static thread_local float a[64][K], b[K][256], sums[64][256];
  if (shape.k != K) fail("a WGMMA of another depth than its elements'");
  for (int n = 0; n < shape.n; ++n)
    for (int k = 0; k < K; ++k) b[k][n] = element<Element>(threads[0]->b, shape.b_mn, n, k);
  for (int row = 0; row < 64; ++row)
    for (int k = 0; k < K; ++k) {
      if (shape.registers) {  // lane l of warp w has rows l/4 and l/4 + 8 of its 16, 4 bytes at l%4 and 16 on
        const int lane = row % 8 * 4 + k / WORD % 4, index = row % 16 / 8 + k / (4 * WORD) * 2;
        const uint32_t word = threads[row / 16 * 32 + lane]->registers[index];
        Element e[WORD];
        std::memcpy(e, &word, 4);
        a[row][k] = float(e[k % WORD]);
      } else {
        a[row][k] = element<Element>(threads[0]->a, shape.a_mn, row, k);
      }
    }
  std::memset(sums, 0, sizeof(sums));
  for (int row = 0; row < 64; ++row)
    for (int k = 0; k < K; ++k)
      for (int n = 0; n < shape.n; ++n) sums[row][n] += a[row][k] * b[k][n];
  for (int thread = 0; thread < 128; ++thread) {
    Product& product = *threads[thread];
    if (product.shape != &shape) fail("threads of a warpgroup with different WGMMAs");
    if (product.b != threads[0]->b || (!shape.registers && product.a != threads[0]->a)) {
      fail("threads of a warpgroup with different descriptors");
    }
    for (int i = 0; i < shape.n / 2; ++i) {
      const int row = thread / 32 * 16 + thread % 32 / 4 + i % 4 / 2 * 8, n = i / 4 * 8 + thread % 4 * 2 + i % 2;
      product.sums[i] = (product.zero ? 0.f : product.sums[i]) + sums[row][n];
    }
  }
}

// The sums of the 128 threads of a warpgroup.
void multiply(Product* const* threads) {
  const Shape& shape = *threads[0]->shape;
  switch (shape.kind) {
    case Kind::BF16: return multiply<__nv_bfloat16>(threads, shape);
    case Kind::F16: return multiply<__half>(threads, shape);
    case Kind::TF32: return multiply<Tf32>(threads, shape);
    case Kind::E4M3: return multiply<__nv_fp8_e4m3>(threads, shape);
  }
}

void enqueue(uint64_t a, uint64_t b, const uint32_t* registers, const Shape& shape, const void* const* places) {
  Product product = {a, b};
  if (registers != nullptr) std::copy(registers, registers + 4, product.registers);
  product.sums = static_cast<float*>(const_cast<void*>(places[0]));
  product.zero = *static_cast<const cute::SM90::GMMA::ScaleOut*>(places[shape.n / 2]) == cute::SM90::GMMA::ScaleOut::Zero;
  product.shape = &shape;
  self->block->warpgroups[self->number / 128].open[self->number % 128].push_back(product);
}

void commit_batch() {
  ++self->fences;  // operands in registers were loaded before the products were issued
  Warpgroup& group = self->block->warpgroups[self->number / 128];
  const int thread = self->number % 128;
  group.committed[thread].push_back(std::move(group.open[thread]));
  group.open[thread].clear();
  const size_t mine = ++group.count[thread];
  // The instruction needs whole warps (.sync.aligned): no lane continues before the others arrive.
  const size_t* warp = group.count + thread / 32 * 32;
  wait_until("wgmma.commit_group", [=] { return *std::min_element(warp, warp + 32) >= mine; });
}

void wait_batches(size_t pending) {
  Warpgroup& group = self->block->warpgroups[self->number / 128];
  const size_t mine = group.count[self->number % 128];
  if (mine <= pending) return;
  const size_t target = mine - pending;
  wait_until("warpgroup_wait", [&] {
    return *std::min_element(group.count, group.count + 128) >= target;
  });
  for (; group.complete < target; ++group.complete) {
    const size_t products = group.committed[0].front().size();
    for (size_t i = 0; i < products; ++i) {
      Product* all[128];
      for (int thread = 0; thread < 128; ++thread) {
        auto& batch = group.committed[thread].front();
        if (batch.size() != products) fail("threads of a warpgroup with different WGMMAs");
        all[thread] = &batch[i];
      }
      multiply(all);
    }
    for (auto& batches : group.committed) batches.erase(batches.begin());
  }
}

}  // namespace emulator
