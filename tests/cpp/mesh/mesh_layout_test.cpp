// The index maths of a mesh, for every factorisation of small worlds into three axes.
#include "mesh/mesh_layout.h"

#include <limits>
#include <set>

#include "base/error.h"
#include "common/error_text.h"

namespace polyreme::testing {
namespace {

// Calls body(layout) for all meshes {pp, dp, tp} of up to 24 ranks.
template <typename Body>
void for_meshes(Body&& body) {
  for (int world = 1; world <= 24; ++world)
    for (int pp = 1; pp <= world; ++pp)
      for (int dp = 1; pp * dp <= world; ++dp)
        if (world % (pp * dp) == 0)
          body(MeshLayout({{"pp", pp}, {"dp", dp}, {"tp", world / (pp * dp)}}, world));
}

TEST(MeshLayout, CoordinatesAreABijectionWithTheLastAxisInnermost) {
  for_meshes([](const MeshLayout& layout) {
    std::set<std::vector<int>> seen;
    for (int rank = 0; rank < layout.world_size(); ++rank) {
      const int pp = layout.coordinate(rank, "pp"), dp = layout.coordinate(rank, "dp"),
                tp = layout.coordinate(rank, "tp");
      ASSERT_TRUE(0 <= pp && pp < layout.size("pp") && 0 <= dp && dp < layout.size("dp") && 0 <= tp &&
                  tp < layout.size("tp"));
      ASSERT_EQ(rank, (pp * layout.size("dp") + dp) * layout.size("tp") + tp);
      seen.insert({pp, dp, tp});
    }
    ASSERT_EQ(static_cast<int>(seen.size()), layout.world_size());
  });
}

TEST(MeshLayout, TheGroupsOfAnAxisPartitionTheRanks) {
  for_meshes([](const MeshLayout& layout) {
    for (const Axis& axis : layout.axes()) {
      std::set<std::vector<int>> groups;
      for (int rank = 0; rank < layout.world_size(); ++rank) {
        const std::vector<int> group = layout.group(rank, axis.name);
        ASSERT_EQ(static_cast<int>(group.size()), axis.size);
        // In order of the axis, this rank at its own coordinate, the others differing in `axis` alone.
        ASSERT_EQ(group[static_cast<size_t>(layout.coordinate(rank, axis.name))], rank);
        for (int i = 0; i < axis.size; ++i) {
          const int member = group[static_cast<size_t>(i)];
          ASSERT_EQ(layout.coordinate(member, axis.name), i);
          ASSERT_EQ(layout.group(member, axis.name), group);
          for (const Axis& other : layout.axes()) {
            if (other.name == axis.name) continue;
            ASSERT_EQ(layout.coordinate(member, other.name), layout.coordinate(rank, other.name));
          }
        }
        groups.insert(group);
      }
      ASSERT_EQ(static_cast<int>(groups.size()) * axis.size, layout.world_size());
    }
  });
}

TEST(MeshLayout, ErrorsShowTheSizes) {
  const auto text = [](std::vector<Axis> axes, int world) {
    return error_text<InvalidArgument>([&] { MeshLayout(std::move(axes), world); });
  };
  expect_parts(text({{"dp", 2}, {"tp", 3}}, 8), {"dp=2 * tp=3 = 6 ranks", "world has 8", "start 6 ranks"});
  expect_parts(text({{"dp", 0}}, 1), {"dp=0", "at least 1"});
  expect_parts(text({{"dp", -2}, {"tp", -2}}, 4), {"dp=-2", "at least 1"});
  expect_parts(text({{"dp", 2}, {"dp", 2}}, 4), {"dp is given twice"});
  // The product of these wraps around to 2^32 * 2^32 = 0 in 64 bits; with 1 more to any size.
  constexpr int kBig = 1 << 30;
  expect_parts(text({{"a", kBig}, {"b", kBig}, {"c", 16}, {"d", 3}}, 0), {"a=1073741824", "world has 0"});
  const MeshLayout layout({{"dp", 2}, {"tp", 2}}, 4);
  expect_parts(error_text<InvalidArgument>([&] { layout.size("pp"); }), {"'pp'", "it has dp, tp"});
  expect_parts(error_text<InvalidArgument>([&] { layout.coordinate(4, "tp"); }), {"rank 4", "world of 4"});
  expect_parts(error_text<InvalidArgument>([&] { layout.group(-1, "tp"); }), {"rank -1"});
}

TEST(MeshLayout, NoAxesIsOneRank) {
  EXPECT_EQ(MeshLayout({}, 1).axes().size(), 0u);
  EXPECT_THROW(MeshLayout({}, 2), InvalidArgument);
}

}  // namespace
}  // namespace polyreme::testing
