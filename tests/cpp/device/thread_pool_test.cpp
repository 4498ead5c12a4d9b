#include "device/cpu/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace polyreme {
namespace {

class ThreadPoolTest : public ::testing::TestWithParam<int> {};

TEST_P(ThreadPoolTest, CallsEachTaskOnce) {
  ThreadPool pool(GetParam());
  EXPECT_EQ(pool.num_threads(), GetParam());
  for (int64_t num_tasks : {0, 1, 2, 3, 7, 64, 1000}) {
    std::vector<std::atomic<int>> calls(static_cast<size_t>(num_tasks));
    std::atomic<int> bad_threads{0};
    parallel_for(pool, num_tasks, [&](int64_t task, int thread) {
      calls[static_cast<size_t>(task)].fetch_add(1);
      if (thread < 0 || thread >= pool.num_threads()) bad_threads.fetch_add(1);
    });
    for (const std::atomic<int>& count : calls) EXPECT_EQ(count.load(), 1);
    EXPECT_EQ(bad_threads.load(), 0);
  }
}

TEST_P(ThreadPoolTest, ManyShortLoopsSeeTheirOwnTasks) {
  // Loops of changing length back to back: a worker that wakes late must not take a task of one
  // loop with the function of another. Plain (not atomic) cells also check visibility under TSan.
  ThreadPool pool(GetParam());
  std::vector<int64_t> cells(9);
  for (int64_t round = 0; round < 5000; ++round) {
    const int64_t num_tasks = 1 + round % 9;
    parallel_for(pool, num_tasks,
                 [&](int64_t task, int) { cells[static_cast<size_t>(task)] = round * 16 + task; });
    for (int64_t task = 0; task < num_tasks; ++task) {
      ASSERT_EQ(cells[static_cast<size_t>(task)], round * 16 + task);
    }
  }
}

TEST_P(ThreadPoolTest, WakesAfterSleeping) {
  ThreadPool pool(GetParam());
  for (int round = 0; round < 5; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    std::atomic<int> calls{0};
    parallel_for(pool, 20, [&](int64_t, int) { calls.fetch_add(1); });
    EXPECT_EQ(calls.load(), 20);
  }
}

TEST_P(ThreadPoolTest, RethrowsAndStaysUsable) {
  ThreadPool pool(GetParam());
  for (int round = 0; round < 50; ++round) {
    try {
      parallel_for(pool, 100, [&](int64_t task, int) {
        if (task == 17) throw std::runtime_error("task 17");
      });
      FAIL() << "the exception was lost";
    } catch (const std::runtime_error& error) {
      EXPECT_EQ(std::string(error.what()), "task 17");
    }
    std::atomic<int> calls{0};
    parallel_for(pool, 10, [&](int64_t, int) { calls.fetch_add(1); });
    ASSERT_EQ(calls.load(), 10);
  }
}

TEST_P(ThreadPoolTest, NestedLoopsRunSeriallyOnTheSameThread) {
  ThreadPool pool(GetParam());
  std::atomic<int> calls{0}, moved{0};
  parallel_for(pool, 8, [&](int64_t, int outer_thread) {
    const std::thread::id id = std::this_thread::get_id();
    parallel_for(pool, 5, [&](int64_t, int inner_thread) {
      calls.fetch_add(1);
      if (inner_thread != outer_thread || std::this_thread::get_id() != id) moved.fetch_add(1);
    });
  });
  EXPECT_EQ(calls.load(), 40);
  EXPECT_EQ(moved.load(), 0);
}

TEST_P(ThreadPoolTest, ScratchIsAlignedPrivateAndGrows) {
  ThreadPool pool(GetParam());
  std::vector<void*> pieces(static_cast<size_t>(GetParam()));
  for (size_t bytes : {size_t{0}, size_t{100}, size_t{4096}, size_t{3} << 20}) {
    for (int thread = 0; thread < GetParam(); ++thread) {
      void* piece = pool.scratch(thread, bytes);
      ASSERT_EQ(reinterpret_cast<uintptr_t>(piece) % 64, 0u);
      std::memset(piece, thread, bytes);
      EXPECT_EQ(pool.scratch(thread, bytes / 2), piece);
      pieces[static_cast<size_t>(thread)] = piece;
    }
    for (int thread = 1; thread < GetParam(); ++thread) {
      EXPECT_NE(pieces[static_cast<size_t>(thread)], pieces[0]);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Threads, ThreadPoolTest, ::testing::Values(1, 2, 3, 4, 8));

TEST(ThreadPool, RefusesNoThreads) {
  EXPECT_THROW(ThreadPool(0), std::invalid_argument);
  EXPECT_THROW(ThreadPool(-1), std::invalid_argument);
}

}  // namespace
}  // namespace polyreme
