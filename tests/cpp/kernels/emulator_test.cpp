// The emulator itself: what it runs right, and faults that were planted and that it must find.
#include <set>

#include "emulator/fake_gpu.h"
#include "kernels/kernel_test.h"
#include "kernels/launch.h"
#include "kernels/warp.cuh"

namespace polyreme::kernel_test {
namespace {

using kernels::kAllLanes;

// Each block reverses its piece of `x` through shared memory.
template <bool kBarrier>
__global__ void reverse_kernel(int* x) {
  POLYREME_SHARED(int, staged, 96);
  const int i = static_cast<int>(threadIdx.x), n = static_cast<int>(blockDim.x);
  int* piece = x + static_cast<int>(blockIdx.x) * n;
  staged[i] = piece[i];
  if (kBarrier) __syncthreads();
  piece[i] = staged[n - 1 - i];
}

// Passes a ring of numbers on by one thread, many times; without the second barrier a thread can be a round
// ahead and overwrite what another has still to read.
template <bool kBarrier>
__global__ void ring_kernel(int* x) {
  POLYREME_SHARED(int, ring, 64);
  const int i = static_cast<int>(threadIdx.x);
  int mine = x[i];
  for (int round = 0; round < 10; ++round) {
    ring[i] = mine;
    __syncthreads();
    mine = ring[(i + 1) % 64];
    if (kBarrier) __syncthreads();
  }
  x[i] = mine;
}

// The sum of a warp by halving in shared memory.
template <bool kBarrier>
__global__ void halving_kernel(int* x) {
  POLYREME_SHARED(int, sums, 32);
  const int i = static_cast<int>(threadIdx.x);
  sums[i] = x[i];
  for (int half = 16; half > 0; half /= 2) {
    if (kBarrier) __syncwarp();
    if (i < half) sums[i] += sums[i + half];
  }
  if (i == 0) x[0] = sums[0];
}

__global__ void overrun_kernel(int* x, int limit) {
  if (static_cast<int>(threadIdx.x) <= limit) x[threadIdx.x] = 1;
}
__global__ void shared_overrun_kernel(int* x) {
  POLYREME_SHARED(int, staged, 32);
  staged[threadIdx.x + 1] = 1;
  x[threadIdx.x] = staged[threadIdx.x];
}
__global__ void half_block_kernel(int*) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncwarp();
    __syncthreads();
  }
}
__global__ void gone_lane_kernel(int* x) {
  if (threadIdx.x == 5) return;
  x[threadIdx.x] = __shfl_xor_sync(kAllLanes, x[threadIdx.x], 1);
}

__global__ void intrinsics_kernel(int* sums, unsigned* votes, double* maxima) {
  const int i = static_cast<int>(threadIdx.x);
  const int lane = i % 32;
  sums[i] = kernels::warp_sum(i);
  const int up = __shfl_up_sync(kAllLanes, i, 3), down = __shfl_down_sync(kAllLanes, i, 30);
  sums[i] += 1000 * (up == (lane < 3 ? i : i - 3) && down == (lane > 1 ? i : i + 30));
  maxima[i] = __shfl_sync(kAllLanes, i + 0.5, 7);
  votes[i] = __ballot_sync(kAllLanes, lane % 3 == 0);
  votes[i] += __any_sync(kAllLanes, lane == 31) && !__all_sync(kAllLanes, lane == 31);
  votes[i] += static_cast<unsigned>(__syncthreads_or(i == 64) + __syncthreads_and(i != 64));
}

template <typename... Parameters, typename... Arguments>
void start(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, Arguments... arguments) {
  POLYREME_LAUNCH(kernel, blocks, threads, nullptr, arguments...);
  ASSERT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);
}

// How many of 100 seeds give other numbers than `wanted`.
int num_wrong(void (*kernel)(int*), unsigned blocks, unsigned threads, const std::vector<int>& from,
              const std::vector<int>& wanted) {
  int wrong = 0;
  for (uint64_t seed = 1; seed <= 100; ++seed) {
    fake_gpu::reset(1, seed);
    const Array<int> x(from);
    start(kernel, blocks, threads, x.data());
    wrong += x.values() != wanted;
    EXPECT_TRUE(fake_gpu::violations().empty()) << fake_gpu::violations()[0];
  }
  return wrong;
}

std::vector<int> counted(int count) {
  std::vector<int> values(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) values[static_cast<size_t>(i)] = i;
  return values;
}

