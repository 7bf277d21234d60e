#include "inflate.h"

#include <array>
#include <cstdint>

namespace jax_splitk {
namespace {

// Bits are consumed least significant first; reading past the end sets `failed` and yields zeros.
class BitReader {
 public:
  explicit BitReader(std::string_view data) : data_(data) {}

  uint32_t Bits(int n) {
    uint32_t value = 0;
    for (int i = 0; i < n; ++i) value |= Bit() << i;
    return value;
  }

  uint32_t Bit() {
    if (left_ == 0) {
      if (next_ == data_.size()) {
        failed_ = true;
        return 0;
      }
      byte_ = static_cast<uint8_t>(data_[next_++]);
      left_ = 8;
    }
    uint32_t bit = byte_ & 1;
    byte_ >>= 1;
    --left_;
    return bit;
  }

  void AlignToByte() { left_ = 0; }
  bool failed() const { return failed_; }

 private:
  std::string_view data_;
  size_t next_ = 0;
  uint32_t byte_ = 0;
  int left_ = 0;
  bool failed_ = false;
};

// Canonical Huffman code: number of codes of each length, and symbols in code order.
class Huffman {
 public:
  // False when the lengths over-subscribe the code space.
  bool Build(const uint8_t* lengths, int n) {
    counts_.fill(0);
    for (int i = 0; i < n; ++i) ++counts_[lengths[i]];
    counts_[0] = 0;
    int space = 1;
    std::array<int, kMaxLength + 2> offsets{};
    for (int length = 1; length <= kMaxLength; ++length) {
      space = 2 * space - counts_[length];
      if (space < 0) return false;
      offsets[length + 1] = offsets[length] + counts_[length];
    }
    for (int i = 0; i < n; ++i) {
      if (lengths[i]) symbols_[offsets[lengths[i]]++] = static_cast<uint16_t>(i);
    }
    return true;
  }

  // The next symbol, or -1 for a code that is not in use.
  int Decode(BitReader& in) const {
    int code = 0, first = 0, index = 0;
    for (int length = 1; length <= kMaxLength; ++length) {
      code |= static_cast<int>(in.Bit());
      int count = counts_[length];
      if (code - first < count) return in.failed() ? -1 : symbols_[index + code - first];
      index += count;
      first = (first + count) << 1;
      code <<= 1;
    }
    return -1;
  }

