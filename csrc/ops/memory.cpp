#include <cstring>

#include "ops/check.h"
#include "ops/cpu/elements.h"
#include "ops/cpu/enqueue.h"
#include "ops/cpu/kernels/elementwise.h"
#include "ops/cpu/ranges.h"
#include "ops/cuda/launch.h"
#include "ops/ops.h"

namespace polyreme {
namespace {

constexpr int64_t kCopyBytes = int64_t{1} << 20;  // one task of a copy

void enqueue_copy(Stream& stream, const char* name, std::vector<Access> accesses, const void* from, void* to,
                  int64_t bytes) {
  if (CudaStream* const gpu = gpu_stream(stream)) {
    std::vector<std::shared_ptr<Buffer>> buffers;
    for (const Access& access : accesses) buffers.push_back(access.buffer);
    return launch(*gpu, name, std::move(buffers), [&](const PolyremeCudaTable& table, void* handle) {
      return table.copy(to, from, static_cast<uint64_t>(bytes), handle);
    });
  }
  as_cpu(stream).enqueue(
      {name, OpKind::kCopy, 0, bytes}, std::move(accesses), [=](const CpuContext& context) {
        for_ranges(context.pool, bytes, kCopyBytes, [=](int64_t begin, int64_t end) {
          std::memcpy(static_cast<char*>(to) + begin, static_cast<const char*>(from) + begin,
                      static_cast<size_t>(end - begin));
        });
      });
}

}  // namespace

void fill(Stream& stream, const Tensor& out, float value) {
  check_float({"fill", "out"}, out);
  if (CudaStream* const gpu = gpu_stream(stream))
    return launch(*gpu, "fill", {out}, &PolyremeCudaTable::fill,
                  {.out = out.raw_address(), .count = out.numel(), .value = value, .dtype = dtype_code(out)});
  const ElementPointer data(out);
  as_cpu(stream).enqueue(
      {"fill", OpKind::kCopy}, {writes(out)}, [=, n = out.numel()](const CpuContext& context) {
        const auto cast = pick(context.isa, cpu::avx2::cast, cpu::avx512::cast);
        uint32_t pattern = 0;  // one element as it is stored
        cast(cpu::Element::kF32, &value, data.type, &pattern, 1);
        for_ranges(context.pool, n, kGrain, [=](int64_t begin, int64_t end) {
          if (data.type == cpu::Element::kF32)
            std::fill_n(static_cast<uint32_t*>(data + begin), end - begin, pattern);
          else
            std::fill_n(static_cast<uint16_t*>(data + begin), end - begin, static_cast<uint16_t>(pattern));
        });
      });
}

void copy(Stream& stream, const Tensor& from, const Tensor& to) {
  check_dense({"copy", "from"}, from, from.dtype());
  check_dense({"copy", "to"}, to, from.shape(), from.dtype());
  check_apart({"copy", "to"}, to, from);
  enqueue_copy(stream, "copy", {reads(from), writes(to)}, from.raw_address(), to.raw_address(),
               from.size_bytes());
}

void copy_runs(Stream& stream, const Tensor& from, const Tensor& to, std::vector<CopyRun> runs) {
  check_dense({"copy_runs", "from"}, from, from.dtype());
  check_dense({"copy_runs", "to"}, to, from.dtype());
  check_apart({"copy_runs", "to"}, to, from);
  const auto fits = [](int64_t begin, int64_t size, const Tensor& tensor) {
    return begin >= 0 && size >= 0 && begin <= tensor.numel() - size;
  };
  for (const CopyRun& run : runs)
    require(fits(run.from, run.size, from) && fits(run.to, run.size, to), "copy_runs: ", run.size,
            " elements from ", run.from, " of ", from.numel(), " to ", run.to, " of ", to.numel());
  const auto bytes = static_cast<int64_t>(dtype_size(from.dtype()));
  const auto* const source = static_cast<const char*>(from.raw_address());
  auto* const target = static_cast<char*>(to.raw_address());
  as_cpu(stream).enqueue({"copy_runs", OpKind::kCopy, 0, to.size_bytes()},
                         {reads(from), reads(to), writes(to)},
                         [=, runs = std::move(runs)](const CpuContext&) {
                           for (const CopyRun& run : runs)
                             std::memcpy(target + run.to * bytes, source + run.from * bytes,
                                         static_cast<size_t>(run.size * bytes));
                         });
}

void copy_from_host(Stream& stream, const void* from, const Tensor& to) {
  check_dense({"copy_from_host", "to"}, to, to.dtype());
  require(from != nullptr || to.numel() == 0,
          "copy_from_host: from: expected host memory, got a null pointer");
  enqueue_copy(stream, "copy_from_host", {writes(to)}, from, to.raw_address(), to.size_bytes());
}

void copy_to_host(Stream& stream, const Tensor& from, void* to) {
  check_dense({"copy_to_host", "from"}, from, from.dtype());
  require(to != nullptr || from.numel() == 0, "copy_to_host: to: expected host memory, got a null pointer");
  enqueue_copy(stream, "copy_to_host", {reads(from)}, from.raw_address(), to, from.size_bytes());
}

}  // namespace polyreme