TEST(Emulator, AMissingBarrierShows) {
  std::vector<int> reversed;
  for (int block = 0; block < 3; ++block)
    for (int i = 95; i >= 0; --i) reversed.push_back(block * 96 + i);
  EXPECT_EQ(num_wrong(&reverse_kernel<true>, 3, 96, counted(288), reversed), 0);
  EXPECT_EQ(num_wrong(&reverse_kernel<false>, 3, 96, counted(288), reversed), 100);
}

TEST(Emulator, AnEarlyOverwriteShows) {
  std::vector<int> passed = counted(64);
  for (int& x : passed) x = (x + 10) % 64;
  EXPECT_EQ(num_wrong(&ring_kernel<true>, 1, 64, counted(64), passed), 0);
  EXPECT_EQ(num_wrong(&ring_kernel<false>, 1, 64, counted(64), passed), 100);
}

TEST(Emulator, AMissingBarrierOfAWarpShows) {
  std::vector<int> summed = counted(32);
  summed[0] = 31 * 32 / 2;
  EXPECT_EQ(num_wrong(&halving_kernel<true>, 1, 32, counted(32), summed), 0);
  EXPECT_GE(num_wrong(&halving_kernel<false>, 1, 32, counted(32), summed), 99);
}

TEST(Emulator, Intrinsics) {
  for_seeds([] {
    const Array<int> sums(96);
    const Array<unsigned> votes(96);
    const Array<double> shuffled(96);
    start(&intrinsics_kernel, 1, 96, sums.data(), votes.data(), shuffled.data());
    EXPECT_TRUE(fake_gpu::violations().empty());
    for (int i = 0; i < 96; ++i) {
      const auto at = static_cast<size_t>(i);
      EXPECT_EQ(sums[at], i / 32 * 32 * 32 + 496 + 1000);
      EXPECT_EQ(votes[at], 0x49249249U + 1 + 1);
      EXPECT_EQ(shuffled[at], i / 32 * 32 + 7.5);
    }
  });
}

TEST(Emulator, OtherSeedsRunThreadsInOtherOrders) {
  std::set<std::vector<int>> orders;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    fake_gpu::reset(1, seed);
    const Array<int> order(64);
    const Array<int> next(std::vector<int>{0});
    void (*kernel)(int*, int*) = [](int* x, int* n) { x[atomicAdd(n, 1)] = static_cast<int>(threadIdx.x); };
    start(kernel, 1, 64, order.data(), next.data());
    orders.insert(order.values());
  }
  EXPECT_EQ(orders.size(), 20U);
}

TEST(Emulator, BarriersThatDoNotMeetAreReported) {
  fake_gpu::reset(1, 1);
  start(&half_block_kernel, 1, 64, static_cast<int*>(nullptr));
  ASSERT_EQ(fake_gpu::violations().size(), 1U);
  EXPECT_NE(fake_gpu::violations()[0].find("threads of a block wait at the barriers of lines"),
            std::string::npos);
  fake_gpu::reset(1, 1);
  const Array<int> x(counted(32));
  start(&gone_lane_kernel, 1, 32, x.data());
  ASSERT_GE(fake_gpu::violations().size(), 1U);
  EXPECT_NE(fake_gpu::violations()[0].find("returned"), std::string::npos) << fake_gpu::violations()[0];
}

TEST(Emulator, ALaunchThatCudaRefusesIsReported) {
  fake_gpu::reset(1, 1);
  const Array<int> x(counted(4));
  start(&overrun_kernel, 1, 1025, x.data(), 1);
  ASSERT_EQ(fake_gpu::violations().size(), 1U);
  EXPECT_NE(fake_gpu::violations()[0].find("1025 threads"), std::string::npos);
}

#ifdef __SANITIZE_ADDRESS__
using EmulatorDeathTest = ::testing::Test;
TEST(EmulatorDeathTest, AccessesOutOfBounds) {
  fake_gpu::reset(1, 1);
  const Array<int> x(counted(32));
  EXPECT_DEATH(start(&overrun_kernel, 1, 64, x.data(), 32), "heap-buffer-overflow");
  EXPECT_DEATH(start(&shared_overrun_kernel, 1, 32, x.data()), "heap-buffer-overflow");
}
#endif

}  // namespace
}  // namespace polyreme::kernel_test
