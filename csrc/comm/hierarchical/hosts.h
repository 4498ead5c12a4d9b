#pragma once

#include <optional>
#include <span>

namespace polyreme {

// Ranks in equal blocks on hosts: rank r is number r % ranks_per_host of host r / ranks_per_host.
struct HostGrid {
  int num_hosts = 1;
  int ranks_per_host = 1;

  int host(int rank) const { return rank / ranks_per_host; }
  int local(int rank) const { return rank % ranks_per_host; }
  int rank_of(int host, int local) const { return host * ranks_per_host + local; }
};

// The grid of a group in which rank r is on host hosts[r], if the ranks of every host are a subtree of
// tree_order: two hosts or more, and on each the same power of two of contiguous ranks, at least two.
std::optional<HostGrid> host_grid(std::span<const int> hosts);

}  // namespace polyreme
