// Text of messages.
#pragma once

#include <string>
#include <string_view>
#include <type_traits>

namespace jax_splitk {

// A string or an integer of a message. Without streams: where the C++ library is linked in, its locales may
// not be the ones that other libraries of the process have set up, and printing a number ends in a fault.
template <typename Part>
void Append(std::string& text, const Part& part) {
  if constexpr (std::is_integral_v<Part>) {
    text += std::to_string(part);
  } else {
    text += std::string_view(part);
  }
}

// The parts in a row.
template <typename... Parts>
std::string Text(const Parts&... parts) {
  std::string text;
  (Append(text, parts), ...);
  return text;
}

// "(2, 3)" for a range of 2 and 3.
template <typename Values>
std::string List(const Values& values) {
  std::string text;
  for (auto value : values) text += (text.empty() ? "" : ", ") + std::to_string(value);
  return "(" + text + ")";
}

}  // namespace jax_splitk
