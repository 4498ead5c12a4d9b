#include "kernels/rows.cuh"

#include "kernels/kernel_test.h"

namespace polyreme::kernel_test {
namespace {

struct Size {
  int64_t rows, cols;
};
constexpr Size kSizes[] = {{1, 1}, {3, 33}, {63, 32}, {64, 48}, {65, 7}, {130, 72}, {200, 40}};

TEST(RowsKernel, SumsHaveTheBitsOfTheCpu) {
  for (const Size s : kSizes)
    for_dtypes([&](auto type) {
      using T = decltype(type);
      SCOPED_TRACE(concat(s.rows, " x ", s.cols));
      const std::vector<float> x = normals_of<T>(s.rows * s.cols, 1), before = normals(s.cols, 2);
      Cpu cpu;
      const Tensor out = cpu.upload(before);
      accumulate_rows(cpu.stream(), cpu.upload({s.rows, s.cols}, x), out);
      for (const size_t shift : {0, 1}) {
        for_seeds([&] {
          const Array<T> gx(x, shift);
          const Array<float> sums(before);
          run<PolyremeAccumulateRows>(kernels::launch_accumulate_rows,
                                      {gx.data(), sums.data(), s.rows, s.cols, kCodeOf<T>});
          expect_bits(sums.floats(), cpu.download(out), "sums");
        });
      }
    });
}

TEST(RowsKernel, LayerNormWeightsHaveTheBitsOfTheCpu) {
  for (const Size s : kSizes)
    for_dtypes([&](auto type) {
      using T = decltype(type);
      SCOPED_TRACE(concat(s.rows, " x ", s.cols));
      const std::vector<float> dy = normals_of<T>(s.rows * s.cols, 1), x = normals_of<T>(s.rows * s.cols, 2),
                               mean = normals(s.rows, 3), rstd = normals(s.rows, 4),
                               gamma = normals(s.cols, 5), beta = normals(s.cols, 6);
      Cpu cpu;
      const Shape shape = {s.rows, s.cols};
      const Tensor dgamma = cpu.upload(gamma), dbeta = cpu.upload(beta);
      layer_norm_backward_weight(cpu.stream(), cpu.upload(shape, dy), cpu.upload(shape, x), cpu.upload(mean),
                                 cpu.upload(rstd), dgamma, dbeta);
      std::vector<double> rms(gamma.begin(), gamma.end());
      for (size_t i = 0; i < x.size(); ++i)
        rms[i % rms.size()] += static_cast<double>(dy[i]) * static_cast<double>(x[i]) *
                               static_cast<double>(rstd[i / rms.size()]);
      for_seeds([&] {
        const Array<T> gdy(dy), gx(x);
        const Array<float> gmean(mean), grstd(rstd), g(gamma), b(beta), g2(gamma);
        PolyremeNormBackwardWeight args = {.dy = gdy.data(),
                                           .x = gx.data(),
                                           .mean = gmean.data(),
                                           .rstd = grstd.data(),
                                           .dgamma = g.data(),
                                           .dbeta = b.data(),
                                           .rows = s.rows,
                                           .cols = s.cols,
                                           .dtype = kCodeOf<T>};
        run(kernels::launch_norm_backward_weight, args);
        expect_bits(g.floats(), cpu.download(dgamma), "dgamma");
        expect_bits(b.floats(), cpu.download(dbeta), "dbeta");
        args.mean = nullptr;
        args.dgamma = g2.data();
        args.dbeta = nullptr;
        run(kernels::launch_norm_backward_weight, args);
        expect_near(Array<float>(g2.floats()), rms, 2e-6, std::sqrt(static_cast<double>(s.rows)),
                    "dgamma of RMSNorm");
      });
    });
}

TEST(RowsKernel, CuttingTheRowsChangesNoBit) {
  const int64_t rows = 150, cols = 40;
  const std::vector<float> x = normals(rows * cols, 1);
  start_case(1);
  const std::vector<float> zeros(cols);
  const Array<float> gx(x), whole(zeros), pieces(zeros);
  run<PolyremeAccumulateRows>(kernels::launch_accumulate_rows, {gx.data(), whole.data(), rows, cols, 0});
  for (const Size piece : {Size{0, 70}, Size{70, 71}, Size{71, 150}})
    run<PolyremeAccumulateRows>(
        kernels::launch_accumulate_rows,
        {gx.data() + piece.rows * cols, pieces.data(), piece.cols - piece.rows, cols, 0});
  expect_bits(pieces.floats(), whole.floats(), "pieces");
}

}  // namespace
}  // namespace polyreme::kernel_test
