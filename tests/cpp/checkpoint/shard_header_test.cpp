#include "checkpoint/shard_header.h"

#include <gtest/gtest.h>

#include "base/error.h"

namespace polyreme {
namespace {

std::string refusal(const std::string& json, int64_t data_bytes) {
  try {
    decode_shard_header(json, data_bytes);
  } catch (const CheckpointCorrupt& error) {
    return error.what();
  }
  return "accepted";
}

TEST(ShardHeader, ReadsWhatItWrites) {
  const ShardHeader header{
      .metadata = {{"a\"\\\n\x01", "\xc3\xa9 \xf0\x9f\x98\x80"}},
      .entries = {
          {"w", "F32", {2, 3}, 0, 24}, {"empty", "F64", {0, 5}, 24, 24}, {"scalar", "I64", {}, 24, 32}}};
  const ShardHeader read = decode_shard_header(encode_shard_header(header) + "   ", 32);
  EXPECT_EQ(read.metadata, header.metadata);
  ASSERT_EQ(read.entries.size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(read.entries[i].name, header.entries[i].name);
    EXPECT_EQ(read.entries[i].shape, header.entries[i].shape);
    EXPECT_EQ(read.entries[i].end, header.entries[i].end);
  }
}

TEST(ShardHeader, ReadsAllOfJsonThatHeadersMayUse) {
  const ShardHeader read = decode_shard_header(
      "\n{ \"\\u00e9\\ud83d\\ude00\\/\\t\" :\t{\"shape\":[ 2 ],\"data_offsets\" : [0 , "
      "4],\"dtype\":\"BF16\"} } \r\n",
      4);
  ASSERT_EQ(read.entries.size(), 1u);
  EXPECT_EQ(read.entries[0].name, "\xc3\xa9\xf0\x9f\x98\x80/\t");
  EXPECT_TRUE(decode_shard_header("{}", 0).entries.empty());
}

TEST(ShardHeader, RefusesWhatIsNoHeader) {
  const auto entry = [](const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return "{\"w\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}}";
  };
  EXPECT_EQ(refusal(entry("F32", "[2]", "[0,8]"), 8), "accepted");
  struct Row {
    std::string json;
    const char* word;
  };
  const Row rows[] = {
      {"", "'{'"},
      {"{", "'\"'"},
      {"{}x", "nothing after"},
      {"[]", "'{'"},
      {entry("F32", "[2]", "[0,7]"), "another size"},
      {entry("F32", "[2]", "[0,16]"), "the data, which has 8"},
      {entry("F32", "[1]", "[4,8]"), "begins at byte 4"},
      {entry("F32", "[1]", "[0,4]"), "cover 4 bytes"},
      {entry("F31", "[2]", "[0,8]"), "F31"},
      {entry("F32", "[-2]", "[0,8]"), "not negative"},
      {entry("F32", "[02]", "[0,8]"), "leading zeros"},
      {entry("F32", "[2.0]", "[0,8]"), "']'"},
      {entry("F32", "[9223372036854775808]", "[0,8]"), "smaller number"},
      {entry("F32", "[4611686018427387904,4]", "[0,8]"), "another size"},
      {entry("F32", "[2,1000000000,1000000000,1000000000]", "[0,8]"), "another size"},
      {entry("F32", "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]", "[0,8]"), "fewer numbers"},
      {entry("F32", "[2]", "[8,0]"), "begins at byte 8"},
      {entry("F32", "[2]", "[0,8,8]"), "fewer numbers"},
      {entry("F32", "[2]", "[0]"), "two data_offsets"},
      {"{\"w\":{\"dtype\":\"F32\",\"shape\":[2]}}", "dtype, shape and data_offsets"},
      {"{\"w\":{\"dtype\":\"F32\",\"shape\":[2],\"shape\":[2],\"data_offsets\":[0,8]}}", "key twice"},
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},\"a\":{}}", "name twice"},
      {"{\"__metadata__\":{\"k\":1}}", "'\"'"},
      {"{\"\xff\":1}", "UTF-8"},
      {"{\"\xc0\x80\":1}", "UTF-8"},
      {"{\"\xed\xa0\x80\":1}", "UTF-8"},
      {"{\"\\ud800\":1}", "surrogate"},
      {"{\"\\udc00\":1}", "surrogate"},
      {"{\"\\x\":1}", "escape"},
      {"{\"a\nb\":1}", "control"},
      {"{\"a", "end of a string"},
  };
  for (const Row& row : rows)
    EXPECT_NE(refusal(row.json, 8).find(row.word), std::string::npos)
        << row.json << ": " << refusal(row.json, 8);
}

}  // namespace
}  // namespace polyreme
