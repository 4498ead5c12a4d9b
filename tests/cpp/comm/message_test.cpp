// Collectives over messages, on an endpoint among threads.

#include <gtest/gtest.h>

#include "comm/conformance.h"
#include "comm/message_threads.h"

namespace polyreme {
namespace {

enum class Way { kDirect, kManySteps };  // the algorithms of small groups, and those of large ones

struct Place {
  int size;
  Way way;
  CpuExecutor executor = CpuExecutor::kImmediate;
};

class MessageGroupTest : public ::testing::TestWithParam<Place> {
 protected:
  void run(int64_t chunk_bytes, const RankMain& rank_main) {
    const Place place = GetParam();
    MessageOptions options = message_options(chunk_bytes);
    if (place.way == Way::kManySteps) options.max_direct_ranks = options.min_halving_ranks = 1;
    EXPECT_EQ(run_over_messages(place.size, options, rank_main, place.executor),
              std::vector<std::string>(static_cast<size_t>(place.size), "ok"));
  }
};

// The expected bits are computed by tree_order alone, as in the tests of the other transports.
TEST_P(MessageGroupTest, Conforms) { run(conformance::kSmallChunk, conformance::check_everything); }

TEST_P(MessageGroupTest, TinyChunks) {
  run(1, [](Communicator& comm, Device& device) {
    const auto stream = device.create_stream("test");
    conformance::check_reductions<float>(comm, device, *stream, 999, ReduceOp::kSum, 3);
  });
}

TEST_P(MessageGroupTest, StreamsAndSubgroups) {
  if (GetParam().size % 2 != 0) GTEST_SKIP() << "the groups of this check are pairs";
  run(conformance::kSmallChunk, conformance::check_streams_and_subgroups);
}

std::string place_name(const ::testing::TestParamInfo<Place>& info) {
  return concat(info.param.way == Way::kDirect ? "direct" : "steps", info.param.size,
                info.param.executor == CpuExecutor::kImmediate ? "" : "deferred");
}
INSTANTIATE_TEST_SUITE_P(Sizes, MessageGroupTest,
                         ::testing::Values(Place{1, Way::kDirect}, Place{2, Way::kDirect},
                                           Place{3, Way::kDirect}, Place{4, Way::kDirect},
                                           Place{7, Way::kDirect}, Place{8, Way::kDirect},
                                           Place{2, Way::kManySteps}, Place{3, Way::kManySteps},
                                           Place{4, Way::kManySteps}, Place{8, Way::kManySteps},
                                           Place{4, Way::kDirect, CpuExecutor::kDeferred}),
                         place_name);

// Where the default options change the way: halving from 16 ranks on, calls opened in steps above 32.
TEST(MessageGroups, ManyRanks) {
  for (const int size : {16, 33, 64})
    EXPECT_EQ(run_over_messages(size, message_options(int64_t{256} << 10),
                                [](Communicator& comm, Device& device) {
                                  const auto stream = device.create_stream("test");
                                  for (const int64_t count : {7, 1001})
                                    conformance::check_reductions<float>(comm, device, *stream, count,
                                                                         ReduceOp::kSum, 3);
                                  comm.barrier(std::chrono::seconds(60));
                                }),
              std::vector<std::string>(static_cast<size_t>(size), "ok"));
}

class LargeMessages : public MessageGroupTest {};
TEST_P(LargeMessages, Conform) { run(conformance::kLargeChunk, conformance::check_large); }
INSTANTIATE_TEST_SUITE_P(Sizes, LargeMessages,
                         ::testing::Values(Place{2, Way::kDirect}, Place{7, Way::kDirect},
                                           Place{8, Way::kManySteps}),
                         place_name);

}  // namespace
}  // namespace polyreme
