// Engine: whole parameters, which ranks of dp, tp and pp have parts of.
#include <algorithm>

#include "base/hash.h"
#include "engine/engine.h"
#include "engine/layer_steps.h"
#include "mesh/agreement.h"
#include "ops/ops.h"

namespace polyreme {
namespace {

// Calls body(elements of the part [begin, end), first element of the whole) for what lies in [first, last) of
// a part.
template <typename Body>
void for_runs_in(const std::vector<PartRun>& runs, int64_t first, int64_t last, const Body& body) {
  for (const PartRun& run : runs) {
    const int64_t begin = std::max(first, run.part_begin), end = std::min(last, run.part_begin + run.size);
    if (begin < end) body(begin, end, run.whole_begin + begin - run.part_begin);
  }
}

}  // namespace

void Engine::init_weights() {
  for (size_t i = 0; i < part_.whole.size(); ++i) {
    const ParamSpec& spec = model_.registry.specs()[static_cast<size_t>(part_.whole[i])];
    const ParamInit& init = spec.init;
    const RandomKey key{options_.seed, RandomPurpose::kInit, static_cast<uint32_t>(text_hash(spec.name)), 0};
    const std::vector<PartRun> runs = part_runs(spec, "tp", part_.lanes.lanes, part_.lane_of[i]);
    params_.weights.write(static_cast<int>(i), [&](const Tensor& part, int64_t first) {
      if (init.kind != ParamInit::Kind::kNormal || !(spec.padded_shape == spec.shape))
        fill(*stream_, part, init.kind == ParamInit::Kind::kOnes ? 1.0f : 0.0f);
      if (init.kind != ParamInit::Kind::kNormal) return;
      for_runs_in(runs, first, first + part.numel(), [&](int64_t begin, int64_t end, int64_t of_whole) {
        fill_normal(*stream_, part.slice(0, begin - first, end - first), static_cast<float>(init.std), key,
                    of_whole);
      });
    });
  }
  if (pipeline_) pipeline_->share_weights();
  stream_->synchronize();
}

Tensor Engine::parts_of(size_t param, const std::string& kind) {
  const ParamSpec& spec = model_.registry.specs()[param];
  const int64_t size = local_shape(spec, "tp", part_.lanes.lanes).numel();
  const bool is_parted = part_.lanes.lanes > 1 && is_cut(spec, "tp");
  const Shape all_shape = {is_parted ? part_.lanes.lanes : 1, size};
  const int first = part_.local[param];
  if (first < 0) return empty(device_, DType::kF32, all_shape, "parameter");
  const auto part_of = [&](int local) {
    return map().view(unit_buffer(kind, map().unit_of(local)), local).view({1, size});
  };
  if (!is_parted) return part_of(first);
  const int count = part_.num_parts[param];
  const Tensor own = empty(device_, DType::kF32, {count, size}, "parts of a parameter");
  for (int lane = 0; lane < count; ++lane)
    copy(*stream_, part_of(first + lane), own.slice(0, lane, lane + 1));
  if (tp_->size() == 1) return own;
  const Tensor all = empty(device_, DType::kF32, all_shape, "parts of a parameter");
  tp_->group().all_gather(own, all, *stream_)->wait_on(*stream_);
  return all;
}

std::vector<float> Engine::read_param(const std::string& name, const std::string& kind) {
  const auto param = static_cast<size_t>(model_.registry.index(name));
  const ParamSpec& spec = model_.registry.specs()[param];
  check_kind(kind, param);
  std::exception_ptr refusal;  // of the stage that has the parameter
  for (const auto& [state, on_host, slices] : optimizer_->state()) {
    const int local = part_.local[param];
    if (state == kind && local >= 0 && !slices[static_cast<size_t>(map().unit_of(local))].defined())
      refusal = std::make_exception_ptr(InvalidArgument(concat("the parameter has no '", kind, "'")));
  }
  if (pipeline_)
    agree(pipeline_->group(), *stream_, {}, refusal, 0, "pp");
  else if (refusal)
    std::rethrow_exception(refusal);
  const Tensor parts = parts_of(param, kind);
  if (pipeline_) pipeline_->group().broadcast(parts, part_.stage_of[param], *stream_)->wait_on(*stream_);
  std::vector<float> stored(static_cast<size_t>(parts.numel())),
      values(static_cast<size_t>(spec.shape.numel()));
  copy_to_host(*stream_, parts, stored.data());
  stream_->synchronize();
  for (int64_t lane = 0; lane < parts.size(0); ++lane)
    for (const PartRun& run : part_runs(spec, "tp", parts.size(0), lane))
      std::copy_n(stored.begin() + lane * parts.size(1) + run.part_begin, run.size,
                  values.begin() + run.whole_begin);
  if (kind == "grad" && *grad_scale_ != 1)
    for (float& value : values) value = static_cast<float>(value / *grad_scale_);
  return values;
}

void Engine::write_param(const std::string& name, const std::vector<float>& values) {
  const auto param = static_cast<size_t>(model_.registry.index(name));
  const ParamSpec& spec = model_.registry.specs()[param];
  require(static_cast<int64_t>(values.size()) == spec.shape.numel(), "parameter '", name, "' has ",
          spec.shape.to_string(), " = ", spec.shape.numel(), " elements, got ", values.size());
  const Shape shape = local_shape(spec, "tp", part_.lanes.lanes);
  for (int lane = 0; lane < part_.num_parts[param]; ++lane) {
    std::vector<float> part(static_cast<size_t>(shape.numel()));
    for (const PartRun& run : part_runs(spec, "tp", part_.lanes.lanes, part_.lanes.first + lane))
      std::copy_n(values.begin() + run.whole_begin, run.size, part.begin() + run.part_begin);
    if (pipeline_) pipeline_->write_shared(static_cast<int>(param), lane, part);
    if (part_.local[param] < 0) continue;  // on another stage
    params_.weights.write(part_.local[param] + lane, [&](const Tensor& piece, int64_t first) {
      copy_from_host(*stream_, &part[static_cast<size_t>(first)], piece);
    });
    stream_->synchronize();
  }
}

}  // namespace polyreme
