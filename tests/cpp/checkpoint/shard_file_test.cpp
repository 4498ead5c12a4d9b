#include "checkpoint/shard_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>

#include "base/crc32c.h"
#include "base/error.h"

namespace polyreme {
namespace {

class ShardFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "shard_XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    directory_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  // Random data of the given sizes, as one shard of I8 entries "0", "1", ...
  ShardSummary write(const std::vector<int64_t>& sizes, const std::string& name = "s") {
    ShardHeader header{.metadata = {{"generation", "g1"}}, .entries = {}};
    int64_t total = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      header.entries.push_back({.name = std::to_string(i), .dtype = "I8", .shape = {sizes[i]}});
      total += sizes[i];
    }
    data_.resize(static_cast<size_t>(total));
    std::mt19937 random(7);
    for (std::byte& byte : data_) byte = static_cast<std::byte>(random());
    return write_shard(files_, directory_, name, header, data_);
  }
  template <typename E>
  std::string text(const std::function<void()>& call) {
    try {
      call();
    } catch (const E& error) {
      return error.what();
    }
    return "";
  }
  void flip(const std::string& name, int64_t at) {
    std::fstream file(directory_ + "/" + name, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(at);
    const char byte = static_cast<char>(file.get() ^ 16);
    file.seekp(at);
    file.put(byte);
  }

  // The next read of the file comes from the disk.
  static void forget(const std::string& path) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    ::fdatasync(fd);
    ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    ::close(fd);
  }

  std::string directory_;
  FileOps files_;
  std::vector<std::byte> data_;
};

TEST_F(ShardFileTest, ReadsAnyRanges) {
  const ShardSummary summary = write({0, 5, 300'000, 262'144, 1'500'000, 1});
  const ShardFile file(directory_, "s", &summary, "g1");
  EXPECT_EQ(file.data_bytes(), static_cast<int64_t>(data_.size()));
  EXPECT_EQ(file.header().entries.size(), 6u);
  std::mt19937 random(3);
  const auto below = [&](size_t n) { return static_cast<int64_t>(random() % n); };
  for (int trial = 0; trial < 40; ++trial) {
    std::vector<std::byte> out(data_.size());
    std::vector<ShardRead> reads;
    for (int64_t k = below(5); k >= 0; --k) {
      const int64_t begin = below(data_.size()), size = below(data_.size() - static_cast<size_t>(begin) + 1);
      reads.push_back({begin, size, out.data() + begin});
    }
    file.read(reads);
    for (const ShardRead& r : reads)
      EXPECT_EQ(std::memcmp(r.to, data_.data() + r.begin, static_cast<size_t>(r.num_bytes)), 0);
  }
  EXPECT_NE(text<InvalidArgument>([&] {
              file.read({{1, static_cast<int64_t>(data_.size()), data_.data()}});
            }),
            "");
}

