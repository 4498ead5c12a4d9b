#pragma once

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/tree.h"
#include "device/cpu/cpu_device.h"

// What every communicator must do, written for one rank of it: the same functions run on threads
// and on forked processes, so failures are exceptions. Every rank knows what every rank contributes
// and computes the expected bits by itself, with tree_order.

namespace polyreme::conformance {

template <typename... Parts>
void expect(bool condition, const Parts&... parts) {
  if (!condition) throw std::runtime_error(concat(parts...));
}

// Element i of what `rank` contributes to trial `trial`; floating-point values of mixed size, so
// that another order of summation shows.
template <typename T>
T value_of(int rank, int64_t i, uint64_t trial) {
  uint64_t z = (static_cast<uint64_t>(rank) << 40) + static_cast<uint64_t>(i) + trial * 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  z ^= z >> 31;
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(z);
  } else {
    return static_cast<T>(std::ldexp(static_cast<double>(z >> 40) - 8e6, static_cast<int>(z % 24) - 12));
  }
}

template <typename T>
std::vector<T> values_of(int rank, int64_t count, uint64_t trial) {
  std::vector<T> values(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) values[static_cast<size_t>(i)] = value_of<T>(rank, i, trial);
  return values;
}

template <typename T>
std::vector<T> reduced_values(int size, int64_t count, uint64_t trial, ReduceOp op) {
  std::vector<std::vector<T>> terms;
  for (int r = 0; r < size; ++r) terms.push_back(values_of<T>(r, count, trial));
  for (const TreeStep& step : tree_order(size))
    for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
      T& a = terms[static_cast<size_t>(step.into)][i];
      const T b = terms[static_cast<size_t>(step.from)][i];
      if (op == ReduceOp::kMax) {
        a = b > a ? b : a;
      } else if (op == ReduceOp::kMin) {
        a = b < a ? b : a;
      } else if constexpr (std::is_integral_v<T>) {
        a = static_cast<T>(static_cast<std::make_unsigned_t<T>>(a) + static_cast<std::make_unsigned_t<T>>(b));
      } else {
        a = a + b;
      }
    }
  return terms[0];
}

template <typename T>
Tensor to_device(Device& device, const std::vector<T>& values, DType dtype) {
  Tensor tensor = empty(device, dtype, {static_cast<int64_t>(values.size())}, "test");
  const HostMapping mapping(tensor.buffer());
  if (!values.empty()) std::memcpy(tensor.raw_address(), values.data(), values.size() * sizeof(T));
  return tensor;
}
template <typename T>
Tensor to_device(Device& device, const std::vector<T>& values) {
  return to_device(device, values, dtype_of<T>());
}

template <typename T>
std::vector<T> to_host(const Tensor& tensor) {
  std::vector<T> values(static_cast<size_t>(tensor.numel()));
  const HostMapping mapping(tensor.buffer());
  if (!values.empty()) std::memcpy(values.data(), tensor.raw_address(), values.size() * sizeof(T));
  return values;
}

// Compares bits, not values.
template <typename T>
void expect_bits(const std::vector<T>& got, const std::vector<T>& wanted, const std::string& what) {
  expect(got.size() == wanted.size(), what, ": ", got.size(), " elements, wanted ", wanted.size());
  for (size_t i = 0; i < got.size(); ++i)
    expect(std::memcmp(&got[i], &wanted[i], sizeof(T)) == 0, what, ": element ", i, " is ", got[i],
           ", wanted ", wanted[i]);
}

template <typename T>
void check_reductions(Communicator& comm, Device& device, Stream& stream, int64_t count, ReduceOp op,
                      uint64_t trial) {
  const int rank = comm.rank(), size = comm.size();
  const std::string what = concat("rank ", rank, " of ", size, ", ", dtype_name(dtype_of<T>()), "[", count,
                                  "] ", reduce_op_name(op));
  const Tensor data = to_device(device, values_of<T>(rank, count, trial));
  comm.all_reduce(data, op, stream)->wait();
  expect_bits(to_host<T>(data), reduced_values<T>(size, count, trial, op), "all_reduce, " + what);

  const std::vector<T> whole = reduced_values<T>(size, count * size, trial + 1, op);
  const auto own = whole.begin() + rank * count;
  const std::vector<T> slice(own, own + count);
  const Tensor input = to_device(device, values_of<T>(rank, count * size, trial + 1));
  const Tensor output = to_device(device, std::vector<T>(static_cast<size_t>(count)));
  comm.reduce_scatter(input, output, op, stream)->wait();
  expect_bits(to_host<T>(output), slice, "reduce_scatter, " + what);
  expect_bits(to_host<T>(input), values_of<T>(rank, count * size, trial + 1),
              "input of reduce_scatter, " + what);
  const Tensor in_place = input.slice(0, rank * count, (rank + 1) * count);
  comm.reduce_scatter(input, in_place, op, stream)->wait();
  expect_bits(to_host<T>(in_place), slice, "reduce_scatter in place, " + what);
}

