// The index maths of a mesh, for every factorisation of small worlds into three axes in every order,
// with ranks that were dealt to hosts in several ways.
#include "mesh/mesh_layout.h"

#include <algorithm>
#include <map>
#include <set>

#include "base/error.h"
#include "common/error_text.h"

namespace polyreme::testing {
namespace {

using Names = std::vector<std::string>;

// Calls body(axes, world) for all meshes of up to 24 ranks with the axes dp, pp and tp, in every order.
template <typename Body>
void for_axes(Body&& body) {
  for (int world = 1; world <= 24; ++world)
    for (int pp = 1; pp <= world; ++pp)
      for (int dp = 1; pp * dp <= world; ++dp) {
        if (world % (pp * dp) != 0) continue;
        std::vector<Axis> axes{{"dp", dp}, {"pp", pp}, {"tp", world / (pp * dp)}};
        const auto by_name = [](const Axis& a, const Axis& b) { return a.name < b.name; };
        do body(axes, world);
        while (std::next_permutation(axes.begin(), axes.end(), by_name));
      }
}

// Hosts of `world` ranks: all on one, dealt round-robin to three, in runs of unequal length.
std::vector<Names> host_lists(int world) {
  std::vector<Names> lists(3);
  for (int r = 0; r < world; ++r) {
    lists[0].push_back("a");
    lists[1].push_back(concat("host", 3 - r % 3));
    lists[2].push_back(concat("host", r % 7 < 4 ? r / 8 : 9));
  }
  return lists;
}

// Calls body(layout, hosts, topology) for all of them.
template <typename Body>
void for_layouts(Body&& body) {
  for_axes([&](const std::vector<Axis>& axes, int world) {
    for (const Names& hosts : host_lists(world))
      for (const Topology topology : {Topology::kLaunch, Topology::kHost})
        body(MeshLayout(axes, hosts, topology), hosts, topology);
  });
}

std::vector<int> coordinates(const MeshLayout& layout, int rank) {
  std::vector<int> result;
  for (const Axis& axis : layout.axes()) result.push_back(layout.coordinate(rank, axis.name));
  return result;
}

TEST(MeshLayout, PositionsCountTheCoordinatesWithTheLastAxisInnermost) {
  for_layouts([](const MeshLayout& layout, const Names&, Topology) {
    std::vector<int> expected(layout.axes().size());
    for (int position = 0; position < layout.world_size(); ++position) {
      ASSERT_EQ(coordinates(layout, layout.rank_at(position)), expected);
      ASSERT_EQ(layout.position(layout.rank_at(position)), position);
      for (size_t i = expected.size(); i-- > 0;) {
        if (++expected[i] < layout.axes()[i].size) break;
        expected[i] = 0;
      }
    }
    ASSERT_EQ(expected, std::vector<int>(expected.size()));  // all were there, once
  });
}

TEST(MeshLayout, TopologyLaunchKeepsTheNumbersOfTheLauncher) {
  for_layouts([](const MeshLayout& layout, const Names&, Topology topology) {
    for (int rank = 0; topology == Topology::kLaunch && rank < layout.world_size(); ++rank)
      ASSERT_EQ(layout.position(rank), rank);
  });
}

TEST(MeshLayout, TopologyHostGivesEachHostNeighbouringPositionsInOrderOfRank) {
  for_layouts([](const MeshLayout& layout, const Names& hosts, Topology topology) {
    if (topology != Topology::kHost) return;
    ASSERT_EQ(layout.rank_at(0), 0);
    std::set<std::string> complete;
    for (int position = 1; position < layout.world_size(); ++position) {
      const int before = layout.rank_at(position - 1), rank = layout.rank_at(position);
      const std::string& host_before = hosts[static_cast<size_t>(before)];
      const std::string& host = hosts[static_cast<size_t>(rank)];
      if (host == host_before) {
        ASSERT_LT(before, rank);
        continue;
      }
      complete.insert(host_before);
      ASSERT_FALSE(complete.contains(host));
      // Hosts come in the order in which their first ranks were numbered.
      const auto first = std::find(hosts.begin(), hosts.end(), host);
      ASSERT_EQ(first - hosts.begin(), rank);
      ASSERT_LT(std::find(hosts.begin(), hosts.end(), host_before), first);
    }
  });
}

// All sets of axes, named in order of the mesh.
std::vector<Names> sets_of_axes(const MeshLayout& layout) {
  std::vector<Names> sets{{}};
  for (const Axis& axis : layout.axes())
    for (size_t i = 0, count = sets.size(); i < count; ++i) {
      sets.push_back(sets[i]);
      sets.back().push_back(axis.name);
    }
  return sets;
}

// The groups along `names` by definition: whoever has the same coordinates on all other axes, in order
// of position; by those coordinates.
std::map<std::vector<int>, std::vector<int>> expected_groups(const MeshLayout& layout, const Names& names) {
  std::map<std::vector<int>, std::vector<int>> groups;
  for (int position = 0; position < layout.world_size(); ++position) {
    std::vector<int> others = coordinates(layout, layout.rank_at(position));
    for (size_t i = 0; i < others.size(); ++i)
      if (std::find(names.begin(), names.end(), layout.axes()[i].name) != names.end()) others[i] = -1;
    groups[others].push_back(layout.rank_at(position));
  }
  return groups;
}

void expect_partition(const MeshLayout& layout, const Names& names) {
  std::set<std::vector<int>> groups, expected;
  for (const auto& [others, members] : expected_groups(layout, names)) expected.insert(members);
  int size = 1;
  for (const std::string& name : names) size *= layout.size(name);
  for (int rank = 0; rank < layout.world_size(); ++rank) {
    const std::vector<int> group = layout.group(rank, names);
    ASSERT_EQ(group, layout.group(rank, Names(names.rbegin(), names.rend())));
    ASSERT_EQ(static_cast<int>(group.size()), size);
    // The documented place: the coordinates on the named axes, counted with the last one innermost.
    int place = 0;
    for (const std::string& name : names) place = place * layout.size(name) + layout.coordinate(rank, name);
    ASSERT_EQ(group[static_cast<size_t>(place)], rank);
    groups.insert(group);
  }
  ASSERT_EQ(groups, expected);
}

TEST(MeshLayout, GroupsOfEverySetOfAxesPartitionTheRanks) {
  for_axes([](const std::vector<Axis>& axes, int world) {
    const MeshLayout layout(axes, host_lists(world)[1], Topology::kHost);
    for (const Names& names : sets_of_axes(layout)) expect_partition(layout, names);
  });
}

TEST(MeshLayout, AFlattenedGroupIsTheUnionOfItsAxes) {
  for_axes([](const std::vector<Axis>& axes, int world) {
    const MeshLayout layout(axes, world);
    for (int rank = 0; rank < world; ++rank) {
      std::set<int> reached;  // along one axis, and from there along the other
      for (const int member : layout.group(rank, {"dp"}))
        for (const int other : layout.group(member, {"tp"})) reached.insert(other);
      const std::vector<int> flattened = layout.group(rank, {"dp", "tp"});
      ASSERT_EQ(std::set<int>(flattened.begin(), flattened.end()), reached);
    }
  });
}

TEST(MeshLayout, AnAxisSpansHostsIfOneOfItsGroupsDoes) {
  for_layouts([](const MeshLayout& layout, const Names& hosts, Topology topology) {
    std::map<std::string, int> count;
    for (const std::string& host : hosts) ++count[host];
    int block = 1;  // of positions: the axis and what is inside it
    for (size_t i = layout.axes().size(); i-- > 0;) {
      const Axis& axis = layout.axes()[i];
      block *= axis.size;
      std::set<std::vector<int>> spanning;
      for (int rank = 0; rank < layout.world_size(); ++rank)
        for (const int member : layout.group(rank, {axis.name}))
          if (hosts[static_cast<size_t>(member)] != hosts[static_cast<size_t>(rank)])
            spanning.insert(layout.group(rank, {axis.name}));
      ASSERT_EQ(layout.host_span(axis.name).empty(), spanning.empty());
      // With topology host, whether it fits is a matter of the hosts' numbers of ranks.
      const bool fits = axis.size == 1 || std::all_of(count.begin(), count.end(), [&](const auto& each) {
                          return each.second % block == 0;
                        });
      ASSERT_TRUE(topology == Topology::kLaunch || spanning.empty() == fits);
    }
  });
}

TEST(MeshLayout, HostSpanNamesRanksAndHosts) {
  const Names dealt{"a", "b", "a", "b"};
  EXPECT_EQ(MeshLayout({{"dp", 2}, {"tp", 2}}, dealt, Topology::kLaunch).host_span("tp"),
            "ranks 0 (host a), 1 (host b)");
  EXPECT_EQ(MeshLayout({{"dp", 2}, {"tp", 2}}, dealt, Topology::kHost).host_span("tp"), "");
  const Names threes{"a", "a", "a", "b", "b", "b"};
  EXPECT_EQ(MeshLayout({{"dp", 3}, {"tp", 2}}, threes, Topology::kHost).host_span("tp"),
            "ranks 2 (host a), 3 (host b)");
}

TEST(MeshLayout, DescriptionsTellLayoutsApart) {
  EXPECT_EQ(MeshLayout({{"pp", 2}, {"dp", 1}, {"tp", 2}}, 4).description(), "pp=2 x tp=2");
  EXPECT_EQ(MeshLayout({{"tp", 2}, {"pp", 2}}, Names(4), Topology::kHost).description(),
            "tp=2 x pp=2 by host");
  EXPECT_EQ(MeshLayout({{"dp", 1}}, 1).description(), "one rank");
}

TEST(MeshLayout, ErrorsShowTheSizes) {
  const auto text = [](std::vector<Axis> axes, int world) {
    return error_text<InvalidArgument>([&] { MeshLayout(std::move(axes), world); });
  };
  expect_parts(text({{"dp", 2}, {"tp", 3}}, 8), {"dp=2 x tp=3 = 6 ranks", "world has 8", "start 6 ranks"});
  expect_parts(text({{"dp", 0}}, 1), {"dp=0", "at least 1"});
  expect_parts(text({{"dp", -2}, {"tp", -2}}, 4), {"dp=-2", "at least 1"});
  expect_parts(text({{"dp", 2}, {"dp", 2}}, 4), {"dp is given twice"});
  // The product of these wraps around to 2^32 * 2^32 = 0 in 64 bits; with 1 more to any size.
  constexpr int kBig = 1 << 30;
  expect_parts(text({{"a", kBig}, {"b", kBig}, {"c", 16}, {"d", 3}}, 0), {"a=1073741824", "world has 0"});
  const MeshLayout layout({{"dp", 2}, {"tp", 2}}, 4);
  expect_parts(error_text<InvalidArgument>([&] { layout.size("pp"); }), {"'pp'", "it has dp, tp"});
  expect_parts(error_text<InvalidArgument>([&] { layout.coordinate(4, "tp"); }), {"rank 4", "world of 4"});
  expect_parts(error_text<InvalidArgument>([&] { layout.group(-1, {"tp"}); }), {"rank -1"});
  expect_parts(error_text<InvalidArgument>([&] { layout.rank_at(4); }), {"position 4", "mesh of 4"});
  expect_parts(error_text<InvalidArgument>([&] { layout.group(0, {"tp", "tp"}); }), {"tp is named twice"});
}

TEST(MeshLayout, NoAxesIsOneRank) {
  EXPECT_EQ(MeshLayout({}, 1).axes().size(), 0u);
  EXPECT_THROW(MeshLayout({}, 2), InvalidArgument);
}

}  // namespace
}  // namespace polyreme::testing
