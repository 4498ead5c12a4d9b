#pragma once

#include <memory>

#include "device/cpu/cpu_device.h"

namespace polyreme {

// The device behind CpuExecutor::kDeferred. One host thread uses it.
std::unique_ptr<Device> make_deferred_device(const CpuDeviceOptions& options);

// Runs `function` and, where the recorder is on, records its span.
void run_recorded(const OpInfo& info, uint32_t stream_id, FlightRecorder& recorder, const CpuContext& context,
                  const CpuFunction& function);

}  // namespace polyreme
