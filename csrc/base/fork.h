#pragma once

#include <cstdint>

#include "base/error.h"

namespace polyreme {

// Grows in the child of every fork of this process.
uint32_t fork_generation();

// Lets an object know that a fork inherited it: the threads and connections behind it are the parent's.
class ForkGuard {
 public:
  bool is_inherited() const { return generation_ != fork_generation(); }
  // Throws InvalidArgument in a fork, naming `what`.
  void require_own(const char* what) const {
    require(!is_inherited(), what,
            " belongs to the process that this one was forked from, and cannot be used here; ",
            "start workers with spawn instead of fork, or leave the work to the parent");
  }

 private:
  uint32_t generation_ = fork_generation();
};

}  // namespace polyreme
