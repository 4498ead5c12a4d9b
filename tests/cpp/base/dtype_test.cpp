#include "base/dtype.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "base/math.h"

namespace polyreme {
namespace {

TEST(DType, NamesAndSizes) {
  const std::pair<DType, size_t> sizes[] = {{DType::kF32, 4}, {DType::kF64, 8}, {DType::kBF16, 2},
                                            {DType::kF16, 2}, {DType::kI8, 1},  {DType::kU8, 1},
                                            {DType::kI32, 4}, {DType::kI64, 8}, {DType::kBool, 1}};
  for (const auto& [dtype, size] : sizes) {
    EXPECT_EQ(dtype_size(dtype), size) << dtype_name(dtype);
    EXPECT_EQ(dtype_from_name(dtype_name(dtype)), dtype);
  }
  EXPECT_STREQ(dtype_name(DType::kBF16), "bfloat16");
  EXPECT_EQ(dtype_of<double>(), DType::kF64);
}

TEST(DType, AnUnknownNameListsTheKnownOnes) {
  try {
    dtype_from_name("float31");
    FAIL();
  } catch (const InvalidArgument& error) {
    const std::string text = error.what();
    for (const char* part : {"'float31'", "float32", "bfloat16", "bool"})
      EXPECT_NE(text.find(part), std::string::npos) << text;
  }
}

TEST(Error, RequireThrowsTheJoinedText) {
  EXPECT_NO_THROW(require(true, "fine"));
  try {
    require<CommError>(false, "rank ", 3, " of ", 4);
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "rank 3 of 4");
    EXPECT_NE(dynamic_cast<const CommError*>(&error), nullptr);
  }
}

TEST(Math, RoundsUp) {
  EXPECT_EQ(round_up(0, 16), 0);
  EXPECT_EQ(round_up(1, 16), 16);
  EXPECT_EQ(round_up(16, 16), 16);
  EXPECT_EQ(ceil_div(17, 16), 2);
  EXPECT_EQ(ceil_div(0, 16), 0);
}

TEST(DType, ANumberThatIsNoneIsUnknown) {
  EXPECT_STREQ(dtype_name(static_cast<DType>(9)), "unknown dtype");
  EXPECT_STREQ(dtype_name(static_cast<DType>(255)), "unknown dtype");
}

}  // namespace
}  // namespace polyreme
