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

template <typename T>
void add_all(const T* x, const T* y, T* out, int64_t n) {
  for_lanes(n,
            [=](int64_t i, auto lanes) { store(out + i, load(x + i, lanes) + load(y + i, lanes), lanes); });
}

template <typename T>
void add_to_all(const T* x, float* out, int64_t n) {
  for_lanes(n,
            [=](int64_t i, auto lanes) { store(out + i, load(out + i, lanes) + load(x + i, lanes), lanes); });
}

template <typename T>
void gelu_forward_all(const T* x, T* y, int64_t n) {
  for_lanes(n, [=](int64_t i, auto lanes) {
    const v16f a = load(x + i, lanes);
    store(y + i, a / (broadcast(1.0f) + exp(minus_two_u(a, a * a))), lanes);
  });
}

template <typename T>
void gelu_backward_all(const T* x, const T* dy, T* dx, int64_t n) {
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

template <typename From, typename To>
void cast_all(const From* from, To* to, int64_t n) {
  for_lanes(n, [=](int64_t i, auto lanes) { store(to + i, load(from + i, lanes), lanes); });
}

}  // namespace

void add(Element type, const void* x, const void* y, void* out, int64_t n) {
  with_element(type, [=](auto t) {
    using T = decltype(t);
    add_all(static_cast<const T*>(x), static_cast<const T*>(y), static_cast<T*>(out), n);
  });
}

void add_to(Element type, const void* x, float* out, int64_t n) {
  with_element(type, [=](auto t) { add_to_all(static_cast<const decltype(t)*>(x), out, n); });
}

void gelu_forward(Element type, const void* x, void* y, int64_t n) {
  with_element(type, [=](auto t) {
    using T = decltype(t);
    gelu_forward_all(static_cast<const T*>(x), static_cast<T*>(y), n);
  });
}

void gelu_backward(Element type, const void* x, const void* dy, void* dx, int64_t n) {
  with_element(type, [=](auto t) {
    using T = decltype(t);
    gelu_backward_all(static_cast<const T*>(x), static_cast<const T*>(dy), static_cast<T*>(dx), n);
  });
}

void cast(Element from_type, const void* from, Element to_type, void* to, int64_t n) {
  with_element(from_type, [=](auto f) {
    with_element(to_type, [=](auto t) {
      cast_all(static_cast<const decltype(f)*>(from), static_cast<decltype(t)*>(to), n);
    });
  });
}

}  // namespace polyreme::cpu::POLYREME_ISA
