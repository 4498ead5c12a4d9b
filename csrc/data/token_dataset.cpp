#include "data/token_dataset.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "base/philox.h"

namespace polyreme {
namespace {

constexpr size_t kHeaderBytes = 64;
constexpr char kMagic[9] = "POLYTOK1";
constexpr char kRemedy[] = "; make one with: polyreme data prepare PATH... --out corpus.bin";

template <typename T>
T field(const char* bytes, size_t offset) {
  T value;
  std::memcpy(&value, bytes + offset, sizeof(T));
  return value;
}

}  // namespace

struct TokenDataset::File {
  explicit File(int descriptor) : fd(descriptor) {}
  ~File() { close(fd); }
  File(const File&) = delete;
  const int fd;
};

TokenDataset::TokenDataset(const std::string& path) : path_(path) {
  // O_NONBLOCK: opening a pipe would wait for its writer, before it could be refused.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  require(fd >= 0, "cannot open the token file '", path, "': ", std::strerror(errno), kRemedy);
  file_ = std::make_shared<const File>(fd);
  struct stat info {};
  require(fstat(fd, &info) == 0 && S_ISREG(info.st_mode), "'", path, "' is not a regular file", kRemedy);
  const auto size = static_cast<size_t>(info.st_size);
  require(size >= kHeaderBytes, "'", path, "' has ", size, " bytes, less than the header's ", kHeaderBytes,
          kRemedy);
  char header[kHeaderBytes];
  read(header, sizeof(header), 0);
  require(std::memcmp(header, kMagic, 8) == 0, "'", path, "' is not a token file (it does not start with ",
          kMagic, ")", kRemedy);
  const auto version = field<uint32_t>(header, 8);
  const auto token_bytes = field<uint32_t>(header, 12);
  const auto num_tokens = field<uint64_t>(header, 16);
  const auto vocab_size = field<uint64_t>(header, 24);
  require(version == 1, "'", path, "' has format version ", version, "; this build reads version 1", kRemedy);
  require(token_bytes == 2 || token_bytes == 4, "'", path, "' has ", token_bytes,
          " bytes per token; expected 2 or 4");
  const uint64_t payload_tokens = (size - kHeaderBytes) / token_bytes;
  require(num_tokens == payload_tokens && (size - kHeaderBytes) % token_bytes == 0, "'", path,
          "' is damaged: its header says ", num_tokens, " tokens of ", token_bytes, " bytes, the file holds ",
          size - kHeaderBytes, " bytes of them", kRemedy);
  require(num_tokens > 0, "'", path, "' holds no tokens", kRemedy);
  require(vocab_size >= 1 && vocab_size <= (uint64_t{1} << 31), "'", path, "' has vocab_size ", vocab_size,
          "; expected 1 to 2^31");
  token_bytes_ = static_cast<int>(token_bytes);
  vocab_size_ = static_cast<int64_t>(vocab_size);
  end_ = static_cast<int64_t>(num_tokens);
}

TokenDataset TokenDataset::subset(int64_t begin, int64_t end) const {
  require(0 <= begin && begin <= end && end <= num_tokens(), "subset [", begin, ", ", end, ") of ",
          num_tokens(), " tokens of '", path_, "'");
  TokenDataset result = *this;
  result.begin_ = begin_ + begin;
  result.end_ = begin_ + end;
  return result;
}

int64_t TokenDataset::num_samples(int64_t seq_len) const {
  require(seq_len >= 1, "seq_len=", seq_len, "; expected at least 1");
  return num_tokens() < 1 ? 0 : (num_tokens() - 1) / seq_len;
}

void TokenDataset::read(char* to, size_t size, int64_t offset) const {
  for (size_t done = 0; done < size;) {
    const ssize_t count = pread(file_->fd, to + done, size - done, offset + static_cast<int64_t>(done));
    if (count < 0 && errno == EINTR) continue;
    require(count >= 0, "cannot read '", path_, "': ", std::strerror(errno), "; check its disk");
    require(count > 0, "'", path_, "' ends at byte ", offset + static_cast<int64_t>(done),
            ": it was cut since it was opened; prepare it again, into a new file");
    done += static_cast<size_t>(count);
  }
}

template <typename T>
void TokenDataset::read_as(const char* source, int64_t seq_len, int64_t vocab_limit, int64_t position,
                           int32_t* tokens, int32_t* targets) const {
  for (int64_t i = 0; i <= seq_len; ++i) {
    const uint32_t token = field<T>(source, static_cast<size_t>(i) * sizeof(T));
    require(token < static_cast<uint64_t>(vocab_limit), "'", path_, "': token ", token, " at position ",
            position + i, " is outside the vocabulary of ", vocab_limit,
            "; use a model with vocab >= ", vocab_size_, " (the file's vocab_size)");
    if (i < seq_len) tokens[i] = static_cast<int32_t>(token);
    if (i > 0) targets[i - 1] = static_cast<int32_t>(token);
  }
}

void TokenDataset::read_sample(int64_t index, int64_t seq_len, int64_t vocab_limit, int32_t* tokens,
                               int32_t* targets) const {
  require(index >= 0 && index < num_samples(seq_len), "sample ", index, " of '", path_, "', which has ",
          num_samples(seq_len), " samples of ", seq_len, " tokens");
  const int64_t position = begin_ + index * seq_len;
  std::vector<char> source(static_cast<size_t>(seq_len + 1) * static_cast<size_t>(token_bytes_));
  read(source.data(), source.size(), static_cast<int64_t>(kHeaderBytes) + position * token_bytes_);
  if (token_bytes_ == 2)
    read_as<uint16_t>(source.data(), seq_len, vocab_limit, position, tokens, targets);
  else
    read_as<uint32_t>(source.data(), seq_len, vocab_limit, position, tokens, targets);
}

SampleOrder::SampleOrder(int64_t num_samples, uint64_t seed, bool shuffle)
    : num_samples_(num_samples), seed_(seed), shuffle_(shuffle), half_bits_(1) {
  require(num_samples >= 1, "the data has no samples; use more text or a shorter seq_len");
  require(num_samples <= int64_t{1} << 60, "the data has ", num_samples, " samples; expected at most 2^60");
  while ((uint64_t{1} << (2 * half_bits_)) < static_cast<uint64_t>(num_samples)) ++half_bits_;
}

uint64_t SampleOrder::permute(uint64_t value, uint32_t epoch) const {
  constexpr int kRounds = 6;
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
  uint64_t left = value >> half_bits_, right = value & mask;
  for (uint32_t round = 0; round < kRounds; ++round) {
    const RandomKey key{seed_, RandomPurpose::kDataOrder, round, epoch};
    const Philox4 random = random_block(key, right);
    const uint64_t next = left ^ ((random.word[0] | (uint64_t{random.word[1]} << 32)) & mask);
    left = right;
    right = next;
  }
  return (left << half_bits_) | right;
}

int64_t SampleOrder::operator()(int64_t position) const {
  require(position >= 0, "sample position ", position, "; expected 0 or more");
  const auto value = static_cast<uint64_t>(position % num_samples_);
  if (!shuffle_) return static_cast<int64_t>(value);
  const auto epoch = static_cast<uint32_t>(position / num_samples_);
  uint64_t permuted = value;
  do permuted = permute(permuted, epoch);
  while (permuted >= static_cast<uint64_t>(num_samples_));
  return static_cast<int64_t>(permuted);
}

}  // namespace polyreme
