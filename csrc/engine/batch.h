#pragma once

#include <functional>
#include <string>
#include <vector>

#include "data/token_dataset.h"
#include "nn/gpt.h"

namespace polyreme {

// Samples in host memory: tokens and targets are [num_samples, seq_len], row after row. A target of
// kIgnoreIndex does not count.
struct HostBatch {
  std::vector<int32_t> tokens;
  std::vector<int32_t> targets;
  int64_t num_samples = 0;
  int64_t seq_len = 0;
  // Of each micro-batch of a training step, in order of samples: the tokens of its samples that are run, at
  // most seq_len; what follows them is filler. Empty: all of them.
  std::vector<int64_t> lengths;
};

// A batch in device memory; targets are undefined where there are none.
struct DeviceBatch {
  Tensor tokens, targets;
};

// Throws InvalidArgument, naming place and value, for shapes that do not fit together or the model, and for
// tokens outside its vocabulary.
void check_batch(const Model& model, const HostBatch& batch, bool needs_targets);
int64_t count_valid(const HostBatch& batch);
// Samples sample(0..count) of `data`. Throws InvalidArgument for tokens outside the vocabulary, OutOfMemory.
HostBatch read_samples(const Model& model, const TokenDataset& data, int64_t count,
                       const std::function<int64_t(int64_t)>& sample);
// The first `seq_len` tokens of the samples [begin, end).
HostBatch part_of(const HostBatch& batch, int64_t begin, int64_t end, int64_t seq_len);
// Every sample followed by ignored tokens up to a multiple of `multiple` tokens. Changes neither loss nor
// gradients: nothing looks ahead, and what follows adds zeros.
HostBatch padded(const HostBatch& batch, int64_t multiple);
// What tells data sets apart, whatever their files are called on each rank.
std::string samples_of(const TokenDataset& data);
// `batch` must live until `stream` was synchronized.
DeviceBatch upload(Stream& stream, const HostBatch& batch);

}  // namespace polyreme
