#include "ops/cpu/kernels/elementwise.h"

#include "ops/cpu/kernels/lanes.h"

// GELU in its tanh form, 0.5 x (1 + tanh(u)) with u = sqrt(2/pi) (x + 0.044715 x^3), is computed as
// x s with s = 1 / (1 + e), e = exp(-2u): the same function, without the cancellation in 1 + tanh
// for negative x. Its derivative is s + x s (1 - s) (2u)' with 1 - s = e s.

namespace polyreme::cpu::POLYREME_ISA {
namespace {

constexpr float kLinear = 1.5957691216057308f;  // 2 sqrt(2/pi)
constexpr float kCubic = 0.07135481282553505f;  // 0.044715 * 2 sqrt(2/pi)

POLYREME_INLINE v16f minus_two_u(v16f x, v16f square) {
  return x * fma(square, broadcast(-kCubic), broadcast(-kLinear));
}

}  // namespace

void add(const float* x, const float* y, float* out, int64_t n) {
  for_lanes(n,
            [=](int64_t i, auto lanes) { store(out + i, load(x + i, lanes) + load(y + i, lanes), lanes); });
}

void gelu_forward(const float* x, float* y, int64_t n) {
  for_lanes(n, [=](int64_t i, auto lanes) {
    const v16f a = load(x + i, lanes);
    store(y + i, a / (broadcast(1.0f) + exp(minus_two_u(a, a * a))), lanes);
  });
}

void gelu_backward(const float* x, const float* dy, float* dx, int64_t n) {
  for_lanes(n, [=](int64_t i, auto lanes) {
    const v16f a = load(x + i, lanes);
    const v16f square = a * a;
    // The bound keeps e finite, so that e * s * s is not inf * 0; a NaN passes min in this order.
    const v16f e = exp(min(broadcast(80.0f), minus_two_u(a, square)));
    const v16f s = broadcast(1.0f) / (broadcast(1.0f) + e);
    const v16f slope = fma(square, broadcast(3.0f * kCubic), broadcast(kLinear));
    const v16f derivative = fma(a * slope, e * s * s, s);
    store(dx + i, load(dy + i, lanes) * derivative, lanes);
  });
}

}  // namespace polyreme::cpu::POLYREME_ISA
