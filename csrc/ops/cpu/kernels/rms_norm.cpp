#include "ops/cpu/kernels/rms_norm.h"

#include "ops/cpu/kernels/lanes.h"

namespace polyreme::cpu::POLYREME_ISA {
namespace {

template <typename T>
void normalize_rows(const RmsNormForward& args, int64_t first_row, int64_t end_row) {
  const float* const gamma = args.gamma;
  const float inverse_n = 1.0f / static_cast<float>(args.cols);
  for (int64_t row = first_row; row < end_row; ++row) {
    const T* x = static_cast<const T*>(args.x) + row * args.cols;
    T* y = static_cast<T*>(args.y) + row * args.cols;
    v16f square[4] = {zero(), zero(), zero(), zero()};
    for_lanes_in_chains<4>(args.cols, [&](int64_t i, auto lanes, int chain) {
      const v16f a = load(x + i, lanes);
      square[chain] = fma(a, a, square[chain]);
    });
    const float row_rstd = 1.0f / __builtin_sqrtf(reduce_chains<4>(square) * inverse_n + args.eps);
    args.rstd[row] = row_rstd;
    const v16f rstd = broadcast(row_rstd);
    for_lanes(args.cols, [=](int64_t i, auto lanes) {
      store(y + i, load(x + i, lanes) * rstd * load(gamma + i, lanes), lanes);
    });
  }
}

template <typename T>
void normalize_rows_backward(const RmsNormBackwardInput& args, int64_t first_row, int64_t end_row) {
  const float* const gamma = args.gamma;
  const float inverse_n = 1.0f / static_cast<float>(args.cols);
  for (int64_t row = first_row; row < end_row; ++row) {
    const T* dy = static_cast<const T*>(args.dy) + row * args.cols;
    const T* x = static_cast<const T*>(args.x) + row * args.cols;
    T* dx = static_cast<T*>(args.dx) + row * args.cols;
    const v16f rstd = broadcast(args.rstd[row]);
    v16f dot[2] = {zero(), zero()};
    for_lanes_in_chains<2>(args.cols, [&](int64_t i, auto lanes, int chain) {
      const v16f g = load(dy + i, lanes) * load(gamma + i, lanes);
      dot[chain] = fma(g, load(x + i, lanes) * rstd, dot[chain]);
    });
    const v16f projection = broadcast(reduce_chains<2>(dot) * inverse_n);
    for_lanes(args.cols, [=](int64_t i, auto lanes) {
      const v16f g = load(dy + i, lanes) * load(gamma + i, lanes);
      store(dx + i, rstd * fnma(load(x + i, lanes) * rstd, projection, g), lanes);
    });
  }
}

// Rows of a chain over rows that are read side by side: the sums are loaded and stored once for all.
constexpr int kRowsAtOnce = 4;

template <int kRows, typename T>
POLYREME_INLINE void add_weight_rows(const RmsNormBackwardWeight& args, int64_t row, int64_t column,
                                     int64_t n) {
  const T* dy = static_cast<const T*>(args.dy) + row * args.cols + column;
  const T* x = static_cast<const T*>(args.x) + row * args.cols + column;
  const float* rstd = args.rstd + row;
  float* dgamma = args.dgamma + column;
  const int64_t stride = args.cols;
  for_lanes(n, [=](int64_t i, auto lanes) {
    v16f sum = load(dgamma + i, lanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const v16f xhat = load(x + r * stride + i, lanes) * broadcast(rstd[r]);
      sum = fma(load(dy + r * stride + i, lanes), xhat, sum);
    }
    store(dgamma + i, sum, lanes);
  });
}

template <typename T>
void accumulate_weights(const RmsNormBackwardWeight& args, int64_t first_column, int64_t end_column) {
  const int64_t n = end_column - first_column;
  int64_t row = 0;
  for (; row + kRowsAtOnce <= args.rows; row += kRowsAtOnce)
    add_weight_rows<kRowsAtOnce, T>(args, row, first_column, n);
  for (; row < args.rows; ++row) add_weight_rows<1, T>(args, row, first_column, n);
}

}  // namespace

void rms_norm_forward(const RmsNormForward& args, int64_t first_row, int64_t end_row) {
  with_element(args.type, [&](auto t) { normalize_rows<decltype(t)>(args, first_row, end_row); });
}

void rms_norm_backward_input(const RmsNormBackwardInput& args, int64_t first_row, int64_t end_row) {
  with_element(args.type, [&](auto t) { normalize_rows_backward<decltype(t)>(args, first_row, end_row); });
}

void rms_norm_backward_weight(const RmsNormBackwardWeight& args, int64_t first_column, int64_t end_column) {
  with_element(args.type, [&](auto t) { accumulate_weights<decltype(t)>(args, first_column, end_column); });
}

}  // namespace polyreme::cpu::POLYREME_ISA
