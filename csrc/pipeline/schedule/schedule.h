#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace polyreme::pipeline {

// A pipeline schedule as data: what every rank does in a training step, in order. README.md beside this
// file defines the words. Everything here is pure: the same on every rank, without devices or groups.

enum class ActionKind : uint8_t {
  kForward,
  kBackward,        // both halves: gradients of the input and of the weights
  kBackwardInput,   // the gradient of the chunk's input
  kBackwardWeight,  // the gradients of the chunk's weights, added to its accumulators
  kSendActivation,  // the output of the chunk, to the rank of the next chunk
  kReceiveActivation,
  kSendGradient,  // the gradient of the chunk's input, to the rank of the chunk before
  kReceiveGradient,
  kGather,   // ZeRO-3: the chunk's whole weights, along dp
  kRelease,  // frees what kGather made
  kReduce,   // sums along dp what the chunk's weight gradients gained since its last kReduce
  kStep      // the optimizer's update; a collective of all ranks
};
inline constexpr int kNumActionKinds = 12;

// Limits of what is built, parsed or validated, checked before memory is taken.
inline constexpr int kMaxRanks = 1024;
inline constexpr int kMaxChunks = 4096;
inline constexpr int kMaxMicroBatches = 65536;
inline constexpr int64_t kMaxActions = int64_t{1} << 23;  // of all ranks
// (chunk, micro-batch) pairs: each has at most three computations, four transfers, and a share of
// collectives.
inline constexpr int64_t kMaxPairs = kMaxActions / 8;

struct Action {
  ActionKind kind = ActionKind::kForward;
  int chunk = -1;        // one that the acting rank holds; -1 for kStep
  int micro_batch = -1;  // of computations and transfers, else -1
  int peer = -1;         // the other rank of a transfer, else -1
  // A transfer that runs at once with the one before it in the list: no order between them.
  bool with_previous = false;

  bool operator==(const Action&) const = default;
};

struct Schedule {
  int micro_batches = 0;
  bool forward_only = false;
  std::vector<std::vector<int>> chunks;      // [rank]: the chunks it holds, ascending
  std::vector<std::vector<Action>> actions;  // [rank]

  int num_ranks() const { return static_cast<int>(chunks.size()); }
  int num_chunks() const;
  bool has_transfers() const;

  bool operator==(const Schedule&) const = default;
};

bool is_compute(ActionKind kind);   // forward and all kinds of backward
bool is_transfer(ActionKind kind);  // sends and receives
bool is_send(ActionKind kind);
bool is_collective(ActionKind kind);  // gather, release and reduce; kStep is apart
// "forward", "send_activation", ...
const char* name(ActionKind kind);
// Throws InvalidArgument for an unknown name, listing the known ones.
ActionKind kind_of_name(std::string_view name);

// The chunk at the other end of a transfer, or whose output (or gradient) a computation takes: chunk + 1 or
// chunk - 1; -1 or num_chunks where the pipeline ends.
int neighbour(const Action& action);
// The kind of the transfer at the other end.
ActionKind counterpart(ActionKind transfer);

// rank_of_chunk(s)[c] is the rank that holds chunk c. Throws InvalidArgument unless the chunks are
// 0 ... n-1, each held once, at least one by each rank, and all sizes are within the limits.
std::vector<int> rank_of_chunk(const Schedule& schedule);

// "F", "SA", "step", ...: what the tokens of a kind begin with.
const char* letters(ActionKind kind);
// "F3", "I0@5", "SA2@1>2", "step": the token of the text form. The chunk is left out where it is clear.
std::string token(const Action& action, bool with_chunk);
std::string token(const Schedule& schedule, int rank, int position);

// The end of the transfers that run at once with the one at `begin`.
size_t batch_end(const std::vector<Action>& list, size_t begin);

}  // namespace polyreme::pipeline
