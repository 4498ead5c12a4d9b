// Loops over arrays in steps of sixteen lanes, with the tail handled by the same code.
#pragma once

#include "ops/cpu/kernels/vec.h"

namespace polyreme::cpu::POLYREME_ISA {

// How many of the sixteen lanes at hand exist: all of them, or the first n.
struct FullLanes {};
struct TailLanes {
  int n;
};

// T: float, bf16 or f16.
template <typename T>
POLYREME_INLINE v16f load(const T* p, FullLanes) {
  return load(p);
}
template <typename T>
POLYREME_INLINE v16f load(const T* p, TailLanes tail) {
  return load_partial(p, tail.n);
}
template <typename T>
POLYREME_INLINE void store(T* p, v16f a, FullLanes) {
  store(p, a);
}
template <typename T>
POLYREME_INLINE void store(T* p, v16f a, TailLanes tail) {
  store_partial(p, a, tail.n);
}
// Lanes that do not exist get `otherwise`.
POLYREME_INLINE v16f keep(v16f a, v16f, FullLanes) { return a; }
POLYREME_INLINE v16f keep(v16f a, v16f otherwise, TailLanes tail) {
  return select(first_lanes(tail.n), a, otherwise);
}

// Calls body(i, lanes) for i = 0, 16, 32, ... < n.
template <typename Body>
POLYREME_INLINE void for_lanes(int64_t n, Body body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, FullLanes{});
  if (i < n) body(i, TailLanes{static_cast<int>(n - i)});
}

// The same for reductions with kChains accumulators: body(i, lanes, chain), chain = (i / 16) % kChains.
// The fixed assignment fixes the order of the sum; several chains hide the latency of the additions.
template <int kChains, typename Body>
POLYREME_INLINE void for_lanes_in_chains(int64_t n, Body body) {
  int64_t i = 0;
  for (; i + kChains * kLanes <= n; i += kChains * kLanes) {
#pragma GCC unroll 8
    for (int chain = 0; chain < kChains; ++chain) body(i + chain * kLanes, FullLanes{}, chain);
  }
#pragma GCC unroll 8
  for (int chain = 0; chain < kChains; ++chain) {
    if (i + kLanes <= n) {
      body(i, FullLanes{}, chain);
    } else if (i < n) {
      body(i, TailLanes{static_cast<int>(n - i)}, chain);
    }
    i += kLanes;
  }
}

// The sum of all lanes of a power of two of accumulators, pairwise.
template <int kChains>
POLYREME_INLINE float reduce_chains(const v16f* acc) {
  if constexpr (kChains == 1) {
    return reduce_sum(acc[0]);
  } else {
    v16f half[kChains / 2];
#pragma GCC unroll 8
    for (int i = 0; i < kChains / 2; ++i) half[i] = acc[i] + acc[i + kChains / 2];
    return reduce_chains<kChains / 2>(half);
  }
}

}  // namespace polyreme::cpu::POLYREME_ISA
