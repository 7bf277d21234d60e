// Decoding of the code image carried in a custom call's attribute: base64 of a raw DEFLATE stream (RFC 1951).
// Written here because no zlib header can be assumed on a machine that only has a C++ compiler; the encoder
// is Python's zlib. Any malformed input gives false, never undefined behaviour.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace jax_splitk {

bool DecodeBase64(std::string_view text, std::string* out);

// Inflates `stream` into exactly `size` bytes; false when the stream is malformed, short, or longer than
// that.
bool Inflate(std::string_view stream, size_t size, std::string* out);

}  // namespace jax_splitk
