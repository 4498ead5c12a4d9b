// Philox 4x32-10 against the known answers of Random123, and the layout of the streams.
#include "base/philox.h"

#include <gtest/gtest.h>

#include <array>
#include <set>

namespace polyreme {
namespace {

using Words = std::array<uint32_t, 4>;

Words philox(const Words& counter, const std::array<uint32_t, 2>& key) {
  const Philox4 result = philox_4x32_10(counter.data(), key.data());
  return {result.word[0], result.word[1], result.word[2], result.word[3]};
}

Words block_of(const RandomKey& key, uint64_t block) {
  const Philox4 result = random_block(key, block);
  return {result.word[0], result.word[1], result.word[2], result.word[3]};
}

// From kat_vectors of the Random123 distribution (Salmon et al. 2011).
TEST(Philox, GivesTheKnownAnswers) {
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, EveryPartOfTheKeyMakesAnotherStream) {
  const RandomKey base{.seed = 1, .purpose = RandomPurpose::kInit, .stream = 2, .step = 3};
  std::set<Words> seen;
  const auto add = [&](RandomKey key, uint64_t block) {
    EXPECT_TRUE(seen.insert(block_of(key, block)).second);
  };
  add(base, 0);
  add(base, 1);
  add(base, uint64_t{1} << 32);
  add(base, (uint64_t{1} << 60) - 1);
  RandomKey key = base;
  key.seed = 2;
  add(key, 0);
  key.seed = 1 + (uint64_t{1} << 32);
  add(key, 0);
  key = base;
  key.purpose = RandomPurpose::kDropout;
  add(key, 0);
  key = base;
  key.stream = 9;
  add(key, 0);
  key = base;
  key.step = 9;
  add(key, 0);
}

}  // namespace
}  // namespace polyreme
