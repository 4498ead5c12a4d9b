#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace polyreme {

// A shard is a file of the safetensors format (huggingface/safetensors, "Format"): eight bytes with the
// length of the header, little-endian; the header, a JSON object padded with spaces; the data. The header
// maps names to {"dtype", "shape", "data_offsets"} and "__metadata__" to an object of strings. The entries
// cover the data without holes or overlap.
//
// In a checkpoint an entry is a whole tensor under its own name, or elements [begin, end) of a tensor's flat
// row-major order under the name "tensor[begin:end]", or the like of a part along one dim, "tensor{0:4-8}"
// and "tensor{0:4-8}[begin:end]". The metadata has
//   format       "polyreme-1"
//   generation   a random text that all files of one save have in common
//   block_bytes  the data is checked in blocks of so many bytes, from the start of the data
//   crc32c       the CRC-32C of each block, eight hexadecimal digits each
// so that a reader of any part of the data can check it; the manifest has the CRC-32C of the header itself.

struct ShardEntry {
  std::string name;
  std::string dtype;  // as safetensors spells it: "F32", "BF16"
  std::vector<int64_t> shape;
  int64_t begin = 0;  // bytes from the start of the data
  int64_t end = 0;
};

struct ShardHeader {
  std::map<std::string, std::string> metadata;
  std::vector<ShardEntry> entries;  // ascending in `begin`
};

constexpr int64_t kMaxHeaderBytes = 100'000'000;  // more is refused by the safetensors package too
constexpr int64_t kLengthBytes = 8;

// Bytes of one element. Throws CheckpointCorrupt for a dtype that the format does not have.
int64_t shard_dtype_size(const std::string& dtype);
// The JSON text, without length and padding.
std::string encode_shard_header(const ShardHeader& header);
// The inverse, padding allowed. Throws CheckpointCorrupt saying at which byte, unless `json` is a valid
// header of `data_bytes` bytes of data: JSON as RFC 8259 has it, no name twice, sizes that agree, no holes.
ShardHeader decode_shard_header(std::string_view json, int64_t data_bytes);

}  // namespace polyreme
