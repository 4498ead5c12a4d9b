#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace polyreme {

struct PlanTensor {
  std::string name;  // for messages
  int64_t num_elements = 0;
  int64_t item_bytes = 1;
};

// Elements [begin, end) of a tensor's flat row-major order.
struct PlanPiece {
  int32_t tensor = 0;
  int64_t begin = 0;
  int64_t end = 0;
};

struct SavePlan {
  std::vector<PlanPiece> pieces;       // that the asking rank writes: ascending in (tensor, begin)
  std::vector<int64_t> bytes_of_rank;  // what every rank writes
};

// Who writes what, so that every element is written once and the bytes are spread evenly. Ranks that hold the
// same pieces are one *class*: `held[c]` has the pieces of a class, `class_of_rank` the class of each rank.
// Every rank computes the same plan from the same arguments. What several ranks hold is dealt out among them,
// those with least to write first; a cut lies at a multiple of `min_cut_bytes` from the start of a run of
// elements that the same ranks hold, so that small tensors stay whole.
// Time and memory are linear in the number of pieces, up to the sorting of each tensor's.
// Throws InvalidArgument naming the elements that nobody holds, and pieces that lie outside their tensor.
SavePlan plan_save(std::span<const PlanTensor> tensors, std::span<const std::vector<PlanPiece>> held,
                   std::span<const int32_t> class_of_rank, int32_t rank, int64_t min_cut_bytes = 1 << 20);

}  // namespace polyreme
