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

// Parts of the logits by columns. max: raised to the largest logit of each row.
cudaError_t launch_vocab_part_max(const PolyremeVocabPart& args, cudaStream_t stream);
// Of each row: sum_exp = the sum of exp(logit - max) with the max of all parts; target_logit: the target's
// logit where it lies in this part, else 0. Parts are added up by lane_sum.
cudaError_t launch_vocab_part_sums(const PolyremeVocabPart& args, cudaStream_t stream);
// log_sum_exp = log(sum_exp) + max, loss = log_sum_exp - target_logit, 0 where the target is negative.
cudaError_t launch_vocab_part_finish(const PolyremeVocabPart& args, cudaStream_t stream);
// Turns logits into gradients, as launch_cross_entropy_backward does; columns that are not valid become 0.
cudaError_t launch_vocab_part_backward(const PolyremeVocabPart& args, cudaStream_t stream);

}  // namespace polyreme::kernels
