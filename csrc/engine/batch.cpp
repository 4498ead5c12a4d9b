#include "engine/batch.h"

#include <algorithm>

#include "base/math.h"
#include "ops/ops.h"

namespace polyreme {

void check_batch(const Model& model, const HostBatch& batch, bool needs_targets) {
  require(batch.seq_len >= 1 && batch.seq_len <= model.max_seq_len, "the batch has seq_len=", batch.seq_len,
          "; the model takes 1 to ", model.max_seq_len);
  const auto size = static_cast<size_t>(batch.num_samples * batch.seq_len);
  const bool targets_fit = batch.targets.size() == size || (!needs_targets && batch.targets.empty());
  require(batch.tokens.size() == size && targets_fit, "the batch is said to be [", batch.num_samples, ", ",
          batch.seq_len, "], but has ", batch.tokens.size(), " tokens and ", batch.targets.size(),
          " targets");
  const auto vocab = static_cast<int32_t>(model.vocab);
  for (size_t i = 0; i < batch.tokens.size(); ++i)
    require(batch.tokens[i] >= 0 && batch.tokens[i] < vocab, "token ", batch.tokens[i], " at sample ",
            i / static_cast<size_t>(batch.seq_len), ", position ", i % static_cast<size_t>(batch.seq_len),
            " is outside the model's vocabulary of ", vocab);
  for (size_t i = 0; i < batch.targets.size(); ++i)
    require((batch.targets[i] >= 0 && batch.targets[i] < vocab) || batch.targets[i] == kIgnoreIndex,
            "target ", batch.targets[i], " at sample ", i / static_cast<size_t>(batch.seq_len), ", position ",
            i % static_cast<size_t>(batch.seq_len), " is neither in the model's vocabulary of ", vocab,
            " nor ", kIgnoreIndex, " (ignored)");
}

int64_t count_valid(const HostBatch& batch) {
  return std::count_if(batch.targets.begin(), batch.targets.end(),
                       [](int32_t t) { return t != kIgnoreIndex; });
}

HostBatch read_samples(const Model& model, const TokenDataset& data, int64_t count,
                       const std::function<int64_t(int64_t)>& sample) {
  const int64_t seq_len = model.max_seq_len;
  HostBatch batch{.num_samples = count, .seq_len = seq_len};
  try {
    batch.tokens.resize(static_cast<size_t>(count * seq_len));
    batch.targets.resize(static_cast<size_t>(count * seq_len));
  } catch (const std::exception&) {
    throw OutOfMemory(concat("out of host memory for ", count, " samples of ", seq_len,
                             " tokens; use a smaller global_batch or more ranks"));
  }
  for (int64_t i = 0; i < count; ++i)
    data.read_sample(sample(i), seq_len, model.vocab, &batch.tokens[static_cast<size_t>(i * seq_len)],
                     &batch.targets[static_cast<size_t>(i * seq_len)]);
  return batch;
}

HostBatch part_of(const HostBatch& batch, int64_t begin, int64_t end, int64_t seq_len) {
  HostBatch part{.num_samples = end - begin, .seq_len = seq_len};
  for (int64_t i = begin; i < end; ++i) {
    const int64_t first = i * batch.seq_len;
    part.tokens.insert(part.tokens.end(), batch.tokens.begin() + first,
                       batch.tokens.begin() + first + seq_len);
    if (batch.targets.empty()) continue;
    part.targets.insert(part.targets.end(), batch.targets.begin() + first,
                        batch.targets.begin() + first + seq_len);
  }
  return part;
}

HostBatch padded(const HostBatch& batch, int64_t multiple) {
  const int64_t from = batch.seq_len, to = round_up(from, multiple);
  HostBatch result{.num_samples = batch.num_samples, .seq_len = to};
  const auto stretch = [&](const std::vector<int32_t>& values, int32_t filler) {
    std::vector<int32_t> out(values.empty() ? 0 : static_cast<size_t>(batch.num_samples * to), filler);
    for (int64_t i = 0; !values.empty() && i < batch.num_samples; ++i)
      std::copy_n(values.begin() + i * from, from, out.begin() + i * to);
    return out;
  };
  result.tokens = stretch(batch.tokens, 0);
  result.targets = stretch(batch.targets, kIgnoreIndex);
  return result;
}

std::string samples_of(const TokenDataset& data) {
  return concat(data.num_tokens(), " tokens of vocabulary ", data.vocab_size());
}

DeviceBatch upload(Stream& stream, const HostBatch& batch) {
  const Shape shape{batch.num_samples, batch.seq_len};
  DeviceBatch result{empty(stream.device(), DType::kI32, shape, "tokens"), {}};
  copy_from_host(stream, batch.tokens.data(), result.tokens);
  if (!batch.targets.empty()) {
    result.targets = empty(stream.device(), DType::kI32, shape, "targets");
    copy_from_host(stream, batch.targets.data(), result.targets);
  }
  return result;
}

}  // namespace polyreme
