// The functions that Python calls, and the parameters of a kernel.

namespace emulator {

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
