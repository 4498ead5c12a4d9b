#include "checkpoint/shard_file.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <new>

#include "base/crc32c.h"
#include "base/error.h"

namespace polyreme {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr int64_t kBlockBytes = 256 << 10;
constexpr int64_t kReadBytes = 16 * kBlockBytes;  // of one call: checked while it is in the cache
// Of one call. Large, since every write past the page cache waits for the disk; small files still keep
// several busy.
constexpr int64_t kMostWriteBytes = 64 * kBlockBytes, kLeastWriteBytes = 4 * kBlockBytes, kNumWrites = 8;
constexpr int64_t kAlignment = kDirectAlignment;  // of the data in the file
constexpr const char* kFormat = "polyreme-1";

int64_t divide_up(int64_t n, int64_t by) { return (n + by - 1) / by; }

void append_hex(std::string& out, uint32_t value) {
  for (int shift = 28; shift >= 0; shift -= 4) out += "0123456789abcdef"[value >> shift & 15];
}

std::string hex(uint32_t value) {
  std::string out;
  append_hex(out, value);
  return out;
}

// -1 unless `text` is eight lower-case hexadecimal digits.
int64_t parse_hex(std::string_view text) {
  int64_t value = 0;
  for (const char c : text) {
    const bool digit = c >= '0' && c <= '9', letter = c >= 'a' && c <= 'f';
    if (!digit && !letter) return -1;
    value = value * 16 + (digit ? c - '0' : c - 'a' + 10);
  }
  return text.size() == 8 ? value : -1;
}

// Length, header and padding: what stands before the data.
std::string framed(const ShardHeader& header) {
  std::string json = encode_shard_header(header);
  const int64_t total = divide_up(kLengthBytes + static_cast<int64_t>(json.size()), kAlignment) * kAlignment;
  json.resize(static_cast<size_t>(total - kLengthBytes), ' ');
  const auto length = static_cast<uint64_t>(json.size());
  std::string bytes(kLengthBytes, '\0');
  std::memcpy(bytes.data(), &length, sizeof(length));
  return bytes + json;
}

void place_entries(ShardHeader& header, int64_t data_bytes) {
  int64_t at = 0;
  for (ShardEntry& entry : header.entries) {
    int64_t size = shard_dtype_size(entry.dtype);
    for (const int64_t extent : entry.shape) size *= extent;
    entry.begin = at;
    entry.end = at += size;
  }
  require(at == data_bytes, "write_shard: the entries have ", at, " bytes, the data ", data_bytes);
}

// In large pages where the system has them: the disk is then asked for more at once.
constexpr std::align_val_t kLargePage{2 << 20};

struct FreeMemory {
  void operator()(std::byte* memory) const { ::operator delete(memory, kLargePage); }
};
using Buffer = std::unique_ptr<std::byte, FreeMemory>;

Buffer make_buffer(int64_t num_bytes) {
  const auto size = static_cast<size_t>(num_bytes);
  Buffer buffer(static_cast<std::byte*>(::operator new(size, kLargePage)));
  ::madvise(buffer.get(), size, MADV_HUGEPAGE);
  return buffer;
}

}  // namespace

ShardSummary write_shard(FileOps& files, const std::string& directory, const std::string& name,
                         ShardHeader header, std::span<const std::byte> data) {
  const auto data_bytes = static_cast<int64_t>(data.size());
  place_entries(header, data_bytes);
  std::vector<uint32_t> checksums(static_cast<size_t>(divide_up(data_bytes, kBlockBytes)));
  header.metadata["format"] = kFormat;
  header.metadata["block_bytes"] = std::to_string(kBlockBytes);
  std::string& digits = header.metadata["crc32c"];
  digits.assign(checksums.size() * 8, '0');
  std::string head = framed(header);  // of the length that it will have
  require(static_cast<int64_t>(head.size()) <= kMaxHeaderBytes, "write_shard: the header of '", name,
          "' has ", head.size(), " bytes; the format allows ", kMaxHeaderBytes, ": save from more ranks");
  const auto data_start = static_cast<int64_t>(head.size());
  const int64_t portion_bytes =
      std::clamp(data_bytes / kNumWrites / kBlockBytes * kBlockBytes, kLeastWriteBytes, kMostWriteBytes);
  files.write_file(directory, name, [&](int fd, const std::string& path) {
    files.write_large(fd, path, data, data_start, portion_bytes, [&](int64_t portion) {
      const int64_t at = portion * portion_bytes;
      const int64_t size = std::min(portion_bytes, data_bytes - at);
      crc32c_of_blocks(data.data() + at, static_cast<size_t>(size), kBlockBytes,
                       &checksums[static_cast<size_t>(at / kBlockBytes)]);
    });
    // The header last: a file that was cut short in between is not one.
    digits.clear();
    for (const uint32_t checksum : checksums) append_hex(digits, checksum);
    head = framed(header);
    files.write_at(fd, path, std::as_bytes(std::span(head)), 0);
  });
  return {data_start + data_bytes, crc32c(head.data(), head.size())};
}