// Several portions by several threads, past the page cache where the memory is aligned and the file system
// can.
TEST_F(ShardFileTest, LargeData) {
  constexpr int64_t kSize = (9 << 20) + 123;
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  const std::unique_ptr<std::byte, Free> memory(
      static_cast<std::byte*>(std::aligned_alloc(kDirectAlignment, 10 << 20)));
  std::mt19937 random(5);
  for (int64_t i = 0; i < kSize; ++i) memory.get()[i] = static_cast<std::byte>(random());
  const auto shifted = [&](int64_t by) {
    return std::span<const std::byte>(memory.get() + by, static_cast<size_t>(kSize - by));
  };
  ShardHeader header{.metadata = {{"generation", "g1"}},
                     .entries = {{.name = "w", .dtype = "I8", .shape = {0}}}};
  for (const int64_t by : {0, 64, 123}) {  // aligned, not aligned, without an end of its own
    const std::span<const std::byte> data = shifted(by);
    header.entries[0].shape = {kSize - by};
    const std::string name = concat("large", by);
    const ShardSummary summary = write_shard(files_, directory_, name, header, data);
    const ShardFile file(directory_, name, &summary, "g1");
    std::vector<std::byte> out(data.size());
    file.read({{0, kSize - by, out.data()}});
    EXPECT_TRUE(std::ranges::equal(out, data)) << by;
    // From the disk: a part in the middle of blocks, one from the last block, which is no whole page; and a
    // flipped bit is found.
    const std::string path = directory_ + "/" + name;
    for (const int64_t begin : {int64_t{300'001}, kSize - by - 1000}) {
      forget(path);
      std::ranges::fill(out, std::byte{});
      file.read({{begin, kSize - by - begin, out.data() + begin}}, true);
      EXPECT_TRUE(std::ranges::equal(std::span(out).subspan(static_cast<size_t>(begin)),
                                     data.subspan(static_cast<size_t>(begin))))
          << begin;
    }
    flip(name, summary.size_bytes - 1);
    forget(path);
    EXPECT_NE(text<CheckpointCorrupt>([&] { file.read({{0, kSize - by, out.data()}}, true); }), "");
    EXPECT_EQ((summary.size_bytes - file.data_bytes()) % kDirectAlignment, 0);
  }
  header.entries[0].shape = {kSize};
  for (int64_t at = 2; at <= 5; ++at) {  // create is the first point
    FileOps failing({.at = at, .kind = FileFault::Kind::kError, .error_number = EIO});
    const std::string message = text<CheckpointError>(
        [&] { write_shard(failing, directory_, concat("fails", at), header, shifted(0)); });
    EXPECT_NE(message.find("EIO 5"), std::string::npos) << message;
  }
}

// F68, F69: whatever is wrong with a file is said with its name, and nothing is delivered.
TEST_F(ShardFileTest, F69_OneFlippedBit) {
  const ShardSummary summary = write({1'000'000, 10});
  const int64_t data_start = summary.size_bytes - static_cast<int64_t>(data_.size());
  const auto read_all = [&] {
    std::vector<std::byte> out(data_.size());
    ShardFile(directory_, "s", &summary, "g1").read({{0, static_cast<int64_t>(data_.size()), out.data()}});
  };
  EXPECT_EQ(text<Error>(read_all), "");
  for (const int64_t at : {int64_t{0}, int64_t{3}, int64_t{9}, data_start / 2, data_start - 1}) {
    flip("s", at);
    EXPECT_NE(text<CheckpointCorrupt>(read_all).find(directory_ + "/s'"), std::string::npos) << at;
    flip("s", at);
  }
  for (const int64_t at : {data_start, data_start + 262'144, data_start + 999'999, summary.size_bytes - 1}) {
    flip("s", at);
    const std::string message = text<CheckpointCorrupt>(read_all);
    EXPECT_NE(message.find("tensor '0'"), std::string::npos) << message;
    EXPECT_NE(message.find("CRC-32C"), std::string::npos) << message;
    flip("s", at);
  }
  EXPECT_EQ(text<Error>(read_all), "");
  // A part whose blocks are whole can still be read.
  flip("s", data_start + 600'000);
  std::vector<std::byte> out(1000);
  ShardFile(directory_, "s", &summary, "g1").read({{100'000, 1000, out.data()}});
}

TEST_F(ShardFileTest, F68_Truncated) {
  const ShardSummary summary = write({1000});
  for (const int64_t size : {int64_t{0}, int64_t{5}, summary.size_bytes / 2, summary.size_bytes - 1}) {
    std::filesystem::resize_file(directory_ + "/s", static_cast<uintmax_t>(size));
    const std::string message = text<CheckpointCorrupt>([&] { ShardFile(directory_, "s", &summary, "g1"); });
    EXPECT_NE(message.find(concat("has ", size, " bytes; the manifest says ", summary.size_bytes)),
              std::string::npos);
    EXPECT_NE(text<CheckpointCorrupt>([&] { ShardFile(directory_, "s", nullptr, ""); }), "");
  }
}

TEST_F(ShardFileTest, RefusesFilesOfOthers) {
  const ShardSummary summary = write({1000});
  EXPECT_NE(text<CheckpointCorrupt>([&] { ShardFile(directory_, "s", &summary, "g2"); }).find("another save"),
            std::string::npos);
  EXPECT_NE(text<CheckpointCorrupt>([&] { ShardFile(directory_, "gone", nullptr, ""); }).find("missing"),
            std::string::npos);
}

// F71: nothing outside of the directory is opened.
TEST_F(ShardFileTest, F71_NamesAndLinks) {
  write({10}, "real");
  for (const char* name : {"../x", "/etc/passwd", "a/b", "", ".", ".."})
    EXPECT_NE(text<InvalidArgument>([&] { ShardFile(directory_, name, nullptr, ""); }), "") << name;
  EXPECT_NE(text<InvalidArgument>([&] { ShardFile(directory_, std::string("real\0x", 6), nullptr, ""); }),
            "");
  std::filesystem::create_symlink("real", directory_ + "/link");
  EXPECT_NE(text<CheckpointError>([&] { ShardFile(directory_, "link", nullptr, ""); }), "");
  ASSERT_EQ(::mkfifo((directory_ + "/pipe").c_str(), 0600), 0);
  EXPECT_NE(text<CheckpointCorrupt>([&] { ShardFile(directory_, "pipe", nullptr, ""); }).find("regular"),
            std::string::npos);
  EXPECT_NE(text<CheckpointError>([&] { write({10}, "link"); }), "");  // nor written through
  std::filesystem::create_directory_symlink(directory_, directory_ + "/sub");
  EXPECT_NE(text<CheckpointError>([&] { ShardFile(directory_ + "/sub", "real", nullptr, ""); }), "");
}

TEST_F(ShardFileTest, FilesArePrivate) {
  write({10});
  struct stat status {};
  ASSERT_EQ(::stat((directory_ + "/s").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
}

TEST_F(ShardFileTest, F64_FailuresNameOperationPathAndErrno) {
  for (int64_t at = 1; at <= 4; ++at) {
    FileOps failing({.at = at, .kind = FileFault::Kind::kError, .error_number = ENOSPC});
    const ShardHeader header{.metadata = {}, .entries = {{.name = "w", .dtype = "I8", .shape = {4}}}};
    const std::vector<std::byte> data(4);
    const std::string message =
        text<CheckpointError>([&] { write_shard(failing, directory_, concat("f", at), header, data); });
    EXPECT_NE(message.find(directory_ + "/f"), std::string::npos) << message;
    EXPECT_NE(message.find("ENOSPC 28"), std::string::npos) << message;
    EXPECT_NE(message.find("free space"), std::string::npos) << message;
  }
}

TEST(Crc32cOfBlocks, IsThatOfEachBlock) {
  std::vector<uint8_t> data(10'000);
  std::mt19937 random(1);
  for (uint8_t& byte : data) byte = static_cast<uint8_t>(random());
  for (const size_t block : {1u, 7u, 64u, 1000u, 4096u})
    for (const size_t size : {0u, 1u, 63u, 4000u, 9999u, 10'000u}) {
      std::vector<uint32_t> found((size + block - 1) / block);
      crc32c_of_blocks(data.data(), size, block, found.data());
      for (size_t i = 0; i < found.size(); ++i)
        ASSERT_EQ(found[i], crc32c(&data[i * block], std::min(block, size - i * block)))
            << block << " " << size;
    }
}

}  // namespace
}  // namespace polyreme
