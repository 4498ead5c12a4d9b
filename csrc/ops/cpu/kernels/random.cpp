#include "ops/cpu/kernels/random.h"

#include "ops/cpu/kernels/lanes.h"
#include "ops/cpu/kernels/scalar_math.h"

namespace polyreme::cpu::POLYREME_ISA {
namespace {

constexpr uint64_t kGroup = 4 * kLanes;  // elements of sixteen blocks

struct Words16 {
  v16i word[4];  // word[j] of sixteen consecutive blocks
};

// random_block() of blocks first .. first + 15. `first` is a multiple of 16, so that the lane number
// never carries into the counter's second word.
POLYREME_INLINE Words16 random_blocks(const RandomKey& key, uint64_t first) {
  v16i c0 = broadcast_i(static_cast<int32_t>(first)) + iota();
  v16i c1 = broadcast_i(
      static_cast<int32_t>(static_cast<uint32_t>(first >> 32) | (static_cast<uint32_t>(key.purpose) << 28)));
  v16i c2 = broadcast_i(static_cast<int32_t>(key.stream));
  v16i c3 = broadcast_i(static_cast<int32_t>(key.step));
  uint32_t k0 = static_cast<uint32_t>(key.seed), k1 = static_cast<uint32_t>(key.seed >> 32);
  const v16i m0 = broadcast_i(static_cast<int32_t>(0xD2511F53)),
             m1 = broadcast_i(static_cast<int32_t>(0xCD9E8D57));
  for (int round = 0; round < 10; ++round) {
    const v16i hi0 = mul_high_unsigned(c0, m0), lo0 = c0 * m0;
    const v16i hi1 = mul_high_unsigned(c2, m1), lo1 = c2 * m1;
    c0 = hi1 ^ c1 ^ broadcast_i(static_cast<int32_t>(k0));
    c1 = lo1;
    c2 = hi0 ^ c3 ^ broadcast_i(static_cast<int32_t>(k1));
    c3 = lo0;
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return {{c0, c1, c2, c3}};
}

// Moves bit i of sixteen bits to bit 4 i.
POLYREME_INLINE uint64_t spread_bits(uint32_t bits) {
  uint64_t b = bits;
  b = (b | (b << 24)) & 0x000000ff000000ff;
  b = (b | (b << 12)) & 0x000f000f000f000f;
  b = (b | (b << 6)) & 0x0303030303030303;
  return (b | (b << 3)) & 0x1111111111111111;
}

// Bit i: element 4 * first_block + i of the stream is kept.
POLYREME_INLINE uint64_t keep_bits(const RandomKey& key, uint64_t first_block, uint32_t threshold) {
  const Words16 words = random_blocks(key, first_block);
  // Flipping the top bit turns the signed comparison into the unsigned one.
  const v16i flip = broadcast_i(INT32_MIN);
  const v16i bound = broadcast_i(static_cast<int32_t>(threshold)) ^ flip;
  uint64_t kept = 0;
  for (int j = 0; j < 4; ++j) kept |= spread_bits(mask_bits(~((words.word[j] ^ flip) < bound))) << j;
  return kept;
}

// Box-Muller for 64 elements.
POLYREME_INLINE void normal_group(const RandomKey& key, uint64_t first_block, double std, float* out) {
  const Words16 words = random_blocks(key, first_block);
  uint32_t word[4][kLanes];
  float value[4][kLanes];
  for (int j = 0; j < 4; ++j) store_i(word[j], words.word[j]);
  for (int pair = 0; pair < 4; pair += 2) {
    for (int i = 0; i < kLanes; ++i) {
      const double u = (static_cast<double>(word[pair][i]) + 0.5) * 0x1p-32;
      const double radius = __builtin_sqrt(-2.0 * log_double(u));
      const SinCos angle = sin_cos_turns(word[pair + 1][i]);
      value[pair][i] = static_cast<float>(radius * angle.cos * std);
      value[pair + 1][i] = static_cast<float>(radius * angle.sin * std);
    }
  }
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < 4; ++j) out[4 * i + j] = value[j][i];
  }
}

// Calls body(first block, elements of its group to skip, i, count) for the groups that elements
// first .. first + n - 1 lie in: count of them, from the array's element i on.
template <typename Body>
POLYREME_INLINE void for_groups(uint64_t first, int64_t n, Body body) {
  for (int64_t i = 0; i < n;) {
    const uint64_t skip = (first + static_cast<uint64_t>(i)) % kGroup;
    const int64_t room = static_cast<int64_t>(kGroup - skip);
    const int64_t count = n - i < room ? n - i : room;
    body((first + static_cast<uint64_t>(i) - skip) / 4, static_cast<int>(skip), i, count);
    i += count;
  }
}

template <typename T>
void dropout_all(const T* x, T* y, int64_t n, const RandomKey& key, uint64_t first_element,
                 DropoutRule rule) {
  const v16f scale = broadcast(rule.keep_scale);
  for_groups(first_element, n, [=, &key](uint64_t block, int skip, int64_t at, int64_t count) {
    const uint64_t kept = keep_bits(key, block, rule.threshold) >> skip;
    for_lanes(count, [=](int64_t i, auto lanes) {
      const v16f factor = select(mask_from_bits(static_cast<uint32_t>(kept >> i) & 0xffff), scale, zero());
      store(y + at + i, load(x + at + i, lanes) * factor, lanes);
    });
  });
}

}  // namespace

void dropout(Element type, const void* x, void* y, int64_t n, const RandomKey& key, uint64_t first_element,
             DropoutRule rule) {
  with_element(type, [=, &key](auto t) {
    using T = decltype(t);
    dropout_all(static_cast<const T*>(x), static_cast<T*>(y), n, key, first_element, rule);
  });
}

void fill_normal(float* out, int64_t n, const RandomKey& key, uint64_t first_element, float std) {
  for_groups(first_element, n, [=, &key](uint64_t block, int skip, int64_t at, int64_t count) {
    float group[kGroup];
    normal_group(key, block, static_cast<double>(std), group);
    for (int64_t i = 0; i < count; ++i) out[at + i] = group[skip + i];
  });
}

}  // namespace polyreme::cpu::POLYREME_ISA
