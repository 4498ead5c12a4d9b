// The layers' functions in plain float64: the straight formulas, row-major, nothing clever.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <numbers>
#include <vector>

#include "base/philox.h"
#include "ops/ops.h"

namespace polyreme::testing::reference {

using Values = std::vector<double>;

// x[rows, in] w[out, in]^T + bias[out]; an empty bias is none.
inline Values linear(const Values& x, const Values& w, const Values& bias, size_t in, size_t out) {
  const size_t rows = x.size() / in;
  Values y(rows * out);
  for (size_t r = 0; r < rows; ++r)
    for (size_t o = 0; o < out; ++o) {
      double sum = bias.empty() ? 0.0 : bias[o];
      for (size_t i = 0; i < in; ++i) sum += x[r * in + i] * w[o * in + i];
      y[r * out + o] = sum;
    }
  return y;
}

inline Values layer_norm(const Values& x, const Values& gamma, const Values& beta, double eps) {
  const size_t cols = gamma.size();
  Values y(x.size());
  for (size_t first = 0; first < x.size(); first += cols) {
    double mean = 0, variance = 0;
    for (size_t i = 0; i < cols; ++i) mean += x[first + i] / static_cast<double>(cols);
    for (size_t i = 0; i < cols; ++i)
      variance += (x[first + i] - mean) * (x[first + i] - mean) / static_cast<double>(cols);
    for (size_t i = 0; i < cols; ++i)
      y[first + i] = (x[first + i] - mean) / std::sqrt(variance + eps) * gamma[i] + beta[i];
  }
  return y;
}

// qkv[samples, seq, 3, heads, head_dim] to [samples, seq, heads, head_dim].
inline Values attention(const Values& qkv, size_t seq, size_t heads, size_t head_dim) {
  const size_t row = heads * head_dim, rows = qkv.size() / (3 * row);
  Values out(rows * row, 0.0);
  for (size_t query = 0; query < rows; ++query)
    for (size_t head = 0; head < heads; ++head) {
      const auto at = [&](size_t token, size_t which, size_t d) {
        return qkv[(token * 3 + which) * row + head * head_dim + d];
      };
      Values weights;
      double sum = 0;
      const size_t first_key = query / seq * seq;
      for (size_t key = first_key; key <= query; ++key) {
        double score = 0;
        for (size_t d = 0; d < head_dim; ++d) score += at(query, 0, d) * at(key, 1, d);
        weights.push_back(std::exp(score / std::sqrt(static_cast<double>(head_dim))));
        sum += weights.back();
      }
      for (size_t key = first_key; key <= query; ++key)
        for (size_t d = 0; d < head_dim; ++d)
          out[query * row + head * head_dim + d] += weights[key - first_key] / sum * at(key, 2, d);
    }
  return out;
}

inline Values rms_norm(const Values& x, const Values& gamma, double eps) {
  const size_t cols = gamma.size();
  Values y(x.size());
  for (size_t first = 0; first < x.size(); first += cols) {
    double square = 0;
    for (size_t i = 0; i < cols; ++i) square += x[first + i] * x[first + i] / static_cast<double>(cols);
    for (size_t i = 0; i < cols; ++i) y[first + i] = x[first + i] / std::sqrt(square + eps) * gamma[i];
  }
  return y;
}

// Rows of gate | up, `cols` each.
inline Values swiglu(const Values& x, size_t cols) {
  Values y(x.size() / 2);
  for (size_t i = 0; i < y.size(); ++i) {
    const size_t row = i / cols, col = i % cols;
    const double gate = x[row * 2 * cols + col], up = x[(row * 2 + 1) * cols + col];
    y[i] = gate / (1 + std::exp(-gate)) * up;
  }
  return y;
}

// qkv[samples, seq, kv_heads, group + 2, head_dim] (for each k and v head its query heads, k, v), with rotary
// positions on q and k, to [samples, seq, kv_heads * group, head_dim].
inline Values grouped_attention(const Values& qkv, size_t seq, size_t kv_heads, size_t group, size_t head_dim,
                                double theta) {
  const size_t rows = qkv.size() / (kv_heads * (group + 2) * head_dim), heads = kv_heads * group;
  const size_t half = head_dim / 2;
  Values equal(rows * 3 * heads * head_dim);  // as `attention` takes it, k and v repeated
  for (size_t row = 0; row < rows; ++row)
    for (size_t head = 0; head < heads; ++head)
      for (size_t which = 0; which < 3; ++which) {
        const size_t slot = which == 0 ? head % group : group + which - 1;
        const double* from = &qkv[((row * kv_heads + head / group) * (group + 2) + slot) * head_dim];
        double* to = &equal[((row * 3 + which) * heads + head) * head_dim];
        for (size_t i = 0; i < half; ++i) {
          const double angle =
              which == 2 ? 0
                         : static_cast<double>(row % seq) *
                               std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(head_dim));
          to[i] = from[i] * std::cos(angle) - from[half + i] * std::sin(angle);
          to[half + i] = from[half + i] * std::cos(angle) + from[i] * std::sin(angle);
        }
      }
  return attention(equal, seq, heads, head_dim);
}

