#include "kernels/embedding.cuh"

#include "kernels/kernel_test.h"

namespace polyreme::kernel_test {
namespace {

struct Size {
  int64_t batch, seq, cols, vocab;
};
// The last one has more tokens than a block has threads.
constexpr Size kSizes[] = {{1, 1, 1, 1}, {2, 3, 5, 4}, {3, 7, 16, 5}, {2, 33, 24, 3}, {2, 161, 8, 40}};

std::vector<int32_t> drawn_tokens(Size s) {
  std::mt19937 random(9);
  std::vector<int32_t> tokens(static_cast<size_t>(s.batch * s.seq));
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % static_cast<uint32_t>(s.vocab));
  return tokens;
}

TEST(EmbeddingKernel, HasTheBitsOfTheCpu) {
  for (const Size s : kSizes)
    for_dtypes([&](auto type) {
      using T = decltype(type);
      SCOPED_TRACE(concat(s.batch, " x ", s.seq, " x ", s.cols));
      const std::vector<int32_t> tokens = drawn_tokens(s);
      const std::vector<float> table = normals_of<T>(s.vocab * s.cols, 1),
                               positions = normals_of<T>(s.seq * s.cols, 2),
                               dout = normals_of<T>(s.batch * s.seq * s.cols, 3),
                               grad = normals(s.vocab * s.cols, 4),
                               position_grad = normals(s.seq * s.cols, 5);
      Cpu cpu;
      const Shape rows = {s.batch, s.seq, s.cols}, token_shape = {s.vocab, s.cols},
                  position_shape = {s.seq, s.cols};
      const Tensor ids = cpu.upload({s.batch, s.seq}, tokens), out = cpu.make(rows);
      embedding_forward(cpu.stream(), ids, cpu.upload(token_shape, table),
                        cpu.upload(position_shape, positions), out);
      const Tensor tgrad = cpu.upload(token_shape, grad), pgrad = cpu.upload(position_shape, position_grad);
      embedding_backward(cpu.stream(), ids, cpu.upload(rows, dout), tgrad, pgrad);
      for_seeds([&] {
        const Array<int32_t> gids(tokens), bad(2);
        const Array<T> gtable(table), gpositions(positions), gout(dout.size()), gdout(dout);
        const Array<float> g(grad), pg(position_grad);
        PolyremeEmbedding args = {.tokens = gids.data(),
                                  .token_rows = gtable.data(),
                                  .position_rows = gpositions.data(),
                                  .rows = gout.data(),
                                  .bad = bad.data(),
                                  .batch = s.batch,
                                  .seq = s.seq,
                                  .cols = s.cols,
                                  .vocab = s.vocab,
                                  .dtype = kCodeOf<T>};
        run(kernels::launch_embedding_forward, args);
        EXPECT_EQ(bad[0], INT32_MAX);
        expect_rounded(gout, cpu.download(out), "out");
        args.token_rows = g.data();
        args.position_rows = pg.data();
        args.rows = gdout.data();
        run(kernels::launch_embedding_backward, args);
        expect_bits(g.floats(), cpu.download(tgrad), "token_grad");
        expect_bits(pg.floats(), cpu.download(pgrad), "position_grad");
      });
    });
}

TEST(EmbeddingKernel, TokensThatAreNoneStopIt) {
  const Size s = {2, 700, 4, 5};
  for (const int32_t bad_token : {-1, 5, INT32_MAX})
    for (const size_t at : {0, 7, 1300}) {
      std::vector<int32_t> tokens = drawn_tokens(s);
      tokens[at] = bad_token;
      tokens[1399] = bad_token;
      for_seeds([&] {
        const std::vector<float> before(static_cast<size_t>(s.batch * s.seq * s.cols), 1.0F);
        const Array<int32_t> ids(tokens), bad(2);
        const Array<float> table(normals(s.vocab * s.cols, 1)), rows(before);
        run<PolyremeEmbedding>(kernels::launch_embedding_forward, {.tokens = ids.data(),
                                                                   .token_rows = table.data(),
                                                                   .rows = rows.data(),
                                                                   .bad = bad.data(),
                                                                   .batch = s.batch,
                                                                   .seq = s.seq,
                                                                   .cols = s.cols,
                                                                   .vocab = s.vocab});
        EXPECT_EQ(bad[0], static_cast<int32_t>(at));
        expect_bits(rows.floats(), before, "untouched");
      });
    }
  std::vector<int32_t> tokens = {0, 7, 1};
  start_case(1);
  const Array<int32_t> ids(tokens), bad(2);
  const std::vector<float> before(2, 1.0F);
  const Array<float> table(before), rows(normals(3, 1));
  run<PolyremeEmbedding>(kernels::launch_embedding_backward, {.tokens = ids.data(),
                                                              .token_rows = table.data(),
                                                              .rows = rows.data(),
                                                              .bad = bad.data(),
                                                              .batch = 1,
                                                              .seq = 3,
                                                              .cols = 1,
                                                              .vocab = 2});
  EXPECT_EQ(bad[0], 1);
  expect_bits(table.floats(), before, "untouched");
}

}  // namespace
}  // namespace polyreme::kernel_test
