#include "comm/dry_communicator.h"

#include "base/error.h"
#include "device/cpu/cpu_device.h"

namespace polyreme {
namespace {

class DryWork final : public Work {
 public:
  DryWork(Stream& stream, std::unique_ptr<Event> done) : stream_(stream), done_(std::move(done)) {}
  void wait() override { done_->synchronize(); }
  void wait_on(Stream& stream) override {
    if (&stream != &stream_) stream.wait(*done_);
  }

 private:
  Stream& stream_;
  std::unique_ptr<Event> done_;
};

}  // namespace

std::unique_ptr<Work> DryCommunicator::run(const char* operation, int64_t sent_bytes,
                                           std::span<const Tensor> tensors, Stream& stream) {
  (*traffic_)[concat(name_, ": ", operation)] += sent_bytes;
  std::vector<Access> accesses;
  for (const Tensor& tensor : tensors)
    accesses.push_back({.buffer = tensor.buffer(), .begin_byte = 0, .end_byte = 0});
  as_cpu(stream).enqueue({operation, OpKind::kCollective}, std::move(accesses), {});
  std::unique_ptr<Event> done = stream.device().create_event();
  stream.record(*done);
  return std::make_unique<DryWork>(stream, std::move(done));
}

std::unique_ptr<Work> DryCommunicator::all_reduce(const Tensor& data, ReduceOp, Stream& stream) {
  return run("all_reduce", 2 * data.size_bytes() * (size_ - 1) / size_, {{data}}, stream);
}

std::unique_ptr<Work> DryCommunicator::reduce_scatter(const Tensor& input, const Tensor& output, ReduceOp,
                                                      Stream& stream) {
  return run("reduce_scatter", input.size_bytes() * (size_ - 1) / size_, {{input, output}}, stream);
}

std::unique_ptr<Work> DryCommunicator::all_gather(const Tensor& input, const Tensor& output, Stream& stream,
                                                  std::span<const int64_t>) {
  return run("all_gather", output.size_bytes() * (size_ - 1) / size_, {{input, output}}, stream);
}

std::unique_ptr<Work> DryCommunicator::broadcast(const Tensor& data, int root, Stream& stream) {
  return run("broadcast", rank_ == root ? data.size_bytes() : 0, {{data}}, stream);
}

std::unique_ptr<Work> DryCommunicator::all_to_all(const Tensor& input, const Tensor& output, Stream& stream,
                                                  std::span<const int64_t>, std::span<const int64_t>) {
  return run("all_to_all", input.size_bytes() * (size_ - 1) / size_, {{input, output}}, stream);
}

std::unique_ptr<Work> DryCommunicator::exchange(std::span<const Transfer> transfers, Stream& stream) {
  std::vector<Tensor> tensors;
  int64_t sent = 0;
  for (const Transfer& transfer : transfers) {
    tensors.push_back(transfer.tensor);
    if (transfer.kind == Transfer::Kind::kSend) sent += transfer.tensor.size_bytes();
  }
  return run("exchange", sent, tensors, stream);
}

std::unique_ptr<Communicator> DryCommunicator::split(int, int, const std::string& name) {
  throw NotAvailable(concat("a dry run has no other ranks to split off the group '", name,
                            "' with; declare it with the mesh, groups=[...]"));
}

std::unique_ptr<Communicator> split_known(Communicator& group, int color, int rank, int size,
                                          const std::string& name) {
  if (const auto* dry = dynamic_cast<const DryCommunicator*>(&group)) return dry->subgroup(rank, size, name);
  return group.split(color, rank, name);
}

}  // namespace polyreme
