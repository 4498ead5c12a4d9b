// What can go wrong between the two ranks of a message.

#include <gtest/gtest.h>

#include "comm/conformance.h"
#include "comm/rank_threads.h"

namespace polyreme {
namespace {

using conformance::to_device;
using conformance::to_host;
using std::chrono::milliseconds;
using std::chrono::seconds;

using Outcomes = std::vector<std::string>;
using RankMain = std::function<void(Communicator&, Device&, Stream&)>;

Outcomes run(int size, milliseconds timeout, const RankMain& rank_main) {
  CommOptions options;
  options.chunk_bytes = conformance::kSmallChunk;
  options.timeout = timeout;
  return run_on_threads(size, options, {}, [&](Communicator& comm, Device& device) {
    const auto stream = device.create_stream("test");
    rank_main(comm, device, *stream);
  });
}

void expect_text(const std::string& outcome, const std::string& type, const std::vector<std::string>& parts) {
  EXPECT_TRUE(outcome.starts_with(type)) << outcome;
  for (const std::string& part : parts)
    EXPECT_NE(outcome.find(part), std::string::npos) << "no '" << part << "' in " << outcome;
}

Tensor ones(Device& device, int64_t count) {
  return to_device(device, std::vector<float>(static_cast<size_t>(count), 1.0F));
}

TEST(LocalExchange, ADifferenceIsFoundBeforeTheReceiverIsWritten) {
  for (const bool other_dtype : {false, true})
    for (const bool sender_first : {false, true}) {
      const Outcomes outcomes = run(3, seconds(20), [&](Communicator& comm, Device& device, Stream& stream) {
        if (comm.rank() == 2) return;
        comm.rank() == 0 ? comm.send(ones(device, 3), 1, stream)->wait()
                         : comm.receive(ones(device, 3), 0, stream)->wait();
        if ((comm.rank() == 0) != sender_first) std::this_thread::sleep_for(milliseconds(50));
        if (comm.rank() == 0) return comm.send(ones(device, 10), 1, stream)->wait();
        const std::vector<int32_t> before(other_dtype ? 10 : 9, 7);
        const Tensor data = to_device(device, before, other_dtype ? DType::kI32 : DType::kF32);
        try {
          comm.receive(data, 0, stream)->wait();
        } catch (const CollectiveMismatch&) {
          EXPECT_EQ(to_host<int32_t>(data), before);
          throw;
        }
      });
      for (const int r : {0, 1})
        expect_text(outcomes[static_cast<size_t>(r)], "CollectiveMismatch",
                    {"message 2 from rank 0 to rank 1: rank 0 sends float32[10], rank 1 receives ",
                     other_dtype ? "int32[10]" : "float32[9]"});
    }
}

TEST(LocalExchange, AMissingPeerIsNamedWithWhatItDidLast) {
  const Outcomes outcomes = run(3, milliseconds(400), [](Communicator& comm, Device& device, Stream& stream) {
    comm.broadcast(ones(device, 4), 0, stream)->wait();
    if (comm.rank() == 0) return comm.receive(ones(device, 4), 2, stream)->wait();
    std::this_thread::sleep_for(milliseconds(1200));
  });
  expect_text(outcomes[0], "Timeout",
              {"group 'world', rank 0, exchange", "sequence 1", "0.4 s", "rank 2 (host",
               "last completed broadcast (sequence 1)", "has called nothing since"});
  EXPECT_EQ(outcomes[0].find("rank 1 (host"), std::string::npos) << outcomes[0];
}

// Whoever waited longer tells both: what the other one is in, and that it waits for the teller.
void expect_each_other(const Outcomes& outcomes, const std::string& call_of_0, const std::string& call_of_1) {
  for (const std::string& outcome : outcomes) {
    const auto told_by = [&](int teller, const std::string& call_of_other) {
      return outcome.find(concat("waited 0.4 s for rank ", 1 - teller, " (host")) != std::string::npos &&
             outcome.find(concat("is in ", call_of_other, " (sequence 1), where it waits for rank ",
                                 teller)) != std::string::npos;
    };
    EXPECT_TRUE(outcome.starts_with("Timeout") && (told_by(0, call_of_1) || told_by(1, call_of_0)))
        << outcome;
  }
}

TEST(LocalExchange, ACollectiveAndAnExchangeThatWaitForEachOther) {
  for (const int receiver : {0, 1}) {
    const Outcomes outcomes =
        run(2, milliseconds(400), [receiver](Communicator& comm, Device& device, Stream& stream) {
          if (comm.rank() == receiver) return comm.receive(ones(device, 4), 1 - receiver, stream)->wait();
          comm.all_reduce(ones(device, 4), ReduceOp::kSum, stream)->wait();
        });
    expect_each_other(outcomes, receiver == 0 ? "exchange" : "all_reduce",
                      receiver == 0 ? "all_reduce" : "exchange");
  }
}

TEST(LocalExchange, TwoThatReceiveFromEachOther) {
  const Outcomes outcomes = run(2, milliseconds(400), [](Communicator& comm, Device& device, Stream& stream) {
    comm.receive(ones(device, 4), 1 - comm.rank(), stream)->wait();
  });
  for (const std::string& outcome : outcomes)
    expect_text(outcome, "Timeout", {"is in exchange (sequence 1)"});
}

TEST(LocalExchange, ADepartureAndAnAbortEndTheWait) {
  const Outcomes left = run(2, seconds(60), [](Communicator& comm, Device& device, Stream& stream) {
    if (comm.rank() == 1) throw std::runtime_error("boom");
    comm.send(ones(device, 4), 1, stream)->wait();
  });
  expect_text(left[0], "PeerLost", {"rank 1 (host", "left the group"});
  const Outcomes aborted = run(3, seconds(60), [](Communicator& comm, Device& device, Stream& stream) {
    if (comm.rank() == 2) {
      std::this_thread::sleep_for(milliseconds(100));
      return comm.abort("the loader failed");
    }
    comm.receive(ones(device, 4), 2, stream)->wait();
  });
  for (const int r : {0, 1})
    expect_text(aborted[static_cast<size_t>(r)], "PeerLost", {"rank 2 (host", "the loader failed"});
}

// Whoever has got or given everything may leave, and is not missed.
TEST(LocalExchange, TheLastMessageCountsAlsoIfItsPeerLeaves) {
  for (int round = 0; round < 20; ++round)
    EXPECT_EQ(run(2, seconds(60),
                  [](Communicator& comm, Device& device, Stream& stream) {
                    const Tensor data = ones(device, 700);
                    comm.rank() == 0 ? comm.send(data, 1, stream)->wait()
                                     : comm.receive(data, 0, stream)->wait();
                  }),
              Outcomes(2, "ok"));
}

// More messages in flight than a rank has lanes, to ranks that take them in another order than they are sent,
// and of which some sit in an exchange that depends on a later one.
TEST(LocalExchange, MoreMessagesThanLanesDoNotBlockEachOther) {
  EXPECT_EQ(run(8, seconds(60),
                [](Communicator& comm, Device& device, Stream& stream) {
                  const int rank = comm.rank();
                  if (rank == 0) {
                    std::vector<Transfer> transfers;
                    for (int peer = 1; peer < 8; ++peer)
                      transfers.push_back({Transfer::Kind::kSend, ones(device, 5000 + peer), peer});
                    return comm.exchange(transfers, stream)->wait();
                  }
                  const Tensor data = to_device(device, std::vector<float>(static_cast<size_t>(5000 + rank)));
                  const Tensor token = to_device(device, std::vector<float>(1));
                  if (rank < 7) comm.receive(token, rank + 1, stream)->wait();  // rank 7 is served first
                  comm.receive(data, 0, stream)->wait();
                  if (rank > 1) comm.send(token, rank - 1, stream)->wait();
                  EXPECT_EQ(to_host<float>(data), std::vector<float>(static_cast<size_t>(5000 + rank), 1.0F));
                }),
            Outcomes(8, "ok"));
}

}  // namespace
}  // namespace polyreme
