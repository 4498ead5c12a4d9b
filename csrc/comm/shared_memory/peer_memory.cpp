#include "comm/shared_memory/peer_memory.h"

#include <utility>

namespace polyreme {
namespace {

class ThreadMemory final : public PeerMemory {
 public:
  uint64_t publish(const void* address, int64_t bytes) const override {
    return bytes == 0 ? 1 : reinterpret_cast<uint64_t>(address);
  }
  const char* find(int, uint64_t handle, int64_t) const override {
    return reinterpret_cast<const char*>(handle);
  }
  std::shared_ptr<void> allocate(size_t) const override { return nullptr; }  // any will do
  bool outlives_its_rank() const override { return false; }
};

class SelectedPeers final : public PeerMemory {
 public:
  SelectedPeers(std::shared_ptr<const PeerMemory> memory, std::vector<int> members)
      : memory_(std::move(memory)), members_(std::move(members)) {}
  uint64_t publish(const void* address, int64_t bytes) const override {
    return memory_->publish(address, bytes);
  }
  const char* find(int rank, uint64_t handle, int64_t bytes) const override {
    return memory_->find(members_[static_cast<size_t>(rank)], handle, bytes);
  }
  std::shared_ptr<void> allocate(size_t size_bytes) const override { return memory_->allocate(size_bytes); }
  bool outlives_its_rank() const override { return memory_->outlives_its_rank(); }

 private:
  std::shared_ptr<const PeerMemory> memory_;
  std::vector<int> members_;
};

}  // namespace

std::shared_ptr<const PeerMemory> make_thread_memory() { return std::make_shared<ThreadMemory>(); }

std::shared_ptr<const PeerMemory> select_peers(std::shared_ptr<const PeerMemory> memory,
                                               std::vector<int> members) {
  return std::make_shared<SelectedPeers>(std::move(memory), std::move(members));
}

}  // namespace polyreme
