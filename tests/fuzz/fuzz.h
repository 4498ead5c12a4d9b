#pragma once

#include <fuzzer/FuzzedDataProvider.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

// A fuzz test is one file that defines `try_input` and `seeds`; fuzz.cpp makes a libFuzzer program of it.
// What may go wrong with the input is caught there: an exception that leaves it is a finding, like one of
// the sanitizers, a hang, and an expectation that does not hold.

namespace polyreme::fuzz {

void try_input(FuzzedDataProvider& input);
// Valid inputs to start from. FuzzedDataProvider takes bytes from the front and numbers from the end.
std::vector<std::string> seeds();

inline void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "does not hold: %s\n", what);
  std::abort();
}

// `bytes` as a socket may deliver them, in pieces whose sizes are the input's.
inline std::vector<std::string_view> cut(std::string_view bytes, FuzzedDataProvider& input) {
  std::vector<size_t> sizes(3);
  for (size_t& size : sizes) size = input.ConsumeIntegralInRange<size_t>(1, 64) + bytes.size() / 64;
  std::vector<std::string_view> pieces;
  for (size_t i = 0; !bytes.empty(); ++i) {
    pieces.push_back(bytes.substr(0, sizes[i % sizes.size()]));
    bytes.remove_prefix(pieces.back().size());
  }
  return pieces;
}

}  // namespace polyreme::fuzz
