// Ranks as threads of this process.
#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "mesh/world.h"

namespace polyreme::testing {

// Calls body(world) on `size` threads, each a rank with a device of its own. Once all threads have
// ended, throws the exception that came first.
template <typename Body>
void run_ranks(int size, const CpuDeviceOptions& device, Body&& body) {
  constexpr std::chrono::seconds kTimeout{20};
  std::vector<std::unique_ptr<World>> worlds = make_local_worlds(size, LocalDevice::kCpu, device, kTimeout);
  std::mutex mutex;
  std::exception_ptr first_error;
  std::vector<std::thread> threads;
  for (std::unique_ptr<World>& world : worlds)
    threads.emplace_back([&] {
      try {
        body(*world);
      } catch (...) {
        {
          const std::lock_guard lock(mutex);
          if (!first_error) first_error = std::current_exception();
        }
        world.reset();  // the others learn that this rank is gone
      }
    });
  for (std::thread& thread : threads) thread.join();
  if (first_error) std::rethrow_exception(first_error);
}

}  // namespace polyreme::testing
