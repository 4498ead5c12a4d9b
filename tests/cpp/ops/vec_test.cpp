// vec.h: every lane operation against plain C++, and AVX2 against AVX-512 bit for bit.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace polyreme::cpu {

#define POLYREME_DECLARE_SHIM(isa)                                                    \
  namespace isa {                                                                     \
  void vec_apply(int op, const float* a, const float* b, const float* c, float* out); \
  void vec_apply_int(int op, const int32_t* a, const int32_t* b, int32_t* out);       \
  void vec_copy_partial(const float* in, int n, float* loaded, float* stored);        \
  uint32_t vec_first_lanes(int n);                                                    \
  void vec_to_bf16(const float* in, uint16_t* out);                                   \
  void vec_from_bf16(const uint16_t* in, float* out);                                 \
  }
POLYREME_DECLARE_SHIM(avx2)
POLYREME_DECLARE_SHIM(avx512)

namespace {

constexpr int kLanes = 16;
constexpr int kNumFloatOps = 24;
constexpr int kNumIntOps = 15;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Level {
  const char* name;
  decltype(&avx2::vec_apply) apply;
  decltype(&avx2::vec_apply_int) apply_int;
  decltype(&avx2::vec_copy_partial) copy_partial;
  decltype(&avx2::vec_first_lanes) first_lanes;
  decltype(&avx2::vec_to_bf16) to_bf16;
  decltype(&avx2::vec_from_bf16) from_bf16;
};

const Level kAvx2 = {"avx2",
                     avx2::vec_apply,
                     avx2::vec_apply_int,
                     avx2::vec_copy_partial,
                     avx2::vec_first_lanes,
                     avx2::vec_to_bf16,
                     avx2::vec_from_bf16};
const Level kAvx512 = {"avx512",
                       avx512::vec_apply,
                       avx512::vec_apply_int,
                       avx512::vec_copy_partial,
                       avx512::vec_first_lanes,
                       avx512::vec_to_bf16,
                       avx512::vec_from_bf16};

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

std::vector<Level> levels() {
  std::vector<Level> found;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back(kAvx2);
  if (has_avx512()) found.push_back(kAvx512);
  return found;
}

uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}

float from_bits(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

// Equal bits, or both NaN: payloads and signs of NaN are outside the contract.
bool same(float a, float b) { return bits_of(a) == bits_of(b) || (std::isnan(a) && std::isnan(b)); }

// Ordinary numbers, every kind of special value, and arbitrary bit patterns.
float random_float(std::mt19937& rng) {
  static const float special[] = {0.0f,   -0.0f,      kInf,      -kInf, kNan,   1.0f,
                                  -1.0f,  1.0e-45f,   -1.0e-40f, 3e38f, -3e38f, 88.722839f,
                                  -87.3f, -87.33655f, 0.625f,    2.5f,  0.5f,   1.17549435e-38f};
  switch (rng() % 3) {
    case 0:
      return special[rng() % (sizeof(special) / sizeof(special[0]))];
    case 1:
      return from_bits(rng());
    default:
      return std::normal_distribution<float>(0.0f, 8.0f)(rng);
  }
}

float expected(int op, const float* a, const float* b, const float* c, int i) {
  const float x = a[i], y = b[i], z = c[i];
  switch (op) {
    case 0:
      return x + y;
    case 1:
      return x - y;
    case 2:
      return x * y;
    case 3:
      return x / y;
    case 4:
      return std::fma(x, y, z);
    case 5:
      return std::fma(-x, y, z);
    case 6:
      return x > y ? x : y;
    case 7:
      return x < y ? x : y;
    case 8:
      return std::isnan(x) || std::isnan(y) ? kNan : (x > y ? x : y);
    case 9:
      return std::isnan(x) || std::isnan(y) ? kNan : (x < y ? x : y);
    case 10:
      return std::sqrt(x);
    case 11:
      return from_bits(bits_of(x) ^ 0x80000000u);
    case 12:
      return std::fabs(x);
    case 13:
      return std::copysign(x, y);
    case 14:
      return x < y ? x : z;
    case 15:
      return x <= y ? x : z;
    case 16:
      return x == y ? x : z;
    case 17:
      return x != y ? x : z;
    case 18:
      return !(x > y) && !std::isnan(z) ? x : z;
    default:
      break;
  }
  float lanes[kLanes];
  std::memcpy(lanes, a, sizeof(lanes));
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int j = 0; j < width; ++j) {
      if (op == 22)
        lanes[j] += lanes[j + width];
      else
        lanes[j] = lanes[j] > lanes[j + width] ? lanes[j] : lanes[j + width];
    }
  }
  return lanes[0];
}

