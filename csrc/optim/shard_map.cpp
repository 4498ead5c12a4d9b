#include "optim/shard_map.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/math.h"

namespace polyreme {

ShardMap::ShardMap(std::span<const ParamSpec> specs, std::vector<std::vector<int>> units, int64_t num_shards)
    : num_shards_(num_shards), slots_(specs.size()) {
  require(num_shards >= 1, "parameters cannot be cut into ", num_shards, " shards");
  for (std::vector<int>& params : units) {
    require(!params.empty(), "unit ", units_.size(), " has no parameters");
    Unit unit{.range = {num_elements_, num_elements_}};
    int64_t end = 0;
    for (const int param : params) {
      require(param >= 0 && index(param) < specs.size(), "unit ", units_.size(), " has parameter ", param,
              " of ", specs.size());
      const ParamSpec& spec = specs[index(param)];
      const ParamSpec& first = specs[index(params.front())];
      require(spec.dtype == first.dtype, "a unit holds one dtype: '", first.name, "' is ",
              dtype_name(first.dtype), ", '", spec.name, "' is ", dtype_name(spec.dtype));
      Slot& slot = slots_[index(param)];
      require(slot.unit < 0, "parameter '", spec.name, "' is in two units");
      slot = {num_units(), end, spec.padded_shape};
      num_parameters_ += spec.padded_shape.numel();
      end = round_up(end + spec.padded_shape.numel(), kAlignment);
    }
    unit.dtype = specs[index(params.front())].dtype;
    unit.params = std::move(params);
    unit.range.end += round_up(end, num_shards * kAlignment);
    num_elements_ = unit.range.end;
    units_.push_back(std::move(unit));
  }
  for (size_t i = 0; i < slots_.size(); ++i)
    require(slots_[i].unit >= 0, "parameter '", specs[i].name, "' is in no unit");
}

FlatRange ShardMap::shard_slice(int unit, int64_t rank) const {
  const int64_t size = unit_elements(unit) / num_shards_;
  return {rank * size, (rank + 1) * size};
}

Tensor ShardMap::view(const Tensor& unit_buffer, int param) const {
  const Slot& slot = slots_[index(param)];
  return unit_buffer.slice(0, slot.offset, slot.offset + slot.shape.numel()).view(slot.shape);
}

std::vector<ShardMap::Piece> ShardMap::pieces(int64_t rank) const {
  std::vector<Piece> result;
  for (int unit = 0; unit < num_units(); ++unit) {
    const FlatRange slice = shard_slice(unit, rank);
    for (const int param : params_of(unit)) {
      const Slot& slot = slots_[index(param)];
      const int64_t begin = std::max(slot.offset, slice.begin);
      const int64_t end = std::min(slot.offset + slot.shape.numel(), slice.end);
      if (begin >= end) continue;
      const int64_t in_slice = begin - slice.begin;
      result.push_back({param, begin - slot.offset, in_slice, shard_offset(unit) + in_slice, end - begin});
    }
  }
  return result;
}

std::vector<std::vector<int>> make_units(std::span<const ParamSpec> specs,
                                         std::span<const int> block_of_param, const UnitOptions& options) {
  struct Open {
    size_t unit;
    int64_t bytes;
    int block;
  };
  std::map<std::pair<DType, int>, Open> open;  // at most one for each kind of parameter
  std::vector<std::vector<int>> units;
  for (size_t i = 0; i < specs.size(); ++i) {
    const int block = block_of_param.empty() ? 0 : block_of_param[i];
    const std::pair kind{specs[i].dtype, options.group_of_param.empty() ? 0 : options.group_of_param[i]};
    auto it = open.find(kind);
    const bool is_closed = it == open.end() || it->second.bytes >= options.bucket_bytes ||
                           (options.end_with_block && it->second.block != block);
    if (is_closed) {
      it = open.insert_or_assign(kind, Open{units.size(), 0, block}).first;
      units.emplace_back();
    }
    units[it->second.unit].push_back(static_cast<int>(i));
    it->second.bytes += specs[i].padded_shape.numel() * static_cast<int64_t>(sizeof(float));
    it->second.block = block;
  }
  return units;
}

}  // namespace polyreme
