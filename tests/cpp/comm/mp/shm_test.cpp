// Groups of real processes over POSIX shared memory.

#include <gtest/gtest.h>

#include "comm/conformance.h"
#include "comm/factory.h"
#include "comm/mp/rank_processes.h"
#include "comm/rank_threads.h"

namespace polyreme {
namespace {

using std::chrono::seconds;

struct Place {
  int size;
  CpuExecutor executor;
};

class ShmGroup : public ::testing::TestWithParam<Place> {
 protected:
  void run(int64_t chunk_bytes, const std::function<void(Communicator&, Device&)>& rank_main) {
    const Place place = GetParam();
    RankProcesses ranks(place.size, [&, place](RankProcesses& self, Store& store, int rank) {
      CommOptions options;
      options.chunk_bytes = chunk_bytes;
      options.timeout = seconds(60);
      const auto device =
          make_cpu_device({.executor = place.executor, .schedule_seed = static_cast<uint64_t>(rank)});
      const auto comm = make_shm_communicator(store, rank, place.size, self.job_id(), options);
      comm->barrier(seconds(60));
      conformance::expect(segments_left(self.job_id()).empty(), "the segment still has a name");
      comm->barrier(seconds(60));  // before a subgroup is made, whose memory has a name for a moment
      rank_main(*comm, *device);
    });
    for (const RankResult& result : ranks.wait(seconds(60))) EXPECT_EQ(result.outcome, "ok");
    EXPECT_EQ(segments_left(ranks.job_id()), std::vector<std::string>());
  }
};

// The expected bits are computed by tree_order alone, as in the test of local groups: what passes
// both has the same bits in both.
TEST_P(ShmGroup, Conforms) { run(conformance::kSmallChunk, conformance::check_everything); }

TEST_P(ShmGroup, ConformsWithLargeChunks) { run(conformance::kLargeChunk, conformance::check_large); }

TEST_P(ShmGroup, ConformsInItsHeap) {
  if (GetParam().size > 4) return;
  run(conformance::kSmallChunk, [](Communicator& comm, Device& device) {
    conformance::check_shared_memory(comm, device);
    const auto half =
        comm.split(comm.rank() % 2, -comm.rank(), "half");  // the heap of the world, in another order
    conformance::check_shared_memory(*half, device);
  });
}

TEST_P(ShmGroup, StreamsAndSubgroups) {
  if (GetParam().size % 2 != 0) return;
  run(conformance::kSmallChunk, conformance::check_streams_and_subgroups);
}

std::string place_name(const ::testing::TestParamInfo<Place>& info) {
  return concat(info.param.executor == CpuExecutor::kImmediate ? "immediate" : "deferred", info.param.size);
}
INSTANTIATE_TEST_SUITE_P(Sizes, ShmGroup,
                         ::testing::Values(Place{1, CpuExecutor::kImmediate},
                                           Place{2, CpuExecutor::kImmediate},
                                           Place{4, CpuExecutor::kImmediate},
                                           Place{7, CpuExecutor::kImmediate},
                                           Place{3, CpuExecutor::kDeferred}),
                         place_name);

}  // namespace
}  // namespace polyreme
