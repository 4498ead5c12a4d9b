#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ops/ops.h"
#include "tensor/param_spec.h"
#include "tensor/tensor.h"

namespace polyreme {

// Elements [begin, end) of a flat index space.
struct FlatRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
};

// Where every parameter lies and which rank keeps which part of it: the one description that all stages of
// ZeRO, the norm, the optimizer and checkpoints read.
//
// Parameters are grouped in *units*: parameters of one dtype whose gradients are reduced, and whose weights
// are gathered and released, together. A unit is a flat buffer: its parameters in order, each from a multiple
// of kAlignment elements on, the whole padded to num_shards equal slices that are multiples of kAlignment.
// The gaps are zero and stay zero. Shard r is the r-th slices of all units, one after the other.
//
// Neither offsets inside a unit nor the blocks of the norm depend on the number of shards.
class ShardMap {
 public:
  static constexpr int64_t kAlignment = kNormBlock;

  // `units`: lists of indices into `specs`, every parameter in exactly one. Throws InvalidArgument, naming
  // the parameters, for units of two dtypes and lists that do not fit; and for num_shards < 1.
  ShardMap(std::span<const ParamSpec> specs, std::vector<std::vector<int>> units, int64_t num_shards);

  int64_t num_shards() const { return num_shards_; }
  int num_units() const { return static_cast<int>(units_.size()); }
  int num_params() const { return static_cast<int>(slots_.size()); }
  // Elements of all units, gaps included.
  int64_t num_elements() const { return num_elements_; }
  // Elements of all parameters, without gaps.
  int64_t num_parameters() const { return num_parameters_; }
  // Elements of one shard, over all units.
  int64_t shard_elements() const { return num_elements_ / num_shards_; }

  // In ascending order of their place in the unit.
  const std::vector<int>& params_of(int unit) const { return units_[index(unit)].params; }
  DType dtype_of(int unit) const { return units_[index(unit)].dtype; }
  int64_t unit_elements(int unit) const { return units_[index(unit)].range.size(); }
  // Of the unit in the flat index space of all units.
  FlatRange unit_range(int unit) const { return units_[index(unit)].range; }
  // Elements of the unit that shard `rank` keeps.
  FlatRange shard_slice(int unit, int64_t rank) const;
  // Where the unit's slice begins in a shard.
  int64_t shard_offset(int unit) const { return units_[index(unit)].range.begin / num_shards_; }

  int unit_of(int param) const { return slots_[index(param)].unit; }
  int64_t offset_in_unit(int param) const { return slots_[index(param)].offset; }
  const Shape& shape_of(int param) const { return slots_[index(param)].shape; }
  // The parameter's part of its unit's buffer [unit_elements()], in the parameter's shape.
  Tensor view(const Tensor& unit_buffer, int param) const;

  // Elements [param_begin, param_begin + size) of a parameter, and where a shard holds them.
  struct Piece {
    int param = 0;
    int64_t param_begin = 0;
    int64_t unit_shard_begin = 0;  // in the shard's slice of the unit
    int64_t shard_begin = 0;       // in the shard
    int64_t size = 0;
  };
  // All that shard `rank` holds, ascending in shard_begin; nothing of parameters without elements there.
  std::vector<Piece> pieces(int64_t rank) const;

 private:
  struct Slot {
    int unit = -1;
    int64_t offset = 0;
    Shape shape;
  };
  struct Unit {
    std::vector<int> params;
    DType dtype = DType::kF32;
    FlatRange range;
  };
  static size_t index(int i) { return static_cast<size_t>(i); }

  int64_t num_shards_;
  std::vector<Slot> slots_;  // by parameter
  std::vector<Unit> units_;
  int64_t num_elements_ = 0;
  int64_t num_parameters_ = 0;
};

struct UnitOptions {
  // A unit is closed once its gradients have this many bytes in fp32; a parameter is never cut.
  int64_t bucket_bytes = int64_t{1} << 62;
  // Whether a unit also ends with its block.
  bool end_with_block = false;
  // Of every parameter; parameters of different groups are never in one unit. Empty: one group.
  std::span<const int> group_of_param = {};
};

// Units for ShardMap: parameters in order, of one dtype and group each. block_of_param: the layer that
// declares each parameter, ascending; empty: one block.
std::vector<std::vector<int>> make_units(std::span<const ParamSpec> specs,
                                         std::span<const int> block_of_param, const UnitOptions& options);

}  // namespace polyreme
