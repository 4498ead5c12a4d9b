#include "ops/cpu/kernels/optimizer.h"

#include "ops/cpu/kernels/lanes.h"

namespace polyreme::cpu::POLYREME_ISA {

// The order of operations is that of torch.optim.AdamW, so results agree with it to rounding.
void adamw(const AdamWArgs& args, int64_t begin, int64_t end) {
  float* const param = args.param + begin;
  const float* const grad = args.grad + begin;
  float* const m = args.m + begin;
  float* const v = args.v + begin;
  const v16f scale = broadcast(args.scale), decay = broadcast(args.decay),
             step_size = broadcast(args.step_size);
  const v16f new_m = broadcast(args.new_m), keep_v = broadcast(args.keep_v), new_v = broadcast(args.new_v);
  const v16f sqrt_bias2 = broadcast(args.sqrt_bias2), eps = broadcast(args.eps);
  for_lanes(end - begin, [=](int64_t i, auto lanes) {
    const v16f g = load(grad + i, lanes) * scale;
    const v16f old_m = load(m + i, lanes);
    const v16f m_new = fma(new_m, g - old_m, old_m);
    const v16f v_new = fma(new_v * g, g, load(v + i, lanes) * keep_v);
    const v16f denominator = sqrt(v_new) / sqrt_bias2 + eps;
    const v16f update = step_size * m_new / denominator;
    store(m + i, m_new, lanes);
    store(v + i, v_new, lanes);
    store(param + i, fma(load(param + i, lanes), decay, -update), lanes);
  });
}

void sgd(const SgdArgs& args, int64_t begin, int64_t end) {
  float* const param = args.param + begin;
  const float* const grad = args.grad + begin;
  float* const buffer = args.buffer == nullptr ? nullptr : args.buffer + begin;
  const v16f scale = broadcast(args.scale), decay = broadcast(args.decay), lr = broadcast(args.lr);
  const v16f momentum = broadcast(args.momentum);
  const bool first_step = args.first_step;
  for_lanes(end - begin, [=](int64_t i, auto lanes) {
    v16f b = load(grad + i, lanes) * scale;
    if (buffer != nullptr) {
      if (!first_step) b = fma(momentum, load(buffer + i, lanes), b);
      store(buffer + i, b, lanes);
    }
    store(param + i, fnma(lr, b, load(param + i, lanes) * decay), lanes);
  });
}

}  // namespace polyreme::cpu::POLYREME_ISA
