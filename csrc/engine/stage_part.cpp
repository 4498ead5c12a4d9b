#include "engine/stage_part.h"

#include <algorithm>

#include "base/error.h"
#include "pipeline/schedule/split.h"

namespace polyreme {
namespace {

// Where the parts between the cuts of a model begin and end.
std::vector<size_t> borders_of(const Model& model) {
  std::vector<size_t> borders = {0};
  borders.insert(borders.end(), model.cuts.begin(), model.cuts.end());
  borders.push_back(model.layers.size());
  return borders;
}

std::vector<int> parts_by_cost(const Model& model, const std::vector<size_t>& borders, int num_chunks) {
  std::vector<double> costs;
  for (size_t part = 0; part + 1 < borders.size(); ++part) {
    Cost cost;
    for (size_t i = borders[part]; i < borders[part + 1]; ++i)
      cost += model.layers[i]->cost(1, model.max_seq_len / model.lanes.size);
    costs.push_back(cost.total_flops());
  }
  return pipeline::split_layers(costs, num_chunks);
}

std::vector<LayerRange> chunks_of(const Model& model, int num_chunks, const std::vector<int>& split) {
  const std::vector<size_t> borders = borders_of(model);
  std::vector<int> parts = split;
  if (split.empty()) {
    parts = parts_by_cost(model, borders, num_chunks);
  } else {
    // A user counts blocks; what is before the first and after the last of them goes with the ends.
    pipeline::check_split(split, static_cast<int>(borders.size()) - 3, num_chunks);
    ++parts.front();
    ++parts.back();
  }
  std::vector<LayerRange> chunks;
  size_t part = 0;
  for (const int count : parts) {
    const size_t end = part + static_cast<size_t>(count);
    chunks.push_back({borders[part], borders[end]});
    part = end;
  }
  return chunks;
}

int lanes_of(const Model& model, size_t param, const LaneRange& lanes) {
  return lanes.lanes > 1 && is_cut(model.registry.specs()[param], "tp") ? static_cast<int>(lanes.count) : 1;
}

void take_params(StagePart& part, const Model& model, const std::vector<bool>& held,
                 const std::vector<size_t>& chunk_of) {
  part.registry = model.registry.part(held, chunk_of, part.lanes, &part.local);
  for (size_t param = 0; param < part.local.size(); ++param) {
    part.num_parts.push_back(lanes_of(model, param, part.lanes));
    if (part.local[param] < 0) continue;
    for (int lane = 0; lane < part.num_parts.back(); ++lane) {
      part.whole.push_back(static_cast<int>(param));
      part.lane_of.push_back(part.lanes.first + lane);
    }
  }
}

}  // namespace

StagePart make_stage_part(const Model& model, const pipeline::Schedule& schedule, int stage,
                          const std::vector<int>& split, const LaneRange& lanes) {
  const std::vector<int> rank_of = pipeline::rank_of_chunk(schedule);
  StagePart part{.chunks = chunks_of(model, schedule.num_chunks(), split), .lanes = lanes};
  std::vector<size_t> chunk_of(model.layers.size());
  std::vector<bool> held(model.layers.size());
  for (size_t chunk = 0; chunk < part.chunks.size(); ++chunk)
    for (size_t layer = part.chunks[chunk].begin; layer < part.chunks[chunk].end; ++layer) {
      chunk_of[layer] = chunk;
      held[layer] = rank_of[chunk] == stage;
    }
  for (size_t param = 0; param < model.registry.specs().size(); ++param) {
    const std::vector<int>& layers = model.registry.layers_of(static_cast<int>(param));
    const size_t chunk = chunk_of[static_cast<size_t>(layers.front())];
    const size_t last_chunk = chunk_of[static_cast<size_t>(layers.back())];
    require<NotAvailable>(chunk == last_chunk || layers.size() == 2, "the parameter '",
                          model.registry.specs()[param].name, "' is used ", layers.size(),
                          " times in chunks ", chunk, " to ", last_chunk,
                          " of the pipeline; this version shares one between two uses");
    for (int lane = 0; chunk != last_chunk && lane < lanes_of(model, param, lanes); ++lane)
      part.shared.push_back({static_cast<int>(param), rank_of[chunk], rank_of[last_chunk], lane});
    part.stage_of.push_back(rank_of[chunk]);
  }
  take_params(part, model, held, chunk_of);
  return part;
}

StagePart whole_model(const Model& model, const LaneRange& lanes) {
  StagePart part{.chunks = {{0, model.layers.size()}},
                 .stage_of = std::vector<int>(model.registry.specs().size(), 0),
                 .lanes = lanes};
  take_params(part, model, std::vector<bool>(model.layers.size(), true),
              std::vector<size_t>(model.layers.size(), 0));
  return part;
}

OptimizerOptions options_of(const StagePart& part, const OptimizerOptions& options) {
  OptimizerOptions result = options;
  const auto narrow = [&](const auto& all, auto& own) {
    if (all.size() != part.local.size()) return;  // empty, or to be refused as it is
    own.clear();
    for (const int param : part.whole) own.push_back(all[static_cast<size_t>(param)]);
  };
  narrow(options.weight_decay, result.weight_decay);
  narrow(options.lr_multiplier, result.lr_multiplier);
  narrow(options.trainable, result.trainable);
  narrow(options.elementwise, result.elementwise);
  return result;
}

}  // namespace polyreme
