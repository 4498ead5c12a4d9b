#include <algorithm>
#include <cstring>
#include <vector>

#include "base/math.h"
#include "ops/check.h"
#include "ops/cpu/enqueue.h"
#include "ops/cuda/launch.h"
#include "ops/ops.h"

namespace polyreme {
namespace {

// The finalizer of splitmix64 (Steele et al. 2014): every bit of the input changes half of the output's.
uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

// Terms of all bytes, four at a time with their place. Their sum wraps, so its order does not matter.
uint64_t sum_of_terms(const char* bytes, int64_t begin_word, int64_t end_word, int64_t size_bytes) {
  uint64_t sum = 0;
  const int64_t end_whole = std::min(end_word, size_bytes / 4);
  for (int64_t word = begin_word; word < end_whole; ++word) {
    uint32_t value = 0;
    std::memcpy(&value, bytes + 4 * word, 4);
    sum += mix((static_cast<uint64_t>(word) << 32) ^ value);
  }
  if (end_whole < end_word) {  // the last few bytes of all
    uint32_t value = 0;
    std::memcpy(&value, bytes + 4 * end_whole, static_cast<size_t>(size_bytes - 4 * end_whole));
    sum += mix((static_cast<uint64_t>(end_whole) << 32) ^ value);
  }
  return sum;
}

}  // namespace

void fingerprint(Stream& stream, const Tensor& x, const Tensor& out) {
  check_dense({"fingerprint", "x"}, x, x.dtype());
  check_dense({"fingerprint", "out"}, out, {1}, DType::kI64);
  const char* const bytes = static_cast<const char*>(x.raw_address());
  int64_t* const result = out.address<int64_t>();
  if (CudaStream* const gpu = gpu_stream(stream))
    return launch(*gpu, "fingerprint", {x, out}, &PolyremeCudaTable::fingerprint,
                  {.x = bytes, .size_bytes = x.size_bytes(), .out = reinterpret_cast<uint64_t*>(result)});
  as_cpu(stream).enqueue(
      {"fingerprint"}, {reads(x), writes(out)}, [=, size = x.size_bytes()](const CpuContext& context) {
        constexpr int64_t kWords = int64_t{1} << 16;  // of one task
        const int64_t words = ceil_div(size, 4);
        std::vector<uint64_t> parts(static_cast<size_t>(ceil_div(words, kWords)));
        parallel_for(context.pool, ceil_div(words, kWords), [&](int64_t task, int) {
          parts[static_cast<size_t>(task)] =
              sum_of_terms(bytes, task * kWords, std::min(words, (task + 1) * kWords), size);
        });
        uint64_t sum = mix(static_cast<uint64_t>(size));
        for (const uint64_t part : parts) sum += part;
        *result = static_cast<int64_t>(sum);
      });
}

}  // namespace polyreme
