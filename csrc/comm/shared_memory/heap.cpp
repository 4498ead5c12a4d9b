#include "comm/shared_memory/heap.h"

#include <algorithm>

#include "base/error.h"
#include "base/math.h"

namespace polyreme {
namespace {

constexpr size_t kPage = 4096;

}  // namespace

SharedHeap::SharedHeap(std::shared_ptr<SharedArena> own, std::vector<std::shared_ptr<SharedMemory>> arenas)
    : own_(std::move(own)), arenas_(std::move(arenas)) {
  free_.emplace(kPage, own_->size_bytes() - kPage);  // 0 is no handle
}

uint64_t SharedHeap::publish(const void* address, int64_t bytes) const {
  if (bytes == 0) return kPage;
  const auto begin = reinterpret_cast<uintptr_t>(own_->address()), at = reinterpret_cast<uintptr_t>(address);
  if (at < begin || at - begin >= own_->size_bytes()) return 0;
  if (static_cast<uint64_t>(bytes) > own_->size_bytes() - (at - begin)) return 0;
  return at - begin;
}

const char* SharedHeap::find(int rank, uint64_t handle, int64_t bytes) const {
  const SharedMemory& arena = *arenas_[static_cast<size_t>(rank)];
  const size_t size = arena.size_bytes();
  if (handle == 0 || handle > size || static_cast<uint64_t>(bytes) > size - handle) return nullptr;
  return static_cast<const char*>(arena.address()) + handle;
}

std::shared_ptr<void> SharedHeap::allocate(size_t size_bytes) const {
  if (size_bytes > own_->size_bytes()) return nullptr;
  const auto bytes = static_cast<size_t>(
      round_up(static_cast<int64_t>(std::max<size_t>(size_bytes, 1)), static_cast<int64_t>(kPage)));
  const std::lock_guard lock(mutex_);
  const auto room =
      std::find_if(free_.begin(), free_.end(), [&](const auto& each) { return each.second >= bytes; });
  if (room == free_.end() || !own_->commit(room->first, bytes)) return nullptr;
  const auto [offset, length] = *room;
  free_.erase(room);
  if (length > bytes) free_.emplace(offset + bytes, length - bytes);
  return {static_cast<char*>(own_->address()) + offset,
          [heap = shared_from_this(), offset = offset, bytes](void*) { heap->release(offset, bytes); }};
}

void SharedHeap::release(size_t offset, size_t size_bytes) const noexcept {
  own_->decommit(offset, size_bytes);
  const std::lock_guard lock(mutex_);
  const auto after = free_.find(offset + size_bytes);
  if (after != free_.end()) {
    size_bytes += after->second;
    free_.erase(after);
  }
  const auto next = free_.lower_bound(offset);
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += size_bytes;
      return;
    }
  }
  free_.emplace(offset, size_bytes);
}

}  // namespace polyreme
