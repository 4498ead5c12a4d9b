#pragma once

#include <pybind11/pybind11.h>

#include "tensor/tensor.h"

namespace polyreme::bindings {

// The memory of a Python array. The owner keeps the array; it may be let go of by any thread.
struct HostArray {
  void* address = nullptr;
  DType dtype = DType::kF32;
  int64_t count = 0;
  std::shared_ptr<void> owner;
  size_t size_bytes() const { return static_cast<size_t>(count) * dtype_size(dtype); }
};
// Takes NumPy arrays and whatever speaks DLPack and lives on the CPU (PyTorch, JAX). Throws InvalidArgument
// for memory that is not contiguous (in C order), of a dtype that no tensor has, on another device, or
// read-only where `writable` is asked for. `what` names the array: "all_reduce: out".
HostArray host_array(const pybind11::object& array, bool writable, const std::string& what);
// The same as a tensor on `device`: no copy. Throws NotAvailable for a GPU too.
Tensor view_of(Device& device, const pybind11::object& array, bool writable, const std::string& what);

// Arrays of the host in calls of a GPU: what it works on are copies.
class ArrayCopies {
 public:
  // A copy of the array, which `stream` fills. Throws as view_of.
  Tensor add(Stream& stream, const pybind11::object& array, bool writable, const std::string& what);
  // Brings what was written, and waited for, back into the arrays, and lets go of them.
  void write_back(Device& device);

 private:
  struct Copy {
    HostArray array;
    Tensor on_device;
    bool written = false;
  };
  std::vector<Copy> copies_;
};

}  // namespace polyreme::bindings
