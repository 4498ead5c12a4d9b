#include "comm/collective.h"

#include <algorithm>

#include "comm/tree.h"

namespace polyreme {
namespace {

void require_dense(const char* op, const char* argument, const Tensor& tensor) {
  require(tensor.defined(), op, ": ", argument, " has no memory");
  require(tensor.is_contiguous(), op, ": ", argument, " ", tensor.to_string(), " is not contiguous (strides ",
          tensor.strides().to_string(), "); pass a contiguous copy");
}

void require_reducible(const char* op, DType dtype) {
  require<NotAvailable>(
      is_reducible(dtype), op, " of ", dtype_name(dtype),
      " is not available; convert to float32 first (float32, float64, int32 and int64 are reduced)");
}

// `part` may be `rank`'s slice of `whole`, or apart from it.
void require_apart(const char* op, const Tensor& part, const Tensor& whole, int rank) {
  if (part.buffer() != whole.buffer() || part.numel() == 0) return;
  const int64_t own_slice = whole.begin_byte() + rank * part.size_bytes();
  const bool apart = part.end_byte() <= whole.begin_byte() || whole.end_byte() <= part.begin_byte();
  require(apart || part.begin_byte() == own_slice, op, ": input and output overlap at bytes [",
          part.begin_byte(), ", ", part.end_byte(), ") and [", whole.begin_byte(), ", ", whole.end_byte(),
          ") of one buffer; only rank ", rank, "'s own slice, at byte ", own_slice, ", may be shared");
}

void require_counts(const char* op, const Tensor& part, const char* part_name, const Tensor& whole,
                    const char* whole_name, int size) {
  require(part.dtype() == whole.dtype(), op, ": input and output differ in dtype: ", part_name, " ",
          part.to_string(), ", ", whole_name, " ", whole.to_string());
  require(whole.numel() == part.numel() * size, op, " over ", size, " ranks: ", whole_name, " ",
          whole.to_string(), " has ", whole.numel(), " elements; expected ", part.numel() * size, ", ", size,
          " times ", part_name, " ", part.to_string());
}

}  // namespace

const char* reduce_op_name(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kMax:
      return "max";
    case ReduceOp::kMin:
      return "min";
  }
  return "unknown reduction";
}

const char* collective_name(CollectiveOp op) {
  switch (op) {
    case CollectiveOp::kNone:
      return "nothing";
    case CollectiveOp::kAttach:
      return "attach";
    case CollectiveOp::kAllReduce:
      return "all_reduce";
    case CollectiveOp::kReduceScatter:
      return "reduce_scatter";
    case CollectiveOp::kAllGather:
      return "all_gather";
    case CollectiveOp::kBroadcast:
      return "broadcast";
    case CollectiveOp::kBarrier:
      return "barrier";
    case CollectiveOp::kSplit:
      return "split";
  }
  return "unknown operation";
}

std::string CollectiveCall::to_string() const {
  std::string text = collective_name(op);
  const bool reduces = op == CollectiveOp::kAllReduce || op == CollectiveOp::kReduceScatter;
  const bool moves = reduces || op == CollectiveOp::kAllGather || op == CollectiveOp::kBroadcast;
  if (moves) text += concat(" ", dtype_name(dtype), "[", count, "]");
  if (reduces) text += concat(" ", reduce_op_name(reduce));
  if (op == CollectiveOp::kBroadcast) text += concat(" root ", root);
  return text;
}

std::string ranks_text(std::span<const int> ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += concat(i == 0 ? "" : ", ", ranks[i]);
  return text;
}

std::string mismatch_text(std::span<const CollectiveCall> calls) {
  struct Party {
    const CollectiveCall* call;
    std::vector<int> ranks;
  };
  std::vector<Party> parties;
  bool same_sequence = true;
  for (size_t r = 0; r < calls.size(); ++r) {
    const auto party = std::find_if(parties.begin(), parties.end(),
                                    [&](const Party& candidate) { return *candidate.call == calls[r]; });
    if (party == parties.end()) {
      parties.push_back({&calls[r], {static_cast<int>(r)}});
    } else {
      party->ranks.push_back(static_cast<int>(r));
    }
    same_sequence = same_sequence && calls[r].sequence == calls[0].sequence;
  }
  std::stable_sort(parties.begin(), parties.end(),
                   [](const Party& a, const Party& b) { return a.ranks.size() < b.ranks.size(); });
  std::string text;
  for (const Party& party : parties) {
    text += concat(text.empty() ? "" : "; ", ranks_text(party.ranks), ": ", party.call->to_string());
    if (!same_sequence) text += concat(" (sequence ", party.call->sequence, ")");
  }
  return text;
}

CollectiveCall check_all_reduce(const Tensor& data, ReduceOp op) {
  require_dense("all_reduce", "data", data);
  require_reducible("all_reduce", data.dtype());
  return {.count = data.numel(), .op = CollectiveOp::kAllReduce, .dtype = data.dtype(), .reduce = op};
}

CollectiveCall check_reduce_scatter(const Tensor& input, const Tensor& output, ReduceOp op, int rank,
                                    int size) {
  const char* name = "reduce_scatter";
  require_dense(name, "input", input);
  require_dense(name, "output", output);
  require_counts(name, output, "output", input, "input", size);
  require_reducible(name, input.dtype());
  require_apart(name, output, input, rank);
  return {.count = output.numel(), .op = CollectiveOp::kReduceScatter, .dtype = input.dtype(), .reduce = op};
}

CollectiveCall check_all_gather(const Tensor& input, const Tensor& output, int rank, int size) {
  const char* name = "all_gather";
  require_dense(name, "input", input);
  require_dense(name, "output", output);
  require_counts(name, input, "input", output, "output", size);
  require_apart(name, input, output, rank);
  return {.count = input.numel(), .op = CollectiveOp::kAllGather, .dtype = input.dtype()};
}

CollectiveCall check_broadcast(const Tensor& data, int root, int size) {
  require_dense("broadcast", "data", data);
  require(root >= 0 && root < size, "broadcast: root is ", root, "; expected a rank of the group, 0 to ",
          size - 1);
  return {.count = data.numel(), .root = root, .op = CollectiveOp::kBroadcast, .dtype = data.dtype()};
}

}  // namespace polyreme