inline Values gelu(const Values& x) {
  Values y(x.size());
  const double c = std::sqrt(2 / std::numbers::pi);
  for (size_t i = 0; i < x.size(); ++i)
    y[i] = 0.5 * x[i] * (1 + std::tanh(c * (x[i] + 0.044715 * x[i] * x[i] * x[i])));
  return y;
}

// Element i of x is element first_element + i of the stream.
inline Values dropout(const Values& x, double p, const RandomKey& key, uint64_t first_element) {
  Values y(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    const uint64_t element = first_element + i;
    const bool kept = random_block(key, element / 4).word[element % 4] >= p * 0x1p32;
    y[i] = kept ? x[i] / (1 - p) : 0;
  }
  return y;
}

// Empty `positions` are none.
inline Values embedding(const std::vector<int32_t>& tokens, const Values& table, const Values& positions,
                        size_t seq, size_t cols) {
  Values y(tokens.size() * cols);
  for (size_t i = 0; i < y.size(); ++i) {
    const size_t row = i / cols, col = i % cols;
    y[i] = table[static_cast<size_t>(tokens[row]) * cols + col];
    if (!positions.empty()) y[i] += positions[row % seq * cols + col];
  }
  return y;
}

// The loss of every row.
inline Values cross_entropy(const Values& logits, const std::vector<int32_t>& targets) {
  const size_t vocab = logits.size() / targets.size();
  Values loss(targets.size(), 0.0);
  for (size_t r = 0; r < targets.size(); ++r) {
    if (targets[r] == kIgnoreIndex) continue;
    double sum = 0;
    for (size_t i = 0; i < vocab; ++i) sum += std::exp(logits[r * vocab + i]);
    loss[r] = std::log(sum) - logits[r * vocab + static_cast<size_t>(targets[r])];
  }
  return loss;
}

inline Values add(const Values& x, const Values& y) {
  Values sum(x);
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += y[i];
  return sum;
}

// d(function)/d(at), by central differences. With a step of 1e-5 and functions whose value and third
// derivative are around 1, truncation (h^2 / 6) and rounding (2^-53 / h) are both near 1e-11.
inline Values gradient(const std::function<double(const Values&)>& function, Values at) {
  constexpr double kStep = 1e-5;
  Values result(at.size());
  for (size_t i = 0; i < at.size(); ++i) {
    const double middle = at[i];
    at[i] = middle + kStep;
    const double above = function(at);
    at[i] = middle - kStep;
    result[i] = (above - function(at)) / (2 * kStep);
    at[i] = middle;
  }
  return result;
}

}  // namespace polyreme::testing::reference
