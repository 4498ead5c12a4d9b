#pragma once

#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "comm/communicator.h"
#include "pipeline/schedule/schedule.h"
#include "pipeline/stage_runner.h"

namespace polyreme::pipeline {

struct ExecutorOptions {
  // Transfers run on a background stream, beside computations, and are issued as early as issue_order.h says
  // where streams run at their own pace. False: one thing after the other.
  bool overlap = true;
  // Whether receives may be issued ahead of computations that the list has before them. Not where
  // computations have collectives of their own, which run in the order of issue: one would wait for a sender
  // that waits for it.
  bool issue_ahead = true;
  // Of the batch's lanes, see ValidateOptions.
  int lanes = 1;
};

// Runs one rank's list of a schedule. It only enqueues: `run` returns when the device has everything, and
// nothing but `wait` waits. Tensors between chunks live from the receive (or computation) that makes them to
// the computation (or send) that uses them, as `peak_bytes` counts; what is sent lives until it has arrived,
// and a few transfers may be in flight.
class Executor {
 public:
  // `group` is the pp axis: its ranks are those of the schedule. `group` and `compute` must outlive the
  // executor. Throws InvalidArgument for a schedule that is not valid, or is for another number of ranks.
  Executor(Schedule schedule, Communicator& group, Stream& compute, const ExecutorOptions& options = {});
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  const Schedule& schedule() const { return schedule_; }

  // Issues the whole list. Collective over the group: all ranks run the same schedule. Whatever goes
  // wrong is thrown with stage, action, chunk, micro-batch and peer in front of its text, and with its
  // class; the group is broken then, and the other ranks get PeerLost with that text.
  void run(StageRunner& runner);
  // Blocks until the transfers of earlier runs are through. Throws as `run` does. Call it before what
  // the pipeline computed is used by the host.
  void wait();

 private:
  // Boundary b lies between the chunks b - 1 and b.
  using Key = std::tuple<bool /*is_gradient*/, int /*boundary*/, int /*micro_batch*/>;
  struct Held {
    Tensor tensor;
    std::shared_ptr<Work> arrival;  // null where it was made on this rank
  };
  struct Issued {
    std::shared_ptr<Work> work;
    size_t begin, end;  // in list_
  };

  void run_action(StageRunner& runner, const Action& action);
  void run_computation(StageRunner& runner, const Action& action);
  void run_transfers(StageRunner& runner, size_t begin, size_t end);
  Tensor take(const Key& key);
  std::string describe(size_t begin, size_t end) const;
  // Throws the error that passes with where it happened, and breaks the group with it.
  // `in_transfer`: an earlier transfer may be why.
  [[noreturn]] void fail(size_t begin, size_t end, bool in_transfer);

  Schedule schedule_;
  Communicator& group_;
  Stream& compute_;
  std::vector<Action> list_;  // as it is issued
  int num_chunks_;
  bool records_;  // a span for each computation, named after its action, around those of its operations
  std::unique_ptr<Stream> background_;  // null without overlap
  std::unique_ptr<Event> computed_;
  std::map<Key, Held> held_;
  std::vector<Issued> issued_;
};

}  // namespace polyreme::pipeline
