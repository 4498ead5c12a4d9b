// The groups of a mesh on thread ranks: who is in them, in which order, and that making them cannot hang.
#include "mesh/mesh.h"

#include <algorithm>

#include "base/error.h"
#include "common/error_text.h"
#include "common/thread_ranks.h"
#include "ops/ops.h"

namespace polyreme::testing {
namespace {

using Names = std::vector<std::string>;

// The world ranks of a group, as its members hear of each other.
std::vector<int> gather(World& world, Communicator& group) {
  Device& device = world.device();
  const auto stream = device.create_stream("gather");
  const int32_t own = world.rank();
  const Tensor input = empty(device, DType::kI32, {1}, "own");
  const Tensor output = empty(device, DType::kI32, {group.size()}, "all");
  copy_from_host(*stream, &own, input);
  group.all_gather(input, output, *stream)->wait_on(*stream);
  std::vector<int32_t> ranks(static_cast<size_t>(group.size()));
  copy_to_host(*stream, output, ranks.data());
  stream->synchronize();
  return {ranks.begin(), ranks.end()};
}

TEST(Mesh, GroupsGatherInTheOrderOfTheLayout) {
  const Names dealt{"a", "b", "a", "b", "b", "a", "b", "a"};
  for (const Names& order : {Names{"pp", "dp", "tp"}, {"tp", "dp", "pp"}, {"dp", "tp", "pp"}})
    for (const Topology topology : {Topology::kLaunch, Topology::kHost}) {
      std::vector<Axis> axes;
      for (const std::string& name : order) axes.push_back({name, 2});
      const MeshLayout layout(axes, dealt, topology);
      run_ranks(8, {}, [&](World& world) {
        const std::vector<Names> flattened{{"dp", "tp"}, {"pp", "tp"}};
        const Mesh mesh(world.communicator(), layout, flattened);
        for (const Names& names :
             {Names{"dp"}, {"tp"}, {"pp"}, {"dp", "tp"}, {"tp", "pp"}, {"dp", "tp", "pp"}}) {
          Communicator& group = mesh.group(names);
          const std::vector<int> expected = layout.group(world.rank(), names);
          EXPECT_EQ(gather(world, group), expected);
          EXPECT_EQ(expected[static_cast<size_t>(group.rank())], world.rank());
        }
        EXPECT_EQ(&mesh.group({"dp", "tp"}), &mesh.group({"tp", "dp"}));
      });
    }
}

TEST(Mesh, TheOrderOfFirstUseIsFree) {
  run_ranks(8, {}, [](World& world) {
    const Mesh mesh(world.communicator(), MeshLayout({{"pp", 2}, {"dp", 2}, {"tp", 2}}, 8), {{"dp", "tp"}});
    // The two halves share none of these groups and use them in opposite orders.
    std::vector<Names> use{{"tp"}, {"dp"}, {"dp", "tp"}};
    if (mesh.coordinate("pp") == 1) std::reverse(use.begin(), use.end());
    for (const Names& names : use)
      EXPECT_EQ(gather(world, mesh.group(names)), mesh.layout().group(world.rank(), names));
  });
}

TEST(Mesh, DeclaredGroupsMayComeInAnyOrderAndTwice) {
  run_ranks(8, {}, [](World& world) {
    const std::vector<Names> groups{{"dp", "tp"}, {"pp", "tp"}, {"pp"}, {"tp", "dp"}, {"pp", "dp", "tp"}};
    const std::vector<Names> reversed(groups.rbegin(), groups.rend());
    const Mesh mesh(world.communicator(), MeshLayout({{"pp", 2}, {"dp", 2}, {"tp", 2}}, 8),
                    world.rank() % 2 == 0 ? groups : reversed);
    for (const Names& names : groups)
      EXPECT_EQ(gather(world, mesh.group(names)), mesh.layout().group(world.rank(), names));
  });
}

TEST(Mesh, AxesOfSizeOneMakeNoDifference) {
  run_ranks(4, {}, [](World& world) {
    const Mesh mesh(world.communicator(), MeshLayout({{"pp", 1}, {"dp", 4}, {"cp", 1}, {"tp", 1}}, 4));
    EXPECT_EQ(&mesh.group({"cp", "dp"}), &mesh.group({"dp"}));
    EXPECT_EQ(&mesh.group({"pp", "dp", "cp", "tp"}), &mesh.group({"dp"}));
    EXPECT_EQ(gather(world, mesh.group({"tp"})), std::vector{world.rank()});
    EXPECT_EQ(mesh.group({"tp", "pp"}).size(), 1);
    EXPECT_EQ(mesh.group({"tp"}).name(), "tp");
  });
}

TEST(Mesh, AMissingGroupSaysHowToDeclareIt) {
  run_ranks(4, {}, [](World& world) {
    const Mesh mesh(world.communicator(), MeshLayout({{"pp", 2}, {"dp", 2}, {"tp", 1}}, 4));
    EXPECT_NO_THROW(mesh.group({"tp", "dp", "pp"}));  // all axes together
    expect_parts(error_text<InvalidArgument>([&] { mesh.group({"dq"}); }), {"'dq'", "pp, dp, tp"});
    expect_parts(error_text<InvalidArgument>([&] { mesh.group({}); }), {"at least one axis"});
  });
  run_ranks(8, {}, [](World& world) {
    const Mesh mesh(world.communicator(), MeshLayout({{"pp", 2}, {"dp", 2}, {"tp", 2}}, 8));
    expect_parts(error_text<InvalidArgument>([&] {
                   mesh.group({"tp", "pp"});
                 }),
                 {"pp=2 x dp=2 x tp=2", "no group along pp and tp", "groups=[(\"pp\", \"tp\")]"});
  });
}

TEST(Mesh, RanksThatAskForDifferentMeshesAllFindOut) {
  const auto expect_mismatch = [](const MeshLayout& even, const MeshLayout& odd,
                                  const std::vector<Names>& even_groups, const Names& parts) {
    run_ranks(8, {}, [&](World& world) {
      const bool is_even = world.rank() % 2 == 0;
      expect_parts(error_text<CollectiveMismatch>([&] {
                     Mesh(world.communicator(), is_even ? even : odd,
                          is_even ? even_groups : std::vector<Names>{});
                   }),
                   parts);
    });
  };
  const MeshLayout cube({{"pp", 2}, {"dp", 2}, {"tp", 2}}, 8);
  expect_mismatch(cube, MeshLayout({{"dp", 4}, {"tp", 2}}, 8), {}, {"'pp=2 x dp=2 x tp=2'", "'dp=4 x tp=2'"});
  expect_mismatch(cube, MeshLayout(cube.axes(), Names(8), Topology::kHost), {},
                  {"x tp=2'", "x tp=2 by host'"});
  expect_mismatch(cube, cube, {{"pp", "tp"}}, {"tp=2, pp+tp'", "tp=2'"});
}

TEST(Mesh, ALayoutOfAnotherSizeIsRefusedBeforeAnybodyIsMet) {
  run_ranks(2, {}, [](World& world) {
    if (world.rank() == 1) return;  // and comes never
    expect_parts(error_text<InvalidArgument>([&] {
                   Mesh(world.communicator(), MeshLayout({{"dp", 4}}, 4));
                 }),
                 {"layout is of 4 ranks", "world has 2"});
  });
}

}  // namespace
}  // namespace polyreme::testing
