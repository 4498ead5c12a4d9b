// Where parameters lie and which shard keeps what, for many lists of sizes.
#include "optim/shard_map.h"

#include <numeric>
#include <random>

#include "common/error_text.h"
#include "ops/op_test.h"

namespace polyreme::testing {
namespace {

ParamSpec spec(const std::string& name, const Shape& shape, DType dtype = DType::kF32) {
  return {.name = name, .shape = shape, .dtype = dtype, .padded_shape = shape};
}

// Up to 11 parameters in up to 5 blocks; some have no element, some share a dtype.
struct RandomModel {
  std::vector<ParamSpec> specs;
  std::vector<int> blocks, groups;
  int64_t parameters = 0;

  explicit RandomModel(std::mt19937& generator) {
    int block = 0;
    for (uint32_t i = 0, count = generator() % 12; i < count; ++i) {
      const Shape shape{static_cast<int64_t>(generator() % 7), static_cast<int64_t>(generator() % 2000)};
      specs.push_back(spec(concat("p", i), shape, generator() % 4 == 0 ? DType::kBF16 : DType::kF32));
      blocks.push_back(block += generator() % 2);
      groups.push_back(static_cast<int>(generator() % 2));
      parameters += shape.numel();
    }
  }
};

TEST(MakeUnits, KeepOrderDtypeGroupAndSize) {
  std::mt19937 generator(1);
  for (int round = 0; round < 500; ++round) {
    const RandomModel model(generator);
    const auto bucket_bytes = static_cast<int64_t>(generator() % 40000);
    const bool end_with_block = generator() % 2;
    const auto units = make_units(
        model.specs, model.blocks,
        {.bucket_bytes = bucket_bytes, .end_with_block = end_with_block, .group_of_param = model.groups});
    std::vector<int> seen;
    for (const std::vector<int>& unit : units) {
      ASSERT_FALSE(unit.empty());
      const auto at = [&](int param) { return static_cast<size_t>(param); };
      int64_t bytes_before_last = 0;
      for (size_t i = 0; i < unit.size(); ++i) {
        seen.push_back(unit[i]);
        ASSERT_EQ(model.specs[at(unit[i])].dtype, model.specs[at(unit[0])].dtype);
        ASSERT_EQ(model.groups[at(unit[i])], model.groups[at(unit[0])]);
        if (end_with_block) {
          ASSERT_EQ(model.blocks[at(unit[i])], model.blocks[at(unit[0])]);
        }
        if (i > 0) {
          ASSERT_LT(unit[i - 1], unit[i]);
          bytes_before_last += 4 * model.specs[at(unit[i - 1])].shape.numel();
          ASSERT_LT(bytes_before_last, bucket_bytes);
        }
      }
    }
    std::sort(seen.begin(), seen.end());
    std::vector<int> all(model.specs.size());
    std::iota(all.begin(), all.end(), 0);
    ASSERT_EQ(seen, all);
  }
}

TEST(ShardMap, PartsAreAlignedInOrderAndApart) {
  std::mt19937 generator(2);
  for (int round = 0; round < 300; ++round) {
    const RandomModel model(generator);
    const auto num_shards = static_cast<int64_t>(1 + generator() % 9);
    const UnitOptions options{.bucket_bytes = static_cast<int64_t>(generator() % 40000)};
    const ShardMap map(model.specs, make_units(model.specs, model.blocks, options), num_shards);
    ASSERT_EQ(map.num_params(), static_cast<int>(model.specs.size()));
    ASSERT_EQ(map.num_parameters(), model.parameters);
    int64_t flat_end = 0;
    for (int unit = 0; unit < map.num_units(); ++unit) {
      ASSERT_EQ(map.unit_range(unit).begin, flat_end);
      flat_end = map.unit_range(unit).end;
      int64_t end = 0;
      for (const int param : map.params_of(unit)) {
        ASSERT_EQ(map.unit_of(param), unit);
        ASSERT_EQ(map.dtype_of(unit), model.specs[static_cast<size_t>(param)].dtype);
        ASSERT_EQ(map.offset_in_unit(param) % ShardMap::kAlignment, 0);
        ASSERT_GE(map.offset_in_unit(param), end);
        ASSERT_LT(map.offset_in_unit(param) - end, ShardMap::kAlignment);
        end = map.offset_in_unit(param) + map.shape_of(param).numel();
      }
      ASSERT_GE(map.unit_elements(unit), end);
      ASSERT_LT(map.unit_elements(unit) - end, num_shards * ShardMap::kAlignment);
      ASSERT_EQ(map.unit_elements(unit) % (num_shards * ShardMap::kAlignment), 0);
    }
    ASSERT_EQ(map.num_elements(), flat_end);
    ASSERT_EQ(map.shard_elements() * num_shards, flat_end);
  }
}

// Offsets and blocks of the norm must not depend on the number of shards.
TEST(ShardMap, ShardsDoNotMoveParameters) {
  std::mt19937 generator(3);
  for (int round = 0; round < 100; ++round) {
    const RandomModel model(generator);
    const auto units =
        make_units(model.specs, model.blocks, {.bucket_bytes = static_cast<int64_t>(generator() % 40000)});
    const ShardMap whole(model.specs, units, 1);
    for (const int64_t num_shards : {2, 3, 4, 7, 8, 64}) {
      const ShardMap map(model.specs, units, num_shards);
      for (int param = 0; param < map.num_params(); ++param)
        ASSERT_EQ(map.offset_in_unit(param), whole.offset_in_unit(param));
      for (int unit = 0; unit < map.num_units(); ++unit) {
        int64_t end = 0;
        for (int64_t shard = 0; shard < num_shards; ++shard) {
          const FlatRange slice = map.shard_slice(unit, shard);
          ASSERT_EQ(slice.begin, end);
          ASSERT_EQ(slice.begin % kNormBlock, 0);
          end = slice.end;
        }
        ASSERT_EQ(end, map.unit_elements(unit));
      }
    }
  }
}

TEST(ShardMap, PiecesHoldEveryElementOnce) {
  std::mt19937 generator(4);
  for (int round = 0; round < 300; ++round) {
    const RandomModel model(generator);
    const auto num_shards = static_cast<int64_t>(1 + generator() % 9);
    const UnitOptions options{.bucket_bytes = static_cast<int64_t>(generator() % 40000)};
    const ShardMap map(model.specs, make_units(model.specs, model.blocks, options), num_shards);
    std::vector<int64_t> held(model.specs.size());
    for (int64_t shard = 0; shard < num_shards; ++shard) {
      int64_t end = 0;
      for (const ShardMap::Piece& piece : map.pieces(shard)) {
        const int unit = map.unit_of(piece.param);
        ASSERT_GT(piece.size, 0);
        ASSERT_GE(piece.shard_begin, end);
        end = piece.shard_begin + piece.size;
        ASSERT_LE(end, map.shard_elements());
        ASSERT_EQ(piece.shard_begin, map.shard_offset(unit) + piece.unit_shard_begin);
        ASSERT_EQ(map.shard_slice(unit, shard).begin + piece.unit_shard_begin,
                  map.offset_in_unit(piece.param) + piece.param_begin);
        ASSERT_EQ(piece.param_begin, held[static_cast<size_t>(piece.param)]) << "in order of the shards";
        held[static_cast<size_t>(piece.param)] += piece.size;
      }
    }
    for (size_t i = 0; i < held.size(); ++i) ASSERT_EQ(held[i], model.specs[i].shape.numel());
  }
}

TEST(ShardMap, ViewsShareTheBuffer) {
  Rig rig;
  const std::vector<ParamSpec> specs = {spec("a", {2, 3}), spec("b", {17}), spec("c", {1})};
  const ShardMap map(specs, {{2}, {0, 1}}, 1);
  ASSERT_EQ(map.unit_elements(1), 2 * ShardMap::kAlignment);
  std::vector<float> values(static_cast<size_t>(map.unit_elements(1)));
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  const Tensor buffer = rig.upload(values);
  EXPECT_EQ(map.view(buffer, 0).shape(), (Shape{2, 3}));
  EXPECT_EQ(rig.download(map.view(buffer, 0)), (std::vector<float>{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(rig.download(map.view(buffer, 1)).back(), static_cast<float>(ShardMap::kAlignment + 16));
  EXPECT_EQ(map.view(buffer, 1).buffer(), buffer.buffer());
}

TEST(ShardMap, PaddedParametersTakeTheirPaddedShape) {
  const std::vector<ParamSpec> specs = {{.name = "a", .shape = {15, 2}, .padded_shape = {16, 2}}};
  const ShardMap map(specs, {{0}}, 1);
  EXPECT_EQ(map.num_parameters(), 32);
  EXPECT_EQ(map.shape_of(0), (Shape{16, 2}));
}

TEST(ShardMap, RefusesUnitsThatDoNotFit) {
  const std::vector<ParamSpec> specs = {spec("a", {2}), spec("b", {3}, DType::kBF16)};
  const auto text = [&](std::vector<std::vector<int>> units, int64_t num_shards = 1) {
    return error_text<InvalidArgument>([&] { ShardMap(specs, std::move(units), num_shards); });
  };
  expect_parts(text({{0}, {1}}, 0), {"0 shards"});
  expect_parts(text({{0, 1}}), {"'a' is float32", "'b' is bfloat16"});
  expect_parts(text({{0}}), {"'b' is in no unit"});
  expect_parts(text({{0}, {1}, {0}}), {"'a' is in two units"});
  expect_parts(text({{0}, {2}}), {"parameter 2 of 2"});
  expect_parts(text({{0}, {}}), {"unit 1 has no parameters"});
}

}  // namespace
}  // namespace polyreme::testing
