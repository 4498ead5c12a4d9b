// The GEMM's contract: its bits are those of one chain of fused multiply-adds, however it is cut.
#include "ops/cpu/kernels/gemm.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "device/cpu/thread_pool.h"

namespace polyreme::cpu {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kSentinel = -12345.5f;

struct Level {
  const char* name;
  bool usable;
  decltype(&avx2::gemm_f32) gemm;
  decltype(&avx2::gemm_f32_serial) gemm_serial;
  decltype(&avx2::gemm_f32_scratch_bytes) scratch_bytes;
  decltype(&avx2::gemm_panel_rows) panel_rows;
  decltype(&avx2::gemm_panel_cols) panel_cols;
  decltype(&avx2::gemm_packed_a_bytes) packed_a_bytes;
  decltype(&avx2::gemm_packed_b_bytes) packed_b_bytes;
  decltype(&avx2::gemm_pack_a) pack_a;
  decltype(&avx2::gemm_pack_b) pack_b;
  decltype(&avx2::gemm_f32_packed) gemm_packed;
};

#define POLYREME_LEVEL(isa, usable)                                                                       \
  Level {                                                                                                 \
#isa, usable, isa::gemm_f32, isa::gemm_f32_serial, isa::gemm_f32_scratch_bytes, isa::gemm_panel_rows, \
        isa::gemm_panel_cols, isa::gemm_packed_a_bytes, isa::gemm_packed_b_bytes, isa::gemm_pack_a,       \
        isa::gemm_pack_b, isa::gemm_f32_packed                                                            \
  }

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

class GemmTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    level_ = GetParam() == "avx512" ? POLYREME_LEVEL(avx512, has_avx512()) : POLYREME_LEVEL(avx2, has_avx2());
    if (!level_.usable) {
      GTEST_SKIP() << "this CPU has no " << (GetParam() == "avx512" ? "AVX-512" : "AVX2");
    }
  }
  Level level_;
};

INSTANTIATE_TEST_SUITE_P(Levels, GemmTest, ::testing::Values("avx2", "avx512"),
                         [](const auto& param_info) { return param_info.param; });

const float* floats(const void* p) { return static_cast<const float*>(p); }
float* floats(void* p) { return static_cast<float*>(p); }

uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}

bool same(float a, float b) { return bits_of(a) == bits_of(b) || (std::isnan(a) && std::isnan(b)); }

// One multiplication with its own memory. Operands have gaps between rows, filled with NaN: a
// padding lane that leaks shows. C has gaps filled with a sentinel.
struct Problem {
  Problem(std::mt19937& rng, int64_t m, int64_t n, int64_t k, bool a_transposed, bool b_transposed,
          bool with_bias, bool accumulate) {
    args.m = m, args.n = n, args.k = k;
    args.accumulate = accumulate;
    const auto gap = [&] { return static_cast<int64_t>(rng() % 3 == 0 ? rng() % 20 : 0); };
    const auto fill = [&](std::vector<float>& v, int64_t rows, int64_t cols, int64_t stride) {
      v.assign(static_cast<size_t>(rows * stride), kNan);
      std::normal_distribution<float> normal;
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < cols; ++j) v[static_cast<size_t>(i * stride + j)] = normal(rng);
      }
    };
    const int64_t lda = (a_transposed ? m : k) + gap(), ldb = (b_transposed ? k : n) + gap();
    fill(a, a_transposed ? k : m, a_transposed ? m : k, lda);
    fill(b, b_transposed ? n : k, b_transposed ? k : n, ldb);
    args.a_row_stride = a_transposed ? 1 : lda, args.a_col_stride = a_transposed ? lda : 1;
    args.b_row_stride = b_transposed ? 1 : ldb, args.b_col_stride = b_transposed ? ldb : 1;
    args.c_row_stride = n + gap();
    fill(c, m, n, args.c_row_stride);
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = n; j < args.c_row_stride; ++j) at(c, i, j) = kSentinel;
    }
    fill(bias, 1, n, n);
    args.a = a.data(), args.b = b.data(), args.bias = with_bias ? bias.data() : nullptr;
  }

  float& at(std::vector<float>& v, int64_t i, int64_t j) const {
    return v[static_cast<size_t>(i * args.c_row_stride + j)];
  }
  float a_at(int64_t i, int64_t p) const {
    return floats(args.a)[i * args.a_row_stride + p * args.a_col_stride];
  }
  float b_at(int64_t p, int64_t j) const {
    return floats(args.b)[p * args.b_row_stride + j * args.b_col_stride];
  }

  float chain(int64_t i, int64_t j) const {
    float acc = args.accumulate ? c[static_cast<size_t>(i * args.c_row_stride + j)] : 0.0f;
    for (int64_t p = 0; p < args.k; ++p) acc = std::fma(a_at(i, p), b_at(p, j), acc);
    return args.bias == nullptr ? acc : acc + args.bias[j];
  }

  // Runs `multiply` on a copy of C; without accumulate what C holds must not matter.
  template <typename Multiply>
  std::vector<float> run(Multiply&& multiply) const {
    std::vector<float> out = c;
    if (!args.accumulate) {
      for (int64_t i = 0; i < args.m; ++i) {
        for (int64_t j = 0; j < args.n; ++j) at(out, i, j) = kNan;
      }
    }
    GemmArgs g = args;
    g.c = out.data();
    multiply(g);
    return out;
  }

  GemmArgs args;
  std::vector<float> a, b, c, bias;
};

