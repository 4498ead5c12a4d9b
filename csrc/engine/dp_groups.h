#pragma once

#include <memory>

#include "comm/dry_communicator.h"

namespace polyreme {

// The ranks of dp as a grid: neighbouring ones form a group that divides state among its ranks (`shard`), and
// those at the same place of their groups hold the same part (`replicas`). The balanced tree over dp is the
// tree over a group, continued by the tree over the replicas, since groups are powers of two.
class DpGroups {
 public:
  // Collective over `dp`, which must outlive this object. shard_size: 1 to dp.
  DpGroups(Communicator& dp, int64_t shard_size)
      : dp_(dp), num_shards_(shard_size), shard_rank_(dp.rank() % shard_size) {
    if (shard_size == 1 || shard_size == dp.size()) return;
    const int size = static_cast<int>(shard_size);
    const int group = dp.rank() / size, place = dp.rank() % size;
    shard_ = split_known(dp, group, place, size, dp.name() + ".shard");
    replicas_ = split_known(dp, place, group, dp.size() / size, dp.name() + ".replicas");
  }

  Communicator& dp() const { return dp_; }
  int64_t num_shards() const { return num_shards_; }
  int64_t shard_rank() const { return shard_rank_; }
  // Divides state if num_shards > 1.
  Communicator& shard() const { return shard_ ? *shard_ : dp_; }
  Communicator* replicas() const { return replicas_.get(); }  // null: nothing is held twice

 private:
  Communicator& dp_;
  int64_t num_shards_, shard_rank_;
  std::unique_ptr<Communicator> shard_, replicas_;
};

}  // namespace polyreme
