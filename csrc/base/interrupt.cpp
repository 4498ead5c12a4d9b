#include "base/interrupt.h"

#include <utility>

namespace polyreme {
namespace {

using Clock = std::chrono::steady_clock;

thread_local InterruptScope* innermost = nullptr;

}  // namespace

// The first check comes after a while: a call that does not wait never makes one.
InterruptScope::InterruptScope(std::function<void()> check)
    : check_(std::move(check)), outer_(innermost), next_(Clock::now() + kInterruptInterval) {
  innermost = this;
}

InterruptScope::~InterruptScope() { innermost = outer_; }

void check_interrupt() {
  if (innermost == nullptr) return;
  const Clock::time_point now = Clock::now();
  if (now < innermost->next_) return;
  innermost->next_ = now + kInterruptInterval;
  for (const InterruptScope* scope = innermost; scope != nullptr; scope = scope->outer_) scope->check_();
}

}  // namespace polyreme