ShardFile::ShardFile(const std::string& directory, const std::string& name, const ShardSummary* expected,
                     const std::string& generation)
    : directory_(directory), name_(name) {
  const InputFile file(directory, name);
  path_ = file.path();
  size_bytes_ = file.size_bytes();
  const std::string& where = path_;
  const int64_t size = size_bytes_;
  require<CheckpointCorrupt>(!expected || size == expected->size_bytes, "'", where, "' has ", size,
                             " bytes; the manifest says ", expected ? expected->size_bytes : 0);
  require<CheckpointCorrupt>(size >= kLengthBytes, "'", where, "' has ", size, " bytes, too few for a shard");
  uint64_t length = 0;
  file.read(&length, 0, kLengthBytes);
  require<CheckpointCorrupt>(length <= kMaxHeaderBytes && static_cast<int64_t>(length) <= size - kLengthBytes,
                             "'", where, "' claims a header of ", length, " bytes; the file has ", size);
  data_start_ = kLengthBytes + static_cast<int64_t>(length);
  std::string head(static_cast<size_t>(data_start_), '\0');
  file.read(head.data(), 0, data_start_);
  if (expected) {
    const uint32_t found = crc32c(head.data(), head.size());
    require<CheckpointCorrupt>(found == expected->header_crc32c, "the header of '", where, "' (bytes 0 to ",
                               data_start_, ") has the CRC-32C ", hex(found), "; the manifest says ",
                               hex(expected->header_crc32c));
  }
  try {
    header_ = decode_shard_header(std::string_view(head).substr(kLengthBytes), data_bytes());
  } catch (const CheckpointCorrupt& error) {
    throw CheckpointCorrupt(concat("'", where, "': ", error.what()));
  }
  const auto text = [&](const char* key) {
    const auto found = header_.metadata.find(key);
    return found == header_.metadata.end() ? std::string() : found->second;
  };
  require<CheckpointCorrupt>(generation.empty() || text("generation") == generation, "'", where,
                             "' is of generation '", text("generation").substr(0, 40),
                             "'; the manifest is of '", generation, "': the file belongs to another save");
  if (text("format") != kFormat) return;
  const std::string digits = text("crc32c");
  const int64_t num_blocks = divide_up(data_bytes(), kBlockBytes);
  require<CheckpointCorrupt>(text("block_bytes") == std::to_string(kBlockBytes) &&
                                 static_cast<int64_t>(digits.size()) == 8 * num_blocks,
                             "'", where, "': block_bytes and crc32c of its metadata do not fit its ",
                             data_bytes(), " bytes of data");
  block_bytes_ = kBlockBytes;
  for (int64_t i = 0; i < num_blocks; ++i) {
    const int64_t value = parse_hex(std::string_view(digits).substr(static_cast<size_t>(8 * i), 8));
    require<CheckpointCorrupt>(value >= 0, "'", where, "': crc32c of its metadata is not hexadecimal");
    checksums_.push_back(static_cast<uint32_t>(value));
  }
}

std::string ShardFile::entry_at(int64_t byte) const {
  for (const ShardEntry& entry : header_.entries)
    if (entry.begin <= byte && byte < entry.end) return entry.name;
  return "";
}

