// Calls a kernel with the parameters that a plan gives as bytes.

namespace emulator {

// Shared memory: this array and the kernel's own variables, which lie in the same thread-local storage.
alignas(1024) inline thread_local uint8_t dynamic[WINDOW];

template <class... Parameters, size_t... I>
std::string launch(void (*kernel)(Parameters...), const unsigned* sizes, void* const* values, const int* bytes,
                   int count, unsigned seed, std::index_sequence<I...>) {
  constexpr int wanted[] = {sizeof(Parameters)...};
  std::string error = check_parameters(wanted, sizeof...(Parameters), bytes, count);
  if (!error.empty()) return error;
  return run_grid({{sizes[0], sizes[1], sizes[2]}, {sizes[3], sizes[4], sizes[5]}, {sizes[6], sizes[7], sizes[8]}, seed,
                   [&] { kernel(*static_cast<std::remove_reference_t<Parameters>*>(values[I])...); },
                   [] { return dynamic; }});
}

template <class... Parameters>
const char* launch(void (*kernel)(Parameters...), const unsigned* sizes, void* const* values, const int* bytes,
                   int count, unsigned seed) {
  return said(launch(kernel, sizes, values, bytes, count, seed, std::index_sequence_for<Parameters...>{}));
}

}  // namespace emulator
