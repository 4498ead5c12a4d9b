// Where parameters lie in flat buffers, for many lists of sizes.
#include "optim/flat_layout.h"

#include <random>

#include "ops/op_test.h"

namespace polyreme::testing {
namespace {

ParamSpec spec(const std::string& name, const Shape& shape) {
  return {.name = name, .shape = shape, .padded_shape = shape};
}

TEST(FlatLayout, PartsAreAlignedInOrderAndApart) {
  std::mt19937 generator(1);
  for (int round = 0; round < 200; ++round) {
    std::vector<ParamSpec> specs;
    int64_t parameters = 0;
    for (uint32_t i = generator() % 12; i-- > 0;) {
      const Shape shape{static_cast<int64_t>(generator() % 7), static_cast<int64_t>(generator() % 40)};
      specs.push_back(spec(concat("p", i), shape));
      parameters += shape.numel();
    }
    const FlatLayout layout(specs);
    ASSERT_EQ(layout.size(), specs.size());
    ASSERT_EQ(layout.num_parameters(), parameters);
    int64_t end = 0;
    for (size_t i = 0; i < specs.size(); ++i) {
      ASSERT_EQ(layout.offset(i) % FlatLayout::kAlignment, 0);
      ASSERT_GE(layout.offset(i), end);
      ASSERT_LT(layout.offset(i) - end, FlatLayout::kAlignment);
      end = layout.offset(i) + specs[i].shape.numel();
    }
    ASSERT_GE(layout.num_elements(), end);
    ASSERT_LT(layout.num_elements() - end, FlatLayout::kAlignment);
    ASSERT_EQ(layout.num_elements() % FlatLayout::kAlignment, 0);
  }
}

TEST(FlatLayout, ViewsShareTheBuffer) {
  Rig rig;
  const std::vector<ParamSpec> specs = {spec("a", {2, 3}), spec("b", {17}), spec("c", {1})};
  const FlatLayout layout(specs);
  ASSERT_EQ(layout.num_elements(), 3 * FlatLayout::kAlignment);
  std::vector<float> values(static_cast<size_t>(layout.num_elements()));
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  const Tensor flat = rig.upload(values);
  EXPECT_EQ(layout.view(flat, 0).shape(), (Shape{2, 3}));
  EXPECT_EQ(rig.download(layout.view(flat, 0)), (std::vector<float>{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(rig.download(layout.view(flat, 1)).back(), static_cast<float>(FlatLayout::kAlignment + 16));
  EXPECT_EQ(rig.download(layout.view(flat, 2)), (std::vector<float>{2 * FlatLayout::kAlignment}));
  EXPECT_EQ(layout.view(flat, 2).buffer(), flat.buffer());
}

TEST(FlatLayout, PaddedParametersTakeTheirPaddedShape) {
  const std::vector<ParamSpec> specs = {{.name = "a", .shape = {15, 2}, .padded_shape = {16, 2}}};
  Rig rig;
  const FlatLayout layout(specs);
  EXPECT_EQ(layout.num_parameters(), 32);
  EXPECT_EQ(layout.view(rig.upload(std::vector<float>(FlatLayout::kAlignment, 1.0f)), 0).shape(),
            (Shape{16, 2}));
}

TEST(FlatLayout, ShardsAreEqualAndCutAtBlocksOfTheNorm) {
  const std::vector<ParamSpec> specs = {spec("a", {700}), spec("b", {5000}), spec("c", {3})};
  const FlatLayout whole(specs);
  for (const int64_t num_shards : {1, 2, 3, 4, 7, 8, 64}) {
    const FlatLayout layout(specs, num_shards);
    int64_t end = 0;
    for (int64_t i = 0; i < num_shards; ++i) {
      const FlatRange shard = layout.shard(i);
      EXPECT_EQ(shard.begin, end);
      EXPECT_EQ(shard.size(), layout.num_elements() / num_shards);
      EXPECT_EQ(shard.begin % kNormBlock, 0);
      end = shard.end;
    }
    EXPECT_EQ(end, layout.num_elements());
    EXPECT_LT(end - whole.num_elements(), num_shards * kNormBlock);
    for (size_t i = 0; i < specs.size(); ++i) EXPECT_EQ(layout.offset(i), whole.offset(i));
  }
  EXPECT_THROW(FlatLayout(specs, 0), InvalidArgument);
}

}  // namespace
}  // namespace polyreme::testing
