#include "comm/stream_copy.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <vector>

namespace polyreme {
namespace {

// By each of the ways: what is copied, and that nothing beside it is written.
TEST(StreamCopy, CopiesWhatMemcpyDoes) {
  constexpr size_t kMargin = 128;
  constexpr size_t kMost = 100'003;  // several groups of pages, and a rest
  std::vector<char> from(kMost + kMargin);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<char>(i * 31 + i / 4096);
  for (const int64_t total : {int64_t{1}, int64_t{4} << 20, int64_t{64} << 20})
    for (const size_t bytes : {size_t{0}, size_t{1}, size_t{63}, size_t{4096}, size_t{16'383}, size_t{16'384},
                               size_t{16'449}, size_t{65'536}, kMost})
      for (const size_t to_offset : {size_t{0}, size_t{1}, size_t{60}})
        for (const size_t from_offset : {size_t{0}, size_t{3}}) {
          std::vector<char> to(kMost + 2 * kMargin, 'x'), expected = to;
          std::memcpy(expected.data() + kMargin + to_offset, from.data() + from_offset, bytes);
          stream_copy(to.data() + kMargin + to_offset, from.data() + from_offset, static_cast<int64_t>(bytes),
                      total);
          ASSERT_EQ(to, expected) << "total " << total << ", bytes " << bytes << ", to " << to_offset
                                  << ", from " << from_offset;
        }
}

TEST(StreamCopy, OntoItselfIsNothing) {
  std::vector<int> data(1000);
  std::iota(data.begin(), data.end(), 0);
  const std::vector<int> before = data;
  stream_copy(data.data(), data.data(), 4000, 64 << 20);
  EXPECT_EQ(data, before);
}

}  // namespace
}  // namespace polyreme
