// The memory that processes of a host read of each other in place.

#include "comm/shared_memory/heap.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>

#include "base/error.h"
#include "comm/mp/rank_processes.h"

namespace polyreme {
namespace {

// A heap and the view of it that a peer has.
class Heap : public ::testing::Test {
 protected:
  Heap() : job_(concat("heap", getpid())), source_(make_posix_source(job_)) {
    own_ = source_->create_arena(&name_);
    view_ = source_->attach_arena(name_);
    source_->forget(name_);
    heap_ = std::make_shared<SharedHeap>(own_, std::vector<std::shared_ptr<SharedMemory>>{own_, view_});
  }
  void* start() const { return own_->address(); }

  std::string job_, name_;
  std::shared_ptr<SharedMemorySource> source_;
  std::shared_ptr<SharedArena> own_;
  std::shared_ptr<SharedMemory> view_;
  std::shared_ptr<SharedHeap> heap_;
};

TEST_F(Heap, APeerFindsWhatIsPublished) {
  EXPECT_EQ(segments_left(job_), std::vector<std::string>());
  const std::shared_ptr<void> memory = heap_->allocate(10'000);
  auto* values = static_cast<uint8_t*>(memory.get());
  std::fill_n(values, 10'000, uint8_t{7});
  const uint64_t handle = heap_->publish(values + 5, 9'995);
  ASSERT_NE(handle, 0u);
  const char* seen = heap_->find(1, handle, 9'995);
  EXPECT_NE(static_cast<const void*>(seen), values + 5) << "the view is the arena itself";
  EXPECT_TRUE(std::all_of(seen, seen + 9'995, [](char c) { return c == 7; }));
}

TEST_F(Heap, OtherMemoryIsNotPublished) {
  int local = 0;
  EXPECT_EQ(heap_->publish(&local, 4), 0u);
  EXPECT_EQ(heap_->publish(static_cast<char*>(start()) + own_->size_bytes(), 1), 0u);
  EXPECT_EQ(heap_->publish(static_cast<char*>(start()) + own_->size_bytes() - 8, 9), 0u);
  EXPECT_NE(heap_->publish(&local, 0), 0u);  // nothing can always be read
  const std::shared_ptr<void> memory = heap_->allocate(64);
  const uint64_t handle = heap_->publish(memory.get(), 64);
  EXPECT_EQ(heap_->find(1, handle, static_cast<int64_t>(own_->size_bytes())), nullptr);
  EXPECT_EQ(heap_->find(1, ~uint64_t{0}, 1), nullptr);
  EXPECT_EQ(heap_->find(1, 0, 1), nullptr);
}

TEST_F(Heap, FreedMemoryIsUsedAgainAndReadsAsZerosMeanwhile) {
  std::vector<std::shared_ptr<void>> blocks;
  for (int i = 0; i < 4; ++i) blocks.push_back(heap_->allocate(100'000));
  void* second = blocks[1].get();
  static_cast<char*>(second)[1] = 1;
  const uint64_t handle = heap_->publish(second, 100'000);
  blocks[1].reset();
  EXPECT_EQ(heap_->find(1, handle, 100'000)[1], 0);
  blocks[2].reset();  // two that touch become one
  EXPECT_EQ(heap_->allocate(200'000).get(), second);
  blocks.clear();
  EXPECT_EQ(heap_->allocate(400'000).get(), static_cast<char*>(start()) + 4096);  // all of it is one again
}

TEST_F(Heap, WhatIsTooMuchIsRefused) {
  EXPECT_EQ(heap_->allocate(own_->size_bytes() + 1), nullptr);
  EXPECT_EQ(heap_->allocate(~size_t{0} - 100), nullptr);
  EXPECT_NE(heap_->allocate(0), nullptr);
}

TEST_F(Heap, ABlockOutlivesTheHeapOfItsGroup) {
  const std::shared_ptr<void> memory = heap_->allocate(5'000);
  heap_.reset();
  own_.reset();
  std::fill_n(static_cast<char*>(memory.get()), 5'000, char{1});
}

TEST(HeapSource, ThreadsHaveNoArenas) {
  std::string name;
  EXPECT_THROW(make_heap_source()->create_arena(&name), NotAvailable);
}

}  // namespace
}  // namespace polyreme
