#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tensor/param_spec.h"
#include "tensor/tensor.h"

namespace polyreme {

// Where each parameter lies in a flat buffer: in order of declaration, each from a multiple of
// kAlignment elements on. The gaps are zero and stay zero. Weights, gradients and moments share it.
class FlatLayout {
 public:
  static constexpr int64_t kAlignment = 16;

  explicit FlatLayout(std::span<const ParamSpec> specs);

  // Elements of the whole buffer, gaps included.
  int64_t num_elements() const { return num_elements_; }
  // Elements of all parameters, without gaps.
  int64_t num_parameters() const { return num_parameters_; }
  size_t size() const { return slots_.size(); }
  int64_t offset(size_t param) const { return slots_[param].offset; }
  // The parameter's part of `flat` [num_elements()], in the parameter's shape.
  Tensor view(const Tensor& flat, size_t param) const;

 private:
  struct Slot {
    int64_t offset;
    Shape shape;
  };
  std::vector<Slot> slots_;
  int64_t num_elements_ = 0;
  int64_t num_parameters_ = 0;
};

}  // namespace polyreme
