#include "bindings/array_view.h"

#include <pybind11/numpy.h>

#include <algorithm>
#include <vector>

#include "ops/ops.h"

namespace py = pybind11;

namespace polyreme::bindings {
namespace {

// The structures of DLPack 0.x as its specification gives them (dmlc.github.io/dlpack, "C API"): what a
// capsule named "dltensor" points to.
struct DlDevice {
  int32_t type;
  int32_t id;
};
struct DlDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};
struct DlTensor {
  void* data;
  DlDevice device;
  int32_t ndim;
  DlDataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; null: contiguous
  uint64_t byte_offset;
};
constexpr int32_t kDlCpu = 1;

struct Memory {
  void* address;
  DType dtype;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;  // in elements; empty: contiguous
};

// Python 3.13 made the question public and took the private name away.
bool interpreter_is_ending() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// Kept by the thread that lets go last, which may not have the GIL, or come after the interpreter has ended:
// then the reference is left, as the memory of the process is about to go anyway.
std::shared_ptr<void> keep(const py::object& object) {
  PyObject* pointer = py::object(object).release().ptr();
  return {pointer, [](void* kept) {
            if (!Py_IsInitialized() || interpreter_is_ending()) return;
            const py::gil_scoped_acquire acquire;
            Py_DECREF(static_cast<PyObject*>(kept));
          }};
}

DType dtype_of_dlpack(const DlDataType& type, const std::string& what) {
  struct Row {
    uint8_t code, bits;
    DType dtype;
  };
  constexpr Row kRows[] = {{0, 8, DType::kI8},   {0, 32, DType::kI32},  {0, 64, DType::kI64},
                           {1, 8, DType::kU8},   {2, 16, DType::kF16},  {2, 32, DType::kF32},
                           {2, 64, DType::kF64}, {4, 16, DType::kBF16}, {6, 8, DType::kBool}};
  for (const Row& row : kRows)
    if (row.code == type.code && row.bits == type.bits && type.lanes == 1) return row.dtype;
  throw InvalidArgument(concat(what, ": DLPack type code ", int{type.code}, " of ", int{type.bits},
                               " bits x ", type.lanes,
                               " is not taken; expected bool, int8, uint8, int32, int64, float16, bfloat16, "
                               "float32 or float64"));
}

Memory memory_of_numpy(const py::array& array, bool writable, const std::string& what) {
  require(!writable || array.writeable(), what, ": the array is read-only; pass a writable one");
  Memory memory{.address = const_cast<void*>(array.data()), .dtype = DType::kF32, .shape = {}, .strides = {}};
  try {
    memory.dtype = dtype_from_name(py::str(array.dtype().attr("name")));
  } catch (const InvalidArgument& unknown) {
    throw InvalidArgument(concat(what, ": ", unknown.what()));
  }
  require(array.dtype().attr("isnative").cast<bool>(), what, ": the array is of foreign byte order");
  const auto item = static_cast<int64_t>(dtype_size(memory.dtype));
  for (py::ssize_t d = 0; d < array.ndim(); ++d) {
    memory.shape.push_back(array.shape(d));
    // A stride that is no multiple of the item is not that of a contiguous array either.
    memory.strides.push_back(array.strides(d) % item == 0 ? array.strides(d) / item : -1);
  }
  return memory;
}

Memory memory_of_dlpack(const py::capsule& capsule, const std::string& what) {
  const auto* tensor = static_cast<const DlTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  if (tensor == nullptr) throw py::error_already_set();
  require(tensor->device.type == kDlCpu, what, ": the array is on DLPack device type ", tensor->device.type,
          "; expected memory of the CPU (type 1): copy it there first");
  Memory memory{.address = static_cast<char*>(tensor->data) + tensor->byte_offset,
                .dtype = dtype_of_dlpack(tensor->dtype, what),
                .shape = {tensor->shape, tensor->shape + tensor->ndim},
                .strides = {}};
  const auto is_empty = [](const DlTensor& t) { return std::count(t.shape, t.shape + t.ndim, 0) > 0; };
  require(tensor->data != nullptr || is_empty(*tensor), what,
          ": the array has no memory; its storage was freed");
  if (tensor->strides != nullptr) memory.strides.assign(tensor->strides, tensor->strides + tensor->ndim);
  return memory;
}

bool is_contiguous(const Memory& memory) {
  for (const int64_t size : memory.shape)
    if (size == 0) return true;  // nothing is apart; its strides may be anything
  int64_t expected = 1;
  for (size_t d = memory.strides.size(); d-- > 0;) {
    if (memory.shape[d] != 1 && memory.strides[d] != expected) return false;
    expected *= memory.shape[d];
  }
  return true;
}

}  // namespace

HostArray host_array(const py::object& array, bool writable, const std::string& what) {
  Memory memory;
  py::object owner = array;
  if (py::isinstance<py::array>(array)) {
    memory = memory_of_numpy(py::reinterpret_borrow<py::array>(array), writable, what);
  } else if (py::hasattr(array, "__dlpack__")) {
    owner = array.attr("__dlpack__")();  // never consumed: its own destructor lets the memory go
    memory = memory_of_dlpack(py::reinterpret_borrow<py::capsule>(owner), what);
  } else {
    throw InvalidArgument(concat(what, ": expected a NumPy array or an object that speaks DLPack, got ",
                                 std::string(py::str(py::type::of(array).attr("__name__")))));
  }
  require(is_contiguous(memory), what, ": the array is not contiguous; pass a contiguous copy of it");
  int64_t count = 1;
  for (const int64_t size : memory.shape) count *= size;
  return {memory.address, memory.dtype, count, keep(owner)};
}

Tensor view_of(Device& device, const py::object& array, bool writable, const std::string& what) {
  const HostArray host = host_array(array, writable, what);
  return Tensor(device.wrap_host(host.address, host.size_bytes(), host.owner), host.dtype, {host.count});
}

Tensor ArrayCopies::add(Stream& stream, const py::object& array, bool writable, const std::string& what) {
  const HostArray host = host_array(array, writable, what);
  const Tensor on_device = empty(stream.device(), host.dtype, {host.count}, "copy of an array");
  copy_from_host(stream, host.address, on_device);
  copies_.push_back({host, on_device, writable});
  return on_device;
}

// On a stream of its own: the background's may hold collectives that wait for other ranks.
void ArrayCopies::write_back(Device& device) {
  if (copies_.empty()) return;
  const std::unique_ptr<Stream> stream = device.create_stream("arrays of the host");
  for (const Copy& copy : copies_)
    if (copy.written) copy_to_host(*stream, copy.on_device, copy.array.address);
  stream->synchronize();
  copies_.clear();
}

}  // namespace polyreme::bindings
