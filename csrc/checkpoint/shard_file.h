#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/file_ops.h"
#include "checkpoint/shard_header.h"

namespace polyreme {

// What the manifest says of a file.
struct ShardSummary {
  int64_t size_bytes = 0;
  uint32_t header_crc32c = 0;  // of the eight bytes and the padded header
};

// Writes the shard `name` in `directory`: entries as in `header` (their begin and end are set here, one after
// the other), the data, and the checksums. The file is durable on return, its name is not. Throws
// CheckpointError, InvalidArgument if sizes do not agree.
ShardSummary write_shard(FileOps& files, const std::string& directory, const std::string& name,
                         ShardHeader header, std::span<const std::byte> data);

// Part of a shard's data and where it goes.
struct ShardRead {
  int64_t begin = 0;  // byte of the data
  int64_t num_bytes = 0;
  std::byte* to = nullptr;
};

// A shard that is read; open only while it is: there may be more shards than files may be open. Thread-safe
// once made.
class ShardFile {
 public:
  // Checks size, header and, if given, the header's checksum and the generation. Throws CheckpointCorrupt,
  // naming the file, what was expected and what is there.
  ShardFile(const std::string& directory, const std::string& name, const ShardSummary* expected,
            const std::string& generation);

  const ShardHeader& header() const { return header_; }
  const std::string& path() const { return path_; }
  int64_t data_bytes() const { return size_bytes_ - data_start_; }
  // Reads the blocks that `reads` touch, checks them where the file has checksums, and hands out the parts.
  // is_alone: nobody else on this host reads them, so they need not go through the page cache.
  // Throws CheckpointCorrupt naming file, entry and range of bytes; what was read until then is undefined.
  void read(std::vector<ShardRead> reads, bool is_alone = false) const;

 private:
  struct Window {
    int64_t begin, end;  // bytes of the data, at borders of blocks
  };
  std::vector<Window> windows_of(const std::vector<ShardRead>& reads, const InputFile* prefetched) const;
  void check_blocks(int64_t begin, int64_t end, const std::byte* data) const;
  std::string entry_at(int64_t byte) const;

  std::string directory_, name_, path_;
  int64_t size_bytes_ = 0;
  ShardHeader header_;
  int64_t data_start_ = 0;
  int64_t block_bytes_ = 0;
  std::vector<uint32_t> checksums_;  // empty: a file of others, without
};

}  // namespace polyreme
