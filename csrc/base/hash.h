#pragma once

#include <cstdint>
#include <string_view>

namespace polyreme {

// FNV-1a (Fowler, Noll, Vo), 64 bits: tells texts apart, guards against nobody.
constexpr uint64_t text_hash(std::string_view text) {
  uint64_t hash = 14695981039346656037u;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return hash;
}

}  // namespace polyreme
