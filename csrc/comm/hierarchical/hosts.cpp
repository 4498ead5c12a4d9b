#include "comm/hierarchical/hosts.h"

#include <bit>
#include <set>

namespace polyreme {

std::optional<HostGrid> host_grid(std::span<const int> hosts) {
  const int size = static_cast<int>(hosts.size());
  const int num_hosts = static_cast<int>(std::set<int>(hosts.begin(), hosts.end()).size());
  if (num_hosts < 2 || size % num_hosts != 0) return std::nullopt;
  const HostGrid grid{num_hosts, size / num_hosts};
  if (grid.ranks_per_host < 2 || !std::has_single_bit(static_cast<unsigned>(grid.ranks_per_host)))
    return std::nullopt;
  for (int r = 0; r < size; ++r)
    if (hosts[static_cast<size_t>(r)] != hosts[static_cast<size_t>(r - grid.local(r))]) return std::nullopt;
  return grid;
}

}  // namespace polyreme
