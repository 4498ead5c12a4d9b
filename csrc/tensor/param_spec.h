#pragma once

#include <string>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "tensor/shape.h"

namespace polyreme {

// How one mesh axis cuts a dim of a parameter. The dim consists of `blocks` equal blocks (3 for a
// fused q|k|v, 2 for gate|up) and every block is cut evenly over the axis, so that a rank's part
// holds its share of each block. `replication` > 1: that many neighbouring ranks of the axis hold
// the same part (key and value heads when there are fewer of them than ranks).
struct Cut {
  int dim = 0;
  std::string axis;
  int64_t blocks = 1;
  int64_t replication = 1;
};

// What the gradient of a rank's part needs on a mesh axis before the optimizer may use it.
enum class GradReduction {
  kNone,     // the part's gradient is complete on every rank
  kLaneSum,  // partial sums over lanes of the axis: one lane_sum
};

struct AxisReduction {
  std::string axis;
  GradReduction reduction = GradReduction::kNone;
};

// How initial values are drawn. Element i depends on (seed, name, i) alone, not on the layout.
struct ParamInit {
  enum class Kind { kZeros, kOnes, kNormal } kind = Kind::kZeros;
  double std = 0;  // kNormal
};

// The one description of a parameter; layers, optimizer, gradient norm, checkpoints and adapters
// all read it. `shape` is the logical, unpadded, uncut shape.
struct ParamSpec {
  std::string name;  // global: "h.3.mlp.fc.weight"
  Shape shape;
  DType dtype = DType::kF32;
  Shape padded_shape;        // equal to shape where nothing is padded; padding is never saved
  std::string tie_group;     // parameters with the same non-empty group are one parameter with several uses
  bool weight_decay = true;  // the default rule; a user's rules by name override it
  std::vector<Cut> cuts;     // empty: replicated on every axis but dp
  std::vector<AxisReduction> grad_reductions = {{"dp", GradReduction::kLaneSum}};
  ParamInit init;
};

// The elements of `spec` that a rank of `axis` holds: its shape, given the axis' size. Throws
// InvalidArgument, naming parameter, dim, blocks and axis size, where the dim does not divide.
Shape local_shape(const ParamSpec& spec, const std::string& axis, int64_t axis_size);
bool is_cut(const ParamSpec& spec, const std::string& axis);

// The lanes of an axis that a rank owns: [first, first + count) of `lanes`.
struct LaneRange {
  int64_t lanes = 1;
  int64_t first = 0;
  int64_t count = 1;
};

// The elements of a parameter whose index along `dim` lies in one of the ranges [begin, end), ascending: a
// lane's part, without padding. No ranges: all of it.
struct PartRanges {
  int dim = 0;
  std::vector<std::pair<int64_t, int64_t>> ranges;
};
// The part of lane `lane` of `lanes`. The parameter is cut once along the axis, without replication.
PartRanges part_ranges(const ParamSpec& spec, const std::string& axis, int64_t lanes, int64_t lane);
// The number of its elements.
int64_t part_elements(const ParamSpec& spec, const PartRanges& part);

// Neighbouring elements of a lane's part of a parameter (row-major in local_shape of axis size `lanes`) that
// are neighbours in `shape` too.
struct PartRun {
  int64_t part_begin = 0;
  int64_t whole_begin = 0;
  int64_t size = 0;
};
// All elements of a lane's part but padding, ascending; of the whole parameter if the axis does not cut it.
std::vector<PartRun> part_runs(const ParamSpec& spec, const std::string& axis, int64_t lanes, int64_t lane);

}  // namespace polyreme
