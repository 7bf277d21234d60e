// Text of messages.
#pragma once

#include <string>
#include <string_view>
#include <type_traits>

namespace jax_splitk {

// A string or an integer in a message. It uses no streams: if the C++ library is linked statically, its
// locales may differ from those that other libraries of the process have set up, and printing a number
// crashes.
template <typename Part>
void Append(std::string& text, const Part& part) {
  if constexpr (std::is_integral_v<Part>) {
    text += std::to_string(part);
  } else {
    text += std::string_view(part);
  }
}

// The parts joined into one text.
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
