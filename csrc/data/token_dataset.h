#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace polyreme {

// A file of tokens, or a range of one, read a sample at a time: of a mapping a file that is cut, or whose
// disk fails, would end the process. Copies share the open file; any thread may read.
//
// File, little endian: 64 bytes of header ("POLYTOK1", u32 version = 1, u32 bytes per token (2 or
// 4), u64 num_tokens, u64 vocab_size, u32 crc32 of the payload, zeros), then the tokens.
class TokenDataset {
 public:
  // Throws InvalidArgument naming the path: missing, empty, not such a file, or shorter than its header says.
  explicit TokenDataset(const std::string& path);

  const std::string& path() const { return path_; }
  int64_t num_tokens() const { return end_ - begin_; }
  int64_t vocab_size() const { return vocab_size_; }
  // Tokens [begin, end) of this range, as a data set of its own.
  TokenDataset subset(int64_t begin, int64_t end) const;
  // Samples of seq_len inputs and their successors that fit: (num_tokens - 1) / seq_len.
  int64_t num_samples(int64_t seq_len) const;
  // Writes sample `index`: tokens[i] = range[index * seq_len + i], targets[i] = the one after it. Throws
  // InvalidArgument for a token outside [0, vocab_limit), naming its position, and where the file cannot be
  // read.
  void read_sample(int64_t index, int64_t seq_len, int64_t vocab_limit, int32_t* tokens,
                   int32_t* targets) const;

 private:
  struct File;

  void read(char* to, size_t size, int64_t offset) const;
  template <typename T>
  void read_as(const char* source, int64_t seq_len, int64_t vocab_limit, int64_t position, int32_t* tokens,
               int32_t* targets) const;

  std::string path_;
  std::shared_ptr<const File> file_;
  int token_bytes_ = 2;
  int64_t vocab_size_ = 0;
  int64_t begin_ = 0;
  int64_t end_ = 0;
};

// The global order of samples, a pure function of (seed, position): every epoch is a permutation of
// [0, num_samples), whatever the number of ranks, and any position can be asked for at once.
//
// The permutation is a balanced Feistel network over the smallest 2^(2k) >= num_samples with Philox
// as round function, walked until it lands inside (Black & Rogaway, "Ciphers with arbitrary finite
// domains", CT-RSA 2002).
class SampleOrder {
 public:
  // Throws InvalidArgument unless 1 <= num_samples <= 2^60.
  SampleOrder(int64_t num_samples, uint64_t seed, bool shuffle);
  int64_t num_samples() const { return num_samples_; }
  uint64_t seed() const { return seed_; }
  // The sample at `position` >= 0 of the endless sequence; epoch = position / num_samples.
  int64_t operator()(int64_t position) const;

 private:
  uint64_t permute(uint64_t value, uint32_t epoch) const;

  int64_t num_samples_;
  uint64_t seed_;
  bool shuffle_;
  int half_bits_;
};

}  // namespace polyreme
