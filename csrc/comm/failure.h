#pragma once

#include <cstdint>
#include <string>

#include "base/error.h"

namespace polyreme {

// Why a group is broken. Plain bytes: it crosses process borders.
enum class FailureKind : uint32_t { kNone, kPeerLost, kTimeout, kMismatch };

// Throws PeerLost, Timeout or CollectiveMismatch.
[[noreturn]] inline void throw_failure(FailureKind kind, const std::string& text) {
  switch (kind) {
    case FailureKind::kTimeout:
      throw Timeout(text);
    case FailureKind::kMismatch:
      throw CollectiveMismatch(text);
    default:
      throw PeerLost(text);
  }
}

}  // namespace polyreme
