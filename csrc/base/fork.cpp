#include "base/fork.h"

#include <pthread.h>

#include <atomic>

namespace polyreme {
namespace {

std::atomic<uint32_t> generation{0};

}  // namespace

uint32_t fork_generation() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1); });
  (void)registered;
  return generation.load(std::memory_order_relaxed);
}

}  // namespace polyreme
