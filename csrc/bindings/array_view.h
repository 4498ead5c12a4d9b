#pragma once

#include <pybind11/pybind11.h>

#include "tensor/tensor.h"

namespace polyreme::bindings {

// The memory of a Python array as a tensor on `device`: no copy. Takes NumPy arrays and whatever speaks
// DLPack and lives on the CPU (PyTorch, CuPy, JAX). The tensor keeps the array; it may be let go of by any
// thread. Throws InvalidArgument for memory that is not contiguous (in C order), of a dtype that no tensor
// has, on another device, or read-only where `writable` is asked for. `what` names the array: "all_reduce:
// out".
Tensor view_of(Device& device, const pybind11::object& array, bool writable, const std::string& what);

}  // namespace polyreme::bindings
