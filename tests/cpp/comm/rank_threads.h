#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "comm/factory.h"
#include "device/cpu/cpu_device.h"

namespace polyreme {

// The class of an exception, as the tests name it.
inline std::string outcome_of(const std::exception_ptr& error) {
  if (!error) return "ok";
  try {
    std::rethrow_exception(error);
  } catch (const Timeout& e) {
    return std::string("Timeout: ") + e.what();
  } catch (const PeerLost& e) {
    return std::string("PeerLost: ") + e.what();
  } catch (const CollectiveMismatch& e) {
    return std::string("CollectiveMismatch: ") + e.what();
  } catch (const CommError& e) {
    return std::string("CommError: ") + e.what();
  } catch (const DeviceError& e) {
    return std::string("DeviceError: ") + e.what();
  } catch (const InvalidArgument& e) {
    return std::string("InvalidArgument: ") + e.what();
  } catch (const OutOfMemory& e) {
    return std::string("OutOfMemory: ") + e.what();
  } catch (const std::exception& e) {
    return std::string("exception: ") + e.what();
  }
}

// Runs `rank_main` on a thread per rank, each with a device of its own. The communicator dies with the
// thread's function, by an exception too. Returns "ok" or "<class>: <message>" by rank.
inline std::vector<std::string> run_on_threads(std::vector<std::unique_ptr<Communicator>> communicators,
                                               const CpuDeviceOptions& device_options,
                                               const std::function<void(Communicator&, Device&)>& rank_main) {
  std::vector<std::exception_ptr> errors(communicators.size());
  std::vector<std::thread> threads;
  for (size_t r = 0; r < communicators.size(); ++r)
    threads.emplace_back([&, r, mine = std::move(communicators[r])]() mutable {
      try {
        const auto device = make_cpu_device(device_options);
        const auto communicator = std::move(mine);
        rank_main(*communicator, *device);
      } catch (...) {
        errors[r] = std::current_exception();
      }
    });
  for (std::thread& thread : threads) thread.join();
  std::vector<std::string> outcomes;
  for (const std::exception_ptr& error : errors) outcomes.push_back(outcome_of(error));
  return outcomes;
}

// The same over a local group.
inline std::vector<std::string> run_on_threads(int size, const CommOptions& options,
                                               const CpuDeviceOptions& device_options,
                                               const std::function<void(Communicator&, Device&)>& rank_main) {
  return run_on_threads(make_local_communicators(size, options), device_options, rank_main);
}

}  // namespace polyreme
