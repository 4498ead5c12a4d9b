#include "kernels/cross_entropy.cuh"

#include "kernels/kernel_test.h"

namespace polyreme::kernel_test {
namespace {

struct Size {
  int64_t rows, vocab;
};
// Eight blocks of 1024 are taken at once.
constexpr Size kSizes[] = {{1, 1}, {3, 7}, {4, 100}, {3, 1024}, {2, 1601}, {2, 9003}, {1, 17000}};

std::vector<int32_t> targets_of(Size s) {
  std::vector<int32_t> targets;
  for (int64_t row = 0; row < s.rows; ++row)
    targets.push_back(row % 4 == 2 ? kernels::kIgnoreTarget
                                   : static_cast<int32_t>((row * 7919 + s.vocab - 1) % s.vocab));
  return targets;
}

// Maxima that move from block to block, and special rows.
template <typename T>
std::vector<float> logits_of(Size s) {
  std::vector<float> logits = normals_of<T>(s.rows * s.vocab, 3, 4.0F);
  for (size_t i = 0; i < logits.size(); i += 700)
    logits[i] = widen(narrow<T>(static_cast<float>(i % 9000) / 500));
  const auto vocab = static_cast<size_t>(s.vocab);
  if (s.rows > 1) logits[vocab + vocab / 2] = -kInf;
  if (s.rows > 2 && s.vocab == 100)
    std::fill_n(logits.begin() + static_cast<std::ptrdiff_t>(3 * vocab), vocab, -kInf);
  return logits;
}

template <typename T>
void check_size(Size s, std::vector<float> logits) {
  const std::vector<int32_t> targets = targets_of(s);
  const auto rows = static_cast<size_t>(s.rows);
  Cpu cpu;
  const Tensor x = cpu.upload({s.rows, s.vocab}, logits), ids = cpu.upload({s.rows}, targets),
               loss = cpu.make({s.rows}), log_sum_exp = cpu.make({s.rows});
  cross_entropy_forward(cpu.stream(), x, ids, loss, log_sum_exp);
  cross_entropy_backward(cpu.stream(), x, ids, log_sum_exp, 0.25F);
  for_seeds([&] {
    const Array<T> gx(logits);
    const Array<int32_t> gids(targets), bad(2);
    const Array<float> gloss(rows), lse(rows);
    const PolyremeCrossEntropy args = {.logits = gx.data(),
                                       .targets = gids.data(),
                                       .loss = gloss.data(),
                                       .log_sum_exp = lse.data(),
                                       .bad = bad.data(),
                                       .rows = s.rows,
                                       .vocab = s.vocab,
                                       .scale = 0.25F,
                                       .dtype = kCodeOf<T>};
    run(kernels::launch_cross_entropy_forward, args);
    EXPECT_EQ(bad[0], INT32_MAX);
    expect_bits(lse.floats(), cpu.download(log_sum_exp), "log_sum_exp");
    expect_bits(gloss.floats(), cpu.download(loss), "loss");
    run(kernels::launch_cross_entropy_backward, args);
    expect_rounded(gx, cpu.download(x), "gradient");
  });
}

TEST(CrossEntropyKernel, HasTheBitsOfTheCpu) {
  for (const Size s : kSizes) {
    SCOPED_TRACE(concat(s.rows, " x ", s.vocab));
    for_dtypes([&](auto type) { check_size<decltype(type)>(s, logits_of<decltype(type)>(s)); });
  }
  std::vector<float> bad = normals(4 * 1601, 1);
  bad[5] = kNan;
  bad[1601 + 1500] = kInf;
  check_size<float>({4, 1601}, bad);
}

TEST(CrossEntropyKernel, AgainstFloat64) {
  const Size s = {5, 1601};
  const std::vector<float> logits = normals(s.rows * s.vocab, 8, 2.0F);
  const std::vector<int32_t> targets = targets_of(s);
  std::vector<double> loss, gradient;
  for (int64_t row = 0; row < s.rows; ++row) {
    const int32_t target = targets[static_cast<size_t>(row)];
    const auto x = [&](int64_t i) {
      return static_cast<double>(logits[static_cast<size_t>(row * s.vocab + i)]);
    };
    double sum = 0;
    for (int64_t i = 0; i < s.vocab; ++i) sum += std::exp(x(i));
    loss.push_back(target < 0 ? 0 : std::log(sum) - x(target));
    for (int64_t i = 0; i < s.vocab; ++i)
      gradient.push_back(target < 0 ? 0 : 0.5 * (std::exp(x(i)) / sum - (i == target)));
  }
  for_seeds([&] {
    const Array<float> gx(logits), gloss(5), lse(5);
    const Array<int32_t> gids(targets), bad(2);
    const PolyremeCrossEntropy args = {.logits = gx.data(),
                                       .targets = gids.data(),
                                       .loss = gloss.data(),
                                       .log_sum_exp = lse.data(),
                                       .bad = bad.data(),
                                       .rows = s.rows,
                                       .vocab = s.vocab,
                                       .scale = 0.5F};
    run(kernels::launch_cross_entropy_forward, args);
    expect_near(gloss, loss, 1e-6, 1.0, "loss");
    run(kernels::launch_cross_entropy_backward, args);
    expect_near(gx, gradient, 2e-6, 1e-4, "gradient");
  });
}

TEST(CrossEntropyKernel, PartsOfTheVocabularyGiveTheLoss) {
  const Size s = {4, 3001};
  for_dtypes([&](auto type) {
    using T = decltype(type);
    const std::vector<float> logits = logits_of<T>(s);
    const std::vector<int32_t> targets = targets_of(s);
    for_seeds([&] {
      const int64_t cuts[] = {0, 1000, 1001, 3001};
      const Array<int32_t> ids(targets);
      std::vector<float> top(4, -kInf);
      std::vector<double> sum(4), target_logit(4);
      for (const bool sums : {false, true})
        for (int part = 0; part < 3; ++part) {
          const int64_t first = cuts[part], cols = cuts[part + 1] - first;
          std::vector<float> own;
          for (int64_t row = 0; row < s.rows; ++row)
            for (int64_t i = first; i < first + cols; ++i)
              own.push_back(logits[static_cast<size_t>(row * s.vocab + i)]);
          const Array<T> x(own);
          const Array<float> max(top), sum_exp(4), at_target(4);
          const PolyremeVocabPart args = {.logits = x.data(),
                                          .targets = ids.data(),
                                          .max = max.data(),
                                          .sum_exp = sum_exp.data(),
                                          .target_logit = at_target.data(),
                                          .rows = s.rows,
                                          .cols = cols,
                                          .valid = cols,
                                          .first_column = first,
                                          .dtype = kCodeOf<T>};
          run(sums ? kernels::launch_vocab_part_sums : kernels::launch_vocab_part_max, args);
          for (size_t row = 0; row < 4; ++row) {
            if (!sums) top[row] = std::max(top[row], max[row]);
            if (sums) sum[row] += static_cast<double>(sum_exp[row]);
            if (sums) target_logit[row] += static_cast<double>(at_target[row]);
          }
        }
      for (size_t row = 0; row < 4; ++row) {
        double whole = 0;
        for (int64_t i = 0; i < s.vocab; ++i)
          whole += std::exp(static_cast<double>(logits[row * 3001 + static_cast<size_t>(i)]));
        EXPECT_NEAR(std::log(sum[row]) + static_cast<double>(top[row]), std::log(whole), 1e-6);
        const int32_t target = targets[row];
        EXPECT_EQ(target_logit[row],
                  target < 0 ? 0.0 : static_cast<double>(logits[row * 3001 + static_cast<size_t>(target)]));
      }
    });
  });
}

TEST(CrossEntropyKernel, TargetsThatAreNoneStopIt) {
  for (const int32_t bad_target : {-1, 7, -101}) {
    const std::vector<float> logits = normals(3 * 7, 1);
    for_seeds([&] {
      const Array<float> x(logits), loss(std::vector<float>(3, 5.0F)), lse(3);
      const Array<int32_t> ids(std::vector<int32_t>{6, kernels::kIgnoreTarget, bad_target}), bad(2);
      const PolyremeCrossEntropy args = {.logits = x.data(),
                                         .targets = ids.data(),
                                         .loss = loss.data(),
                                         .log_sum_exp = lse.data(),
                                         .bad = bad.data(),
                                         .rows = 3,
                                         .vocab = 7};
      run(kernels::launch_cross_entropy_forward, args);
      run(kernels::launch_cross_entropy_backward, args);
      EXPECT_EQ(bad[0], 2);
      expect_bits(x.floats(), logits, "untouched");
      EXPECT_EQ(loss[0], 5.0F);
    });
  }
}

}  // namespace
}  // namespace polyreme::kernel_test
