#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "comm/store.h"

namespace polyreme {

// What a process says of itself when it joins: library version, instruction-set levels, ...
using RankFields = std::map<std::string, std::string>;

struct RankRecord {
  int rank = 0;
  std::string host;
  int64_t pid = 0;
  RankFields fields;
};

struct RendezvousOptions {
  int rank = 0;
  int world_size = 1;
  RankFields fields;
  std::chrono::milliseconds limit{std::chrono::minutes(5)};
  // Called about every progress_interval while ranks are missing, with
  // "rendezvous: 3/4 joined, waiting for rank(s) 3".
  std::function<void(const std::string&)> progress;
  std::chrono::milliseconds progress_interval{std::chrono::seconds(2)};
  std::string name = "rendezvous";  // one store can host several, under different names
};

// Waits until all ranks of the job have joined and returns what they said, in rank order, the same
// on every rank. All ranks fail together, with one text:
// InvalidArgument if a rank is outside the world, if two processes claim one rank, or if WORLD_SIZE
// differs between ranks, naming both sides with host and pid; Timeout naming the missing ranks when
// the first one has waited for `limit`. Throws PeerLost if the store is gone, CommError if a rank wrote
// into it what no rank writes.
std::vector<RankRecord> rendezvous(Store& store, const RendezvousOptions& options);

// Throws InvalidArgument with the values by rank unless all ranks gave field `name` the same value.
void require_same_field(const std::vector<RankRecord>& records, const std::string& name);

}  // namespace polyreme
