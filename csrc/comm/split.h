#pragma once

#include <map>
#include <string>
#include <vector>

namespace polyreme {

// What a rank wants of a split. Plain bytes: it crosses process borders.
struct SplitWish {
  static constexpr size_t kMaxNameBytes = 200;  // CpuCommunicator::split sees to it
  int32_t color = -1;
  int32_t key = 0;
  char name[kMaxNameBytes + 1] = {};

  static SplitWish of(int color, int key, const std::string& name);
};

// Members of each new group in their order: by (key, rank). wishes[r] is rank r's.
std::map<int, std::vector<int>> members_by_color(const std::vector<SplitWish>& wishes);

// Empty if the members of each new group agree on its name.
std::string name_conflict(const std::vector<SplitWish>& wishes,
                          const std::map<int, std::vector<int>>& members);

}  // namespace polyreme