int64_t random_size(std::mt19937& rng, int64_t most) {
  return 1 + static_cast<int64_t>(rng() % static_cast<uint64_t>(most));
}

Problem random_problem(std::mt19937& rng, int64_t most) {
  const int64_t m = random_size(rng, most), n = random_size(rng, most), k = random_size(rng, most);
  return Problem(rng, m, n, k, rng() % 2, rng() % 2, rng() % 2, rng() % 2);
}

std::string describe(const Problem& p) {
  const GemmArgs& g = p.args;
  return "m " + std::to_string(g.m) + " n " + std::to_string(g.n) + " k " + std::to_string(g.k) +
         " a strides " + std::to_string(g.a_row_stride) + "," + std::to_string(g.a_col_stride) +
         " b strides " + std::to_string(g.b_row_stride) + "," + std::to_string(g.b_col_stride);
}

// Compares everything, gaps included; on a difference says where.
void expect_same(const std::vector<float>& got, const std::vector<float>& want, const Problem& p,
                 const std::string& what) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_TRUE(same(got[i], want[i])) << what << ": row " << i / static_cast<size_t>(p.args.c_row_stride)
                                       << " column " << i % static_cast<size_t>(p.args.c_row_stride) << ": "
                                       << got[i] << ", expected " << want[i] << " (" << describe(p) << ")";
  }
}

std::vector<float> chain_result(const Problem& p) {
  std::vector<float> want = p.c;
  for (int64_t i = 0; i < p.args.m; ++i) {
    for (int64_t j = 0; j < p.args.n; ++j) p.at(want, i, j) = p.chain(i, j);
  }
  return want;
}

TEST_P(GemmTest, SmallShapesAreTheChain) {
  ThreadPool pool(1);
  std::mt19937 rng(1);
  for (int round = 0; round < 400; ++round) {
    const Problem p = random_problem(rng, 70);
    expect_same(p.run([&](GemmArgs& g) { level_.gemm(g, pool); }), chain_result(p), p, "chain");
    if (HasFatalFailure()) return;
  }
}

