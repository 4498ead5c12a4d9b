// Without branches, so that the loops are vectorised for any CPU. Both formats are handled as bits; the idea
// of letting the float adder align and round subnormal numbers is Fabian Giesen's ("half to float done
// quick").

#include "comm/half.h"

#include <bit>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "base/error.h"
#include "device/cpu/isa.h"

namespace polyreme {
namespace {

constexpr uint32_t kSign = 0x80000000;
constexpr uint32_t kInfinity = 0x7f800000;

struct BFloat16 {
  static float widen(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
  static uint16_t narrow(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const uint32_t nan = (bits >> 16) | 0x40;
    return static_cast<uint16_t>((bits & ~kSign) > kInfinity ? nan : rounded);
  }
};

struct Float16 {
  static constexpr int kMantissaShift = 23 - 10;
  static constexpr uint32_t kRebias = uint32_t{127 - 15} << 23;
  static constexpr uint32_t kSmallestNormal = uint32_t{127 - 14} << 23;  // 2^-14
  static constexpr uint32_t kTooLarge = uint32_t{127 + 16} << 23;        // 2^16

  static float widen(uint16_t half) {
    const uint32_t magnitude = static_cast<uint32_t>(half & 0x7fff) << kMantissaShift;
    const bool infinite = magnitude >= (uint32_t{31} << 23);  // or NaN
    const uint32_t normal = magnitude + kRebias + (infinite ? kRebias : 0);
    // 2^-14 * (1 + m / 1024) - 2^-14
    const float subnormal =
        std::bit_cast<float>(magnitude + kSmallestNormal) - std::bit_cast<float>(kSmallestNormal);
    const uint32_t bits = magnitude < (uint32_t{1} << 23) ? std::bit_cast<uint32_t>(subnormal) : normal;
    const uint32_t quiet =
        magnitude > (uint32_t{31} << 23) ? 0x00400000 : 0;  // NaN, as the instruction has it
    return std::bit_cast<float>(bits | quiet | static_cast<uint32_t>(half & 0x8000) << 16);
  }
  static uint16_t narrow(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t magnitude = bits & ~kSign;
    // Beside 2^-1 the last place of a float32 is that of a subnormal float16, 2^-24.
    constexpr uint32_t kHalf = uint32_t{127 - 1} << 23;
    const uint32_t subnormal =
        std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + std::bit_cast<float>(kHalf)) - kHalf;
    const uint32_t normal =
        (magnitude - kRebias + 0xfff + ((magnitude >> kMantissaShift) & 1)) >> kMantissaShift;
    const uint32_t nan = 0x7e00 | ((magnitude >> kMantissaShift) & 0x3ff);
    const uint32_t finite = magnitude < kSmallestNormal ? subnormal : normal;
    const uint32_t large = magnitude > kInfinity ? nan : 0x7c00;
    return static_cast<uint16_t>((magnitude >= kTooLarge ? large : finite) | ((bits & kSign) >> 16));
  }
};

template <typename Format>
void widen_all(const uint16_t* in, int64_t count, float* out) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) out[i] = Format::widen(in[i]);
}

template <typename Format>
void narrow_all(const float* in, int64_t count, uint16_t* out) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) out[i] = Format::narrow(in[i]);
}

#if defined(__x86_64__)
// The same bits by instructions that all CPUs with AVX2 have: of eight at once.
[[gnu::target("avx,f16c")]] void widen_float16(const uint16_t* in, int64_t count, float* out) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8)
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
  for (; i < count; ++i) out[i] = Float16::widen(in[i]);
}

[[gnu::target("avx,f16c")]] void narrow_float16(const float* in, int64_t count, uint16_t* out) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  int64_t i = 0;
  for (; i + 8 <= count; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm256_cvtps_ph(_mm256_loadu_ps(in + i), kNearest));
  for (; i < count; ++i) out[i] = Float16::narrow(in[i]);
}

const bool kHasInstructions = has_f16c();
const auto kWidenFloat16 = kHasInstructions ? widen_float16 : widen_all<Float16>;
const auto kNarrowFloat16 = kHasInstructions ? narrow_float16 : narrow_all<Float16>;
#else
constexpr auto kWidenFloat16 = widen_all<Float16>;
constexpr auto kNarrowFloat16 = narrow_all<Float16>;
#endif

void require_half(DType dtype) {
  require(dtype == DType::kBF16 || dtype == DType::kF16, "expected float16 or bfloat16, got ",
          dtype_name(dtype));
}

}  // namespace

void widen(DType from, const void* in, int64_t count, float* out) {
  require_half(from);
  (from == DType::kBF16 ? widen_all<BFloat16> : kWidenFloat16)(static_cast<const uint16_t*>(in), count, out);
}

void narrow(DType to, const float* in, int64_t count, void* out) {
  require_half(to);
  (to == DType::kBF16 ? narrow_all<BFloat16> : kNarrowFloat16)(in, count, static_cast<uint16_t*>(out));
}

}  // namespace polyreme
