// Calls a kernel with the parameters that a plan gives as bytes.

namespace emulator {

template <class... Parameters, size_t... I>
std::string launch(void (*kernel)(Parameters...), const unsigned* sizes, void* const* values, const int* bytes,
                   int count, unsigned seed, std::index_sequence<I...>) {
  if (count != sizeof...(Parameters)) return "the kernel has other parameters than the plan";
  constexpr size_t wanted[] = {sizeof(Parameters)...};
  for (int i = 0; i < count; ++i) {
    if (wanted[i] > size_t(bytes[i]) || wanted[i] + 8 <= size_t(bytes[i])) {
      return "parameter " + std::to_string(i) + ": " + std::to_string(bytes[i]) + " bytes in the plan, " +
             std::to_string(wanted[i]) + " in the kernel";
    }
  }
  return run_grid({sizes[0], sizes[1], sizes[2]}, {sizes[3], sizes[4], sizes[5]}, {sizes[6], sizes[7], sizes[8]}, seed,
                  [&] { kernel(*static_cast<std::remove_reference_t<Parameters>*>(values[I])...); });
}

template <class... Parameters>
std::string launch(void (*kernel)(Parameters...), const unsigned* sizes, void* const* values, const int* bytes,
                   int count, unsigned seed) {
  return launch(kernel, sizes, values, bytes, count, seed, std::index_sequence_for<Parameters...>{});
}

inline const char* said(const std::string& text) {
  static std::string kept;
  kept = text;
  return kept.c_str();
}

}  // namespace emulator