 private:
  static constexpr int kMaxLength = 15;
  std::array<int, kMaxLength + 1> counts_{};
  std::array<uint16_t, 288> symbols_{};
};

constexpr int kEndOfBlock = 256;
constexpr std::array<uint16_t, 29> kLengthBase = {3,  4,  5,  6,   7,   8,   9,   10,  11, 13,
                                                  15, 17, 19, 23,  27,  31,  35,  43,  51, 59,
                                                  67, 83, 99, 115, 131, 163, 195, 227, 258};
constexpr std::array<uint8_t, 29> kLengthExtra = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2,
                                                  2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0};
constexpr std::array<uint16_t, 30> kDistanceBase = {
    1,   2,   3,   4,   5,   7,    9,    13,   17,   25,   33,   49,   65,    97,    129,
    193, 257, 385, 513, 769, 1025, 1537, 2049, 3073, 4097, 6145, 8193, 12289, 16385, 24577};
constexpr std::array<uint8_t, 30> kDistanceExtra = {0, 0, 0, 0, 1, 1, 2, 2,  3,  3,  4,  4,  5,  5,  6,
                                                    6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13};

bool StoredBlock(BitReader& in, size_t size, std::string* out) {
  in.AlignToByte();
  uint32_t length = in.Bits(16);
  if (length != (~in.Bits(16) & 0xffffu) || in.failed() || out->size() + length > size) return false;
  for (uint32_t i = 0; i < length; ++i) out->push_back(static_cast<char>(in.Bits(8)));
  return !in.failed();
}

bool FixedCodes(Huffman* literals, Huffman* distances) {
  std::array<uint8_t, 288> lengths;
  for (int i = 0; i < 288; ++i) lengths[i] = i < 144 ? 8 : i < 256 ? 9 : i < 280 ? 7 : 8;
  std::array<uint8_t, 30> five;
  five.fill(5);
  return literals->Build(lengths.data(), 288) && distances->Build(five.data(), 30);
}

bool DynamicCodes(BitReader& in, Huffman* literals, Huffman* distances) {
  constexpr std::array<uint8_t, 19> kOrder = {16, 17, 18, 0, 8,  7, 9,  6, 10, 5,
                                              11, 4,  12, 3, 13, 2, 14, 1, 15};
  int num_literals = static_cast<int>(in.Bits(5)) + 257;
  int num_distances = static_cast<int>(in.Bits(5)) + 1;
  int num_codes = static_cast<int>(in.Bits(4)) + 4;
  if (num_literals > 286 || num_distances > 30) return false;
  std::array<uint8_t, 320> lengths{};
  for (int i = 0; i < num_codes; ++i) lengths[kOrder[i]] = static_cast<uint8_t>(in.Bits(3));
  Huffman codes;
  if (!codes.Build(lengths.data(), 19)) return false;
  lengths.fill(0);
  for (int i = 0; i < num_literals + num_distances;) {
    int symbol = codes.Decode(in);
    if (symbol < 0) return false;
    if (symbol < 16) {
      lengths[i++] = static_cast<uint8_t>(symbol);
      continue;
    }
    if (symbol == 16 && i == 0) return false;
    uint8_t value = symbol == 16 ? lengths[i - 1] : 0;
    int repeat = symbol == 16 ? 3 + in.Bits(2) : symbol == 17 ? 3 + in.Bits(3) : 11 + in.Bits(7);
    if (i + repeat > num_literals + num_distances) return false;
    while (repeat--) lengths[i++] = value;
  }
  return lengths[kEndOfBlock] != 0 && literals->Build(lengths.data(), num_literals) &&
         distances->Build(lengths.data() + num_literals, num_distances);
}

bool CompressedBlock(BitReader& in, const Huffman& literals, const Huffman& distances, size_t size,
                     std::string* out) {
  for (;;) {
    int symbol = literals.Decode(in);
    if (symbol < 0) return false;
    if (symbol == kEndOfBlock) return true;
    if (symbol < kEndOfBlock) {
      if (out->size() == size) return false;
      out->push_back(static_cast<char>(symbol));
      continue;
    }
    symbol -= kEndOfBlock + 1;
    if (symbol >= static_cast<int>(kLengthBase.size())) return false;
    size_t length = kLengthBase[symbol] + in.Bits(kLengthExtra[symbol]);
    int code = distances.Decode(in);
    if (code < 0) return false;
    size_t distance = kDistanceBase[code] + in.Bits(kDistanceExtra[code]);
    if (in.failed() || distance > out->size() || out->size() + length > size) return false;
    for (size_t i = 0; i < length; ++i) out->push_back((*out)[out->size() - distance]);
  }
}

}  // namespace

bool DecodeBase64(std::string_view text, std::string* out) {
  auto value = [](char c) -> int {
    if (c >= 'A' && c <= 'Z') return c - 'A';
    if (c >= 'a' && c <= 'z') return c - 'a' + 26;
    if (c >= '0' && c <= '9') return c - '0' + 52;
    return c == '+' ? 62 : c == '/' ? 63 : -1;
  };
  while (!text.empty() && text.back() == '=') text.remove_suffix(1);
  if (text.size() % 4 == 1) return false;
  out->clear();
  out->reserve(text.size() * 3 / 4);
  uint32_t bits = 0;
  int have = 0;
  for (char c : text) {
    int v = value(c);
    if (v < 0) return false;
    bits = (bits << 6) | static_cast<uint32_t>(v);
    have += 6;
    if (have >= 8) {
      have -= 8;
      out->push_back(static_cast<char>((bits >> have) & 0xff));
    }
  }
  return true;
}

bool Inflate(std::string_view stream, size_t size, std::string* out) {
  BitReader in(stream);
  out->clear();
  out->reserve(size);
  for (bool last = false; !last;) {
    last = in.Bit();
    uint32_t type = in.Bits(2);
    if (in.failed()) return false;
    if (type == 0) {
      if (!StoredBlock(in, size, out)) return false;
      continue;
    }
    Huffman literals, distances;
    if (type == 1 ? !FixedCodes(&literals, &distances)
                  : type == 3 || !DynamicCodes(in, &literals, &distances)) {
      return false;
    }
    if (!CompressedBlock(in, literals, distances, size, out)) return false;
  }
  return out->size() == size;
}

}  // namespace jax_splitk
