#include "comm/split.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"

namespace polyreme {

SplitWish SplitWish::of(int color, int key, const std::string& name) {
  SplitWish wish{.color = color, .key = key};
  std::memcpy(wish.name, name.data(), std::min(name.size(), kMaxNameBytes));
  return wish;
}

std::map<int, std::vector<int>> members_by_color(const std::vector<SplitWish>& wishes) {
  std::map<int, std::vector<int>> members;
  for (size_t r = 0; r < wishes.size(); ++r)
    if (wishes[r].color >= 0) members[wishes[r].color].push_back(static_cast<int>(r));
  for (auto& [color, ranks] : members)
    std::stable_sort(ranks.begin(), ranks.end(), [&](int a, int b) {
      return wishes[static_cast<size_t>(a)].key < wishes[static_cast<size_t>(b)].key;
    });
  return members;
}

std::string name_conflict(const std::vector<SplitWish>& wishes,
                          const std::map<int, std::vector<int>>& members) {
  for (const auto& [color, ranks] : members)
    for (const int r : ranks) {
      const char* first = wishes[static_cast<size_t>(ranks.front())].name;
      const char* other = wishes[static_cast<size_t>(r)].name;
      if (std::strncmp(first, other, SplitWish::kMaxNameBytes) != 0)
        return concat("split: the group of color ", color, " is '", first, "' on rank ", ranks.front(),
                      " and '", other, "' on rank ", r);
    }
  return {};
}

}  // namespace polyreme
