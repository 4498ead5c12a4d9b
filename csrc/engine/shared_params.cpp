#include "engine/shared_params.h"

#include "ops/ops.h"

namespace polyreme {

SharedParams::SharedParams(const Model& model, const StagePart& part, Communicator& stages, Stream& stream,
                           ParamStore& params, const std::vector<uint8_t>& trainable)
    : model_(model), part_(part), stages_(stages), stream_(stream), params_(params), trainable_(trainable) {
  for (const SharedParam& shared : part.shared) {
    Share share{
        .what = shared, .is_owner = shared.owner == stages.rank(), .is_user = shared.user == stages.rank()};
    if (!share.is_owner && !share.is_user) continue;
    if (share.is_owner) params.grads.defer(local_of(share));
    if (!share.is_owner) share.weight = new_tensor(share, dtype_of(share), "shared weight");
    shares_.push_back(std::move(share));
  }
  params.set_shared(this);
}

Tensor SharedParams::new_tensor(const Share& share, DType dtype, const char* label) const {
  const ParamSpec& spec = model_.registry.specs()[static_cast<size_t>(share.what.param)];
  return empty(stream_.device(), dtype, local_shape(spec, "tp", part_.lanes.lanes), label);
}

SharedParams::Share* SharedParams::find(int param, int lane) {
  for (Share& share : shares_)
    if (share.what.param == param && share.what.lane == lane && share.is_user) return &share;
  return nullptr;
}

void SharedParams::begin_step() {
  for (Share& share : shares_) {
    share.grads.clear();
    share.is_begun = false;
  }
}

Tensor SharedParams::grad(const ParamUse& use) {
  Share& share = *find(use.param, use.lane);
  if (!is_trainable(use.param)) return new_tensor(share, DType::kF32, "gradient of a frozen one");  // dropped
  if (!share.is_begun) {
    share.grads.push_back(new_tensor(share, DType::kF32, "shared gradient"));
    fill(stream_, share.grads.back(), 0.0f);
    share.is_begun = true;
  }
  return share.grads.back();
}

Tensor SharedParams::weight(const ParamUse& use) {
  const Share& share = *find(use.param, use.lane);
  return share.weight.defined() ? share.weight : params_.weights.weight(local_of(share));
}

void SharedParams::complete_lane(const LayerRange& layers) {
  for (Share& share : shares_) {
    const auto layer = static_cast<size_t>(model_.registry.layers_of(share.what.param).back());
    if (share.is_user && layers.begin <= layer && layer < layers.end) share.is_begun = false;
  }
}

void SharedParams::add_gradients() {
  for (Share& share : shares_) {
    const int local = share.is_owner ? local_of(share) : -1;
    if (share.is_owner && !share.is_user) {
      for (size_t lane = 0; lane < params_.grads.num_deferred(local); ++lane) {
        share.grads.push_back(new_tensor(share, DType::kF32, "shared gradient"));
        stages_.receive(share.grads.back(), share.what.user, stream_)->wait_on(stream_);
      }
    } else if (!share.is_owner) {
      for (const Tensor& grad : share.grads) stages_.send(grad, share.what.owner, stream_)->wait_on(stream_);
    }
    if (share.is_owner) params_.grads.complete_deferred(local, share.grads);
    share.grads.clear();
  }
}

void SharedParams::write(int param, int lane, const std::vector<float>& values) {
  const Share* share = find(param, lane);
  if (!share || !share->weight.defined()) return;
  const bool is_narrow = share->weight.dtype() != DType::kF32;
  const Tensor wide = is_narrow ? new_tensor(*share, DType::kF32, "shared weight") : share->weight;
  copy_from_host(stream_, values.data(), wide);
  if (is_narrow) cast(stream_, wide, share->weight);
  stream_.synchronize();
}

std::vector<MemoryTerm> SharedParams::memory(int64_t lanes) const {
  int64_t weights = 0, gradients = 0;
  for (const Share& share : shares_) {
    if (share.weight.defined()) weights += share.weight.size_bytes();
    if (!trainable_.empty() && trainable_[static_cast<size_t>(share.what.param)] == 0) continue;
    // The user's; at the owner also its own, which wait for them.
    const ParamSpec& spec = model_.registry.specs()[static_cast<size_t>(share.what.param)];
    const auto bytes =
        static_cast<int64_t>(sizeof(float)) * local_shape(spec, "tp", part_.lanes.lanes).numel();
    gradients += lanes * bytes * (share.is_owner ? 2 : 1);
  }
  return {{"shared weights", weights, true}, {"shared gradients", gradients, false}};
}

void SharedParams::share_weights() {
  for (const Share& share : shares_) {
    if (share.is_owner && share.is_user) continue;
    const Tensor weight = share.is_owner ? params_.weights.weight(local_of(share)) : share.weight;
    const auto work = share.is_owner ? stages_.send(weight, share.what.user, stream_)
                                     : stages_.receive(weight, share.what.owner, stream_);
    work->wait_on(stream_);
  }
}

}  // namespace polyreme