void ShardFile::read(std::vector<ShardRead> reads, bool is_alone) const {
  for (const ShardRead& r : reads)
    require(r.begin >= 0 && r.num_bytes >= 0 && r.begin <= data_bytes() - r.num_bytes, "read of bytes ",
            r.begin, " to ", r.begin + r.num_bytes, " of '", path(), "', which has ", data_bytes());
  std::erase_if(reads, [](const ShardRead& r) { return r.num_bytes == 0; });
  if (reads.empty()) return;
  InputFile file(directory_, name_);
  require<CheckpointCorrupt>(file.size_bytes() == size_bytes_, "'", path_, "' had ", size_bytes_,
                             " bytes when it was opened, and has ", file.size_bytes());
  if (checksums_.empty()) {
    for (const ShardRead& r : reads) file.read(r.to, data_start_ + r.begin, r.num_bytes);
    return;
  }
  std::ranges::sort(reads, {}, &ShardRead::begin);
  const bool is_direct = is_alone && data_start_ % kDirectAlignment == 0;
  Buffer buffer;
  const std::vector<Window> windows = windows_of(reads, is_direct ? nullptr : &file);
  size_t first = 0;  // reads before it are done
  for (const Window& window : windows) {
    // What one read wants whole goes to its place at once.
    const ShardRead& next = reads[first];
    const bool in_place =
        !is_direct && next.begin == window.begin && window.end - window.begin <= next.num_bytes;
    if (!in_place && !buffer) buffer = make_buffer(kReadBytes);
    std::byte* const data = in_place ? next.to : buffer.get();
    const int64_t size = window.end - window.begin;
    if (is_direct)
      file.read_direct(data, data_start_ + window.begin, size);
    else
      file.read(data, data_start_ + window.begin, size);
    check_blocks(window.begin, window.end, data);
    size_t left = first;
    for (size_t i = first; i < reads.size() && reads[i].begin < window.end; ++i) {
      ShardRead& r = reads[i];
      const int64_t count = std::min(r.num_bytes, window.end - r.begin);
      const std::byte* const source = data + (r.begin - window.begin);
      if (source != r.to) std::memcpy(r.to, source, static_cast<size_t>(count));
      r = {r.begin + count, r.num_bytes - count, r.to + count};
      if (r.num_bytes == 0) std::swap(reads[i], reads[left++]);  // the others begin at the window's end
    }
    first = left;
  }
}

// The blocks that the reads touch, neighbours together up to kReadBytes; tells the system that they come.
std::vector<ShardFile::Window> ShardFile::windows_of(const std::vector<ShardRead>& reads,
                                                     const InputFile* prefetched) const {
  std::vector<Window> runs, windows;
  for (const ShardRead& r : reads) {
    const int64_t begin = r.begin / block_bytes_ * block_bytes_;
    const int64_t end = std::min(divide_up(r.begin + r.num_bytes, block_bytes_) * block_bytes_, data_bytes());
    if (!runs.empty() && begin <= runs.back().end)
      runs.back().end = std::max(runs.back().end, end);
    else
      runs.push_back({begin, end});
  }
  for (const Window& run : runs) {
    if (prefetched) prefetched->prefetch(data_start_ + run.begin, run.end - run.begin);
    for (int64_t at = run.begin; at < run.end; at += kReadBytes)
      windows.push_back({at, std::min(at + kReadBytes, run.end)});
  }
  return windows;
}

void ShardFile::check_blocks(int64_t begin, int64_t end, const std::byte* data) const {
  std::vector<uint32_t> found(static_cast<size_t>(divide_up(end - begin, block_bytes_)));
  crc32c_of_blocks(data, static_cast<size_t>(end - begin), static_cast<size_t>(block_bytes_), found.data());
  for (size_t i = 0; i < found.size(); ++i) {
    const int64_t place = begin + static_cast<int64_t>(i) * block_bytes_;
    const uint32_t expected = checksums_[static_cast<size_t>(place / block_bytes_)];
    require<CheckpointCorrupt>(found[i] == expected, "'", path_, "': bytes ", data_start_ + place, " to ",
                               data_start_ + std::min(place + block_bytes_, end), " of the file, tensor '",
                               entry_at(place), "' and following, have the CRC-32C ", hex(found[i]),
                               "; expected ", hex(expected));
  }
}

}  // namespace polyreme
