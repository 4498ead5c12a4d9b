#include "checkpoint/shard_header.h"

#include "base/error.h"
#include "fuzz.h"

// The header of a safetensors file, as anybody may have written it.

namespace polyreme::fuzz {

void try_input(FuzzedDataProvider& input) {
  const auto data_bytes = input.ConsumeIntegralInRange<int64_t>(0, int64_t{1} << 40);
  const std::string json = input.ConsumeRemainingBytesAsString();
  ShardHeader header;
  try {
    header = decode_shard_header(json, data_bytes);
  } catch (const CheckpointCorrupt&) {
    return;
  }
  int64_t end = 0;
  for (const ShardEntry& entry : header.entries) {
    expect(entry.begin == end && entry.end >= entry.begin, "entries follow each other");
    end = entry.end;
    int64_t size = shard_dtype_size(entry.dtype);
    for (const int64_t extent : entry.shape) size = extent == 0 ? 0 : size * extent;
    expect(entry.shape.empty() || size == entry.end - entry.begin, "shape and bytes agree");
  }
  expect(end == data_bytes, "entries cover the data");
  const std::string again = encode_shard_header(header);
  expect(encode_shard_header(decode_shard_header(again, data_bytes)) == again, "a header has one text");
}

std::vector<std::string> seeds() {
  const ShardHeader header{.metadata = {{"format", "polyreme-1"}, {"crc32c", "00ff00ff"}},
                           .entries = {{"w", "F32", {2, 3}, 0, 24}, {"b[0:4]", "BF16", {4}, 24, 32}}};
  // The number is taken from the end: 32 of 2^40 in six bytes.
  const std::string size("\x20\0\0\0\0\0", 6);
  return {encode_shard_header(header) + size,
          std::string("{\"\\u00e9\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]}}") +
              std::string("\x01\0\0\0\0\0", 6)};
}

}  // namespace polyreme::fuzz
