#pragma once

#include <span>
#include <vector>

namespace polyreme::pipeline {

// How many consecutive layers each chunk gets, at least one: the split whose dearest chunk is cheapest, and
// of those the most even one (the least sum of squares). A pure function of its arguments. Throws
// InvalidArgument, with the numbers that work, if there are fewer layers than chunks or a cost is no
// finite number >= 0.
std::vector<int> split_layers(std::span<const double> costs, int num_chunks);

// Throws InvalidArgument unless `counts`, a user's list, gives every one of `num_layers` layers to one of
// `num_chunks` chunks and no chunk none; naming the numbers and the nearest list that works.
void check_split(std::span<const int> counts, int num_layers, int num_chunks);

}  // namespace polyreme::pipeline
