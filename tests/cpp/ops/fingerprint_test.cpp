// A hash of a tensor's bytes: any bit that flips shows, on every device alike.
#include "ops/op_test.h"

namespace polyreme::testing {
namespace {

int64_t print_of(Rig& rig, const Tensor& x) {
  const Tensor out = empty(rig.device(), DType::kI64, {1}, "fingerprint");
  fingerprint(rig.stream(), x, out);
  return rig.download<int64_t>(out)[0];
}

TEST(Fingerprint, EveryBitAndEveryPlaceCount) {
  Rig rig({.executor = CpuExecutor::kDeferred});
  const std::vector<float> x(67, 1.5f);
  const int64_t before = print_of(rig, rig.upload(x));
  EXPECT_EQ(print_of(rig, rig.upload(x)), before);
  for (size_t i = 0; i < x.size(); ++i)
    for (uint32_t bit = 0; bit < 32; ++bit) {
      std::vector<float> flipped = x;
      flipped[i] = std::bit_cast<float>(bits_of(x[i]) ^ (1u << bit));
      ASSERT_NE(print_of(rig, rig.upload(flipped)), before) << i << ", bit " << bit;
    }
  std::vector<float> swapped = {1, 2, 3};
  const int64_t ordered = print_of(rig, rig.upload(swapped));
  std::swap(swapped[0], swapped[1]);
  EXPECT_NE(print_of(rig, rig.upload(swapped)), ordered);
  EXPECT_NE(print_of(rig, rig.upload(std::vector<float>(3, 0.0f))),
            print_of(rig, rig.upload(std::vector<float>(4, 0.0f))));
}

TEST(Fingerprint, DoesNotDependOnThreadsOrInstructionSet) {
  const std::vector<float> x = random_floats(300001, 1);
  same_bits_everywhere([&](Rig& rig) {
    const auto print = static_cast<uint64_t>(print_of(rig, rig.upload(x)));
    return std::vector<float>{static_cast<float>(print & 0xffff), static_cast<float>(print >> 48)};
  });
}

}  // namespace
}  // namespace polyreme::testing
