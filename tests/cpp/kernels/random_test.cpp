#include "kernels/random.cuh"

#include "kernels/kernel_test.h"

namespace polyreme::kernel_test {
namespace {

const RandomKey kKey = {
    .seed = 0x123456789abcdef, .purpose = RandomPurpose::kDropout, .stream = 7, .step = 11};
constexpr PolyremeRandomKey kGpuKey = {0x123456789abcdef, static_cast<uint32_t>(RandomPurpose::kDropout), 7,
                                       11};
constexpr int64_t kFirsts[] = {0, 4, 1001, (int64_t{1} << 34) + 6};

TEST(RandomKernel, DropoutHasTheBitsOfTheCpu) {
  for_dtypes([&](auto type) {
    using T = decltype(type);
    for (const int64_t count : {1, 9, 64, 1031})
      for (const int64_t first : kFirsts)
        for (const float p : {0.0F, 0.1F, 0.9F}) {
          std::vector<float> x = normals_of<T>(count, 1);
          x[0] = kInf;
          Cpu cpu;
          const Tensor wanted = cpu.make({count});
          dropout(cpu.stream(), cpu.upload(x), wanted, p, kKey, first);
          const auto exact = static_cast<double>(p);
          for_seeds([&] {
            const Array<T> gx(x), y(x.size());
            run<PolyremeDropout>(kernels::launch_dropout,
                                 {.x = gx.data(),
                                  .y = y.data(),
                                  .count = count,
                                  .first_element = first,
                                  .key = kGpuKey,
                                  .threshold = static_cast<uint32_t>(std::ceil(exact * 0x1p32)),
                                  .keep_scale = static_cast<float>(1.0 / (1.0 - exact)),
                                  .dtype = kCodeOf<T>});
            expect_rounded(y, cpu.download(wanted), concat("p ", p, ", first ", first));
          });
        }
  });
}

TEST(RandomKernel, NormalNumbersHaveTheBitsOfTheCpu) {
  for (const int64_t count : {1, 6, 1000})
    for (const int64_t first : kFirsts) {
      Cpu cpu;
      const Tensor wanted = cpu.make({count});
      fill_normal(cpu.stream(), wanted, 0.02F, kKey, first);
      for (const size_t shift : {0, 1}) {
        for_seeds([&] {
          const Array<float> out(static_cast<size_t>(count), shift);
          run<PolyremeFillNormal>(kernels::launch_fill_normal, {out.data(), count, first, kGpuKey, 0.02F});
          expect_bits(out.floats(), cpu.download(wanted), concat("first ", first));
        });
      }
    }
}

TEST(RandomKernel, StochasticRoundingHasTheBitsOfTheCpu) {
  for (const int64_t count : {1, 6, 1000})
    for (const int64_t first : kFirsts) {
      std::vector<float> x = normals(count, 1);
      x[0] = 3.4e38F;
      x.back() = count == 6 ? kNan : count == 1000 ? -kInf : x.back();
      Cpu cpu;
      const Tensor wanted = cpu.make({count}, DType::kBF16), wide = cpu.make({count});
      round_stochastic(cpu.stream(), cpu.upload(x), wanted, kKey, first);
      cast(cpu.stream(), wanted, wide);
      for_seeds([&] {
        const Array<float> gx(x);
        const Array<BFloat16> y(x.size());
        run<PolyremeRoundStochastic>(kernels::launch_round_stochastic,
                                     {gx.data(), y.data(), count, first, kGpuKey});
        expect_bits(y.floats(), cpu.download(wide), concat("first ", first));
      });
    }
}

}  // namespace
}  // namespace polyreme::kernel_test
