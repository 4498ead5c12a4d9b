// Engine: whether ranks that hold the same numbers still hold the same bits.
#include <algorithm>
#include <map>

#include "engine/engine.h"
#include "mesh/agreement.h"
#include "ops/ops.h"

namespace polyreme {
namespace {

// What ranks of `group` should have alike: tensors and their names.
struct Copies {
  Communicator* group;
  const char* axis;
  int rank;  // this one's along the axis
  std::vector<Tensor> tensors;
  std::vector<std::string> names;
};

std::string ranks_text(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += concat(text.empty() ? "" : ", ", rank);
  return text;
}

// "rank 1 has another weight 'h.0.x' than ranks 0, 2"; empty if all are equal. `values`: of all ranks.
std::string difference(const Copies& copies, const std::vector<int64_t>& values, size_t index,
                       const std::vector<int>& ranks_on_axis) {
  std::map<int64_t, std::vector<int>> ranks_of;
  for (size_t r = 0; r < ranks_on_axis.size(); ++r)
    ranks_of[values[r * copies.names.size() + index]].push_back(ranks_on_axis[r]);
  if (ranks_of.size() == 1) return {};
  std::vector<int> usual, others;
  for (const auto& [value, ranks] : ranks_of)
    if (ranks.size() > usual.size() || (ranks.size() == usual.size() && ranks < usual)) usual = ranks;
  for (const auto& [value, ranks] : ranks_of)
    if (ranks != usual) others.insert(others.end(), ranks.begin(), ranks.end());
  return concat(copies.axis, " rank ", ranks_text(others), " has another ", copies.names[index], " than ",
                copies.axis, " rank ", ranks_text(usual));
}

}  // namespace

void Engine::check_replicas() {
  const std::vector<ParamSpec>& specs = part_.registry.specs();
  Copies whole{&dp_, "dp", dp_rank_, {}, {}};
  Copies slices{map().num_shards() == 1 ? &dp_ : groups_.replicas(), "dp", dp_rank_, {}, {}};
  Copies uncut{tp_ ? &tp_->group() : nullptr, "tp", tp_ ? static_cast<int>(tp_->rank()) : 0, {}, {}};
  for (int param = 0; param < map().num_params(); ++param) {
    const int unit = map().unit_of(param);
    if (!plan_.stays_whole[static_cast<size_t>(unit)]) continue;
    whole.tensors.push_back(params_.weights.weight(param));
    whole.names.push_back(concat("weight '", specs[static_cast<size_t>(param)].name, "'"));
  }
  // The first copy of the state has nobody to be compared with, unless shards are held more than once.
  for (const StatePart& part : slices.group || uncut.group ? state_parts() : std::vector<StatePart>{}) {
    const ParamSpec& spec = model_.registry.specs()[static_cast<size_t>(part.param)];
    for (Copies* copies : {&slices, &uncut}) {
      if (!copies->group || (copies == &uncut && is_cut(spec, "tp"))) continue;
      copies->tensors.push_back(part.tensor);
      copies->names.push_back(concat(part.kind, " '", spec.name, "'"));
    }
  }
  std::string found;
  for (const Copies& copies : {whole, slices, uncut}) {
    if (!copies.group || copies.group->size() == 1) continue;
    const auto count = static_cast<int64_t>(copies.tensors.size());
    std::vector<int64_t> mine(copies.tensors.size());
    if (count > 0) {
      const WaitAtExit wait(*stream_);
      const Tensor prints = empty(device_, DType::kI64, {count}, "fingerprints");
      for (int64_t i = 0; i < count; ++i)
        fingerprint(*stream_, copies.tensors[static_cast<size_t>(i)], prints.slice(0, i, i + 1));
      copy_to_host(*stream_, prints, mine.data());
      stream_->synchronize();
    }
    mine.push_back(copies.rank);
    const std::vector<int64_t> all = gather_values(*copies.group, *stream_, mine);
    std::vector<int64_t> values;
    std::vector<int> ranks_on_axis;
    for (size_t r = 0; r < static_cast<size_t>(copies.group->size()); ++r) {
      const auto begin = all.begin() + static_cast<std::ptrdiff_t>(r * mine.size());
      values.insert(values.end(), begin, begin + count);
      ranks_on_axis.push_back(static_cast<int>(begin[count]));
    }
    for (size_t i = 0; i < copies.names.size() && found.empty(); ++i)
      found = difference(copies, values, i, ranks_on_axis);
  }
  // Ranks of other shards may see nothing: all stop together.
  std::vector<int64_t> differ = gather_values(dp_, *stream_, {found.empty() ? 0 : 1});
  bool any = std::find(differ.begin(), differ.end(), 1) != differ.end();
  const auto stop_with = [&](Communicator& group, const char* others) {
    const std::vector<int64_t> all = gather_values(group, *stream_, {any ? 1 : 0});
    const auto one = std::find(all.begin(), all.end(), 1);
    if (one == all.end() || any) return;
    any = true;
    if (found.empty())
      found = concat("ranks of ", others, " ", one - all.begin(),
                     " do not hold equal bits (their errors say which)");
  };
  if (tp_) stop_with(tp_->group(), "tp rank");
  if (pipeline_) stop_with(pipeline_->group(), "stage");
  if (!any) return;
  const auto first = std::find(differ.begin(), differ.end(), 1);
  if (found.empty()) found = concat("dp rank ", first - differ.begin(), " and its replicas differ");
  throw NumericError(
      concat("after step ", applied_steps_, ": ", found,
             ", though they should be equal to the bit: a fault of memory or of a processor, or a "
             "script that changed them on some ranks. Go back to a checkpoint"));
}

}  // namespace polyreme
