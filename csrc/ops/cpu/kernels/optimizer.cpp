#include "ops/cpu/kernels/optimizer.h"

#include "ops/cpu/kernels/square_sum.h"

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

void lion(const LionArgs& args, int64_t begin, int64_t end) {
  float* const param = args.param + begin;
  const float* const grad = args.grad + begin;
  float* const m = args.m + begin;
  const v16f scale = broadcast(args.scale), decay = broadcast(args.decay), lr = broadcast(args.lr);
  const v16f new_u = broadcast(args.new_u), new_m = broadcast(args.new_m);
  for_lanes(end - begin, [=](int64_t i, auto lanes) {
    const v16f old_m = load(m + i, lanes);
    const v16f change = load(grad + i, lanes) * scale - old_m;
    const v16f u = fma(new_u, change, old_m);
    const v16f step = select(u == zero(), zero(), copy_sign(lr, u));
    store(m + i, fma(new_m, change, old_m), lanes);
    store(param + i, fma(load(param + i, lanes), decay, -step), lanes);
  });
}

namespace {

// Asks for the line a page ahead: the hardware's prefetchers stop at the end of a page. Where a pass has as
// much arithmetic as memory this hides what they leave.
template <typename... Streams>
POLYREME_INLINE void ask_ahead(int64_t i, const Streams*... data) {
  (__builtin_prefetch(data + i + 1024), ...);
}

// r of LAMB, from moments that are up to date. Bias correction is taken out of the root's fraction, since a
// second division would cost more than the memory does.
struct LambDirection {
  explicit LambDirection(const AdamWArgs& args, float weight_decay)
      : step_size(broadcast(args.step_size * args.sqrt_bias2)),
        eps(broadcast(args.eps * args.sqrt_bias2)),
        decay(broadcast(weight_decay)) {}
  v16f step_size, eps, decay;
};

POLYREME_INLINE v16f lamb_direction(const LambDirection& d, v16f param, v16f m, v16f v) {
  return fma(d.decay, param, d.step_size * m / (sqrt(v) + d.eps));
}

}  // namespace

void lamb_moments(const AdamWArgs& args, float decay, int64_t begin, int64_t end, double* sums) {
  const float* const param = args.param + begin;
  const float* const grad = args.grad + begin;
  float* const m = args.m + begin;
  float* const v = args.v + begin;
  const v16f scale = broadcast(args.scale), new_m = broadcast(args.new_m), keep_v = broadcast(args.keep_v),
             new_v = broadcast(args.new_v);
  const LambDirection direction(args, decay);
  SquareSum param_squares, direction_squares;
  for_lanes(end - begin, [&](int64_t i, auto lanes) {
    ask_ahead(i, param, grad, m, v);
    const v16f g = load(grad + i, lanes) * scale;
    const v16f old_m = load(m + i, lanes);
    const v16f m_new = fma(new_m, g - old_m, old_m);
    const v16f v_new = fma(new_v * g, g, load(v + i, lanes) * keep_v);
    store(m + i, m_new, lanes);
    store(v + i, v_new, lanes);
    const v16f p = load(param + i, lanes);
    add_squares(param_squares, p);
    add_squares(direction_squares, lamb_direction(direction, p, m_new, v_new));
  });
  sums[0] = total(param_squares);
  sums[1] = total(direction_squares);
}

void lamb_apply(const AdamWArgs& args, float decay, float lr, int64_t begin, int64_t end) {
  float* const param = args.param + begin;
  const float* const m = args.m + begin;
  const float* const v = args.v + begin;
  const LambDirection direction(args, decay);
  const v16f factor = broadcast(lr);
  for_lanes(end - begin, [&](int64_t i, auto lanes) {
    ask_ahead(i, param, m, v);
    const v16f p = load(param + i, lanes);
    const v16f r = lamb_direction(direction, p, load(m + i, lanes), load(v + i, lanes));
    store(param + i, fnma(factor, r, p), lanes);
  });
}

void muon_momentum(const MomentumArgs& args, int64_t begin, int64_t end) {
  const float* const grad = args.grad + begin;
  float* const m = args.m + begin;
  float* const out = args.out + begin;
  const v16f scale = broadcast(args.scale), new_m = broadcast(args.new_m),
             momentum = broadcast(args.momentum);
  for_lanes(end - begin, [=](int64_t i, auto lanes) {
    const v16f g = load(grad + i, lanes) * scale;
    const v16f old_m = load(m + i, lanes);
    const v16f m_new = fma(new_m, g - old_m, old_m);
    store(m + i, m_new, lanes);
    store(out + i, fma(momentum, m_new - g, g), lanes);
  });
}

void weighted_sum(float a, const float* x, float b, const float* y, float* out, int64_t n) {
  const v16f factor_x = broadcast(a), factor_y = broadcast(b);
  if (y == nullptr) {
    for_lanes(n, [=](int64_t i, auto lanes) { store(out + i, factor_x * load(x + i, lanes), lanes); });
  } else {
    for_lanes(n, [=](int64_t i, auto lanes) {
      store(out + i, fma(factor_y, load(y + i, lanes), factor_x * load(x + i, lanes)), lanes);
    });
  }
}

bool accumulate(Element type, const void* x, float* out, int64_t n) {
  bool not_finite = false;
  with_element(type, [&](auto element) {
    const auto* const terms = static_cast<const decltype(element)*>(x);
    v16f spoiled = zero();  // NaN where a term was not finite
    for_lanes(n, [&](int64_t i, auto lanes) {
      const v16f term = load(terms + i, lanes);
      spoiled = fma(term, zero(), spoiled);
      store(out + i, load(out + i, lanes) + term, lanes);
    });
    not_finite = any(is_nan(spoiled));
  });
  return not_finite;
}

void scale(Element type, void* x, float factor, int64_t n) {
  with_element(type, [=](auto element) {
    auto* const data = static_cast<decltype(element)*>(x);
    const v16f factors = broadcast(factor);
    for_lanes(n, [=](int64_t i, auto lanes) { store(data + i, load(data + i, lanes) * factors, lanes); });
  });
}

}  // namespace polyreme::cpu::POLYREME_ISA
