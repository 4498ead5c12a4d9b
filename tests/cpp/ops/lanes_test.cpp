// What lanes of tensor parallelism need: parts of a vocabulary give what the whole does.
#include "ops/op_test.h"

namespace polyreme::testing {
namespace {

struct Case {
  int64_t rows, vocab, lanes;
  int64_t part() const { return (vocab + lanes - 1) / lanes; }
  int64_t valid(int64_t lane) const { return std::clamp<int64_t>(vocab - lane * part(), 0, part()); }
};

// The lane's columns, padded with numbers that would spoil everything if they counted.
std::vector<float> columns_of(const Case& c, const std::vector<float>& logits, int64_t lane) {
  std::vector<float> result(static_cast<size_t>(c.rows * c.part()), 1e30f);
  for (int64_t row = 0; row < c.rows; ++row)
    for (int64_t i = 0; i < c.valid(lane); ++i)
      result[row * c.part() + i] = logits[row * c.vocab + lane * c.part() + i];
  return result;
}

// loss | log_sum_exp | gradient of the parts, one after the other.
std::vector<float> run_parts(Rig& rig, const Case& c, const std::vector<float>& logits,
                             const std::vector<int32_t>& targets) {
  const Tensor t = rig.upload({c.rows}, targets);
  const Tensor top = rig.upload({c.rows}, std::vector<float>(static_cast<size_t>(c.rows), -INFINITY));
  std::vector<LogitsPart> parts;
  for (int64_t lane = 0; lane < c.lanes; ++lane)
    parts.push_back(
        {rig.upload({c.rows, c.part()}, columns_of(c, logits, lane)), lane * c.part(), c.valid(lane)});
  for (const LogitsPart& part : parts) cross_entropy_part_max(rig.stream(), part, top);
  const Tensor sums = rig.upload({2, c.rows}, std::vector<float>(static_cast<size_t>(2 * c.rows), 0.0f));
  for (const LogitsPart& part : parts) {
    const Tensor own = rig.empty_f32({2, c.rows});
    cross_entropy_part_sums(rig.stream(), part, t, top, own);
    add(rig.stream(), sums, own, sums);
  }
  const Tensor loss = rig.empty_f32({c.rows}), log_sum_exp = rig.empty_f32({c.rows});
  cross_entropy_finish(rig.stream(), sums, t, top, loss, log_sum_exp);
  std::vector<float> result = rig.download(loss);
  append(result, rig.download(log_sum_exp));
  for (const LogitsPart& part : parts) {
    cross_entropy_part_backward(rig.stream(), part, t, log_sum_exp, 0.5f);
    append(result, rig.download(part.logits));
  }
  return result;
}

TEST(Lanes, CrossEntropyOverPartsIsThatOfTheWhole) {
  for (const Case& c : {Case{5, 11, 4}, Case{5, 5, 4}, Case{3, 3000, 2}, Case{4, 17, 1}, Case{2, 9, 8}}) {
    SCOPED_TRACE(concat(c.rows, " rows, ", c.vocab, " classes, ", c.lanes, " lanes"));
    const auto logits = random_floats(c.rows * c.vocab, 1, 3.0f);
    std::vector<int32_t> targets(static_cast<size_t>(c.rows));
    for (int64_t r = 0; r < c.rows; ++r)
      targets[r] = static_cast<int32_t>((r * 7919 + c.vocab - 1) % c.vocab);
    targets.back() = kIgnoreIndex;
    const auto got = same_bits_everywhere([&](Rig& rig) { return run_parts(rig, c, logits, targets); });
    for (int64_t r = 0; r < c.rows; ++r) {
      double top = -INFINITY, sum = 0;
      for (int64_t i = 0; i < c.vocab; ++i) top = std::max(top, static_cast<double>(logits[r * c.vocab + i]));
      for (int64_t i = 0; i < c.vocab; ++i) sum += std::exp(logits[r * c.vocab + i] - top);
      const double log_sum_exp = top + std::log(sum);
      const bool is_ignored = targets[r] == kIgnoreIndex;
      EXPECT_NEAR(got[r], is_ignored ? 0 : log_sum_exp - logits[r * c.vocab + targets[r]], 1e-6);
      EXPECT_NEAR(got[c.rows + r], log_sum_exp, 1e-6);
      for (int64_t lane = 0; lane < c.lanes; ++lane) {
        for (int64_t i = 0; i < c.part(); ++i) {
          const int64_t which = lane * c.part() + i;
          const float gradient = got[2 * c.rows + (lane * c.rows + r) * c.part() + i];
          const bool counts = !is_ignored && i < c.valid(lane);
          const double p = counts ? std::exp(logits[r * c.vocab + which] - log_sum_exp) : 0;
          const double expected = counts ? 0.5 * (p - (which == targets[r] ? 1 : 0)) : 0;
          ASSERT_NEAR(gradient, expected, 1e-6) << r << " " << which;
          if (!counts) {
            EXPECT_EQ(bits_of(gradient), 0u);
          }
        }
      }
    }
  }
}

TEST(Lanes, WhatIsNotANumberSpoilsItsRowAlone) {
  Rig rig;
  const Case c{4, 6, 2};
  auto logits = random_floats(c.rows * c.vocab, 2);
  logits[1] = NAN;                                                    // of the first lane
  logits[c.vocab + 5] = INFINITY;                                     // of the second
  std::fill_n(logits.begin() + 2 * c.vocab, c.vocab, -INFINITY);      // all of a row
  std::fill_n(logits.begin() + 3 * c.vocab, c.vocab / 2, -INFINITY);  // all of a lane
  const auto got = run_parts(rig, c, logits, {0, 1, 2, 4});
  for (int64_t row = 0; row < 3; ++row) EXPECT_TRUE(std::isnan(got[row])) << row;
  EXPECT_TRUE(std::isfinite(got[3]));
}

TEST(Lanes, EmbeddingPartsAddUpToTheWhole) {
  const int64_t vocab = 10, cols = 19, samples = 2, seq = 7, part = 4;
  const auto table = random_floats(3 * part * cols, 3), dout = random_floats(samples * seq * cols, 4);
  std::vector<int32_t> tokens;
  for (int32_t i = 0; i < samples * seq; ++i) tokens.push_back(i * 7 % vocab);
  same_bits_everywhere([&](Rig& rig) {
    const Tensor t = rig.upload({samples, seq}, tokens), dy = rig.upload({samples, seq, cols}, dout);
    const Tensor whole_table = rig.upload({3 * part, cols}, table),
                 whole = rig.empty_f32({samples, seq, cols});
    embedding_forward(rig.stream(), t, whole_table, {}, whole);
    const Tensor whole_grad = rig.upload({3 * part, cols}, table);
    embedding_backward(rig.stream(), t, dy, whole_grad, {});
    const Tensor sum = rig.upload({samples, seq, cols}, std::vector<float>(dout.size(), 0.0f));
    const Tensor grad = rig.upload({3 * part, cols}, table);
    for (int64_t lane = 0; lane < 3; ++lane) {
      const Tensor own = rig.empty_f32({samples, seq, cols});
      embedding_part_forward(rig.stream(), t, whole_table.slice(0, lane * part, (lane + 1) * part),
                             lane * part, own);
      add(rig.stream(), sum, own, sum);
      embedding_part_backward(rig.stream(), t, dy, lane * part,
                              grad.slice(0, lane * part, (lane + 1) * part));
    }
    auto result = rig.download(sum);
    expect_same_bits(result, rig.download(whole));
    expect_same_bits(rig.download(grad), rig.download(whole_grad));
    return result;
  });
}

TEST(Lanes, RowsOfATableAreAddedAndRoundedOnce) {
  const int64_t rows = 6, cols = 21;
  const auto x = random_floats(rows * cols, 5), table = random_floats(3 * cols, 6);
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    same_bits_everywhere([&](Rig& rig) {
      const Tensor out = empty(rig.device(), dtype, {rows, cols}, "out");
      add_rows(rig.stream(), rig.upload({rows, cols}, x), rig.upload({3, cols}, table), out);
      std::vector<float> sum(x.size());
      for (size_t i = 0; i < x.size(); ++i) sum[i] = x[i] + table[i % table.size()];
      const Tensor expected = empty(rig.device(), dtype, {rows, cols}, "expected");
      cast(rig.stream(), rig.upload({rows, cols}, sum), expected);
      const auto widened = [&](const Tensor& t) {
        const Tensor wide = rig.empty_f32({rows, cols});
        cast(rig.stream(), t, wide);
        return rig.download(wide);
      };
      auto result = widened(out);
      expect_same_bits(result, widened(expected));
      return result;
    });
  }
  Rig rig;
  const Tensor out = rig.upload({2, 2}, std::vector<float>{1, 2, 3, 4});
  add_to(rig.stream(), rig.upload({2, 2}, std::vector<float>{10, 20, 30, 40}), out);
  EXPECT_EQ(rig.download(out), (std::vector<float>{11, 22, 33, 44}));
}

TEST(CopyRuns, MovesRunsAndLeavesTheRest) {
  const auto x = random_floats(20, 1);
  const auto moved = same_bits_everywhere([&](Rig& rig) {
    const Tensor from = rig.upload(x), to = rig.upload(std::vector<float>(10, 7.0f));
    copy_runs(rig.stream(), from, to, {{0, 5, 3}, {18, 0, 2}, {4, 9, 1}, {20, 10, 0}});
    EXPECT_THROW(copy_runs(rig.stream(), from, to, {{0, 8, 3}}), InvalidArgument);
    EXPECT_THROW(copy_runs(rig.stream(), from, to, {{-1, 0, 1}}), InvalidArgument);
    return rig.download(to);
  });
  const std::vector<float> expected = {x[18], x[19], 7, 7, 7, x[0], x[1], x[2], 7, x[4]};
  EXPECT_EQ(moved, expected);
}

}  // namespace
}  // namespace polyreme::testing
