#pragma once

#include <memory>

#include "device/cpu/cpu_device.h"

namespace polyreme {

// A CPU device for dry runs: it hands out memory that does not exist, and drops every operation instead of
// running it, so that a step of any size costs nothing but its count of memory. What a background stream is
// given keeps its buffers until something waits for it: the latest moment at which a real one would let go of
// them. Any access to its memory by the host is an error. Values read from it are those that the host's
// memory had before.
std::unique_ptr<Device> make_dry_device();

bool is_dry(const Device& device);

}  // namespace polyreme
