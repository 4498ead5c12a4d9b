#include "comm/collective.h"

#include <algorithm>
#include <numeric>

#include "base/hash.h"
#include "comm/transport.h"
#include "comm/tree.h"

namespace polyreme {
namespace {

void require_dense(const char* op, const char* argument, const Tensor& tensor) {
  require(tensor.defined(), op, ": ", argument, " has no memory");
  require(tensor.is_contiguous(), op, ": ", argument, " ", tensor, " is not contiguous (strides ",
          tensor.strides(), "); pass a contiguous copy");
}

// A quotient of integers would be rounded somehow: the caller knows better how.
void require_reducible(const char* op, DType dtype, ReduceOp reduce) {
  require(is_reducible(reduce, dtype), op, ": no ", reduce_op_name(reduce), " of ", dtype_name(dtype),
          "; convert to float32 first, or reduce by sum and divide");
}

const char* begin_of(const Tensor& tensor) { return static_cast<const char*>(tensor.raw_address()); }

// By address: two buffers can be views of one array of somebody else.
bool overlap(const Tensor& a, const Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0) return false;
  return begin_of(a) < begin_of(b) + b.size_bytes() && begin_of(b) < begin_of(a) + a.size_bytes();
}

// `part` may be this rank's slice of `whole`, which begins at byte `slice_byte` of it, or apart from it.
void require_apart(const char* op, const Tensor& part, const Tensor& whole, int64_t slice_byte) {
  if (!overlap(part, whole) || begin_of(part) == begin_of(whole) + slice_byte) return;
  const int64_t place = begin_of(part) - begin_of(whole);
  throw InvalidArgument(concat(op, ": input and output overlap: bytes [", place, ", ",
                               place + part.size_bytes(),
                               ") of the larger one are the other; only this rank's own slice, at byte ",
                               slice_byte, ", may be shared"));
}

void require_same_dtype(const char* op, const Tensor& input, const Tensor& output) {
  require(input.dtype() == output.dtype(), op, ": input and output differ in dtype: input ", input,
          ", output ", output);
}

// One block for each rank: `counts` is well-formed and sums to the elements of `tensor`.
void require_blocks(const char* op, const char* name, std::span<const int64_t> counts, int size,
                    const char* tensor_name, const Tensor& tensor) {
  require(static_cast<int>(counts.size()) == size, op, ": ", name, " has ", counts.size(),
          " entries; expected one for each of the ", size, " ranks");
  int64_t total = 0;
  for (size_t r = 0; r < counts.size(); ++r) {
    require(counts[r] >= 0 && counts[r] <= tensor.numel() - total, op, ": ", name, "[", r, "] is ", counts[r],
            "; expected entries >= 0 that sum to the ", tensor.numel(), " elements of ", tensor_name, " ",
            tensor);
    total += counts[r];
  }
  require(total == tensor.numel(), op, ": ", name, " sums to ", total, "; ", tensor_name, " ", tensor,
          " has ", tensor.numel(), " elements");
}

uint64_t hash_of(std::span<const int64_t> counts) {
  const uint64_t hash = text_hash({reinterpret_cast<const char*>(counts.data()), counts.size_bytes()});
  return hash == 0 ? 1 : hash;
}

void require_counts(const char* op, const Tensor& part, const char* part_name, const Tensor& whole,
                    const char* whole_name, int size) {
  require_same_dtype(op, part, whole);
  require(whole.numel() == part.numel() * size, op, " over ", size, " ranks: ", whole_name, " ", whole,
          " has ", whole.numel(), " elements; expected ", part.numel() * size, ", ", size, " times ",
          part_name, " ", part);
}

}  // namespace

const char* reduce_op_name(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kProduct:
      return "product";
    case ReduceOp::kMax:
      return "max";
    case ReduceOp::kMin:
      return "min";
    case ReduceOp::kAverage:
      return "average";
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
    case CollectiveOp::kAllToAll:
      return "all_to_all";
    case CollectiveOp::kExchange:
      return "exchange";
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
  const bool moves = op != CollectiveOp::kNone && op != CollectiveOp::kAttach &&
                     op != CollectiveOp::kBarrier && op != CollectiveOp::kSplit;
  if (op == CollectiveOp::kExchange) {
    text += concat(" that sends ", count, " bytes");
  } else if (moves && op == CollectiveOp::kAllToAll && counts_hash != 0) {
    text += concat(" ", dtype_name(dtype), ", uneven");
  } else if (moves) {
    text += concat(" ", dtype_name(dtype), "[", count, "]");
    if (counts_hash != 0) text += concat(" uneven (counts ", std::hex, counts_hash, std::dec, ")");
  }
  if (reduces) text += concat(" ", reduce_op_name(reduce));
  if (op == CollectiveOp::kBroadcast) text += concat(" root ", root);
  return text;
}

