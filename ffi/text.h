// Text of messages.
#pragma once

#include <sstream>
#include <string>

namespace jax_splitk {

// The parts in a row, each as a stream prints it.
template <typename... Parts>
std::string Text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// "(2, 3)" for a range of 2 and 3.
template <typename Values>
std::string List(const Values& values) {
  std::string text;
  for (auto value : values) text += (text.empty() ? "" : ", ") + std::to_string(value);
  return "(" + text + ")";
}

}  // namespace jax_splitk
