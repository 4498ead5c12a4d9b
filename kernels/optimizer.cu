// update_kernel: flat arrays of `count` elements.
// Grid: one-dimensional, one thread per four elements, strides of the whole grid.
// Bytes per element: AdamW 16 read, 12 written; SGD 12 and 8 (without momentum 8 and 4); Lion 12 and 8; the
// optional weight 2 (4) more written. Memory-bound: four 16-byte loads in flight per thread, at least 2048
// threads per multiprocessor wanted.
// Accumulator: none, all arithmetic is fp32.
#include "kernels/elements.cuh"
#include "kernels/optimizer.cuh"

namespace polyreme::kernels {
namespace {

constexpr int kOfThread = 4;

// Each rule: State, what it keeps of an element besides the parameter; apply(gradient, parameter, state).
struct AdamWRule {
  static constexpr int kStates = 2;
  float new_m, keep_v, new_v, sqrt_bias2, eps, step_size, decay;
  __device__ float apply(float g, float param, float (&state)[kStates]) const {
    const float m = fmaf(new_m, g - state[0], state[0]);
    const float v = fmaf(new_v * g, g, state[1] * keep_v);
    const float denominator = sqrtf(v) / sqrt_bias2 + eps;
    state[0] = m;
    state[1] = v;
    return fmaf(param, decay, -(step_size * m / denominator));
  }
};
struct SgdRule {
  static constexpr int kStates = 0;
  float lr, decay;
  __device__ float apply(float g, float param, float*) const { return fmaf(-lr, g, param * decay); }
};
struct MomentumRule {
  static constexpr int kStates = 1;
  float momentum, lr, decay;
  int first_step;
  __device__ float apply(float g, float param, float (&state)[kStates]) const {
    if (!first_step) g = fmaf(momentum, state[0], g);
    state[0] = g;
    return fmaf(-lr, g, param * decay);
  }
};
struct LionRule {
  static constexpr int kStates = 1;
  float new_u, new_m, lr, decay;
  __device__ float apply(float g, float param, float (&state)[kStates]) const {
    const float change = g - state[0];
    const float u = fmaf(new_u, change, state[0]);
    const float step = u == 0.0f ? 0.0f : copysignf(lr, u);
    state[0] = fmaf(new_m, change, state[0]);
    return fmaf(param, decay, -step);
  }
};

struct States {
  float* at[2];
};

template <typename Rule, typename Weight>
__global__ void update_kernel(PolyremeUpdate update, States states, Rule rule, bool packs) {
  const float scale = *update.scale;
  if (scale != scale) return;
  auto* weight = static_cast<Weight*>(update.weight);
  for_elements<kOfThread>(update.count, packs, [&](int64_t i, auto pack) {
    constexpr int kCount = decltype(pack)::value;
    float param[kCount], grad[kCount], state[Rule::kStates + 1][kCount];
    load_pack(update.param + i, param);
    load_pack(update.grad + i, grad);
#pragma unroll
    for (int s = 0; s < Rule::kStates; ++s) load_pack(states.at[s] + i, state[s]);
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      float own[Rule::kStates + (Rule::kStates == 0)];
#pragma unroll
      for (int s = 0; s < Rule::kStates; ++s) own[s] = state[s][e];
      param[e] = rule.apply(grad[e] * scale, param[e], own);
#pragma unroll
      for (int s = 0; s < Rule::kStates; ++s) state[s][e] = own[s];
    }
#pragma unroll
    for (int s = 0; s < Rule::kStates; ++s) store_pack(states.at[s] + i, state[s]);
    store_pack(update.param + i, param);
    if (weight != nullptr) store_pack(weight + i, param);
  });
}

template <typename Rule>
cudaError_t launch_rule(const PolyremeUpdate& update, const States& states, const Rule& rule,
                        cudaStream_t stream) {
  if (update.count < 0) return cudaErrorInvalidValue;
  if (update.count == 0) return cudaSuccess;
  const bool packs = packs_fit(update.param, update.grad, update.weight, states.at[0], states.at[1]);
  return with_type(update.weight == nullptr ? 0 : update.weight_dtype, [&](auto weight) {
    void (*kernel)(PolyremeUpdate, States, Rule, bool) = &update_kernel<Rule, decltype(weight)>;
    POLYREME_LAUNCH(kernel, blocks_for(update.count, kThreads * kOfThread), kThreads, stream, update, states,
                    rule, packs);
    return cudaGetLastError();
  });
}

}  // namespace

cudaError_t launch_adamw(const PolyremeAdamW& args, cudaStream_t stream) {
  const AdamWRule rule = {args.new_m, args.keep_v,    args.new_v, args.sqrt_bias2,
                          args.eps,   args.step_size, args.decay};
  return launch_rule(args.update, {{args.m, args.v}}, rule, stream);
}

cudaError_t launch_sgd(const PolyremeSgd& args, cudaStream_t stream) {
  if (args.buffer == nullptr)
    return launch_rule(args.update, {{nullptr, nullptr}}, SgdRule{args.lr, args.decay}, stream);
  const MomentumRule rule = {args.momentum, args.lr, args.decay, args.first_step};
  return launch_rule(args.update, {{args.buffer, nullptr}}, rule, stream);
}

cudaError_t launch_lion(const PolyremeLion& args, cudaStream_t stream) {
  const LionRule rule = {args.new_u, args.new_m, args.lr, args.decay};
  return launch_rule(args.update, {{args.m, nullptr}}, rule, stream);
}

}  // namespace polyreme::kernels
