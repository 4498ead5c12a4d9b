// Token files, good and bad, and the order of samples.
#include "data/token_dataset.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <set>

#include "base/error.h"
#include "common/error_text.h"

namespace polyreme::testing {
namespace {

struct Header {
  char magic[8] = {'P', 'O', 'L', 'Y', 'T', 'O', 'K', '1'};
  uint32_t version = 1;
  uint32_t token_bytes = 2;
  uint64_t num_tokens = 0;
  uint64_t vocab_size = 1000;
  uint32_t crc32 = 0;
  char zeros[28] = {};
};
static_assert(sizeof(Header) == 64);

class TokenFile : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string name = ::testing::UnitTest::GetInstance()->current_test_info()->name();
    folder_ = std::filesystem::path(::testing::TempDir()) / concat("polyreme-", getpid(), "-", name);
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string path() const { return (folder_ / "tokens.bin").string(); }

  template <typename T>
  void write(Header header, const std::vector<T>& tokens) const {
    std::ofstream file(path(), std::ios::binary | std::ios::trunc);
    file.write(reinterpret_cast<const char*>(&header), sizeof(header));
    file.write(reinterpret_cast<const char*>(tokens.data()),
               static_cast<std::streamsize>(tokens.size() * sizeof(T)));
  }
  // A file of tokens 0, 1, 2, ...
  template <typename T>
  TokenDataset count_up(size_t num_tokens) const {
    std::vector<T> tokens(num_tokens);
    std::iota(tokens.begin(), tokens.end(), T{0});
    write({.token_bytes = sizeof(T), .num_tokens = num_tokens}, tokens);
    return TokenDataset(path());
  }
  // The file does not open, and the message has its path and `parts`.
  void expect_refused(const std::vector<std::string>& parts) const {
    const std::string text = error_text<InvalidArgument>([&] { TokenDataset{path()}; });
    expect_parts(text, {path()});
    expect_parts(text, parts);
  }

