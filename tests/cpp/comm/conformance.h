#pragma once

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/conformance_values.h"
#include "device/cpu/cpu_device.h"

// What every communicator must do, written for one rank of it: the same functions run on threads
// and on forked processes, so failures are exceptions.

namespace polyreme::conformance {

template <typename T>
Tensor to_device(Device& device, const std::vector<T>& values, DType dtype) {
  Tensor tensor = empty(device, dtype, {static_cast<int64_t>(values.size())}, "test");
  write_bytes(tensor, values.data());
  return tensor;
}
template <typename T>
Tensor to_device(Device& device, const std::vector<T>& values) {
  return to_device(device, values, dtype_of<T>());
}

template <typename T>
std::vector<T> to_host(const Tensor& tensor) {
  std::vector<T> values(static_cast<size_t>(tensor.numel()));
  read_bytes(tensor, values.data());
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

// A rank of a group under test.
struct Place {
  Communicator& comm;
  Device& device;
  Stream& stream;
  bool allocates = false;  // tensors from the communicator, not from the device

  int rank() const { return comm.rank(); }
  int size() const { return comm.size(); }
  Tensor empty(DType dtype, int64_t count) const {
    return allocates ? comm.allocate(device, dtype, {count}, "test")
                     : polyreme::empty(device, dtype, {count}, "test");
  }
  std::string text(const std::string& what, DType dtype, int64_t count) const {
    return concat(what, " of ", dtype_name(dtype), "[", count, "], rank ", rank(), " of ", size());
  }
};

// A tensor in the middle of a buffer, at no address in particular, that notices writes beside it.
class Guarded {
 public:
  Guarded(const Place& place, DType dtype, const Bytes& content)
      : element_(static_cast<int64_t>(dtype_size(dtype))),
        content_bytes_(static_cast<int64_t>(content.size())) {
    const int64_t count = content_bytes_ / element_;
    const Tensor whole = place.empty(dtype, count + 2 * kMargin);
    Bytes bytes(static_cast<size_t>(whole.size_bytes()), kGuard);
    std::copy(content.begin(), content.end(), bytes.begin() + kMargin * element_);
    write_bytes(whole, bytes.data());
    tensor_ = whole.slice(0, kMargin, kMargin + count);
  }
  Guarded(const Place& place, DType dtype, int64_t count)
      : Guarded(place, dtype, Bytes(static_cast<size_t>(count) * dtype_size(dtype), 0x33)) {}

  const Tensor& tensor() const { return tensor_; }
  operator const Tensor&() const { return tensor_; }
  Bytes bytes() const {
    Bytes bytes(static_cast<size_t>(content_bytes_));
    read_bytes(tensor_, bytes.data());
    return bytes;
  }
  // The content, bit for bit, and nothing beside it.
  void expect_bytes(const Bytes& wanted, const std::string& what) const {
    const int64_t margin = kMargin * element_;
    const Tensor whole(tensor_.buffer(), DType::kI8, {content_bytes_ + 2 * margin});
    Bytes begin(static_cast<size_t>(whole.numel()));
    read_bytes(whole, begin.data());
    expect(wanted.size() == static_cast<size_t>(content_bytes_), what, ": ", content_bytes_,
           " bytes, wanted ", wanted.size());
    for (int64_t i = 0; i < content_bytes_; ++i)
      expect(begin[margin + i] == wanted[static_cast<size_t>(i)], what, ": element ", i / element_,
             " differs");
    for (int64_t i = 0; i < margin; ++i)
      expect(begin[i] == kGuard && begin[margin + content_bytes_ + i] == kGuard, what,
             ": memory beside the tensor was written");
  }

 private:
  static constexpr int64_t kMargin = 3;
  static constexpr char kGuard = 0x5a;
  int64_t element_;
  int64_t content_bytes_;
  Tensor tensor_;
};

inline void check_reductions(const Place& place, Trial trial, int64_t count, ReduceOp op) {
  const int rank = place.rank(), size = place.size();
  trial.size = size;
  const std::string what = place.text(reduce_op_name(op), trial.dtype, count);
  const Guarded data(place, trial.dtype, drawn(trial, rank, count));
  place.comm.all_reduce(data, op, place.stream)->wait();
  data.expect_bytes(reduced(trial, op, 0, count), "all_reduce: " + what);

  trial.seed += 2;
  const Bytes slice = reduced(trial, op, rank * count, (rank + 1) * count);
  const Bytes mine = drawn(trial, rank, count * size);
  const Guarded input(place, trial.dtype, mine);
  const Guarded output(place, trial.dtype, count);
  place.comm.reduce_scatter(input, output, op, place.stream)->wait();
  output.expect_bytes(slice, "reduce_scatter: " + what);
  input.expect_bytes(mine, "input of reduce_scatter: " + what);
  const Tensor own = input.tensor().slice(0, rank * count, (rank + 1) * count);
  place.comm.reduce_scatter(input, own, op, place.stream)->wait();
  Bytes in_place = mine;  // only the own slice may change
  std::copy(slice.begin(), slice.end(), in_place.begin() + rank * static_cast<int64_t>(slice.size()));
  input.expect_bytes(in_place, "reduce_scatter in place: " + what);
}

// counts: elements by rank; empty: `count` of each.
inline void check_all_gather(const Place& place, const Trial& trial, int64_t count,
                             const std::vector<int64_t>& counts = {}) {
  const int rank = place.rank(), size = place.size();
  const std::string what =
      place.text(counts.empty() ? "all_gather" : "uneven all_gather", trial.dtype, count);
  Bytes whole;
  int64_t own_begin = 0, total = 0;
  for (int r = 0; r < size; ++r) {
    const int64_t length = counts.empty() ? count : counts[static_cast<size_t>(r)];
    const Bytes part = drawn(trial, r, length);
    whole.insert(whole.end(), part.begin(), part.end());
    if (r < rank) own_begin += length;
    total += length;
  }
  const int64_t own = counts.empty() ? count : counts[static_cast<size_t>(rank)];
  const Bytes mine = drawn(trial, rank, own);
  const Guarded input(place, trial.dtype, mine);
  const Guarded output(place, trial.dtype, total);
  place.comm.all_gather(input, output, place.stream, counts)->wait();
  output.expect_bytes(whole, what);
  input.expect_bytes(mine, "input of " + what);

  Bytes before(whole.size(), 0x11);
  std::copy(mine.begin(), mine.end(),
            before.begin() + own_begin * static_cast<int64_t>(dtype_size(trial.dtype)));
  const Guarded gathered(place, trial.dtype, before);
  place.comm
      .all_gather(gathered.tensor().slice(0, own_begin, own_begin + own), gathered, place.stream, counts)
      ->wait();
  gathered.expect_bytes(whole, what + " in place");
}

inline void check_broadcast(const Place& place, const Trial& trial, int64_t count) {
  for (int root = 0; root < place.size(); root += std::max(1, place.size() / 2)) {
    const Guarded data(place, trial.dtype, drawn(trial, place.rank(), count));
    place.comm.broadcast(data, root, place.stream)->wait();
    data.expect_bytes(drawn(trial, root, count),
                      place.text(concat("broadcast from ", root), trial.dtype, count));
  }
}

// What rank a sends to rank b: the elements of its draw of trial seed + b.
inline Bytes for_peer(Trial trial, int from, int to, int64_t count) {
  trial.seed += static_cast<uint64_t>(to);
  return drawn(trial, from, count);
}

// count_of(a, b): elements from rank a to rank b; null: `count` for all.
using PairCounts = int64_t (*)(int from, int to, int64_t count);
inline void check_all_to_all(const Place& place, const Trial& trial, int64_t count, PairCounts count_of) {
  const int rank = place.rank();
  const std::string what = place.text(count_of ? "uneven all_to_all" : "all_to_all", trial.dtype, count);
  Bytes sent, wanted;
  std::vector<int64_t> send_counts, receive_counts;
  for (int r = 0; r < place.size(); ++r) {
    const int64_t to = count_of ? count_of(rank, r, count) : count;
    const int64_t from = count_of ? count_of(r, rank, count) : count;
    const Bytes out = for_peer(trial, rank, r, to), in = for_peer(trial, r, rank, from);
    sent.insert(sent.end(), out.begin(), out.end());
    wanted.insert(wanted.end(), in.begin(), in.end());
    send_counts.push_back(to);
    receive_counts.push_back(from);
  }
  const Guarded input(place, trial.dtype, sent);
  const Guarded output(place, trial.dtype, Bytes(wanted.size(), 0x22));
  if (count_of) {
    place.comm.all_to_all(input, output, place.stream, send_counts, receive_counts)->wait();
  } else {
    place.comm.all_to_all(input, output, place.stream)->wait();
  }
  output.expect_bytes(wanted, what);
  input.expect_bytes(sent, "input of " + what);
}

// Every rank sends two messages to every other one and receives as many, of different sizes, in one call and
// in an order of its own.
inline void check_exchange(const Place& place, const Trial& trial, int64_t count) {
  const int rank = place.rank(), size = place.size();
  struct Received {
    Guarded tensor;
    Bytes wanted;
  };
  std::vector<Transfer> transfers;
  std::vector<Received> received;
  const auto length = [&](int from, int to, int message) {
    return message == 0 ? count : (from + 2 * to) % 3 * 50;
  };
  Trial second = trial;
  second.seed += 100;
  for (int step = 1; step < size; ++step) {
    const int peer = rank % 2 == 0 ? (rank + step) % size : (rank + size - step) % size;
    for (int message = 0; message < 2; ++message) {
      const Trial& each = message == 0 ? trial : second;
      received.push_back({Guarded(place, each.dtype, length(peer, rank, message)),
                          for_peer(each, peer, rank, length(peer, rank, message))});
      const Guarded sent(place, each.dtype, for_peer(each, rank, peer, length(rank, peer, message)));
      const Transfer in{Transfer::Kind::kReceive, received.back().tensor, peer};
      const Transfer out{Transfer::Kind::kSend, sent, peer};
      transfers.insert(transfers.end(), {rank % 3 == 0 ? in : out, rank % 3 == 0 ? out : in});
    }
  }
  place.comm.exchange(transfers, place.stream)->wait();
  for (const Received& each : received)
    each.tensor.expect_bytes(each.wanted, place.text("exchange", trial.dtype, count));
}

// From each rank to the next one, which passes it on; ranks that are not concerned go on.
inline void check_send_and_receive(const Place& place, const Trial& trial, int64_t count) {
  const int rank = place.rank(), size = place.size();
  const Guarded data(place, trial.dtype, rank == 0 ? drawn(trial, 0, count) : drawn(trial, 99, count));
  if (rank > 0) place.comm.receive(data, rank - 1, place.stream)->wait();
  if (rank < size - 1) place.comm.send(data, rank + 1, place.stream)->wait();
  data.expect_bytes(drawn(trial, 0, count), place.text("send and receive", trial.dtype, count));
}

// A cycle of large messages: each rank sends to the next and receives from the previous one.
inline void check_cycle(const Place& place, int64_t count) {
  const int rank = place.rank(), size = place.size(), next = (rank + 1) % size,
            last = (rank + size - 1) % size;
  if (size == 1) return;
  const auto content = [&](int of_rank) {
    Bytes bytes(static_cast<size_t>(count) * 4);
    for (size_t i = 0; i < bytes.size(); ++i)
      bytes[i] = static_cast<char>(i * 31 + (i >> 12) + static_cast<size_t>(of_rank));
    return bytes;
  };
  const Guarded out(place, DType::kF32, content(rank)), in(place, DType::kF32, count);
  const std::vector<Transfer> transfers = {{Transfer::Kind::kSend, out, next},
                                           {Transfer::Kind::kReceive, in, last}};
  place.comm.exchange(transfers, place.stream)->wait();
  in.expect_bytes(content(last), place.text("cycle", DType::kF32, count));
}

// Counts that reach 0, 1, odd, and several chunks when chunk_bytes is kSmallChunk.
inline constexpr int64_t kSmallChunk = 1024;
inline const std::vector<int64_t> kCounts = {0, 1, 3, 127, 256, 257, 1023, 3001};
inline const std::vector<int64_t> kFewCounts = {0, 1, 257, 1501};

inline const std::vector<int64_t>& counts_for(DType dtype) {
  return dtype == DType::kF32 ? kCounts : kFewCounts;
}

inline void check_all_reductions(const Place& place, DType dtype, Draw draw) {
  uint64_t seed = 2;
  for (const int64_t count : counts_for(dtype))
    for (const ReduceOp op : kAllOps)
      if (is_reducible(op, dtype))  // odd seeds: exact averages
        check_reductions(place, {dtype, (seed += 4) + (op == ReduceOp::kAverage), draw}, count, op);
}

inline void check_all_copies(const Place& place, DType dtype) {
  const Trial trial{dtype, 5};
  for (const int64_t count : counts_for(dtype)) {
    check_all_gather(place, trial, count);
    check_broadcast(place, trial, count);
    check_all_to_all(place, trial, count, nullptr);
  }
  for (const int64_t count : kFewCounts) {
    std::vector<int64_t> counts;
    for (int r = 0; r < place.size(); ++r) counts.push_back(r % 3 == 1 ? 0 : count * (r % 3) / 2 + r);
    check_all_gather(place, trial, count, counts);
    check_all_to_all(place, trial, count, [](int from, int to, int64_t n) -> int64_t {
      return (from + to) % 3 == 0 ? 0 : from == to ? n : (from * n + to) % (n + 3);
    });
    check_exchange(place, trial, count);
    check_send_and_receive(place, trial, count);
  }
}

// Everything, in the ordered mode.
inline void check_everything(Communicator& comm, Device& device) {
  const auto stream = device.create_stream("test");
  const Place place{comm, device, *stream, false};
  for (const DType dtype : kAllDTypes) {
    check_all_reductions(place, dtype, Draw::kMixed);
    check_all_copies(place, dtype);
  }
  comm.exchange({}, *stream)->wait();
  comm.barrier(std::chrono::seconds(30));
}

// In the fast mode: any order of summation, but the same result on all ranks.
inline void check_everything_fast(Communicator& comm, Device& device) {
  const auto stream = device.create_stream("test");
  const Place place{comm, device, *stream, false};
  for (const DType dtype : kAllDTypes) check_all_reductions(place, dtype, Draw::kExact);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Guarded data(place, dtype, drawn({dtype, 3}, comm.rank(), 3001));
    comm.all_reduce(data, ReduceOp::kSum, *stream)->wait();
    const Guarded all(place, dtype, 3001 * comm.size());
    comm.all_gather(data, all, *stream)->wait();
    Bytes repeated;
    const Bytes own = data.bytes();
    for (int r = 0; r < comm.size(); ++r) repeated.insert(repeated.end(), own.begin(), own.end());
    all.expect_bytes(repeated, "fast all_reduce on all ranks");
  }
}

// With chunks of kLargeChunk: one chunk in two meetings, and a few of them.
inline constexpr int64_t kLargeChunk = 65536;
inline void check_large(Communicator& comm, Device& device) {
  const auto stream = device.create_stream("test");
  const Place place{comm, device, *stream, false};
  for (const int64_t count : {int64_t{12'001}, int64_t{60'001}})
    check_reductions(place, {DType::kF32, 11}, count, ReduceOp::kSum);
  check_reductions(place, {DType::kBF16, 13}, 40'001, ReduceOp::kAverage);
  check_all_gather(place, {DType::kF32, 12}, 60'001);
  check_all_to_all(place, {DType::kF32, 14}, 30'001, nullptr);
  check_cycle(place, comm.size() <= 3 ? int64_t{2} << 20 : int64_t{1} << 18);  // 8 MB, 1 MB
}

// Tensors that the ranks may read of each other in place; also if one rank has some that they cannot read.
inline void check_shared_memory(Communicator& comm, Device& device) {
  const auto stream = device.create_stream("test");
  for (const bool all : {true, false}) {
    const Place place{comm, device, *stream, all || comm.rank() % 2 == 0};
    const int64_t count = 17'001;
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kProduct})
      check_reductions(place, {DType::kF32, 21}, count, op);
    check_reductions(place, {DType::kBF16, 22}, 2 * count, ReduceOp::kAverage);
    check_reductions(place, {DType::kI64, 23}, count, ReduceOp::kMax);
    check_all_gather(place, {DType::kF64, 24}, count);
    std::vector<int64_t> counts;
    for (int r = 0; r < comm.size(); ++r) counts.push_back(r % 3 == 1 ? 0 : count + r);
    check_all_gather(place, {DType::kF32, 25}, count, counts);
    check_broadcast(place, {DType::kF32, 26}, count);
    check_all_to_all(place, {DType::kF32, 27}, count, nullptr);
    check_all_to_all(place, {DType::kF32, 28}, count, [](int from, int to, int64_t n) -> int64_t {
      return (from + to) % 3 == 0 ? 0 : n + from - to;
    });
    check_exchange(place, {DType::kF32, 29}, count);
  }
  const int64_t before = device.memory().in_use_bytes;
  {
    const Tensor tensor = comm.allocate(device, DType::kF32, {10'000}, "test");
    expect(device.memory().in_use_bytes >= before + 40'000, "memory of the group is not counted");
  }
  expect(device.memory().in_use_bytes == before, "memory of the group is still counted");
}

// A trial of one dtype; for tests of other things that want to see the group work.
template <typename T>
void check_reductions(Communicator& comm, Device& device, Stream& stream, int64_t count, ReduceOp op,
                      uint64_t seed) {
  check_reductions(Place{comm, device, stream, false}, {dtype_of<T>(), seed}, count, op);
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
