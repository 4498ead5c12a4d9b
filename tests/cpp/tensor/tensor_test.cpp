// Shapes, views and what they say about memory; cuts of parameters.
#include "tensor/tensor.h"

#include <gtest/gtest.h>

#include "device/cpu/cpu_device.h"
#include "tensor/param_spec.h"

namespace polyreme {
namespace {

class TensorTest : public ::testing::Test {
 protected:
  Tensor make(const Shape& shape, DType dtype = DType::kF32) { return empty(*device_, dtype, shape, "test"); }

  std::unique_ptr<Device> device_ = make_cpu_device({});
};

TEST(Shape, HoldsExtents) {
  const Shape shape = {2, 3, 4};
  EXPECT_EQ(shape.size(), 3);
  EXPECT_EQ(shape.numel(), 24);
  EXPECT_EQ(shape.to_string(), "[2, 3, 4]");
  EXPECT_EQ(Shape{}.numel(), 1);
  EXPECT_EQ((Shape{5, 0}).numel(), 0);
  EXPECT_EQ(shape, (Shape{2, 3, 4}));
  EXPECT_FALSE(shape == (Shape{2, 3}));
  EXPECT_FALSE(shape == (Shape{2, 3, 5}));
  EXPECT_THROW((Shape{1, 1, 1, 1, 1, 1, 1}), InvalidArgument);
  EXPECT_THROW((Shape{2, -1}), InvalidArgument);
}

TEST_F(TensorTest, IsContiguousWhenMade) {
  const Tensor t = make({2, 3, 4}, DType::kF64);
  EXPECT_TRUE(t.defined());
  EXPECT_TRUE(t.is_contiguous());
  EXPECT_EQ(t.strides(), (Shape{12, 4, 1}));
  EXPECT_EQ(t.size(-1), 4);
  EXPECT_EQ(t.stride(-3), 12);
  EXPECT_EQ(t.size_bytes(), 192);
  EXPECT_EQ(t.begin_byte(), 0);
  EXPECT_EQ(t.end_byte(), 192);
  EXPECT_EQ(t.to_string(), "float64[2, 3, 4]");
  EXPECT_FALSE(Tensor().defined());
  EXPECT_THROW(Tensor(t.buffer(), DType::kF64, {25}), InvalidArgument);
  EXPECT_THROW(Tensor(t.buffer(), DType::kF64, {1}, -1), InvalidArgument);
  EXPECT_NO_THROW(Tensor(t.buffer(), DType::kF64, {4}, 20));
}

TEST_F(TensorTest, AddressChecksTheType) {
  const Tensor t = make({4, 5});
  EXPECT_EQ(t.address<float>(), t.buffer()->address());
  EXPECT_THROW(t.address<double>(), InvalidArgument);
  EXPECT_THROW(t.address<int32_t>(), InvalidArgument);
  EXPECT_EQ(t.slice(0, 2, 4).address<float>(), t.address<float>() + 10);
}

TEST_F(TensorTest, SlicesShareMemoryAndNameTheirBytes) {
  const Tensor t = make({4, 6});
  const Tensor rows = t.slice(0, 1, 3);
  EXPECT_TRUE(rows.is_contiguous());
  EXPECT_EQ(rows.begin_byte(), 24);
  EXPECT_EQ(rows.end_byte(), 72);
  const Tensor columns = t.slice(1, 2, 4);
  EXPECT_FALSE(columns.is_contiguous());
  EXPECT_EQ(columns.shape(), (Shape{4, 2}));
  EXPECT_EQ(columns.begin_byte(), 8);
  EXPECT_EQ(columns.end_byte(), (3 * 6 + 4) * 4);
  EXPECT_EQ(columns.slice(0, 3, 4).slice(1, 1, 2).begin_byte(), (3 * 6 + 3) * 4);
  const Tensor none = t.slice(0, 2, 2);
  EXPECT_EQ(none.numel(), 0);
  EXPECT_EQ(none.begin_byte(), none.end_byte());
  for (const auto& [dim, begin, end] : {std::tuple{2, 0, 1}, {-1, 0, 1}, {0, -1, 2}, {0, 3, 2}, {0, 0, 5}})
    EXPECT_THROW(t.slice(dim, begin, end), InvalidArgument) << dim << begin << end;
}

TEST_F(TensorTest, ViewsAndTransposes) {
  const Tensor t = make({4, 6});
  EXPECT_EQ(t.view({3, 8}).strides(), (Shape{8, 1}));
  EXPECT_EQ(t.slice(0, 1, 3).view({12}).begin_byte(), 24);
  EXPECT_THROW(t.view({5, 5}), InvalidArgument);
  const Tensor transposed = t.transpose(0, 1);
  EXPECT_EQ(transposed.shape(), (Shape{6, 4}));
  EXPECT_EQ(transposed.strides(), (Shape{1, 6}));
  EXPECT_FALSE(transposed.is_contiguous());
  EXPECT_EQ(transposed.end_byte(), t.end_byte());
  EXPECT_THROW(transposed.view({24}), InvalidArgument);
  EXPECT_THROW(t.transpose(0, 2), InvalidArgument);
  // A dim of extent 1 may have any stride.
  EXPECT_TRUE(make({1, 5}).transpose(0, 1).is_contiguous());
  EXPECT_TRUE(t.slice(1, 0, 1).slice(0, 0, 1).is_contiguous());
}

TEST_F(TensorTest, ViewsKeepTheMemoryAlive) {
  const int64_t before = device_->memory().in_use_bytes;
  Tensor part;
  {
    const Tensor t = make({1000});
    part = t.slice(0, 10, 20);
  }
  EXPECT_GE(device_->memory().in_use_bytes - before, 4000);
  part = Tensor();
  EXPECT_EQ(device_->memory().in_use_bytes, before);
}

TEST(ParamSpec, LocalShapeDividesBlocks) {
  ParamSpec spec{.name = "qkv",
                 .shape = {768, 2304},
                 .padded_shape = {768, 2304},
                 .cuts = {{.dim = 1, .axis = "tp", .blocks = 3}}};
  EXPECT_EQ(local_shape(spec, "tp", 4), (Shape{768, 576}));
  EXPECT_EQ(local_shape(spec, "dp", 4), spec.shape);
  spec.cuts[0].replication = 2;
  EXPECT_EQ(local_shape(spec, "tp", 4), (Shape{768, 1152}));
  for (const int64_t size : {5, 3}) {
    try {
      local_shape(spec, "tp", size);
      ADD_FAILURE() << size;
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find(concat("'qkv': dim 1")), std::string::npos) << error.what();
    }
  }
}

// Every element belongs to one place of one lane's part, and is where it would be in that part as a tensor.
TEST(ParamSpec, LanesHaveTheirPartsAndNoPadding) {
  for (const auto& [shape, padded, dim, blocks, lanes] :
       {std::tuple<Shape, Shape, int, int64_t, int64_t>{{24, 5}, {24, 5}, 0, 3, 4},
        {{5, 24}, {5, 24}, 1, 1, 4},
        {{24}, {24}, 0, 2, 2},
        {{4, 12, 3}, {4, 12, 3}, 1, 3, 2},
        {{11, 3}, {12, 3}, 0, 1, 4},
        {{5, 3}, {8, 3}, 0, 1, 4},
        {{7, 3}, {7, 3}, 0, 1, 1}}) {
    const ParamSpec spec{
        .name = "w", .shape = shape, .padded_shape = padded, .cuts = {{dim, "tp", blocks, 1}}};
    SCOPED_TRACE(concat(shape.to_string(), " dim ", dim, ", ", lanes, " lanes"));
    const Shape part = local_shape(spec, "tp", lanes);
    std::vector<int> seen(static_cast<size_t>(shape.numel()));
    for (int64_t lane = 0; lane < lanes; ++lane) {
      int64_t elements = 0, end = 0;
      for (const PartRun& run : part_runs(spec, "tp", lanes, lane)) {
        EXPECT_GE(run.part_begin, end);
        end = run.part_begin + run.size;
        EXPECT_LE(end, part.numel());
        elements += run.size;
        for (int64_t i = 0; i < run.size; ++i) ++seen[static_cast<size_t>(run.whole_begin + i)];
      }
      EXPECT_EQ(elements, part_elements(spec, part_ranges(spec, "tp", lanes, lane)));
    }
    EXPECT_EQ(seen, std::vector<int>(seen.size(), 1));
  }
  const ParamSpec qkv{.name = "qkv", .shape = {6, 2}, .padded_shape = {6, 2}, .cuts = {{0, "tp", 3, 1}}};
  EXPECT_EQ(part_ranges(qkv, "tp", 2, 1).ranges,
            (std::vector<std::pair<int64_t, int64_t>>{{1, 2}, {3, 4}, {5, 6}}));
}

}  // namespace
}  // namespace polyreme
