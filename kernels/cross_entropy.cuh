// Softmax cross-entropy over rows of logits, with the bits of the CPU's
// (csrc/ops/cpu/kernels/cross_entropy.h), and its parts where the vocabulary is cut over ranks.
#pragma once

#include <cuda_runtime.h>

#include "device/cuda/kernel_args.h"

namespace polyreme::kernels {

// loss = log_sum_exp - logits[target], 0 where the target is kIgnoreTarget. With another target outside of
// [0, vocab) `bad` tells its row and nothing else is written.
inline constexpr int32_t kIgnoreTarget = -100;
cudaError_t launch_cross_entropy_forward(const PolyremeCrossEntropy& args, cudaStream_t stream);
// Turns logits into (exp(logit - log_sum_exp) - (column == target)) * scale, 0 in rows to be ignored.
cudaError_t launch_cross_entropy_backward(const PolyremeCrossEntropy& args, cudaStream_t stream);

// Columns [first_column, first_column + cols) of the logits. max: the largest logit of each row, -inf without
// any.
cudaError_t launch_vocab_part_max(const PolyremeVocabPart& args, cudaStream_t stream);
// Of each row: sum_exp = the sum of exp(logit - max) with the max of all parts; target_logit: the target's
// logit where it lies in this part, else 0. Parts are added up by lane_sum; log(sum) + max - target_logit is
// the loss.
cudaError_t launch_vocab_part_sums(const PolyremeVocabPart& args, cudaStream_t stream);

}  // namespace polyreme::kernels
