// Embedding: a sum of two table rows, and its gradients token after token.
#include "ops/op_test.h"

namespace polyreme::testing {
namespace {

constexpr int64_t kBatch = 3, kSeq = 5, kCols = 45, kVocab = 7, kPositions = 8;
const std::vector<int32_t> kTokens = {0, 6, 3, 3, 1, 3, 3, 3, 3, 3, 5, 0, 6, 2, 2};

TEST(Embedding, ForwardAddsTheTwoRows) {
  const auto table = random_floats(kVocab * kCols, 1), positions = random_floats(kPositions * kCols, 2);
  const auto out = same_bits_everywhere([&](Rig& rig) {
    const Tensor result = rig.empty_f32({kBatch, kSeq, kCols});
    embedding_forward(rig.stream(), rig.upload({kBatch, kSeq}, kTokens), rig.upload({kVocab, kCols}, table),
                      rig.upload({kPositions, kCols}, positions), result);
    return rig.download(result);
  });
  for (int64_t i = 0; i < kBatch * kSeq; ++i)
    for (int64_t c = 0; c < kCols; ++c)
      ASSERT_EQ(out[i * kCols + c], table[kTokens[i] * kCols + c] + positions[i % kSeq * kCols + c]);
}

TEST(Embedding, BackwardIsOneChainInTokenOrder) {
  const auto dout = random_floats(kBatch * kSeq * kCols, 3);
  const auto token_start = random_floats(kVocab * kCols, 4),
             position_start = random_floats(kPositions * kCols, 5);
  const auto got = same_bits_everywhere([&](Rig& rig) {
    const Tensor token_grad = rig.upload({kVocab, kCols}, token_start);
    const Tensor position_grad = rig.upload({kPositions, kCols}, position_start);
    embedding_backward(rig.stream(), rig.upload({kBatch, kSeq}, kTokens),
                       rig.upload({kBatch, kSeq, kCols}, dout), token_grad, position_grad);
    auto result = rig.download(token_grad);
    append(result, rig.download(position_grad));
    return result;
  });
  auto expected = token_start;
  auto expected_positions = position_start;
  for (int64_t i = 0; i < kBatch * kSeq; ++i) {
    for (int64_t c = 0; c < kCols; ++c) {
      expected[kTokens[i] * kCols + c] += dout[i * kCols + c];
      expected_positions[i % kSeq * kCols + c] += dout[i * kCols + c];
    }
  }
  append(expected, expected_positions);
  expect_same_bits(got, expected);
}

TEST(Embedding, BackwardDoesNotDependOnTheCutOfSamples) {
  Rig rig;
  const Tensor tokens = rig.upload({kBatch, kSeq}, kTokens);
  const Tensor dout = rig.upload({kBatch, kSeq, kCols}, random_floats(kBatch * kSeq * kCols, 3));
  std::vector<std::vector<float>> results;
  for (const auto& cuts : {std::vector<int64_t>{0, 3}, {0, 1, 2, 3}, {0, 2, 3}}) {
    const Tensor token_grad = rig.upload({kVocab, kCols}, random_floats(kVocab * kCols, 4));
    const Tensor position_grad = rig.upload({kPositions, kCols}, random_floats(kPositions * kCols, 5));
    for (size_t i = 0; i + 1 < cuts.size(); ++i)
      embedding_backward(rig.stream(), tokens.slice(0, cuts[i], cuts[i + 1]),
                         dout.slice(0, cuts[i], cuts[i + 1]), token_grad, position_grad);
    results.push_back(rig.download(token_grad));
    append(results.back(), rig.download(position_grad));
    expect_same_bits(results.back(), results.front());
  }
}

TEST(Embedding, RejectsBadArgumentsAndWritesNothing) {
  Rig rig;
  Stream& s = rig.stream();
  const Tensor tokens = rig.upload({kBatch, kSeq}, kTokens),
               table = rig.upload({kVocab, kCols}, random_floats(kVocab * kCols, 1));
  const Tensor positions = rig.upload({kPositions, kCols}, random_floats(kPositions * kCols, 2));
  const std::vector<float> sevens(kBatch * kSeq * kCols, 7.0f);
  const Tensor out = rig.upload({kBatch, kSeq, kCols}, sevens);
  EXPECT_THROW_WITH(embedding_forward(s, table, table, positions, out), InvalidArgument,
                    "tokens: expected a contiguous int32");
  EXPECT_THROW_WITH(embedding_forward(s, tokens, table.view({kCols, kVocab}), positions, out),
                    InvalidArgument, "position_table");
  EXPECT_THROW_WITH(embedding_forward(s, tokens, table, positions.slice(0, 0, 4), out), InvalidArgument,
                    "expected at least 5 rows");
  EXPECT_THROW_WITH(embedding_forward(s, tokens, table, positions, out.view({kSeq, kBatch, kCols})),
                    InvalidArgument, "out:");
  EXPECT_THROW_WITH(embedding_backward(s, tokens, out, table, table), InvalidArgument,
                    "position_grad: expected memory apart");
  for (const int32_t bad : {-1, static_cast<int32_t>(kVocab)}) {
    auto wrong = kTokens;
    wrong[14] = bad;
    embedding_forward(s, rig.upload({kBatch, kSeq}, wrong), table, positions, out);
    EXPECT_THROW_WITH(rig.synchronize(), InvalidArgument, concat("token 14 is ", bad));
  }
  expect_same_bits(rig.download(out), sevens);
}

}  // namespace
}  // namespace polyreme::testing
