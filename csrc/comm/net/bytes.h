#pragma once

#include <charconv>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

// Integers as bytes, little-endian on every machine, and in decimal.

namespace polyreme {

inline void append_u32(std::string& to, uint32_t value) {
  for (int shift = 0; shift < 32; shift += 8) to.push_back(static_cast<char>(value >> shift & 0xff));
}

inline uint32_t load_u32(std::string_view from) {
  uint32_t value = 0;
  for (size_t i = 0; i < 4; ++i) value |= uint32_t{static_cast<uint8_t>(from[i])} << (8 * i);
  return value;
}

inline void append_u64(std::string& to, uint64_t value) {
  append_u32(to, static_cast<uint32_t>(value));
  append_u32(to, static_cast<uint32_t>(value >> 32));
}

inline uint64_t load_u64(std::string_view from) {
  return load_u32(from) | uint64_t{load_u32(from.substr(4))} << 32;
}

// Nothing unless the text is one whole number.
inline std::optional<int64_t> parse_number(std::string_view text) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

}  // namespace polyreme
