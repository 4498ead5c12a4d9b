#include "ops/cpu/kernels/layer_norm.h"

#include "ops/cpu/kernels/lanes.h"

namespace polyreme::cpu::POLYREME_ISA {
namespace {

struct Moments {
  float mean, variance;
};

// The corrected two-pass algorithm (Chan, Golub & LeVeque 1983): the second pass sums the deviations
// from the first mean as well as their squares, which removes the rounding error of that mean.
template <typename T>
POLYREME_INLINE Moments row_moments(const T* x, int64_t n) {
  const float inverse_n = 1.0f / static_cast<float>(n);
  v16f sum[4] = {zero(), zero(), zero(), zero()};
  for_lanes_in_chains<4>(
      n, [&](int64_t i, auto lanes, int chain) { sum[chain] = sum[chain] + load(x + i, lanes); });
  const float first_mean = reduce_chains<4>(sum) * inverse_n;

  const v16f shift = broadcast(first_mean);
  v16f rest[2] = {zero(), zero()}, square[2] = {zero(), zero()};
  for_lanes_in_chains<2>(n, [&](int64_t i, auto lanes, int chain) {
    const v16f d = keep(load(x + i, lanes) - shift, zero(), lanes);
    rest[chain] = rest[chain] + d;
    square[chain] = fma(d, d, square[chain]);
  });
  const float correction = reduce_chains<2>(rest) * inverse_n;
  const float variance = reduce_chains<2>(square) * inverse_n - correction * correction;
  // Rounding can leave a tiny negative number where all elements are equal; NaN stays NaN.
  return {first_mean + correction, variance < 0.0f ? 0.0f : variance};
}

// Rows of a chain over rows that are read side by side: the sums are loaded and stored once for all.
constexpr int kRowsAtOnce = 4;

template <int kRows, typename T>
POLYREME_INLINE void add_rows(const T* x, int64_t stride, int64_t n, float* out) {
  for_lanes(n, [=](int64_t i, auto lanes) {
    v16f sum = load(out + i, lanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) sum = sum + load(x + r * stride + i, lanes);
    store(out + i, sum, lanes);
  });
}

template <int kRows, typename T>
POLYREME_INLINE void add_weight_rows(const LayerNormBackwardWeight& args, int64_t row, int64_t column,
                                     int64_t n) {
  const T* dy = static_cast<const T*>(args.dy) + row * args.cols + column;
  const T* x = static_cast<const T*>(args.x) + row * args.cols + column;
  const float* mean = args.mean + row;
  const float* rstd = args.rstd + row;
  float* dgamma = args.dgamma + column;
  float* dbeta = args.dbeta + column;
  const int64_t stride = args.cols;
  for_lanes(n, [=](int64_t i, auto lanes) {
    v16f gamma_sum = load(dgamma + i, lanes), beta_sum = load(dbeta + i, lanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const v16f gradient = load(dy + r * stride + i, lanes);
      const v16f xhat = (load(x + r * stride + i, lanes) - broadcast(mean[r])) * broadcast(rstd[r]);
      gamma_sum = fma(gradient, xhat, gamma_sum);
      beta_sum = beta_sum + gradient;
    }
    store(dgamma + i, gamma_sum, lanes);
    store(dbeta + i, beta_sum, lanes);
  });
}

template <typename T>
void normalize_rows(const LayerNormForward& args, int64_t first_row, int64_t end_row) {
  const float* const gamma = args.gamma;
  const float* const beta = args.beta;
  for (int64_t row = first_row; row < end_row; ++row) {
    const T* x = static_cast<const T*>(args.x) + row * args.cols;
    T* y = static_cast<T*>(args.y) + row * args.cols;
    const Moments moments = row_moments(x, args.cols);
    const float row_rstd = 1.0f / __builtin_sqrtf(moments.variance + args.eps);
    args.mean[row] = moments.mean;
    args.rstd[row] = row_rstd;
    const v16f mean = broadcast(moments.mean), rstd = broadcast(row_rstd);
    for_lanes(args.cols, [=](int64_t i, auto lanes) {
      const v16f xhat = (load(x + i, lanes) - mean) * rstd;
      store(y + i, fma(xhat, load(gamma + i, lanes), load(beta + i, lanes)), lanes);
    });
  }
}

template <typename T>
void normalize_rows_backward(const LayerNormBackwardInput& args, int64_t first_row, int64_t end_row) {
  const float* const gamma = args.gamma;
  const float inverse_n = 1.0f / static_cast<float>(args.cols);
  for (int64_t row = first_row; row < end_row; ++row) {
    const T* dy = static_cast<const T*>(args.dy) + row * args.cols;
    const T* x = static_cast<const T*>(args.x) + row * args.cols;
    T* dx = static_cast<T*>(args.dx) + row * args.cols;
    const v16f mean = broadcast(args.mean[row]), rstd = broadcast(args.rstd[row]);
    // Lanes that do not exist load dy = gamma = 0 and add nothing to either sum.
    v16f sum[2] = {zero(), zero()}, dot[2] = {zero(), zero()};
    for_lanes_in_chains<2>(args.cols, [&](int64_t i, auto lanes, int chain) {
      const v16f g = load(dy + i, lanes) * load(gamma + i, lanes);
      const v16f xhat = keep((load(x + i, lanes) - mean) * rstd, zero(), lanes);
      sum[chain] = sum[chain] + g;
      dot[chain] = fma(g, xhat, dot[chain]);
    });
    const v16f average = broadcast(reduce_chains<2>(sum) * inverse_n);
    const v16f projection = broadcast(reduce_chains<2>(dot) * inverse_n);
    for_lanes(args.cols, [=](int64_t i, auto lanes) {
      const v16f g = load(dy + i, lanes) * load(gamma + i, lanes);
      const v16f xhat = (load(x + i, lanes) - mean) * rstd;
      store(dx + i, rstd * fnma(xhat, projection, g - average), lanes);
    });
  }
}

template <typename T>
void accumulate_weights(const LayerNormBackwardWeight& args, int64_t first_column, int64_t end_column) {
  int64_t row = 0;
  for (; row + kRowsAtOnce <= args.rows; row += kRowsAtOnce)
    add_weight_rows<kRowsAtOnce, T>(args, row, first_column, end_column - first_column);
  for (; row < args.rows; ++row) add_weight_rows<1, T>(args, row, first_column, end_column - first_column);
}

template <typename T>
void accumulate_all_rows(const AccumulateRows& args, int64_t first_column, int64_t end_column) {
  const T* x = static_cast<const T*>(args.x) + first_column;
  float* out = args.out + first_column;
  const int64_t n = end_column - first_column;
  int64_t row = 0;
  for (; row + kRowsAtOnce <= args.rows; row += kRowsAtOnce)
    add_rows<kRowsAtOnce>(x + row * args.cols, args.cols, n, out);
  for (; row < args.rows; ++row) add_rows<1>(x + row * args.cols, args.cols, n, out);
}

}  // namespace

void layer_norm_forward(const LayerNormForward& args, int64_t first_row, int64_t end_row) {
  with_element(args.type, [&](auto t) { normalize_rows<decltype(t)>(args, first_row, end_row); });
}

void layer_norm_backward_input(const LayerNormBackwardInput& args, int64_t first_row, int64_t end_row) {
  with_element(args.type, [&](auto t) { normalize_rows_backward<decltype(t)>(args, first_row, end_row); });
}

void layer_norm_backward_weight(const LayerNormBackwardWeight& args, int64_t first_column,
                                int64_t end_column) {
  with_element(args.type, [&](auto t) { accumulate_weights<decltype(t)>(args, first_column, end_column); });
}

void accumulate_rows(const AccumulateRows& args, int64_t first_column, int64_t end_column) {
  with_element(args.type, [&](auto t) { accumulate_all_rows<decltype(t)>(args, first_column, end_column); });
}

}  // namespace polyreme::cpu::POLYREME_ISA
