#pragma once

#include <pybind11/pybind11.h>

#include <optional>

#include "base/interrupt.h"
#include "comm/communicator.h"

namespace polyreme::bindings {

// Instead of gil_scoped_release around a call that may wait for other ranks. Python's signal handlers run
// while the main thread waits; where one raises (Ctrl-C), the call ends with that exception, and `group`,
// with those that were split from it, is aborted, so that the other ranks learn why. A handler must not use
// the group itself.
class Interruptible {
 public:
  explicit Interruptible(Communicator* group = nullptr);
  ~Interruptible() = default;  // in reverse order: the GIL comes back first
  Interruptible(const Interruptible&) = delete;
  Interruptible& operator=(const Interruptible&) = delete;

 private:
  void check();

  Communicator* group_;
  std::optional<InterruptScope> scope_;
  std::optional<pybind11::gil_scoped_release> release_;
};

// For the translator of exceptions: whatever a call throws that Ctrl-C ended, Ctrl-C is the cause. Makes it
// Python's current error, once. With the GIL.
bool restore_interrupt();

}  // namespace polyreme::bindings