std::string rank_text(int rank, int job_rank, const std::string& host, int64_t pid) {
  const std::string place = job_rank == rank ? "" : concat("rank ", job_rank, " of the job, ");
  return concat("rank ", rank, " (", place, "host ", host, ", pid ", pid, ")");
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
  require_reducible("all_reduce", data.dtype(), op);
  return {.count = data.numel(), .op = CollectiveOp::kAllReduce, .dtype = data.dtype(), .reduce = op};
}

CollectiveCall check_reduce_scatter(const Tensor& input, const Tensor& output, ReduceOp op, int rank,
                                    int size) {
  const char* name = "reduce_scatter";
  require_dense(name, "input", input);
  require_dense(name, "output", output);
  require_counts(name, output, "output", input, "input", size);
  require_reducible(name, input.dtype(), op);
  require_apart(name, output, input, output.size_bytes() * rank);
  return {.count = output.numel(), .op = CollectiveOp::kReduceScatter, .dtype = input.dtype(), .reduce = op};
}

CollectiveCall check_all_gather(const Tensor& input, const Tensor& output, std::span<const int64_t> counts,
                                int rank, int size) {
  const char* name = "all_gather";
  require_dense(name, "input", input);
  require_dense(name, "output", output);
  if (counts.empty()) {
    require_counts(name, input, "input", output, "output", size);
    require_apart(name, input, output, input.size_bytes() * rank);
    return {.count = input.numel(), .op = CollectiveOp::kAllGather, .dtype = input.dtype()};
  }
  require_same_dtype(name, input, output);
  require_blocks(name, "counts", counts, size, "output", output);
  const int64_t own = counts[static_cast<size_t>(rank)];
  require(input.numel() == own, name, ": input ", input, " has ", input.numel(), " elements; counts[", rank,
          "] is ", own);
  const int64_t before = std::accumulate(counts.begin(), counts.begin() + rank, int64_t{0});
  require_apart(name, input, output, before * static_cast<int64_t>(dtype_size(input.dtype())));
  return {.count = output.numel(),
          .counts_hash = hash_of(counts),
          .op = CollectiveOp::kAllGather,
          .dtype = input.dtype()};
}

CollectiveCall check_broadcast(const Tensor& data, int root, int size) {
  require_dense("broadcast", "data", data);
  require(root >= 0 && root < size, "broadcast: root is ", root, "; expected a rank of the group, 0 to ",
          size - 1);
  return {.count = data.numel(), .root = root, .op = CollectiveOp::kBroadcast, .dtype = data.dtype()};
}

CollectiveCall check_all_to_all(const Tensor& input, const Tensor& output,
                                std::span<const int64_t> send_counts, std::span<const int64_t> receive_counts,
                                int size) {
  const char* name = "all_to_all";
  require_dense(name, "input", input);
  require_dense(name, "output", output);
  require_same_dtype(name, input, output);
  require(!overlap(input, output), name, ": input and output overlap; pass memory of its own for the output");
  require(send_counts.empty() == receive_counts.empty(), name,
          ": send_counts and receive_counts come together; one of them is missing");
  CollectiveCall call{.op = CollectiveOp::kAllToAll, .dtype = input.dtype()};
  if (!send_counts.empty()) {
    require_blocks(name, "send_counts", send_counts, size, "input", input);
    require_blocks(name, "receive_counts", receive_counts, size, "output", output);
    call.counts_hash = 1;
    return call;
  }
  require(input.numel() == output.numel() && input.numel() % size == 0, name, " over ", size,
          " ranks: input ", input, " and output ", output, "; expected equal numbers of elements, ", size,
          " equal blocks");
  call.count = input.numel() / size;
  return call;
}

CollectiveCall check_exchange(std::span<const Transfer> transfers, int rank, int size) {
  const char* name = "exchange";
  CollectiveCall call{.op = CollectiveOp::kExchange};
  for (size_t i = 0; i < transfers.size(); ++i) {
    const Transfer& transfer = transfers[i];
    const bool sends = transfer.kind == Transfer::Kind::kSend;
    require_dense(name, sends ? "a tensor to send" : "a tensor to receive", transfer.tensor);
    require(transfer.peer >= 0 && transfer.peer < size && transfer.peer != rank, name, ": the peer of rank ",
            rank, " is ", transfer.peer, "; expected another rank of the group, 0 to ", size - 1);
    if (sends) call.count += transfer.tensor.size_bytes();
    for (size_t j = 0; j < i; ++j) {
      const bool written = !sends || transfers[j].kind == Transfer::Kind::kReceive;
      require(!written || !overlap(transfer.tensor, transfers[j].tensor), name, ": tensors ", j, " and ", i,
              " overlap, and one of them is received; pass memory of its own for it");
    }
  }
  return call;
}

}  // namespace polyreme
