#include "checkpoint/save_plan.h"

#include <algorithm>
#include <numeric>
#include <unordered_map>

#include "base/error.h"

namespace polyreme {
namespace {

// What one set of classes holds, and nobody else: these ranks share the writing of it.
struct Pool {
  std::vector<int32_t> ranks;
  std::vector<PlanPiece> runs;
  int64_t num_bytes = 0;
};

struct Holding {
  int64_t begin, end;
  int32_t holder;
};

// A hash of a set is the sum of its members' (mod 2^64); the finaliser of splitmix64 (Steele et al. 2014).
uint64_t hash_of(int32_t holder) {
  uint64_t x = (static_cast<uint64_t>(holder) + 1) * 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// The holdings of each tensor: those of tensor t are in [first[t], first[t + 1]).
struct ByTensor {
  std::vector<size_t> first;
  std::vector<Holding> holdings;
};

ByTensor sort_by_tensor(std::span<const PlanTensor> tensors, std::span<const std::vector<PlanPiece>> held) {
  ByTensor result{.first = std::vector<size_t>(tensors.size() + 1), .holdings = {}};
  for (const std::vector<PlanPiece>& pieces : held)
    for (const PlanPiece& piece : pieces) {
      require(piece.tensor >= 0 && static_cast<size_t>(piece.tensor) < tensors.size(),
              "plan_save: a piece of tensor ", piece.tensor, " of ", tensors.size());
      const PlanTensor& tensor = tensors[static_cast<size_t>(piece.tensor)];
      require(0 <= piece.begin && piece.begin <= piece.end && piece.end <= tensor.num_elements, "tensor '",
              tensor.name, "': a rank holds elements ", piece.begin, " to ", piece.end, " of ",
              tensor.num_elements);
      ++result.first[static_cast<size_t>(piece.tensor) + 1];
    }
  std::partial_sum(result.first.begin(), result.first.end(), result.first.begin());
  result.holdings.resize(result.first.back());
  std::vector<size_t> next(result.first.begin(), result.first.end() - 1);
  for (size_t c = 0; c < held.size(); ++c)
    for (const PlanPiece& piece : held[c])
      result.holdings[next[static_cast<size_t>(piece.tensor)]++] = {piece.begin, piece.end,
                                                                    static_cast<int32_t>(c)};
  return result;
}

class Pools {
 public:
  Pools(size_t num_classes, std::span<const int32_t> class_of_rank)
      : depth_(num_classes), ranks_of_class_(num_classes) {
    for (size_t r = 0; r < class_of_rank.size(); ++r)
      ranks_of_class_[static_cast<size_t>(class_of_rank[r])].push_back(static_cast<int32_t>(r));
  }

  // Sweeps over the borders of a tensor's holdings; between two borders the holders are the same.
  void add_tensor(int32_t index, const PlanTensor& tensor, std::span<const Holding> holdings) {
    events_.clear();
    for (const Holding& h : holdings) {
      if (h.begin == h.end) continue;
      events_.push_back({h.begin, h.holder, true});
      events_.push_back({h.end, h.holder, false});
    }
    std::ranges::sort(events_, {}, &Event::at);
    uint64_t hash = 0;
    int64_t from = 0;
    const auto flush = [&](int64_t to) {
      if (to == from) return;
      require(hash != 0, "tensor '", tensor.name, "': no rank holds its elements ", from, " to ", to, " of ",
              tensor.num_elements);
      add_run(hash, index, from, to, tensor.item_bytes);
      from = to;
    };
    for (const Event& event : events_) {
      flush(event.at);
      int32_t& depth = depth_[static_cast<size_t>(event.holder)];  // pieces of one rank may overlap
      if (event.opens ? depth++ == 0 : --depth == 0)
        hash += event.opens ? hash_of(event.holder) : -hash_of(event.holder);
    }
    flush(tensor.num_elements);
  }

  std::vector<Pool>& pools() { return pools_; }

 private:
  struct Event {
    int64_t at;
    int32_t holder;
    bool opens;
  };

  void add_run(uint64_t hash, int32_t tensor, int64_t begin, int64_t end, int64_t item_bytes) {
    const auto [found, is_new] = index_.try_emplace(hash, pools_.size());
    if (is_new) {
      Pool& pool = pools_.emplace_back();
      for (size_t c = 0; c < depth_.size(); ++c)
        if (depth_[c] > 0)
          pool.ranks.insert(pool.ranks.end(), ranks_of_class_[c].begin(), ranks_of_class_[c].end());
    }
    Pool& pool = pools_[found->second];
    pool.num_bytes += (end - begin) * item_bytes;
    if (!pool.runs.empty() && pool.runs.back().tensor == tensor && pool.runs.back().end == begin)
      pool.runs.back().end = end;
    else
      pool.runs.push_back({tensor, begin, end});
  }

  std::vector<int32_t> depth_;
  std::vector<std::vector<int32_t>> ranks_of_class_;
  std::vector<Event> events_;
  std::unordered_map<uint64_t, size_t> index_;
  std::vector<Pool> pools_;
};

// How much of `num_bytes` each rank takes so that the largest load is least: water poured on uneven ground.
std::vector<int64_t> fill(const std::vector<int64_t>& loads, int64_t num_bytes) {
  std::vector<int64_t> sorted = loads;
  std::ranges::sort(sorted);
  int64_t left = num_bytes, level = sorted[0];
  size_t count = 1;
  for (; count < sorted.size(); ++count) {
    const int64_t step = (sorted[count] - level) * static_cast<int64_t>(count);
    if (step > left) break;
    left -= step;
    level = sorted[count];
  }
  level += left / static_cast<int64_t>(count);
  int64_t rest = left % static_cast<int64_t>(count);
  std::vector<int64_t> quotas;
  for (const int64_t load : loads) {
    quotas.push_back(std::max<int64_t>(level - load, 0));
    if (rest > 0 && load <= level) ++quotas.back(), --rest;
  }
  return quotas;
}

// Deals the runs of a pool out, in order, to its ranks in order.
void deal(const Pool& pool, std::span<const PlanTensor> tensors, int32_t rank, int64_t min_cut_bytes,
          SavePlan& plan) {
  std::vector<int64_t> loads;
  for (const int32_t r : pool.ranks) loads.push_back(plan.bytes_of_rank[static_cast<size_t>(r)]);
  const std::vector<int64_t> quotas = fill(loads, pool.num_bytes);
  size_t turn = 0;
  int64_t left = quotas[0];
  for (const PlanPiece& run : pool.runs) {
    const int64_t item = tensors[static_cast<size_t>(run.tensor)].item_bytes;
    const int64_t grain = std::max<int64_t>(min_cut_bytes / item, 1);  // elements
    for (int64_t at = run.begin; at < run.end;) {
      while (left <= 0 && turn + 1 < quotas.size()) left += quotas[++turn];
      int64_t count = run.end - at;
      // The part for this rank in whole grains, to the nearest; the last rank takes what there is.
      if (turn + 1 < quotas.size() && count * item > left)
        count = std::min(count, (left / item + grain / 2) / grain * grain);
      if (count == 0) {
        left += quotas[++turn];
        continue;
      }
      const int32_t writer = pool.ranks[turn];
      if (writer == rank) plan.pieces.push_back({run.tensor, at, at + count});
      plan.bytes_of_rank[static_cast<size_t>(writer)] += count * item;
      left -= count * item;
      at += count;
    }
  }
}

}  // namespace

SavePlan plan_save(std::span<const PlanTensor> tensors, std::span<const std::vector<PlanPiece>> held,
                   std::span<const int32_t> class_of_rank, int32_t rank, int64_t min_cut_bytes) {
  for (const int32_t c : class_of_rank)
    require(c >= 0 && static_cast<size_t>(c) < held.size(), "plan_save: class ", c, " of ", held.size());
  require(rank >= 0 && static_cast<size_t>(rank) < class_of_rank.size(), "plan_save: rank ", rank, " of ",
          class_of_rank.size());
  Pools pools(held.size(), class_of_rank);
  {
    const ByTensor by_tensor = sort_by_tensor(tensors, held);
    for (size_t t = 0; t < tensors.size(); ++t)
      pools.add_tensor(static_cast<int32_t>(t), tensors[t],
                       std::span(by_tensor.holdings)
                           .subspan(by_tensor.first[t], by_tensor.first[t + 1] - by_tensor.first[t]));
  }
  // Those with least choice first.
  std::ranges::stable_sort(pools.pools(), {}, [](const Pool& pool) { return pool.ranks.size(); });
  SavePlan plan{.pieces = {}, .bytes_of_rank = std::vector<int64_t>(class_of_rank.size())};
  for (const Pool& pool : pools.pools()) deal(pool, tensors, rank, min_cut_bytes, plan);
  std::ranges::sort(plan.pieces, [](const PlanPiece& a, const PlanPiece& b) {
    return a.tensor != b.tensor ? a.tensor < b.tensor : a.begin < b.begin;
  });
  return plan;
}

}  // namespace polyreme
