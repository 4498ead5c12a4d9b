#include "pipeline/schedule/split.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/error.h"

namespace polyreme::pipeline {
namespace {

constexpr double kNone = std::numeric_limits<double>::infinity();

std::string list_text(std::span<const int> counts) {
  std::string text = "[";
  for (size_t i = 0; i < counts.size(); ++i) text += concat(i == 0 ? "" : ", ", counts[i]);
  return text + "]";
}

void check_sizes(int num_layers, int num_chunks) {
  require(num_chunks >= 1, "a model is split into ", num_chunks, " chunks; expected 1 or more");
  require(num_layers >= num_chunks, num_layers, " layers cannot fill ", num_chunks,
          " chunks (stages x chunks per stage): some would be empty; use at most ", num_layers,
          " chunks, or a model of at least ", num_chunks, " layers");
}

// best[k][n]: the least of `measure` over the ways to cut the first n layers into k chunks, where a chunk
// costs `cost(begin, end)` and chunks are joined by `join`. Fills from[k][n] with the begin of the last
// chunk.
template <typename Cost, typename Join>
std::vector<std::vector<double>> cut(int num_layers, int num_chunks, const Cost& cost, const Join& join,
                                     std::vector<std::vector<int>>* from) {
  const auto sized = [&](auto value) {
    return std::vector(static_cast<size_t>(num_chunks) + 1,
                       std::vector(static_cast<size_t>(num_layers) + 1, value));
  };
  std::vector<std::vector<double>> best = sized(kNone);
  *from = sized(0);
  best[0][0] = 0;
  for (size_t k = 1; k < best.size(); ++k)
    for (size_t n = k; n <= static_cast<size_t>(num_layers); ++n)
      for (size_t begin = n; begin-- > k - 1;) {
        const double last = cost(begin, n);
        if (last == kNone) break;  // longer ones cost no less
        const double whole = join(best[k - 1][begin], last);
        if (whole < best[k][n]) {
          best[k][n] = whole;
          (*from)[k][n] = static_cast<int>(begin);
        }
      }
  return best;
}

}  // namespace

std::vector<int> split_layers(std::span<const double> costs, int num_chunks) {
  const int num_layers = static_cast<int>(costs.size());
  check_sizes(num_layers, num_chunks);
  for (size_t i = 0; i < costs.size(); ++i)
    require(std::isfinite(costs[i]) && costs[i] >= 0, "layer ", i, " costs ", costs[i],
            "; expected a finite number, 0 or more");
  std::vector<double> sums(costs.size() + 1, 0.0);
  std::partial_sum(costs.begin(), costs.end(), sums.begin() + 1);
  const auto cost = [&](size_t begin, size_t end) { return sums[end] - sums[begin]; };
  std::vector<std::vector<int>> from;
  const auto greatest = [](double a, double b) { return std::max(a, b); };
  const double limit = cut(num_layers, num_chunks, cost, greatest, &from).back().back();
  // The same sum may be formed from other differences.
  const double bound = limit + 1e-9 * sums.back();
  const auto square = [&](size_t begin, size_t end) {
    const double c = cost(begin, end);
    return c <= bound ? c * c : kNone;
  };
  cut(num_layers, num_chunks, square, std::plus<>(), &from);
  std::vector<int> counts(static_cast<size_t>(num_chunks));
  for (int k = num_chunks, end = num_layers; k > 0; --k) {
    const int begin = from[static_cast<size_t>(k)][static_cast<size_t>(end)];
    counts[static_cast<size_t>(k - 1)] = end - begin;
    end = begin;
  }
  return counts;
}

void check_split(std::span<const int> counts, int num_layers, int num_chunks) {
  check_sizes(num_layers, num_chunks);
  std::vector<int> even(static_cast<size_t>(num_chunks), num_layers / num_chunks);
  for (int i = 0; i < num_layers % num_chunks; ++i) ++even[static_cast<size_t>(i)];
  const std::string remedy = concat("; for example ", list_text(even));
  require(counts.size() == even.size(), "the split ", list_text(counts), " has ", counts.size(),
          " numbers; expected one for each of ", num_chunks, " chunks", remedy);
  int64_t sum = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    require(counts[i] >= 1, "the split ", list_text(counts), " gives chunk ", i, " ", counts[i],
            " layers; expected at least 1", remedy);
    sum += counts[i];
  }
  require(sum == num_layers, "the split ", list_text(counts), " has ", sum, " layers; the model has ",
          num_layers, remedy);
}

}  // namespace polyreme::pipeline