  std::filesystem::path folder_;
};

template <typename T>
void check_samples(const TokenDataset& data, int32_t first_token) {
  EXPECT_EQ(data.num_tokens(), 23);
  EXPECT_EQ(data.vocab_size(), 1000);
  EXPECT_EQ(data.num_samples(22), 1);
  EXPECT_EQ(data.num_samples(23), 0);
  ASSERT_EQ(data.num_samples(5), 4);
  for (int32_t index = 0; index < 4; ++index) {
    int32_t tokens[5], targets[5];
    data.read_sample(index, 5, 1000, tokens, targets);
    for (int32_t i = 0; i < 5; ++i) {
      EXPECT_EQ(tokens[i], first_token + 5 * index + i);
      EXPECT_EQ(targets[i], tokens[i] + 1);
    }
  }
}

TEST_F(TokenFile, TwoByteTokens) { check_samples<uint16_t>(count_up<uint16_t>(23), 0); }
TEST_F(TokenFile, FourByteTokens) { check_samples<uint32_t>(count_up<uint32_t>(23), 0); }

TEST_F(TokenFile, ASubsetIsADataSetAndOutlivesTheFile) {
  const TokenDataset part = [&] {
    const TokenDataset whole = count_up<uint16_t>(60);
    return whole.subset(10, 50).subset(4, 27);
  }();
  std::filesystem::remove(path());
  check_samples<uint16_t>(part, 14);
  EXPECT_EQ(part.subset(3, 3).num_samples(5), 0);
  EXPECT_EQ(part.subset(0, 23).num_tokens(), 23);
  for (const auto& [begin, end] : std::vector<std::pair<int64_t, int64_t>>{{-1, 2}, {3, 2}, {0, 24}})
    expect_parts(error_text<InvalidArgument>([&, b = begin, e = end] { part.subset(b, e); }),
                 {concat("[", begin, ", ", end, ")"), "23 tokens"});
}

TEST_F(TokenFile, LargeTokensKeepTheirBits) {
  write<uint16_t>({.num_tokens = 2, .vocab_size = 65536}, {65535, 40000});
  int32_t token, target;
  TokenDataset(path()).read_sample(0, 1, 65536, &token, &target);
  EXPECT_EQ(token, 65535);
  EXPECT_EQ(target, 40000);
}

TEST_F(TokenFile, WhatIsNoRegularFile) {
  expect_refused({"cannot open", "No such file", "polyreme data prepare"});
  std::filesystem::create_directory(path());
  expect_refused({"not a regular file"});
  std::filesystem::remove(path());
  ASSERT_EQ(mkfifo(path().c_str(), 0600), 0);
  expect_refused({"not a regular file"});  // and does not wait for a writer
}

TEST_F(TokenFile, WrongHeaders) {
  std::ofstream(path()).close();
  expect_refused({"has 0 bytes", "64"});
  std::ofstream(path()) << std::string(63, 'P');
  expect_refused({"has 63 bytes"});
  const std::vector<uint16_t> tokens = {1, 2, 3};
  write<uint16_t>({.magic = {'P', 'O', 'L', 'Y', 'T', 'O', 'K', '2'}, .num_tokens = 3}, tokens);
  expect_refused({"POLYTOK1"});
  write<uint16_t>({.version = 2, .num_tokens = 3}, tokens);
  expect_refused({"version 2", "version 1"});
  for (const uint32_t bytes : {0u, 1u, 3u, 8u}) {
    write<uint16_t>({.token_bytes = bytes, .num_tokens = 3}, tokens);
    expect_refused({concat(bytes, " bytes per token"), "2 or 4"});
  }
  for (const uint64_t vocab : {uint64_t{0}, (uint64_t{1} << 31) + 1, ~uint64_t{0}}) {
    write<uint16_t>({.num_tokens = 3, .vocab_size = vocab}, tokens);
    expect_refused({concat("vocab_size ", vocab)});
  }
}

TEST_F(TokenFile, WrongLengths) {
  const std::vector<uint16_t> tokens = {1, 2, 3};
  write<uint16_t>({.num_tokens = 3}, tokens);
  EXPECT_EQ(TokenDataset(path()).num_tokens(), 3);
  std::filesystem::resize_file(path(), 64 + 5);
  expect_refused({"damaged", "3 tokens of 2 bytes", "holds 5 bytes"});
  std::filesystem::resize_file(path(), 64 + 7);
  expect_refused({"damaged", "holds 7 bytes"});
  std::filesystem::resize_file(path(), 64 + 8);
  expect_refused({"damaged", "holds 8 bytes"});
  // Counts whose bytes wrap around in 64 bits.
  for (const uint64_t count : {uint64_t{1} << 63, (uint64_t{1} << 63) + 3, ~uint64_t{0}}) {
    write<uint16_t>({.num_tokens = count}, tokens);
    expect_refused({"damaged", concat(count)});
  }
  write<uint16_t>({.num_tokens = 0}, {});
  expect_refused({"no tokens"});
}

TEST_F(TokenFile, ATokenOutsideTheVocabularyNamesItsPosition) {
  const TokenDataset part = count_up<uint16_t>(60).subset(20, 60);
  std::vector<int32_t> tokens(10), targets(10);
  EXPECT_NO_THROW(part.read_sample(1, 10, 41, tokens.data(), targets.data()));
  // Sample 1 is 30..39 with the target 40 at the end.
  expect_parts(
      error_text<InvalidArgument>([&] { part.read_sample(1, 10, 40, tokens.data(), targets.data()); }),
      {path(), "token 40 at position 40", "vocabulary of 40", "vocab >= 1000"});
  expect_parts(
      error_text<InvalidArgument>([&] { part.read_sample(1, 10, 35, tokens.data(), targets.data()); }),
      {"token 35 at position 35"});
  write<uint32_t>({.token_bytes = 4, .num_tokens = 2}, {7, 0x80000000u});
  expect_parts(error_text<InvalidArgument>(
                   [&] { TokenDataset(path()).read_sample(0, 1, 1000, tokens.data(), targets.data()); }),
               {"token 2147483648 at position 1"});
}

TEST_F(TokenFile, SamplesThatAreNotThere) {
  const TokenDataset data = count_up<uint16_t>(23);
  int32_t tokens[5], targets[5];
  for (const int64_t index : {int64_t{-1}, int64_t{4}, int64_t{1} << 62})
    expect_parts(error_text<InvalidArgument>([&] { data.read_sample(index, 5, 1000, tokens, targets); }),
                 {concat("sample ", index), "4 samples of 5 tokens"});
  for (const int64_t seq_len : {0, -3})
    expect_parts(error_text<InvalidArgument>([&] { data.num_samples(seq_len); }),
                 {concat("seq_len=", seq_len)});
}

// ---- the order of samples ----

std::vector<int64_t> epoch_of(const SampleOrder& order, int64_t epoch) {
  std::vector<int64_t> samples;
  for (int64_t i = 0; i < order.num_samples(); ++i) samples.push_back(order(epoch * order.num_samples() + i));
  return samples;
}

bool is_permutation(std::vector<int64_t> samples) {
  std::sort(samples.begin(), samples.end());
  for (size_t i = 0; i < samples.size(); ++i)
    if (samples[i] != static_cast<int64_t>(i)) return false;
  return true;
}

TEST(SampleOrder, EveryEpochIsAPermutation) {
  std::vector<int64_t> sizes(300);
  std::iota(sizes.begin(), sizes.end(), 1);
  for (const int64_t more : {1000, 1024, 1025, 65535, 65536, 65537}) sizes.push_back(more);
  for (const int64_t size : sizes) {
    const SampleOrder order(size, 7, true);
    for (const int64_t epoch : {0, 1, 5})
      ASSERT_TRUE(is_permutation(epoch_of(order, epoch))) << size << " " << epoch;
  }
}

TEST(SampleOrder, ODl05EpochsDifferAndRunsAgree) {
  const SampleOrder first(50, 3, true), second(50, 3, true), other_seed(50, 4, true);
  std::set<std::vector<int64_t>> epochs;
  for (int64_t epoch = 0; epoch < 3; ++epoch) {
    const std::vector<int64_t> samples = epoch_of(first, epoch);
    EXPECT_TRUE(is_permutation(samples));
    EXPECT_EQ(samples, epoch_of(second, epoch));
    EXPECT_NE(samples, epoch_of(other_seed, epoch));
    epochs.insert(samples);
    // Two ranks that take every global batch of 10 in halves see every sample once.
    std::set<int64_t> rank[2];
    for (size_t i = 0; i < samples.size(); ++i) rank[i % 10 / 5].insert(samples[i]);
    EXPECT_EQ(rank[0].size(), 25u);
    EXPECT_EQ(rank[1].size(), 25u);
    for (const int64_t sample : rank[0]) EXPECT_FALSE(rank[1].contains(sample));
  }
  EXPECT_EQ(epochs.size(), 3u);
}

TEST(SampleOrder, IsAPureFunctionOfThePosition) {
  const SampleOrder order(97, 5, true);
  const std::vector<int64_t> second_epoch = epoch_of(order, 1);
  for (int64_t i = 96; i >= 0; --i) EXPECT_EQ(order(97 + i), second_epoch[static_cast<size_t>(i)]);
  // The first positions of later epochs are not that of the first, over and over.
  std::set<int64_t> starts;
  for (int64_t epoch = 0; epoch < 50; ++epoch) starts.insert(order(epoch * 97));
  EXPECT_GT(starts.size(), 25u);
}

// How often sample s comes at position p should be even: over many epochs of 8 samples, 64 cells of
// about 250 each, chi-square with 49 degrees of freedom (mean 49, deviation 10).
TEST(SampleOrder, SpreadsEvenly) {
  constexpr int64_t kSize = 8, kEpochs = 2000;
  const SampleOrder order(kSize, 11, true);
  double count[kSize][kSize] = {};
  for (int64_t epoch = 0; epoch < kEpochs; ++epoch)
    for (int64_t i = 0; i < kSize; ++i) count[i][order(epoch * kSize + i)] += 1;
  double chi_square = 0;
  const double expected = static_cast<double>(kEpochs) / kSize;
  for (const auto& row : count)
    for (const double cell : row) chi_square += (cell - expected) * (cell - expected) / expected;
  EXPECT_LT(chi_square, 49 + 5 * 10);
}

TEST(SampleOrder, WithoutShuffleItIsTheFile) {
  const SampleOrder order(5, 3, false);
  for (int64_t position = 0; position < 20; ++position) EXPECT_EQ(order(position), position % 5);
}

TEST(SampleOrder, LimitsAndErrors) {
  const SampleOrder huge(int64_t{1} << 60, 3, true);
  for (const int64_t position : {int64_t{0}, int64_t{12345}, (int64_t{1} << 60) - 1}) {
    EXPECT_GE(huge(position), 0);
    EXPECT_LT(huge(position), int64_t{1} << 60);
  }
  EXPECT_EQ(SampleOrder(1, 3, true)(1000000), 0);
  expect_parts(error_text<InvalidArgument>([] { SampleOrder(0, 3, true); }), {"no samples"});
  expect_parts(error_text<InvalidArgument>([] { SampleOrder((int64_t{1} << 60) + 1, 3, true); }), {"2^60"});
  expect_parts(error_text<InvalidArgument>([] { SampleOrder(5, 3, true)(-1); }), {"position -1"});
}

}  // namespace
}  // namespace polyreme::testing
