#pragma once

#include <cstdint>

// CUDA's kernels draw the same numbers.
#ifdef __CUDACC__
#define POLYREME_HOST_DEVICE __host__ __device__
#else
#define POLYREME_HOST_DEVICE
#endif

namespace polyreme {

// Philox 4x32-10, a counter-based random number generator: Salmon et al., "Parallel random
// numbers: as easy as 1, 2, 3", SC 2011. There is no state: the numbers are a pure function of
// (seed, purpose, step, element), so every rank that needs element i of a stream gets the same
// value, whoever owns it.
struct Philox4 {
  uint32_t word[4];
};

[[gnu::always_inline]] POLYREME_HOST_DEVICE inline Philox4 philox_4x32_10(const uint32_t counter[4],
                                                                          const uint32_t key[2]) {
  uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
  uint32_t k0 = key[0], k1 = key[1];
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53} * c0;
    const uint64_t p1 = uint64_t{0xCD9E8D57} * c2;
    const uint32_t hi0 = static_cast<uint32_t>(p0 >> 32), lo0 = static_cast<uint32_t>(p0);
    const uint32_t hi1 = static_cast<uint32_t>(p1 >> 32), lo1 = static_cast<uint32_t>(p1);
    c0 = hi1 ^ c1 ^ k0;
    c1 = lo1;
    c2 = hi0 ^ c3 ^ k1;
    c3 = lo0;
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return {{c0, c1, c2, c3}};
}

// What a stream of random numbers is for; a part of the counter, so streams never overlap.
enum class RandomPurpose : uint32_t { kInit = 1, kDropout = 2, kDataOrder = 3, kRounding = 4 };

// Names one stream: `stream` tells uses of one purpose apart (a parameter's name hash, a dropout
// layer's index), `step` is the training step (0 where it does not apply).
struct RandomKey {
  uint64_t seed = 0;
  RandomPurpose purpose = RandomPurpose::kInit;
  uint32_t stream = 0;
  uint32_t step = 0;
};

// Four random words for elements 4*block .. 4*block+3 of the stream.
[[gnu::always_inline]] POLYREME_HOST_DEVICE inline Philox4 random_block(const RandomKey& key,
                                                                        uint64_t block) {
  const uint32_t key_words[2] = {static_cast<uint32_t>(key.seed), static_cast<uint32_t>(key.seed >> 32)};
  // Blocks stay below 2^60, so the purpose fits above them.
  const uint32_t counter[4] = {
      static_cast<uint32_t>(block),
      static_cast<uint32_t>(block >> 32) | (static_cast<uint32_t>(key.purpose) << 28), key.stream, key.step};
  return philox_4x32_10(counter, key_words);
}

}  // namespace polyreme
