#include "ops/cpu/kernels/llama.h"

#include "ops/cpu/kernels/lanes.h"
#include "ops/cpu/kernels/scalar_math.h"

namespace polyreme::cpu::POLYREME_ISA {
namespace {

// cos | sin of the angles of one position. An angle is a number of turns in 64-bit fixed point: multiplied by
// the position it wraps around exactly, so that late positions are as accurate as early ones, and no libm
// decides a bit.
void fill_turn(const Rotary& args, int64_t position, float* turn) {
  const int64_t half = args.head_dim / 2;
  const double log_theta = log_double(args.theta);
  for (int64_t i = 0; i < half; ++i) {
    const double exponent = -2.0 * static_cast<double>(i) / static_cast<double>(args.head_dim);
    const double turns = exp_double(exponent * log_theta) * 0.15915494309189535;  // 1 / (2 pi)
    const auto step = static_cast<uint64_t>(turns * 0x1p64);
    const uint64_t angle = step * static_cast<uint64_t>(position) + 0x80000000u;
    const SinCos at = sin_cos_turns(static_cast<uint32_t>(angle >> 32));
    turn[i] = static_cast<float>(at.cos);
    turn[half + i] = static_cast<float>(args.inverse ? -at.sin : at.sin);
  }
}

template <typename T>
void turn_heads(const Rotary& args, int64_t first_position, int64_t end_position, float* turn) {
  const int64_t half = args.head_dim / 2, group_row = args.group_heads * args.head_dim;
  for (int64_t position = first_position; position < end_position; ++position) {
    fill_turn(args, position, turn);
    for (int64_t i = 0; i < args.samples * args.groups; ++i) {
      const int64_t token = i / args.groups * args.seq + position;
      const int64_t begin = (token * args.groups + i % args.groups) * group_row;
      const T* const x = static_cast<const T*>(args.x) + begin;
      T* const y = static_cast<T*>(args.y) + begin;
      for (int64_t low = 0; low < args.heads * args.head_dim; low += args.head_dim)
        for_lanes(half, [=](int64_t at, auto lanes) {
          const v16f a = load(x + low + at, lanes), b = load(x + low + half + at, lanes);
          const v16f cos = load(turn + at, lanes), sin = load(turn + half + at, lanes);
          store(y + low + at, fnma(b, sin, a * cos), lanes);
          store(y + low + half + at, fma(a, sin, b * cos), lanes);
        });
      if (x == y) continue;
      const int64_t turned = args.heads * args.head_dim;
      for_lanes(group_row - turned,
                [=](int64_t at, auto lanes) { store(y + turned + at, load(x + turned + at, lanes), lanes); });
    }
  }
}

template <typename T>
void swiglu_rows(const SwiGlu& args, int64_t first_row, int64_t end_row) {
  for (int64_t row = first_row; row < end_row; ++row) {
    const T* gate = static_cast<const T*>(args.x) + row * 2 * args.cols;
    const T* up = gate + args.cols;
    T* y = static_cast<T*>(args.y) + row * args.cols;
    for_lanes(args.cols, [=](int64_t i, auto lanes) {
      const v16f g = load(gate + i, lanes);
      store(y + i, g / (broadcast(1.0f) + exp(-g)) * load(up + i, lanes), lanes);
    });
  }
}

// silu' = s + g s (1 - s) with s = 1 / (1 + e), e = exp(-g), 1 - s = e s.
template <typename T>
void swiglu_rows_backward(const SwiGlu& args, int64_t first_row, int64_t end_row) {
  for (int64_t row = first_row; row < end_row; ++row) {
    const T* gate = static_cast<const T*>(args.x) + row * 2 * args.cols;
    const T* up = gate + args.cols;
    const T* dy = static_cast<const T*>(args.dy) + row * args.cols;
    T* dgate = static_cast<T*>(args.dx) + row * 2 * args.cols;
    T* dup = dgate + args.cols;
    for_lanes(args.cols, [=](int64_t i, auto lanes) {
      const v16f g = load(gate + i, lanes), u = load(up + i, lanes), d = load(dy + i, lanes);
      // The bound keeps e finite, so that e * s * s is not inf * 0; a NaN passes min in this order.
      const v16f e = exp(min(broadcast(80.0f), -g));
      const v16f s = broadcast(1.0f) / (broadcast(1.0f) + e);
      store(dgate + i, d * u * fma(g, e * s * s, s), lanes);
      store(dup + i, d * (g * s), lanes);
    });
  }
}

}  // namespace

void rotary(const Rotary& args, int64_t first_position, int64_t end_position, float* turn) {
  with_element(args.type, [&](auto t) { turn_heads<decltype(t)>(args, first_position, end_position, turn); });
}

void swiglu_forward(const SwiGlu& args, int64_t first_row, int64_t end_row) {
  with_element(args.type, [&](auto t) { swiglu_rows<decltype(t)>(args, first_row, end_row); });
}

void swiglu_backward(const SwiGlu& args, int64_t first_row, int64_t end_row) {
  with_element(args.type, [&](auto t) { swiglu_rows_backward<decltype(t)>(args, first_row, end_row); });
}

}  // namespace polyreme::cpu::POLYREME_ISA