TEST_P(GemmTest, EveryTileShapeIsTheChain) {
  ThreadPool pool(1);
  std::mt19937 rng(2);
  for (int64_t m = 1; m <= 2 * level_.panel_rows() + 1; ++m) {
    for (int64_t n = 1; n <= 2 * level_.panel_cols() + 1; ++n) {
      const Problem p(rng, m, n, 1 + (m + n) % 19, rng() % 2, rng() % 2, n % 2 == 0, m % 2 == 0);
      expect_same(p.run([&](GemmArgs& g) { level_.gemm(g, pool); }), chain_result(p), p, "tile");
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(GemmTest, ShapesBeyondTheBlocksAreTheChain) {
  struct Shape {
    int64_t m, n, k;
  };
  // Several blocks of k, of rows, of columns; one longer than any packed operand may be.
  const Shape shapes[] = {{37, 83, 1500}, {700, 70, 400}, {19, 6500, 40}, {9, 35, 13000}};
  ThreadPool pool(1);
  std::mt19937 rng(3);
  for (const Shape& s : shapes) {
    for (int form = 0; form < 4; ++form) {
      const Problem p(rng, s.m, s.n, s.k, form & 1, form & 2, true, form != 0);
      const std::vector<float> got = p.run([&](GemmArgs& g) { level_.gemm(g, pool); });
      for (int sample = 0; sample < 400; ++sample) {
        const int64_t i = random_size(rng, s.m) - 1, j = random_size(rng, s.n) - 1;
        const float value = got[static_cast<size_t>(i * p.args.c_row_stride + j)];
        ASSERT_TRUE(same(value, p.chain(i, j)))
            << "row " << i << " column " << j << " form " << form << " (" << describe(p) << ")";
      }
    }
  }
}

TEST_P(GemmTest, ThreadsChangeNothing) {
  std::mt19937 rng(4);
  std::vector<std::unique_ptr<ThreadPool>> pools;
  for (int threads = 1; threads <= 4; ++threads) {
    pools.push_back(std::make_unique<ThreadPool>(threads));
  }
  for (int round = 0; round < 40; ++round) {
    const Problem p = random_problem(rng, round % 2 == 0 ? 300 : 60);
    const std::vector<float> one = p.run([&](GemmArgs& g) { level_.gemm(g, *pools[0]); });
    for (auto& pool : pools) {
      expect_same(p.run([&](GemmArgs& g) { level_.gemm(g, *pool); }), one, p,
                  std::to_string(pool->num_threads()) + " threads");
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(GemmTest, CuttingRowsColumnsOrSumsChangesNothing) {
  ThreadPool pool(2);
  std::mt19937 rng(5);
  for (int round = 0; round < 60; ++round) {
    const Problem p = random_problem(rng, round < 10 ? 900 : 200);
    const std::vector<float> whole = p.run([&](GemmArgs& g) { level_.gemm(g, pool); });
    const std::vector<float> rows = p.run([&](GemmArgs& g) {
      for (int64_t i = 0, next; i < p.args.m; i = next) {
        next = std::min(p.args.m, i + random_size(rng, p.args.m));
        GemmArgs part = g;
        part.m = next - i;
        part.a = floats(part.a) + i * g.a_row_stride;
        part.c = floats(part.c) + i * g.c_row_stride;
        level_.gemm(part, pool);
      }
    });
    expect_same(rows, whole, p, "rows cut");
    const std::vector<float> cols = p.run([&](GemmArgs& g) {
      for (int64_t j = 0, next; j < p.args.n; j = next) {
        next = std::min(p.args.n, j + random_size(rng, p.args.n));
        GemmArgs part = g;
        part.n = next - j;
        part.b = floats(part.b) + j * g.b_col_stride;
        part.c = floats(part.c) + j;
        if (g.bias != nullptr) part.bias += j;
        level_.gemm(part, pool);
      }
    });
    expect_same(cols, whole, p, "columns cut");
    const std::vector<float> sums = p.run([&](GemmArgs& g) {
      for (int64_t q = 0, next; q < p.args.k; q = next) {
        next = std::min(p.args.k, q + random_size(rng, p.args.k));
        GemmArgs part = g;
        part.k = next - q;
        part.a = floats(part.a) + q * g.a_col_stride;
        part.b = floats(part.b) + q * g.b_row_stride;
        part.accumulate = g.accumulate || q > 0;
        if (next < p.args.k) part.bias = nullptr;
        level_.gemm(part, pool);
      }
    });
    expect_same(sums, whole, p, "sum cut");
    if (HasFatalFailure()) return;
  }
}

TEST_P(GemmTest, ErrorStaysWithinTheFloat64Bound) {
  ThreadPool pool(2);
  std::mt19937 rng(6);
  for (int round = 0; round < 30; ++round) {
    const Problem p = random_problem(rng, 150);
    const std::vector<float> got = p.run([&](GemmArgs& g) { level_.gemm(g, pool); });
    for (int64_t i = 0; i < p.args.m; ++i) {
      for (int64_t j = 0; j < p.args.n; ++j) {
        const size_t at = static_cast<size_t>(i * p.args.c_row_stride + j);
        double exact = p.args.accumulate ? p.c[at] : 0.0, magnitude = std::fabs(exact);
        for (int64_t q = 0; q < p.args.k; ++q) {
          const double term = static_cast<double>(p.a_at(i, q)) * p.b_at(q, j);
          exact += term;
          magnitude += std::fabs(term);
        }
        if (p.args.bias != nullptr) exact += p.args.bias[j], magnitude += std::fabs(p.args.bias[j]);
        const double roundoff = std::ldexp(1.0, -24) * static_cast<double>(p.args.k + 2);
        ASSERT_LE(std::fabs(got[at] - exact), 1.01 * roundoff * magnitude) << describe(p);
      }
    }
  }
}

TEST_P(GemmTest, SpecialValuesStayWhereTheyBelong) {
  ThreadPool pool(1);
  std::mt19937 rng(7);
  const float special[] = {kInf, -kInf, kNan, 0.0f, -0.0f, 1e-44f, 3e38f};
  for (int round = 0; round < 200; ++round) {
    Problem p = random_problem(rng, 60);
    for (int i = 0; i < 3; ++i) {
      p.a[rng() % p.a.size()] = special[rng() % 7];
      p.b[rng() % p.b.size()] = special[rng() % 7];
    }
    expect_same(p.run([&](GemmArgs& g) { level_.gemm(g, pool); }), chain_result(p), p, "special");
    if (HasFatalFailure()) return;
  }
}

TEST_P(GemmTest, EmptySizesAreLegal) {
  ThreadPool pool(2);
  std::mt19937 rng(8);
  for (int form = 0; form < 4; ++form) {
    Problem p(rng, 21, 37, 5, false, true, form & 1, form & 2);
    p.args.k = 0;
    expect_same(p.run([&](GemmArgs& g) { level_.gemm(g, pool); }), chain_result(p), p, "k = 0");
    for (int which = 0; which < 2; ++which) {
      const std::vector<float> untouched = p.run([](GemmArgs&) {});
      expect_same(p.run([&](GemmArgs& g) {
        (which == 0 ? g.m : g.n) = 0;
        g.k = 5;
        level_.gemm(g, pool);
      }),
                  untouched, p, "m or n = 0");
    }
  }
}

// Memory that ends right before a page that faults on access.
class GuardedFloats {
 public:
  explicit GuardedFloats(const std::vector<float>& values) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t bytes = values.size() * sizeof(float);
    size_ = (bytes + page - 1) / page * page + page;
    base_ = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) throw std::bad_alloc();
    char* const guard = static_cast<char*>(base_) + size_ - page;
    mprotect(guard, page, PROT_NONE);
    data_ = reinterpret_cast<float*>(guard - bytes);
    std::memcpy(data_, values.data(), bytes);
  }
  ~GuardedFloats() { munmap(base_, size_); }
  GuardedFloats(const GuardedFloats&) = delete;
  GuardedFloats& operator=(const GuardedFloats&) = delete;
  float* data() const { return data_; }

 private:
  void* base_;
  size_t size_;
  float* data_;
};

TEST_P(GemmTest, NeverTouchesMemoryPastTheOperands) {
  ThreadPool pool(1);
  std::mt19937 rng(9);
  for (int round = 0; round < 200; ++round) {
    Problem p = random_problem(rng, 70);
    const auto trim = [](std::vector<float>& v, int64_t lines, int64_t line, int64_t stride) {
      v.resize(static_cast<size_t>((lines - 1) * stride + line));
    };
    const GemmArgs& s = p.args;
    if (s.a_col_stride == 1)
      trim(p.a, s.m, s.k, s.a_row_stride);
    else
      trim(p.a, s.k, s.m, s.a_col_stride);
    if (s.b_col_stride == 1)
      trim(p.b, s.k, s.n, s.b_row_stride);
    else
      trim(p.b, s.n, s.k, s.b_col_stride);
    trim(p.c, s.m, s.n, s.c_row_stride);
    const GuardedFloats a(p.a), b(p.b), c(p.c), bias(p.bias);
    GemmArgs g = p.args;
    g.a = a.data(), g.b = b.data(), g.c = c.data();
    if (g.bias != nullptr) g.bias = bias.data();
    const std::vector<float> want = chain_result(p);
    level_.gemm(g, pool);
    expect_same(std::vector<float>(c.data(), c.data() + want.size()), want, p, "guarded");
    if (HasFatalFailure()) return;
  }
}

struct FreeDeleter {
  void operator()(float* p) const { std::free(p); }
};
using Aligned = std::unique_ptr<float, FreeDeleter>;

Aligned aligned(int64_t bytes) {
  const size_t rounded = (static_cast<size_t>(bytes) + 63) / 64 * 64;
  return Aligned(static_cast<float*>(std::aligned_alloc(64, rounded)));
}

TEST_P(GemmTest, SerialEntryAndPackedOperandsGiveTheSameBits) {
  ThreadPool pool(1);
  std::mt19937 rng(10);
  for (int round = 0; round < 80; ++round) {
    const Problem p = random_problem(rng, round < 8 ? 700 : 130);
    const GemmArgs& s = p.args;
    const std::vector<float> whole = p.run([&](GemmArgs& g) { level_.gemm(g, pool); });
    const Aligned scratch = aligned(level_.scratch_bytes(s.m, s.n, s.k, Element::kF32));
    expect_same(p.run([&](GemmArgs& g) { level_.gemm_serial(g, scratch.get()); }), whole, p, "serial");
    const Aligned packed_a = aligned(level_.packed_a_bytes(s.m, s.k));
    const Aligned packed_b = aligned(level_.packed_b_bytes(s.k, s.n));
    level_.pack_a(s, packed_a.get());
    level_.pack_b(s, packed_b.get());
    expect_same(p.run([&](GemmArgs& g) { level_.gemm_packed(g, packed_a.get(), packed_b.get()); }), whole, p,
                "packed");
    // Blocks of the same packed operands, as an attention kernel uses them.
    const int64_t step_m = 2 * level_.panel_rows(), step_n = level_.panel_cols();
    expect_same(p.run([&](GemmArgs& g) {
      for (int64_t i = 0; i < s.m; i += step_m) {
        for (int64_t j = 0; j < s.n; j += step_n) {
          GemmArgs part = g;
          part.m = std::min(step_m, s.m - i);
          part.n = std::min(step_n, s.n - j);
          part.c = floats(part.c) + i * g.c_row_stride + j;
          if (g.bias != nullptr) part.bias += j;
          level_.gemm_packed(part, packed_a.get() + i * s.k, packed_b.get() + s.k * j);
        }
      }
    }),
                whole, p, "packed blocks");
    if (HasFatalFailure()) return;
  }
}

TEST_P(GemmTest, AProductIsAPackedOperandOfTheNext) {
  // (X Y) Z^T taken as Z (Y^T X^T): the inner product, one panel wide, is used as a packed B.
  std::mt19937 rng(13);
  const int64_t width = level_.panel_cols(), m = 93, k = 40;
  for (int64_t n : {width, width - 5}) {
    const Problem inner(rng, m, n, k, false, true, false, false);
    const Problem outer(rng, 50, n, m, false, false, false, false);
    const Aligned scratch = aligned(level_.scratch_bytes(200, 200, 200, Element::kF32));
    std::vector<float> panel(static_cast<size_t>(m * width), kNan);
    GemmArgs g = inner.args;
    g.c = panel.data();
    g.c_row_stride = width;
    level_.gemm_serial(g, scratch.get());
    const Aligned packed_a = aligned(level_.packed_a_bytes(50, m));
    level_.pack_a(outer.args, packed_a.get());
    const std::vector<float> got =
        outer.run([&](GemmArgs& o) { level_.gemm_packed(o, packed_a.get(), panel.data()); });
    expect_same(got, outer.run([&](GemmArgs& o) {
      o.b = panel.data();
      o.b_row_stride = width;
      o.b_col_stride = 1;
      level_.gemm_serial(o, scratch.get());
    }),
                outer, "chained");
  }
}

TEST_P(GemmTest, RunsInsideATask) {
  ThreadPool pool(3);
  std::mt19937 rng(11);
  const Problem p(rng, 200, 220, 150, false, true, true, false);
  const std::vector<float> want = p.run([&](GemmArgs& g) { level_.gemm(g, pool); });
  std::atomic<int> different{0};
  parallel_for(pool, 6, [&](int64_t, int) {
    const std::vector<float> got = p.run([&](GemmArgs& g) { level_.gemm(g, pool); });
    for (size_t i = 0; i < want.size(); ++i) {
      if (!same(got[i], want[i])) different.fetch_add(1);
    }
  });
  EXPECT_EQ(different.load(), 0);
}

TEST(Gemm, Avx512GivesTheBitsOfAvx2) {
  if (!has_avx512()) GTEST_SKIP() << "this CPU has no AVX-512";
  ThreadPool pool(2);
  std::mt19937 rng(12);
  for (int round = 0; round < 150; ++round) {
    const Problem p = random_problem(rng, round < 20 ? 900 : 70);
    const std::vector<float> narrow = p.run([&](GemmArgs& g) { avx2::gemm_f32(g, pool); });
    expect_same(p.run([&](GemmArgs& g) { avx512::gemm_f32(g, pool); }), narrow, p, "AVX-512");
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace polyreme::cpu
