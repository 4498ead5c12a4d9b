#pragma once

#include <pybind11/pybind11.h>

#include "nn/replace.h"

namespace polyreme::bindings {

// Layers written in Python: `runners` maps places to objects of polyreme.layers. An empty map: null.
Replacer python_replacer(const pybind11::dict& runners);

}  // namespace polyreme::bindings
