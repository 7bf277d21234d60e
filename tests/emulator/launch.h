// Calls a kernel with the parameters that a plan gives as bytes.

namespace emulator {

// Shared memory: this array and the kernel's own variables, which lie in the same thread-local storage.
alignas(1024) inline thread_local uint8_t dynamic[WINDOW];

template <class... Parameters, size_t... I>
void call(void (*function)(), void* const* values, std::index_sequence<I...>) {
  const auto kernel = reinterpret_cast<void (*)(Parameters...)>(function);
  kernel(*static_cast<std::remove_reference_t<Parameters>*>(values[I])...);
}

template <class... Parameters>
const char* launch(void (*kernel)(Parameters...), const unsigned* sizes, void* const* values, const int* bytes,
                   int count, unsigned seed) {
  static constexpr int wanted[] = {sizeof(Parameters)...};
  const Kernel given = {
      reinterpret_cast<void (*)()>(kernel),
      [](void (*function)(), void* const* values) {
        call<Parameters...>(function, values, std::index_sequence_for<Parameters...>{});
      },
      [] { return dynamic; }, wanted, sizeof...(Parameters)};
  return run_grid(given, sizes, values, bytes, count, seed);
}

}  // namespace emulator
