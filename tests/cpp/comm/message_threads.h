#pragma once

#include <string>
#include <vector>

#include "comm/cpu_communicator.h"
#include "comm/messages/message_transport.h"
#include "comm/rank_threads.h"
#include "comm/thread_endpoint.h"

namespace polyreme {

using RankMain = std::function<void(Communicator&, Device&)>;

inline MessageOptions message_options(int64_t chunk_bytes,
                                      std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  MessageOptions options;
  options.name = "world";
  options.timeout = timeout;
  options.chunk_bytes = chunk_bytes;
  return options;
}

// For ThreadEndpoint::on_exchange: the `at`-th exchange finds the link broken.
inline void break_at(ThreadEndpoint& endpoint, int at, int& count) {
  if (++count < at) return;
  endpoint.close();
  throw PeerLost("the cable was pulled");
}

// `rank_main` on a thread per rank of a group over messages; see run_on_threads.
inline std::vector<std::string> run_over_messages(std::vector<std::unique_ptr<ThreadEndpoint>> endpoints,
                                                  const MessageOptions& options, const RankMain& rank_main,
                                                  CpuExecutor executor = CpuExecutor::kImmediate) {
  std::vector<std::unique_ptr<Communicator>> communicators;
  for (auto& endpoint : endpoints)
    communicators.push_back(
        std::make_unique<CpuCommunicator>(std::make_unique<MessageTransport>(std::move(endpoint), options)));
  return run_on_threads(std::move(communicators), {.executor = executor},
                        [&](Communicator& comm, Device& device) {
                          static_cast<CpuCommunicator&>(comm).attach();
                          rank_main(comm, device);
                        });
}
inline std::vector<std::string> run_over_messages(int size, const MessageOptions& options,
                                                  const RankMain& rank_main,
                                                  CpuExecutor executor = CpuExecutor::kImmediate) {
  return run_over_messages(make_thread_endpoints(size), options, rank_main, executor);
}

}  // namespace polyreme
