#include "kernels/fingerprint.cuh"

#include "kernels/kernel_test.h"

namespace polyreme::kernel_test {
namespace {

TEST(FingerprintKernel, HasTheBitsOfTheCpu) {
  for (const int64_t size : {0, 1, 3, 4, 7, 2048, 70001})
    for (const size_t shift : {0, 1, 2}) {
      std::vector<uint8_t> bytes(static_cast<size_t>(size));
      std::mt19937 random(static_cast<uint32_t>(size));
      for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
      Cpu cpu;
      const Tensor x = cpu.make({size}, DType::kU8), wanted = cpu.make({1}, DType::kI64);
      copy_from_host(cpu.stream(), bytes.data(), x);
      fingerprint(cpu.stream(), x, wanted);
      for_seeds([&] {
        const Array<uint8_t> gx(bytes, shift);
        const Array<uint64_t> out(1);
        run<PolyremeFingerprint>(kernels::launch_fingerprint, {gx.data(), size, out.data()});
        EXPECT_EQ(static_cast<int64_t>(out[0]), cpu.download<int64_t>(wanted)[0]) << size << " bytes";
      });
    }
}

}  // namespace
}  // namespace polyreme::kernel_test
