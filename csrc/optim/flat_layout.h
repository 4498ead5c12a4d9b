#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ops/ops.h"
#include "tensor/param_spec.h"
#include "tensor/tensor.h"

namespace polyreme {

// Elements [begin, end) of a flat buffer.
struct FlatRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
};

// Where each parameter lies in a flat buffer: in order of declaration, each from a multiple of
// kAlignment elements on. The gaps are zero and stay zero. Weights, gradients and moments share it.
// It is also the shard map of ZeRO: the buffer is padded so that it cuts into equal shards, at block
// borders of the norm, so that neither offsets nor norms depend on the number of shards.
class FlatLayout {
 public:
  static constexpr int64_t kAlignment = kNormBlock;

  explicit FlatLayout(std::span<const ParamSpec> specs, int64_t num_shards = 1);

  // Elements of the whole buffer, gaps included.
  int64_t num_elements() const { return num_elements_; }
  // Elements of all parameters, without gaps.
  int64_t num_parameters() const { return num_parameters_; }
  size_t size() const { return slots_.size(); }
  int64_t offset(size_t param) const { return slots_[param].offset; }
  // The elements of shard `index` of num_shards.
  FlatRange shard(int64_t index) const;
  // The parameter's part of `flat` [num_elements()], in the parameter's shape.
  Tensor view(const Tensor& flat, size_t param) const;

 private:
  struct Slot {
    int64_t offset;
    Shape shape;
  };
  std::vector<Slot> slots_;
  int64_t num_shards_;
  int64_t num_elements_ = 0;
  int64_t num_parameters_ = 0;
};

}  // namespace polyreme
