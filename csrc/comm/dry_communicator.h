#pragma once

#include <map>
#include <memory>
#include <string>

#include "comm/communicator.h"

namespace polyreme {

// Bytes that a rank sends, by group and operation: "dp: reduce_scatter". Of the ordered algorithms, whose
// bytes are the ring's; the first word is the name of the group.
using Traffic = std::map<std::string, int64_t>;

// A group of a dry run: its other ranks do not exist. Collectives are checked by nobody, move nothing, keep
// their tensors as long as a real one may, and are counted in `traffic`. See make_dry_device.
class DryCommunicator final : public Communicator {
 public:
  DryCommunicator(int rank, int size, std::string name, std::shared_ptr<Traffic> traffic)
      : rank_(rank), size_(size), name_(std::move(name)), traffic_(std::move(traffic)) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const std::string& name() const override { return name_; }
  std::unique_ptr<Work> all_reduce(const Tensor& data, ReduceOp op, Stream& stream) override;
  std::unique_ptr<Work> reduce_scatter(const Tensor& input, const Tensor& output, ReduceOp op,
                                       Stream& stream) override;
  std::unique_ptr<Work> all_gather(const Tensor& input, const Tensor& output, Stream& stream,
                                   std::span<const int64_t> counts) override;
  std::unique_ptr<Work> broadcast(const Tensor& data, int root, Stream& stream) override;
  std::unique_ptr<Work> all_to_all(const Tensor& input, const Tensor& output, Stream& stream,
                                   std::span<const int64_t> send_counts,
                                   std::span<const int64_t> receive_counts) override;
  std::unique_ptr<Work> exchange(std::span<const Transfer> transfers, Stream& stream) override;
  void barrier(std::chrono::milliseconds) override {}
  // Throws NotAvailable: who else calls it with what is not known. See split_known.
  std::unique_ptr<Communicator> split(int color, int key, const std::string& name) override;
  std::unique_ptr<Communicator> subgroup(int rank, int size, const std::string& name) const {
    return std::make_unique<DryCommunicator>(rank, size, name, traffic_);
  }
  void abort(const std::string&) noexcept override {}
  void fail(const std::string&) noexcept override {}
  void set_label(const std::string&) override {}

 private:
  std::unique_ptr<Work> run(const char* operation, int64_t sent_bytes, std::span<const Tensor> tensors,
                            Stream& stream);

  int rank_, size_;
  std::string name_;
  std::shared_ptr<Traffic> traffic_;
};

// group.split where this rank knows what comes of it: its place in the new group, and how many ranks it has.
std::unique_ptr<Communicator> split_known(Communicator& group, int color, int rank, int size,
                                          const std::string& name);

}  // namespace polyreme
