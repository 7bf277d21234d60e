// The functions that Python calls, and the parameters of a kernel.

namespace emulator {

std::string check_parameters(const int* wanted, int parameters, const int* bytes, int count) {
  if (count != parameters) return "the kernel has other parameters than the plan";
  for (int i = 0; i < count; ++i) {
    if (wanted[i] > bytes[i] || wanted[i] + 8 <= bytes[i]) {
      return "parameter " + std::to_string(i) + ": " + std::to_string(bytes[i]) + " bytes in the plan, " +
             std::to_string(wanted[i]) + " in the kernel";
    }
  }
  return "";
}

const char* said(const std::string& text) {
  static std::string kept;
  kept = text;
  return kept.c_str();
}

}  // namespace emulator

// Call before the launches of a plan: sets its buffers, and whether accesses are counted.
extern "C" void begin(const emulator::Bytes* buffers, int count, bool counting) {
  emulator::buffers.assign(buffers, buffers + count);
  emulator::counting = counting, emulator::costs.clear();
}
extern "C" const char* counted_accesses() { return emulator::said(emulator::counted()); }
