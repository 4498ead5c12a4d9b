// What a machine with GPUs runs to show that the CUDA device and NCCL work there: scripts/gpu_check.sh. Ranks
// are threads, one for each GPU; with one GPU the group has one rank, and its collectives are local.
#pragma once

#include <chrono>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "comm/conformance.h"
#include "comm/factory.h"
#include "comm/memory_store.h"
#include "comm/nccl/nccl_communicator.h"
#include "comm/tree.h"
#include "device/cuda/cuda_device.h"
#include "device/cuda/cuda_table.h"

namespace polyreme::gpu_check {

struct Options {
  const PolyremeCudaTable& cuda;
  const PolyremeNcclTable& nccl;
  int num_gpus = 1;
  std::vector<int64_t> sizes_bytes;  // of the bandwidth
  int rounds = 20;
};

// One check: "ok", or what went wrong.
struct Result {
  std::string name;
  std::string outcome;
};
struct Bandwidth {
  std::string mode;
  int64_t size_bytes;
  double seconds;       // of one all_reduce
  double bus_gb_per_s;  // 2 (n - 1) / n of the bytes by the time; with one rank the bytes by the time
};
struct Report {
  std::vector<Result> results;
  std::vector<Bandwidth> bandwidths;
  bool ok() const {
    return std::all_of(results.begin(), results.end(),
                       [](const Result& each) { return each.outcome == "ok"; });
  }
};

inline std::string outcome_of_check(const std::function<void()>& check) {
  try {
    check();
    return "ok";
  } catch (const std::exception& failure) {
    return failure.what();
  }
}

// Bytes there and back, over two streams and an event.
inline void check_copies(CudaDevice& device) {
  constexpr int64_t kBytes = int64_t{8} << 20;
  const auto up = device.create_stream("up"), down = device.create_stream("down");
  const auto pinned = allocate_pinned(device, kBytes), back = allocate_pinned(device, kBytes);
  for (int64_t i = 0; i < kBytes; ++i)
    static_cast<char*>(pinned.get())[i] = static_cast<char>(i * 7 + (i >> 9));
  const auto written = device.create_event();
  auto buffer = device.allocate(kBytes, "copies");
  copy_from_host(buffer, 0, pinned.get(), kBytes, *up);
  up->record(*written);
  down->wait(*written);
  copy_to_host(back.get(), buffer, 0, kBytes, *down);
  down->synchronize();
  conformance::expect(std::memcmp(pinned.get(), back.get(), kBytes) == 0, "bytes differ after a round trip");
  up->synchronize();
  buffer.reset();
  conformance::expect(device.memory().in_use_bytes == 0,
                      "memory is still in use: ", device.memory().in_use_bytes);
}

// The kernel against the CPU, all dtypes and operations, bit by bit.
inline void check_tree(CudaDevice& device) {
  const auto stream = device.create_stream("tree");
  constexpr int64_t kCount = 5000;
  for (const DType dtype : conformance::kAllDTypes)
    for (const ReduceOp op : conformance::kAllOps)
      for (const int num_terms : {1, 2, 3, 5, 8, 13}) {
        if (!is_reducible(op, dtype)) continue;
        conformance::Bytes all;
        for (int t = 0; t < num_terms; ++t) {
          const conformance::Bytes term = conformance::drawn({dtype, 4}, t, kCount);
          all.insert(all.end(), term.begin(), term.end());
        }
        const auto stride = all.size() / static_cast<size_t>(num_terms);
        const auto terms = device.allocate(all.size(), "terms"), out = device.allocate(stride, "out");
        copy_from_host(terms, 0, all.data(), static_cast<int64_t>(all.size()), *stream);
        const PolyremeTreeReduce reduction{.dtype = static_cast<int32_t>(dtype),
                                           .reduce = static_cast<int32_t>(op),
                                           .num_terms = num_terms,
                                           .own = -1,
                                           .terms = terms->address(),
                                           .own_term = nullptr,
                                           .stride_bytes = stride,
                                           .count = kCount,
                                           .out = out->address()};
        as_cuda(*stream).enqueue({terms, out}, [&](void* handle) {
          const PolyremeCudaStatus status = device.table().tree_reduce(&reduction, handle);
          conformance::expect(status.code == 0, status.text);
        });
        conformance::Bytes got(stride), wanted(stride);
        copy_to_host(got.data(), out, 0, static_cast<int64_t>(stride), *stream);
        stream->synchronize();
        std::vector<const void*> addresses;
        for (int t = 0; t < num_terms; ++t) addresses.push_back(all.data() + static_cast<size_t>(t) * stride);
        tree_reduce(Reduction::whole(op, dtype, num_terms), addresses.data(), num_terms, kCount,
                    wanted.data());
        conformance::expect(got == wanted, dtype_name(dtype), " ", reduce_op_name(op), " of ", num_terms,
                            " terms: bits differ from the CPU's");
      }
}

// Runs `rank_main` on a thread for each GPU. Throws the first failure.
inline void on_all_gpus(const Options& options, ReduceMode mode,
                        const std::function<void(Communicator&, CudaDevice&)>& rank_main) {
  MemoryStore store;
  std::vector<std::exception_ptr> errors(static_cast<size_t>(options.num_gpus));
  std::vector<std::thread> threads;
  for (int r = 0; r < options.num_gpus; ++r)
    threads.emplace_back([&, r] {
      try {
        const auto device = make_cuda_device(options.cuda, r);
        const auto copies = device->create_stream("copies");
        conformance::copy_stream = copies.get();
        const CommOptions comm_options{.timeout = std::chrono::seconds(60), .reduce_mode = mode};
        const auto communicator =
            make_nccl_communicator(options.nccl, store, r, options.num_gpus, *device, comm_options);
        rank_main(*communicator, *device);
      } catch (...) {
        errors[static_cast<size_t>(r)] = std::current_exception();
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
}

// The all_reduce of a large bfloat16 array: GPUs against the `local` communicator of the CPU.
inline void check_against_local(const Options& options) {
  constexpr int64_t kCount = 300'001;
  const conformance::Trial trial{DType::kBF16, 6};
  std::vector<conformance::Bytes> on_cpu(static_cast<size_t>(options.num_gpus)), on_gpu = on_cpu;
  const auto sum = [&](Communicator& comm, Device& device, std::vector<conformance::Bytes>& results) {
    const auto stream = device.create_stream("sum");
    const conformance::Guarded data({comm, device, *stream}, trial.dtype,
                                    conformance::drawn(trial, comm.rank(), kCount));
    comm.all_reduce(data, ReduceOp::kSum, *stream)->wait();
    results[static_cast<size_t>(comm.rank())] = data.bytes();
  };
  std::vector<std::thread> threads;
  for (auto& communicator : make_local_communicators(options.num_gpus, {}))
    threads.emplace_back([&, mine = std::move(communicator)] { sum(*mine, *make_cpu_device({}), on_cpu); });
  for (std::thread& thread : threads) thread.join();
  on_all_gpus(options, ReduceMode::kOrdered,
              [&](Communicator& comm, CudaDevice& device) { sum(comm, device, on_gpu); });
  conformance::expect(on_cpu == on_gpu, "an ordered all_reduce differs from the CPU's");
}

// A rank aborts while the others wait in a collective: their streams must end, and their calls say why.
inline void check_abort(const Options& options) {
  on_all_gpus(options, ReduceMode::kFast, [](Communicator& comm, CudaDevice& device) {
    const auto stream = device.create_stream("test");
    const Tensor data = conformance::to_device(device, std::vector<float>(1000));
    comm.all_reduce(data, ReduceOp::kSum, *stream)->wait();
    if (comm.rank() == 1) return comm.abort("to see whether it works");
    try {
      comm.all_reduce(data, ReduceOp::kSum, *stream)->wait();
    } catch (const PeerLost& failure) {
      stream->synchronize();
      return conformance::expect(
          std::string(failure.what()).find("to see whether it works") != std::string::npos, failure.what());
    }
    throw Error("a collective ended although a rank had aborted it");
  });
}

inline std::vector<Bandwidth> measure(const Options& options, ReduceMode mode, const char* name) {
  std::vector<Bandwidth> bandwidths;
  on_all_gpus(options, mode, [&](Communicator& comm, CudaDevice& device) {
    const auto stream = device.create_stream("bandwidth");
    for (const int64_t size_bytes : options.sizes_bytes) {
      const Tensor data =
          conformance::to_device(device, std::vector<float>(static_cast<size_t>(size_bytes / 4)));
      for (int i = 0; i < 3; ++i) comm.all_reduce(data, ReduceOp::kSum, *stream);
      stream->synchronize();
      comm.barrier(std::chrono::seconds(60));
      const auto start = std::chrono::steady_clock::now();
      for (int i = 0; i < options.rounds; ++i) comm.all_reduce(data, ReduceOp::kSum, *stream);
      stream->synchronize();
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      const double seconds = took.count() / options.rounds;
      const double factor = comm.size() == 1 ? 1 : 2.0 * (comm.size() - 1) / comm.size();
      if (comm.rank() == 0)
        bandwidths.push_back(
            {name, size_bytes, seconds, factor * static_cast<double>(size_bytes) / seconds / 1e9});
    }
  });
  return bandwidths;
}

inline Report run(const Options& options) {
  Report report;
  const auto check = [&](const std::string& name, const std::function<void()>& body) {
    report.results.push_back({name, outcome_of_check(body)});
  };
  for (int i = 0; i < options.num_gpus; ++i) {
    check(concat("copies on cuda:", i), [&] { check_copies(*make_cuda_device(options.cuda, i)); });
    check(concat("tree kernel on cuda:", i), [&] { check_tree(*make_cuda_device(options.cuda, i)); });
  }
  check("ordered against the CPU", [&] { check_against_local(options); });
  check("conformance, ordered",
        [&] { on_all_gpus(options, ReduceMode::kOrdered, conformance::check_everything); });
  check("conformance, fast",
        [&] { on_all_gpus(options, ReduceMode::kFast, conformance::check_everything_fast); });
  check("large messages", [&] { on_all_gpus(options, ReduceMode::kOrdered, conformance::check_large); });
  if (options.num_gpus % 2 == 0)
    check("streams and subgroups",
          [&] { on_all_gpus(options, ReduceMode::kOrdered, conformance::check_streams_and_subgroups); });
  if (options.num_gpus > 1) check("abort", [&] { check_abort(options); });
  check("bandwidth", [&] {
    report.bandwidths = measure(options, ReduceMode::kFast, "fast");
    for (const Bandwidth& each : measure(options, ReduceMode::kOrdered, "ordered"))
      report.bandwidths.push_back(each);
  });
  return report;
}

// As one JSON object.
inline std::string to_json(const Report& report, int num_gpus, const std::string& cuda,
                           const std::string& nccl) {
  const auto quoted = [](const std::string& text) {
    std::string json = "\"";
    for (const char c : text) {
      if (c == '"' || c == '\\') json += '\\';
      json += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
    return json + "\"";
  };
  std::string json = concat("{\"ok\": ", report.ok() ? "true" : "false", ", \"num_gpus\": ", num_gpus,
                            ", \"cuda\": ", quoted(cuda), ", \"nccl\": ", quoted(nccl), ", \"checks\": {");
  for (size_t i = 0; i < report.results.size(); ++i)
    json +=
        concat(i == 0 ? "" : ", ", quoted(report.results[i].name), ": ", quoted(report.results[i].outcome));
  json += "}, \"all_reduce_float32\": [";
  for (size_t i = 0; i < report.bandwidths.size(); ++i) {
    const Bandwidth& each = report.bandwidths[i];
    json += concat(i == 0 ? "" : ", ", "{\"mode\": ", quoted(each.mode), ", \"bytes\": ", each.size_bytes,
                   ", \"seconds\": ", each.seconds, ", \"bus_gb_per_s\": ", each.bus_gb_per_s, "}");
  }
  return json + "]}";
}

}  // namespace polyreme::gpu_check
