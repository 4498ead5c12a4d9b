#include <pybind11/stl.h>

#include <tuple>

#include "base/error.h"
#include "bindings/bindings.h"
#include "pipeline/schedule/complete.h"
#include "pipeline/schedule/generators.h"
#include "pipeline/schedule/memory.h"
#include "pipeline/schedule/text.h"
#include "pipeline/schedule/timeline.h"
#include "pipeline/schedule/validate.h"

namespace py = pybind11;
using namespace py::literals;

namespace polyreme::bindings {
namespace {

using pipeline::Action;
using pipeline::Schedule;

// An action as Python sees it: kind, chunk, micro-batch, peer, with_previous; -1 for what it does not have.
using ActionTuple = std::tuple<std::string, int, int, int, bool>;
using Numbers = std::vector<double>;

Schedule make_schedule(int micro_batches, bool forward_only, std::vector<std::vector<int>> chunks,
                       const std::vector<std::vector<ActionTuple>>& lists) {
  Schedule schedule{micro_batches, forward_only, std::move(chunks), {}};
  for (const auto& list : lists) {
    std::vector<Action>& actions = schedule.actions.emplace_back();
    for (const auto& [kind, chunk, micro_batch, peer, with_previous] : list)
      actions.push_back({pipeline::kind_of_name(kind), chunk, micro_batch, peer, with_previous});
  }
  pipeline::rank_of_chunk(schedule);  // throws for sizes that are not right
  return schedule;
}

std::vector<std::vector<ActionTuple>> action_tuples(const Schedule& schedule) {
  std::vector<std::vector<ActionTuple>> lists;
  for (const std::vector<Action>& actions : schedule.actions) {
    auto& list = lists.emplace_back();
    for (const Action& a : actions)
      list.emplace_back(pipeline::name(a.kind), a.chunk, a.micro_batch, a.peer, a.with_previous);
  }
  return lists;
}

pipeline::Costs costs(Numbers forward, Numbers backward_input, Numbers backward_weight, Numbers transfer,
                      double gather, double reduce, double step, bool overlap) {
  return {std::move(forward),
          std::move(backward_input),
          std::move(backward_weight),
          std::move(transfer),
          gather,
          reduce,
          step,
          overlap};
}

py::object problem(const Schedule& schedule, int lanes, bool implied_transfers) {
  const auto found = pipeline::find_problem(schedule, {lanes, implied_transfers});
  if (!found) return py::none();
  py::list cycle;
  for (const pipeline::Wait& wait : found->cycle)
    cycle.append(py::dict("rank"_a = wait.place.rank, "position"_a = wait.place.position,
                          "action"_a = pipeline::token(schedule, wait.place.rank, wait.place.position),
                          "waits_for"_a = wait.for_rank));
  return py::dict("rank"_a = found->place.rank, "position"_a = found->place.position,
                  "action"_a = found->action, "reason"_a = found->reason, "cycle"_a = cycle,
                  "message"_a = pipeline::describe(*found));
}

py::dict simulate(const Schedule& schedule, const pipeline::Costs& all) {
  const pipeline::Timeline timeline = pipeline::simulate(schedule, all);
  std::vector<std::vector<std::pair<double, double>>> spans;
  std::vector<double> bubbles;
  for (int r = 0; r < schedule.num_ranks(); ++r) {
    auto& list = spans.emplace_back();
    for (const pipeline::Span& span : timeline.spans[static_cast<size_t>(r)])
      list.emplace_back(span.start, span.end);
    bubbles.push_back(timeline.bubble(r));
  }
  return py::dict("spans"_a = spans, "makespan"_a = timeline.makespan, "busy"_a = timeline.busy,
                  "bubble"_a = bubbles);
}

pipeline::Gather gather_policy(const std::string& name) {
  if (name == "none") return pipeline::Gather::kNone;
  if (name == "step") return pipeline::Gather::kStep;
  if (name == "use") return pipeline::Gather::kUse;
  throw InvalidArgument(concat("unknown gather '", name, "'; expected none, step or use"));
}

void bind_class(py::module_& m) {
  py::class_<Schedule>(m, "Schedule")
      .def(py::init(&make_schedule), "micro_batches"_a, "forward_only"_a, "chunks"_a, "actions"_a)
      .def_readonly("micro_batches", &Schedule::micro_batches)
      .def_readonly("forward_only", &Schedule::forward_only)
      .def_readonly("chunks", &Schedule::chunks)
      .def_property_readonly("actions", &action_tuples)
      .def_property_readonly("has_transfers", &Schedule::has_transfers)
      .def(
          "token",
          [](const Schedule& s, int rank, int position) {
            require(rank >= 0 && rank < s.num_ranks() && position >= 0 &&
                        static_cast<size_t>(position) < s.actions[static_cast<size_t>(rank)].size(),
                    "schedule: no action ", position, " of rank ", rank);
            return pipeline::token(s, rank, position);
          },
          "rank"_a, "position"_a)
      .def("problem", &problem, "lanes"_a, "implied_transfers"_a)
      .def("peak_activations", &pipeline::peak_activations)
      .def(
          "peak_bytes",
          [](const Schedule& s, std::vector<int64_t> activation, std::vector<int64_t> kept,
             std::vector<int64_t> boundary) {
            return pipeline::peak_bytes(s, {std::move(activation), std::move(kept), std::move(boundary)});
          },
          "activation"_a, "kept"_a, "boundary"_a)
      .def("simulate", &simulate, "costs"_a)
      .def("add_transfers", &pipeline::add_transfers, "costs"_a)
      .def("remove_transfers", &pipeline::remove_transfers)
      .def(
          "add_collectives",
          [](const Schedule& s, const std::string& gather, bool reduce, bool step) {
            return pipeline::add_collectives(s, {gather_policy(gather), reduce, step});
          },
          "gather"_a, "reduce"_a, "step"_a)
      .def("to_text", &pipeline::to_text)
      .def(
          "equals", [](const Schedule& a, const Schedule& b) { return a == b; }, "other"_a);
}

}  // namespace

void bind_schedule(py::module_& m) {
  py::class_<pipeline::Costs>(m, "ScheduleCosts")
      .def(py::init(&costs), py::kw_only(), "forward"_a, "backward_input"_a, "backward_weight"_a,
           "transfer"_a, "gather"_a, "reduce"_a, "step"_a, "overlap"_a);
  bind_class(m);
  m.def(
      "generate_schedule",
      [](const std::string& kind, int stages, int micro_batches, int chunks) {
        return pipeline::generate({pipeline::schedule_kind_of_name(kind), stages, micro_batches, chunks});
      },
      "kind"_a, "stages"_a, "micro_batches"_a, "chunks"_a);
  m.def("generate_forward_only", &pipeline::generate_forward_only, "chunks"_a, "micro_batches"_a);
  m.def(
      "place_chunks",
      [](const std::string& kind, int stages, int chunks) {
        return pipeline::place_chunks(pipeline::schedule_kind_of_name(kind), stages, chunks);
      },
      "kind"_a, "stages"_a, "chunks"_a);
  m.def("parse_schedule", &pipeline::from_text, "text"_a);
}

}  // namespace polyreme::bindings
