#pragma once

#include <atomic>

namespace polyreme {

// Fences that are not tied to one access. ThreadSanitizer knows none (and the compiler warns of them there):
// it judges by the accesses alone, which have to be atomic anyway.

// Everything before is visible to all threads before anything after is read.
inline void full_fence() {
#if defined(__SANITIZE_THREAD__)
  std::atomic<int> any{0};
  any.exchange(1, std::memory_order_seq_cst);
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

// What is written after it becomes visible no sooner than what was read and written before.
inline void release_fence() {
#if defined(__SANITIZE_THREAD__)
  full_fence();
#else
  std::atomic_thread_fence(std::memory_order_release);
#endif
}

}  // namespace polyreme
