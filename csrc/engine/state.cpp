// Engine: what checkpoints save and bring back.
#include <algorithm>

#include "engine/engine.h"
#include "ops/ops.h"

namespace polyreme {

std::vector<StatePart> Engine::state_parts() const {
  std::vector<StatePart> parts;
  const std::vector<ShardMap::Piece> pieces = map().pieces(groups_.shard_rank() % map().num_shards());
  const auto add = [&](const std::string& kind, const std::vector<Tensor>& slices) {
    for (const ShardMap::Piece& piece : pieces) {
      const Tensor& slice = slices[static_cast<size_t>(map().unit_of(piece.param))];
      if (!slice.defined()) continue;  // a unit without such state
      const auto local = static_cast<size_t>(piece.param);
      const ParamSpec& spec = model_.registry.specs()[static_cast<size_t>(part_.whole[local])];
      const PartRanges part = part_ranges(spec, "tp", part_.lanes.lanes, part_.lane_of[local]);
      const int64_t size = std::min(piece.size, part_elements(spec, part) - piece.param_begin);
      if (size <= 0) continue;  // padding
      parts.push_back({kind, part_.whole[local], piece.param_begin, size,
                       slice.slice(0, piece.unit_shard_begin, piece.unit_shard_begin + size), part});
    }
  };
  add("weight", params_.weights.own());
  for (const auto& [name, on_host, slices] : optimizer_->state()) add(name, slices);
  return parts;
}

namespace {

// Calls body(tensor, offset) for each range, with its place in the host memory.
template <typename Body>
void for_each_range(const std::vector<StatePart>& parts, std::span<const Engine::StateRange> ranges,
                    size_t host_bytes, const Body& body) {
  size_t offset = 0;
  std::vector<std::pair<Tensor, size_t>> places;
  for (const auto& [index, begin, end] : ranges) {
    require(index >= 0 && static_cast<size_t>(index) < parts.size(), "state: part ", index, " of ",
            parts.size());
    const StatePart& part = parts[static_cast<size_t>(index)];
    require(part.begin <= begin && begin <= end && end <= part.begin + part.size, "state: elements ", begin,
            " to ", end, " of a part that has ", part.begin, " to ", part.begin + part.size);
    const Tensor tensor = part.tensor.slice(0, begin - part.begin, end - part.begin);
    places.emplace_back(tensor, offset);
    offset += static_cast<size_t>(tensor.size_bytes());
  }
  require(offset == host_bytes, "state: the ranges have ", offset, " bytes, the memory ", host_bytes);
  for (const auto& [tensor, place] : places) body(tensor, place);
}

}  // namespace

void Engine::read_state(std::span<const StateRange> ranges, std::span<std::byte> to) {
  for_each_range(state_parts(), ranges, to.size(), [&](const Tensor& tensor, size_t offset) {
    copy_to_host(*stream_, tensor, to.data() + offset);
  });
  stream_->synchronize();
}

void Engine::write_state(std::span<const StateRange> ranges, std::span<const std::byte> from) {
  for_each_range(state_parts(), ranges, from.size(), [&](const Tensor& tensor, size_t offset) {
    copy_from_host(*stream_, from.data() + offset, tensor);
  });
  params_.weights.gather_updated();
  if (pipeline_) pipeline_->share_weights();
  stream_->synchronize();
  background().synchronize();
}

void Engine::count_update() {
  std::vector<int64_t> updates = updates_;
  const std::vector<uint8_t>& trainable = options_.optimizer.trainable;
  for (size_t param = 0; param < updates.size(); ++param)
    if (trainable.empty() || trainable[param] != 0) ++updates[param];
  set_updates(std::move(updates));
}

void Engine::set_updates(std::vector<int64_t> updates) {
  std::vector<int64_t> own;
  for (const int param : part_.whole) own.push_back(updates[static_cast<size_t>(param)]);
  optimizer_->set_updates(std::move(own));
  updates_ = std::move(updates);
}

void Engine::set_progress(int64_t applied_steps, int64_t skipped_steps, int64_t skipped_in_a_row,
                          std::vector<int64_t> updates) {
  require(applied_steps >= 0 && skipped_in_a_row >= 0 && skipped_steps >= skipped_in_a_row,
          "set_progress: applied_steps is ", applied_steps, ", skipped_steps ", skipped_steps,
          ", skipped_in_a_row ", skipped_in_a_row, "; expected at least 0, and no more in a row than in all");
  require(updates.size() == part_.local.size(), "set_progress: ", updates.size(), " counts of updates for ",
          part_.local.size(), " parameters");
  set_updates(std::move(updates));
  applied_steps_ = applied_steps;
  skipped_steps_ = skipped_steps;
  skipped_in_a_row_ = skipped_in_a_row;
}

}  // namespace polyreme