TEST(Vec, FloatOperationsMatchScalarCode) {
  for (const Level& level : levels()) {
    std::mt19937 rng(1);
    for (int round = 0; round < 2000; ++round) {
      float a[kLanes], b[kLanes], c[kLanes], out[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        a[i] = random_float(rng), b[i] = random_float(rng), c[i] = random_float(rng);
      }
      for (int op = 0; op < kNumFloatOps; ++op) {
        if (op >= 19 && op <= 21) continue;  // exp, tanh, log have their own test
        if (op == 23) {                      // reduce_max promises nothing about NaN
          for (float& x : a) x = std::isnan(x) ? 1.0f : x;
        }
        level.apply(op, a, b, c, out);
        for (int i = 0; i < kLanes; ++i) {
          const float want = expected(op, a, b, c, i);
          // reduce_max may return either zero.
          ASSERT_TRUE(same(out[i], want) || (op == 23 && out[i] == want))
              << level.name << " op " << op << " lane " << i << ": " << a[i] << ", " << b[i] << ", " << c[i]
              << " gave " << out[i] << ", expected " << want;
        }
      }
    }
  }
}

int32_t expected_int(int op, int32_t sx, int32_t sy, int lane) {
  const uint32_t x = static_cast<uint32_t>(sx), y = static_cast<uint32_t>(sy);
  const float f = from_bits(x);
  switch (op) {
    case 0:
      return static_cast<int32_t>(x + y);
    case 1:
      return static_cast<int32_t>(x - y);
    case 2:
      return static_cast<int32_t>(x * y);
    case 3:
      return sx ^ sy;
    case 4:
      return sx & sy;
    case 5:
      return sx | sy;
    case 6:
      return static_cast<int32_t>(x << 7);
    case 7:
      return static_cast<int32_t>(x >> 7);
    case 8:
      return sx >> 7;
    case 9:
      return static_cast<int32_t>((uint64_t{x} * y) >> 32);
    case 10:
      return std::fabs(f) < 2147483648.0f ? static_cast<int32_t>(std::nearbyint(f)) : INT32_MIN;
    case 11:
      return static_cast<int32_t>(bits_of(static_cast<float>(sx)));
    case 12:
      return sx < sy ? sx : lane;
    case 13:
      return sx == sy ? sx : 0;
    default:
      return sx > sy ? sx : sy;
  }
}

TEST(Vec, IntegerOperationsMatchScalarCode) {
  for (const Level& level : levels()) {
    std::mt19937 rng(2);
    for (int round = 0; round < 2000; ++round) {
      int32_t a[kLanes], b[kLanes], out[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        a[i] = static_cast<int32_t>(rng());
        b[i] = rng() % 4 == 0 ? a[i] : static_cast<int32_t>(rng());
      }
      for (int op = 0; op < kNumIntOps; ++op) {
        level.apply_int(op, a, b, out);
        for (int i = 0; i < kLanes; ++i) {
          ASSERT_EQ(out[i], expected_int(op, a[i], b[i], i)) << level.name << " op " << op;
        }
      }
    }
  }
}

// Distance from the float64 result in units of the last place of the rounded result.
double ulps(float got, double want) {
  const float rounded = static_cast<float>(want);
  if (rounded == 0.0f || std::isnan(want) || std::isinf(rounded) || std::isnan(got) || std::isinf(got)) {
    return got == rounded || same(got, rounded) ? 0.0 : kInf;
  }
  return std::fabs(got - want) / std::ldexp(1.0, std::ilogb(rounded) - 23);
}

