#include "ops/cpu/kernels/cross_entropy.h"

#include "ops/cpu/kernels/lanes.h"
#include "ops/cpu/kernels/scalar_math.h"

namespace polyreme::cpu::POLYREME_ISA {
namespace {

constexpr int kChains = 4;
constexpr int64_t kBlock = 1024;

// The maximum of a block, NaN passed over.
template <typename T>
POLYREME_INLINE float block_max(const T* x, int64_t n) {
  const v16f lowest = broadcast(-__builtin_inff());
  v16f top[kChains] = {lowest, lowest, lowest, lowest};
  for_lanes_in_chains<kChains>(n, [&](int64_t i, auto lanes, int chain) {
    top[chain] = max(keep(load(x + i, lanes), lowest, lanes), top[chain]);
  });
  return reduce_max(max(max(top[0], top[1]), max(top[2], top[3])));
}

// The sum of exp(x - shift) over a block. Meanwhile the next block comes into the cache.
template <typename T>
POLYREME_INLINE float block_sum_exp(const T* x, int64_t n, float shift) {
  const v16f shifts = broadcast(shift);
  v16f sum[kChains] = {zero(), zero(), zero(), zero()};
  for_lanes_in_chains<kChains>(n, [&](int64_t i, auto lanes, int chain) {
    __builtin_prefetch(x + kBlock + i);
    sum[chain] = sum[chain] + keep(exp(load(x + i, lanes) - shifts), zero(), lanes);
  });
  return reduce_chains<kChains>(sum);
}

// exp of one number, with the bits that it has in a lane of a vector.
POLYREME_INLINE float exp_lane(float x) {
  float lanes[kLanes];
  store(lanes, exp(broadcast(x)));
  return lanes[0];
}

// log(sum(exp(x))), NaN where an element is NaN or +inf or all are -inf. The maximum and the sum
// relative to it are carried from block to block (Milakov & Gimelshein 2018).
template <typename T>
POLYREME_INLINE double row_log_sum_exp(const T* x, int64_t n) {
  constexpr float kLowest = -__builtin_inff();
  float top = kLowest;
  double sum = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t count = n - begin < kBlock ? n - begin : kBlock;
    const float block_top = block_max(x + begin, count);
    if (block_top > top) {
      sum *= static_cast<double>(exp_lane(top - block_top));
      top = block_top;
    }
    // While all are -inf, any finite shift makes their terms 0 rather than exp(-inf + inf).
    sum += static_cast<double>(block_sum_exp(x + begin, count, top == kLowest ? 0.0f : top));
  }
  return sum > 0 ? static_cast<double>(top) + log_double(sum) : __builtin_nan("");
}

POLYREME_INLINE bool is_target(int32_t target, int64_t vocab) { return target >= 0 && target < vocab; }

template <typename T>
void forward_rows(const CrossEntropyForward& args, int64_t first_row, int64_t end_row) {
  for (int64_t row = first_row; row < end_row; ++row) {
    const T* x = static_cast<const T*>(args.logits) + row * args.vocab;
    const double log_sum_exp = row_log_sum_exp(x, args.vocab);
    args.log_sum_exp[row] = static_cast<float>(log_sum_exp);
    const int32_t target = args.targets[row];
    args.loss[row] = is_target(target, args.vocab)
                         ? static_cast<float>(log_sum_exp - static_cast<double>(widen(x[target])))
                         : 0.0f;
  }
}

template <typename T>
void backward_rows(const CrossEntropyBackward& args, int64_t first_row, int64_t end_row) {
  const v16f scale = broadcast(args.scale);
  for (int64_t row = first_row; row < end_row; ++row) {
    T* x = static_cast<T*>(args.logits) + row * args.vocab;
    const int32_t target = args.targets[row];
    if (!is_target(target, args.vocab)) {
      for_lanes(args.vocab, [=](int64_t i, auto lanes) { store(x + i, zero(), lanes); });
      continue;
    }
    const v16f shift = broadcast(args.log_sum_exp[row]);
    const float target_probability = exp_lane(widen(x[target]) - args.log_sum_exp[row]);
    for_lanes(args.vocab,
              [=](int64_t i, auto lanes) { store(x + i, exp(load(x + i, lanes) - shift) * scale, lanes); });
    narrow((target_probability - 1.0f) * args.scale, x + target);
  }
}

template <typename T>
void part_max_rows(const CrossEntropyPart& args, int64_t first_row, int64_t end_row) {
  for (int64_t row = first_row; row < end_row; ++row) {
    const T* x = static_cast<const T*>(args.logits) + row * args.cols;
    const float top = block_max(x, args.valid);
    if (top > args.top[row]) args.top[row] = top;
  }
}

template <typename T>
void part_sums_rows(const CrossEntropyPart& args, int64_t first_row, int64_t end_row) {
  for (int64_t row = first_row; row < end_row; ++row) {
    const T* x = static_cast<const T*>(args.logits) + row * args.cols;
    const float shift = args.top[row] == -__builtin_inff() ? 0.0f : args.top[row];
    double sum = 0;
    for (int64_t begin = 0; begin < args.valid; begin += kBlock) {
      const int64_t count = args.valid - begin < kBlock ? args.valid - begin : kBlock;
      sum += static_cast<double>(block_sum_exp(x + begin, count, shift));
    }
    args.sums[row] = static_cast<float>(sum);
    const int64_t target = args.targets[row] - args.first_class;
    args.sums[args.rows + row] = target >= 0 && target < args.valid ? widen(x[target]) : 0.0f;
  }
}

template <typename T>
void part_backward_rows(const CrossEntropyPart& args, int64_t first_row, int64_t end_row) {
  const v16f scale = broadcast(args.scale);
  for (int64_t row = first_row; row < end_row; ++row) {
    T* x = static_cast<T*>(args.logits) + row * args.cols;
    const int64_t target = args.targets[row] - args.first_class;
    const int64_t used = args.targets[row] < 0 ? 0 : args.valid;
    const v16f shift = broadcast(args.log_sum_exp[row]);
    const bool is_here = target >= 0 && target < used;
    const float probability = is_here ? exp_lane(widen(x[target]) - args.log_sum_exp[row]) : 0.0f;
    for_lanes(used,
              [=](int64_t i, auto lanes) { store(x + i, exp(load(x + i, lanes) - shift) * scale, lanes); });
    for_lanes(args.cols - used, [=](int64_t i, auto lanes) { store(x + used + i, zero(), lanes); });
    if (is_here) narrow((probability - 1.0f) * args.scale, x + target);
  }
}

}  // namespace

