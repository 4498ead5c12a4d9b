#pragma once

#include <pybind11/pybind11.h>

#include "optim/optimizer.h"

namespace polyreme::bindings {

// From the dict that polyreme.optim.Optimizer.core_options makes.
OptimizerOptions optimizer_options(const pybind11::dict& rule);

}  // namespace polyreme::bindings