// exp, tanh and log of the numbers with bit patterns begin, begin + stride, ... below end.
void check_elementary(const Level& level, uint64_t begin, uint64_t end, uint64_t stride) {
  for (uint64_t base = begin; base < end; base += kLanes * stride) {
    float x[kLanes], out[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      x[i] = from_bits(static_cast<uint32_t>(base + static_cast<uint64_t>(i) * stride));
    }
    level.apply(19, x, x, x, out);
    for (int i = 0; i < kLanes; ++i) {
      const double want = std::exp(static_cast<double>(x[i]));
      if (want < 1.17549435e-38) {
        ASSERT_EQ(out[i], 0.0f) << level.name << " exp(" << x[i] << ")";
      } else {
        ASSERT_LE(ulps(out[i], want), 1.0) << level.name << " exp(" << x[i] << ")";
      }
    }
    level.apply(20, x, x, x, out);
    for (int i = 0; i < kLanes; ++i) {
      const double want = std::tanh(static_cast<double>(x[i]));
      if (std::fabs(x[i]) < 1.0e-37f) {
        ASSERT_EQ(out[i], x[i]) << level.name;
      } else {
        ASSERT_LE(ulps(out[i], want), 2.0) << level.name << " tanh(" << x[i] << ")";
      }
    }
    level.apply(21, x, x, x, out);
    for (int i = 0; i < kLanes; ++i) {
      const bool flushed = x[i] >= 0.0f && x[i] < 1.17549435e-38f;
      const double want = flushed ? -kInf : std::log(static_cast<double>(x[i]));
      ASSERT_LE(ulps(out[i], want), 1.0) << level.name << " log(" << x[i] << ")";
    }
  }
}

TEST(Vec, ElementaryFunctionsAreAccurate) {
  // A stride through all bit patterns: zeros, subnormals, infinities and NaN included.
  for (const Level& level : levels()) check_elementary(level, 0, 1ull << 32, 4999);
}

TEST(Vec, ElementaryFunctionsAreAccurateAtEveryNumberNearTheirBorders) {
  // Overflow and underflow of exp, the same for tanh's exp(2 |x|), tanh's change of formula and saturation,
  // the smallest normal number, and 1.
  for (const Level& level : levels())
    for (const float border : {88.722839f, 87.336548f, 44.361419f, 0.625f, 9.02f, 1.17549435e-38f, 1.0f})
      for (const float x : {border, -border}) {
        const uint64_t center = bits_of(x);
        check_elementary(level, center - 20000, center + 20000, 1);
      }
}

TEST(Vec, PartialAccessTouchesOnlyItsLanes) {
  for (const Level& level : levels()) {
    for (int n = 0; n <= kLanes; ++n) {
      float in[kLanes], loaded[kLanes], stored[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        in[i] = i < n ? static_cast<float>(i + 1) : kNan;
        stored[i] = -7.0f;
      }
      level.copy_partial(in, n, loaded, stored);
      for (int i = 0; i < kLanes; ++i) {
        EXPECT_EQ(loaded[i], i < n ? static_cast<float>(i + 1) : 0.0f) << level.name;
        EXPECT_EQ(stored[i], i < n ? static_cast<float>(i + 1) : -7.0f) << level.name;
      }
      EXPECT_EQ(level.first_lanes(n), (1u << n) - 1u) << level.name;
    }
    EXPECT_EQ(level.first_lanes(-3), 0u);
    EXPECT_EQ(level.first_lanes(99), 0xffffu);
  }
}

TEST(Vec, Bf16RoundsToNearestEven) {
  for (const Level& level : levels()) {
    std::mt19937 rng(3);
    for (int round = 0; round < 4000; ++round) {
      float in[kLanes], back[kLanes];
      uint16_t half[kLanes];
      for (float& x : in) x = random_float(rng);
      level.to_bf16(in, half);
      level.from_bf16(half, back);
      for (int i = 0; i < kLanes; ++i) {
        if (std::isnan(in[i])) {
          EXPECT_TRUE(std::isnan(back[i])) << level.name;
          continue;
        }
        const uint32_t u = bits_of(in[i]);
        const uint32_t want = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
        ASSERT_EQ(half[i], want) << level.name << " " << in[i];
        ASSERT_EQ(bits_of(back[i]), want << 16) << level.name;
      }
    }
  }
}

TEST(Vec, Avx512GivesTheBitsOfAvx2) {
  if (!has_avx512()) GTEST_SKIP() << "this CPU has no AVX-512";
  std::mt19937 rng(4);
  for (int round = 0; round < 20000; ++round) {
    float a[kLanes], b[kLanes], c[kLanes], narrow[kLanes], wide[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      a[i] = random_float(rng), b[i] = random_float(rng), c[i] = random_float(rng);
    }
    for (int op = 0; op < kNumFloatOps; ++op) {
      avx2::vec_apply(op, a, b, c, narrow);
      avx512::vec_apply(op, a, b, c, wide);
      for (int i = 0; i < kLanes; ++i) {
        ASSERT_TRUE(same(narrow[i], wide[i]))
            << "op " << op << ": " << narrow[i] << " on AVX2, " << wide[i] << " on AVX-512";
      }
    }
  }
}

}  // namespace
}  // namespace polyreme::cpu
