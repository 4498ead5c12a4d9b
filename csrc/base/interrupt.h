#pragma once

#include <chrono>
#include <functional>

namespace polyreme {

// While it lives, everything in which this thread waits for longer calls `check` now and then, which may
// throw and so ends the wait: a Ctrl-C in Python, say. Scopes nest; all of their checks are made. Of the
// thread and not of an object, because the waits are far below whoever knows what may end them.
class InterruptScope {
 public:
  explicit InterruptScope(std::function<void()> check);
  ~InterruptScope();
  InterruptScope(const InterruptScope&) = delete;
  InterruptScope& operator=(const InterruptScope&) = delete;

 private:
  friend void check_interrupt();

  std::function<void()> check_;
  InterruptScope* outer_;
  std::chrono::steady_clock::time_point next_;
};

// How often a wait calls check_interrupt() at least; more often does not cost more.
inline constexpr std::chrono::milliseconds kInterruptInterval{50};

// Throws what a check of this thread's scopes throws. Without one it costs nothing.
void check_interrupt();

}  // namespace polyreme
