// Ranks as threads of this process.
#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <thread>
#include <vector>

#include "mesh/world.h"

namespace polyreme::testing {

// Calls body(world) on `size` threads, each a rank with a device of its own (schedule_seed + rank).
// The first exception of any rank is thrown again once all threads have ended.
template <typename Body>
void run_ranks(int size, CpuDeviceOptions device, Body&& body) {
  constexpr std::chrono::seconds kTimeout{20};
  std::vector<std::unique_ptr<World>> worlds = make_local_worlds(size, device, kTimeout);
  std::vector<std::exception_ptr> errors(worlds.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < worlds.size(); ++rank)
    threads.emplace_back([&, rank] {
      try {
        body(*worlds[rank]);
      } catch (...) {
        errors[rank] = std::current_exception();
        worlds[rank].reset();  // the others learn that this rank is gone
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
}

}  // namespace polyreme::testing
