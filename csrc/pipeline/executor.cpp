#include "pipeline/executor.h"

#include <utility>

#include "base/error.h"
#include "device/cpu/background_stream.h"
#include "device/cpu/dry_device.h"
#include "pipeline/schedule/issue_order.h"
#include "pipeline/schedule/validate.h"

namespace polyreme::pipeline {
namespace {

// A rank that runs ahead of its neighbours holds what it sends to them: transfers in flight, at most.
constexpr size_t kMaxInFlight = 4;

// Throws the error that passes again: of its class, with `where` before its text.
[[noreturn]] void rethrow_at(const std::string& where) {
  const auto text = [&](const std::exception& error) { return concat(where, ": ", error.what()); };
  try {
    throw;
  } catch (const Timeout& error) {
    throw Timeout(text(error));
  } catch (const PeerLost& error) {
    throw PeerLost(text(error));
  } catch (const CollectiveMismatch& error) {
    throw CollectiveMismatch(text(error));
  } catch (const CommError& error) {
    throw CommError(text(error));
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(text(error));
  } catch (const NotAvailable& error) {
    throw NotAvailable(text(error));
  } catch (const DeviceError& error) {
    throw DeviceError(text(error));
  } catch (const OutOfMemory& error) {
    throw OutOfMemory(text(error));
  } catch (const NumericError& error) {
    throw NumericError(text(error));
  } catch (const std::bad_alloc&) {
    throw OutOfMemory(concat(where, ": out of host memory"));
  } catch (const std::exception& error) {
    throw Error(text(error));
  }
}

bool is_of_gradient(ActionKind transfer) {
  return transfer == ActionKind::kSendGradient || transfer == ActionKind::kReceiveGradient;
}

// The boundary of a transfer: below its chunk or above.
int boundary_of(const Action& transfer) {
  const bool below =
      transfer.kind == ActionKind::kReceiveActivation || transfer.kind == ActionKind::kSendGradient;
  return transfer.chunk + (below ? 0 : 1);
}

// The deferred CPU device runs its streams one by one: a receive ahead would hold up what its sender waits
// for.
bool runs_beside_the_host(Stream& stream) {
  return stream.device().kind() != DeviceKind::kCpu || is_dry(stream.device()) ||
         dynamic_cast<BackgroundStream*>(&stream) != nullptr;
}

// Else a computation is not over when its call returns.
bool runs_at_once(Stream& stream) {
  return stream.device().kind() == DeviceKind::kCpu && as_cpu(stream).runs_at_once();
}

std::string words(const Action& action) {
  if (action.kind == ActionKind::kStep) return "step";
  std::string text = name(action.kind);
  for (char& c : text)
    if (c == '_') c = ' ';
  text += concat(", chunk ", action.chunk);
  if (action.micro_batch >= 0) text += concat(", micro-batch ", action.micro_batch);
  if (action.peer >= 0) text += concat(is_send(action.kind) ? ", to stage " : ", from stage ", action.peer);
  return text;
}

}  // namespace

Executor::Executor(Schedule schedule, Communicator& group, Stream& compute, const ExecutorOptions& options)
    : schedule_(std::move(schedule)),
      group_(group),
      compute_(compute),
      num_chunks_(schedule_.num_chunks()),
      records_(runs_at_once(compute)),
      computed_(compute.device().create_event()) {
  validate(schedule_, {.lanes = options.lanes});
  require(schedule_.num_ranks() == group.size(), "the schedule is for ", schedule_.num_ranks(),
          " stages, but the pp axis has ", group.size(), " ranks; make it for stages=", group.size());
  list_ = schedule_.actions[static_cast<size_t>(group.rank())];
  if (!options.overlap || !schedule_.has_transfers()) return;
  background_ = compute.device().create_stream("pipeline", StreamKind::kBackground);
  if (options.issue_ahead && runs_beside_the_host(*background_)) list_ = issue_order(list_);
}

Executor::~Executor() = default;

void Executor::run(StageRunner& runner) {
  size_t begin = 0, end = 0;
  try {
    for (; begin < list_.size(); begin = end) {
      end = is_transfer(list_[begin].kind) ? batch_end(list_, begin) : begin + 1;
      if (is_transfer(list_[begin].kind)) {
        run_transfers(runner, begin, end);
      } else {
        run_action(runner, list_[begin]);
      }
    }
  } catch (...) {
    fail(begin, end, is_transfer(list_[begin].kind));
  }
}

void Executor::wait() {
  std::vector<Issued> issued = std::exchange(issued_, {});
  for (Issued& each : issued) {
    try {
      each.work->wait();
    } catch (...) {
      fail(each.begin, each.end, false);
    }
    each.work = nullptr;
  }
}

void Executor::run_action(StageRunner& runner, const Action& action) {
  switch (action.kind) {
    case ActionKind::kGather:
      return runner.gather(action.chunk);
    case ActionKind::kRelease:
      return runner.release(action.chunk);
    case ActionKind::kReduce:
      return runner.reduce(action.chunk);
    case ActionKind::kStep:
      return runner.step();
    default:
      return run_computation(runner, action);
  }
}

void Executor::run_computation(StageRunner& runner, const Action& action) {
  const auto [kind, chunk, micro_batch, peer, with_previous] = action;
  const bool is_gradient = kind != ActionKind::kForward;
  const int from = is_gradient ? chunk + 1 : chunk, to = is_gradient ? chunk : chunk + 1;
  const auto is_inside = [this](int boundary) { return boundary > 0 && boundary < num_chunks_; };
  const bool has_tensors = kind != ActionKind::kBackwardWeight;
  Tensor in = has_tensors && is_inside(from) ? take({is_gradient, from, micro_batch}) : Tensor(), out;
  const int64_t start_ns = records_ ? FlightRecorder::now_ns() : 0;
  if (kind == ActionKind::kForward)
    out = runner.forward(chunk, micro_batch, std::move(in));
  else if (kind == ActionKind::kBackward)
    out = runner.backward(chunk, micro_batch, std::move(in));
  else if (kind == ActionKind::kBackwardInput)
    out = runner.backward_input(chunk, micro_batch, std::move(in));
  else if (kind == ActionKind::kBackwardWeight)
    runner.backward_weight(chunk, micro_batch);
  FlightRecorder& recorder = compute_.device().recorder();
  if (records_ && recorder.enabled())
    recorder.record({.name = name(kind), .start_ns = start_ns, .end_ns = FlightRecorder::now_ns()});
  if (has_tensors && is_inside(to)) held_[{is_gradient, to, micro_batch}] = {std::move(out), nullptr};
}

// What a computation takes, or a send.
Tensor Executor::take(const Key& key) {
  auto node = held_.extract(key);
  require<Error>(!node.empty() && node.mapped().tensor.defined(),
                 "the runner made no tensor for the next chunk");
  if (node.mapped().arrival) node.mapped().arrival->wait_on(compute_);
  return std::move(node.mapped().tensor);
}

void Executor::run_transfers(StageRunner& runner, size_t begin, size_t end) {
  std::vector<Transfer> transfers;
  std::vector<std::pair<Key, Tensor>> received;
  for (size_t i = begin; i < end; ++i) {
    const Action& action = list_[i];
    const bool is_gradient = is_of_gradient(action.kind);
    const Key key{is_gradient, boundary_of(action), action.micro_batch};
    if (is_send(action.kind)) {
      transfers.push_back({Transfer::Kind::kSend, take(key), action.peer});
    } else {
      Tensor tensor = runner.make_boundary(boundary_of(action), action.micro_batch, is_gradient);
      transfers.push_back({Transfer::Kind::kReceive, tensor, action.peer});
      received.emplace_back(key, std::move(tensor));
    }
  }
  Stream& stream = background_ ? *background_ : compute_;
  if (background_) {
    if (issued_.size() >= kMaxInFlight) issued_[issued_.size() - kMaxInFlight].work->wait_on(compute_);
    // After what is sent was computed; and not before the computation in front, which bounds how far
    // transfers run ahead.
    compute_.record(*computed_);
    stream.wait(*computed_);
  }
  const std::shared_ptr<Work> work = group_.exchange(transfers, stream);
  for (auto& [key, tensor] : received) held_[key] = {std::move(tensor), work};
  issued_.push_back({work, begin, end});
}

std::string Executor::describe(size_t begin, size_t end) const {
  std::string text = concat("pipeline stage ", group_.rank(), " of ", group_.size());
  for (size_t i = begin; i < end; ++i) text += concat(i == begin ? ": " : "; ", words(list_[i]));
  return text;
}

void Executor::fail(size_t begin, size_t end, bool in_transfer) {
  const std::vector<Issued> issued = std::exchange(issued_, {});
  held_.clear();
  try {
    try {
      throw;
    } catch (const CommError&) {
      if (!in_transfer) throw;
      // The group was broken before, and nothing that is in flight blocks any more.
      for (const Issued& each : issued) {
        try {
          each.work->wait();
        } catch (...) {
          begin = each.begin, end = each.end;
          throw;
        }
      }
      throw;
    }
  } catch (...) {
    try {
      rethrow_at(describe(begin, end));
    } catch (const std::exception& error) {
      group_.abort(error.what());
      throw;
    }
  }
}

}  // namespace polyreme::pipeline
