// A TMA descriptor, which the launcher encodes: by value, as a `__grid_constant__` parameter.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};