void cross_entropy_part_max(const CrossEntropyPart& args, int64_t first_row, int64_t end_row) {
  with_element(args.type, [&](auto t) { part_max_rows<decltype(t)>(args, first_row, end_row); });
}

void cross_entropy_part_sums(const CrossEntropyPart& args, int64_t first_row, int64_t end_row) {
  with_element(args.type, [&](auto t) { part_sums_rows<decltype(t)>(args, first_row, end_row); });
}

void cross_entropy_finish(const CrossEntropyPart& args, int64_t first_row, int64_t end_row) {
  for (int64_t row = first_row; row < end_row; ++row) {
    const double sum = args.sums[row];
    const double log_sum_exp =
        sum > 0 ? static_cast<double>(args.top[row]) + log_double(sum) : __builtin_nan("");
    args.log_sum_exp[row] = static_cast<float>(log_sum_exp);
    args.loss[row] = args.targets[row] >= 0
                         ? static_cast<float>(log_sum_exp - static_cast<double>(args.sums[args.rows + row]))
                         : 0.0f;
  }
}

void cross_entropy_part_backward(const CrossEntropyPart& args, int64_t first_row, int64_t end_row) {
  with_element(args.type, [&](auto t) { part_backward_rows<decltype(t)>(args, first_row, end_row); });
}

void cross_entropy_forward(const CrossEntropyForward& args, int64_t first_row, int64_t end_row) {
  with_element(args.type, [&](auto t) { forward_rows<decltype(t)>(args, first_row, end_row); });
}

void cross_entropy_backward(const CrossEntropyBackward& args, int64_t first_row, int64_t end_row) {
  with_element(args.type, [&](auto t) { backward_rows<decltype(t)>(args, first_row, end_row); });
}

}  // namespace polyreme::cpu::POLYREME_ISA