template <typename T>
void check_copies(Communicator& comm, Device& device, Stream& stream, DType dtype, int64_t count,
                  uint64_t trial) {
  const int rank = comm.rank(), size = comm.size();
  const std::string what = concat("rank ", rank, " of ", size, ", ", dtype_name(dtype), "[", count, "]");
  std::vector<T> whole;
  for (int r = 0; r < size; ++r)
    for (const T value : values_of<T>(r, count, trial)) whole.push_back(value);
  const Tensor input = to_device(device, values_of<T>(rank, count, trial), dtype);
  const Tensor output = to_device(device, std::vector<T>(whole.size()), dtype);
  comm.all_gather(input, output, stream)->wait();
  expect_bits(to_host<T>(output), whole, "all_gather, " + what);

  const Tensor gathered = to_device(device, std::vector<T>(whole.size()), dtype);
  const Tensor own = gathered.slice(0, rank * count, (rank + 1) * count);
  {
    const HostMapping mapping(gathered.buffer());
    const std::vector<T> values = values_of<T>(rank, count, trial);
    if (count > 0) std::memcpy(own.raw_address(), values.data(), values.size() * sizeof(T));
  }
  comm.all_gather(own, gathered, stream)->wait();
  expect_bits(to_host<T>(gathered), whole, "all_gather in place, " + what);

  for (int root = 0; root < size; root += std::max(1, size / 2)) {
    const Tensor data = to_device(device, values_of<T>(rank, count, trial), dtype);
    comm.broadcast(data, root, stream)->wait();
    expect_bits(to_host<T>(data), values_of<T>(root, count, trial),
                concat("broadcast from ", root, ", ", what));
  }
}

template <typename T>
void check_all_reductions(Communicator& comm, Device& device, Stream& stream,
                          const std::vector<int64_t>& counts) {
  uint64_t trial = 0;
  for (const int64_t count : counts)
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin})
      check_reductions<T>(comm, device, stream, count, op, trial += 2);
}

// Counts that reach 0, 1, odd, and several chunks when chunk_bytes is kSmallChunk.
inline constexpr int64_t kSmallChunk = 1024;
inline const std::vector<int64_t> kCounts = {0, 1, 3, 127, 256, 257, 1023, 3001};

inline void check_everything(Communicator& comm, Device& device) {
  const auto stream = device.create_stream("test");
  check_all_reductions<float>(comm, device, *stream, kCounts);
  check_all_reductions<double>(comm, device, *stream, kCounts);
  check_all_reductions<int32_t>(comm, device, *stream, kCounts);
  check_all_reductions<int64_t>(comm, device, *stream, kCounts);
  for (const int64_t count : kCounts) {
    check_copies<float>(comm, device, *stream, DType::kF32, count, 5);
    check_copies<int64_t>(comm, device, *stream, DType::kI64, count, 6);
    check_copies<uint8_t>(comm, device, *stream, DType::kU8, count, 7);
    check_copies<uint16_t>(comm, device, *stream, DType::kBF16, count, 8);
  }
  comm.barrier(std::chrono::seconds(30));
}

// With chunks of kLargeChunk: one chunk in two meetings, and a few of them.
inline constexpr int64_t kLargeChunk = 65536;
inline void check_large(Communicator& comm, Device& device) {
  const auto stream = device.create_stream("test");
  for (const int64_t count : {int64_t{12'001}, int64_t{60'001}})
    check_reductions<float>(comm, device, *stream, count, ReduceOp::kSum, 11);
  check_copies<float>(comm, device, *stream, DType::kF32, 60'001, 12);
}

// Many collectives in flight on two streams, over the group and two of its subgroups.
inline void check_streams_and_subgroups(Communicator& world, Device& device) {
  const int rank = world.rank(), size = world.size();
  const auto rows = world.split(rank / 2, rank, "row");
  const auto columns = world.split(rank % 2, -rank, "column");  // in reverse order of rank
  expect(rows->rank() == rank % 2 && columns->name() == "column", "wrong place in a subgroup");
  const auto compute = device.create_stream("compute");
  const auto comm = device.create_stream("comm");
  std::vector<Tensor> tensors;
  std::vector<std::unique_ptr<Work>> works;
  constexpr int kRounds = 12;
  for (int i = 0; i < kRounds; ++i) {
    Communicator& group = i % 3 == 0 ? world : i % 3 == 1 ? *rows : *columns;
    tensors.push_back(to_device(device, std::vector<int64_t>(300, rank + i)));
    works.push_back(group.all_reduce(tensors.back(), ReduceOp::kSum, i % 2 == 0 ? *compute : *comm));
  }
  for (int i = kRounds - 1; i >= 0; --i) {
    works[static_cast<size_t>(i)]->wait();
    int64_t wanted = 0;
    for (int r = 0; r < size; ++r)
      if (i % 3 == 0 || (i % 3 == 1 ? r / 2 == rank / 2 : r % 2 == rank % 2)) wanted += r + i;
    expect_bits(to_host<int64_t>(tensors[static_cast<size_t>(i)]), std::vector<int64_t>(300, wanted),
                concat("round ", i));
  }
}

}  // namespace polyreme::conformance
