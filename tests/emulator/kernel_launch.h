// What kernels/launch.h needs to run kernels on the CPU (kernel_engine.h): launches, shared memory, the
// built-in variables, and those intrinsics of CUDA that its headers leave out of a C++ compilation. An
// intrinsic that is missing here does not compile; there are no atomics on floating-point numbers, since
// kernels may not use any.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "emulator/fake_gpu.h"
#include "emulator/happens_before.h"
#include "emulator/kernel_engine.h"

namespace polyreme::fake_gpu {

// Where a launch stands in the sources.
struct Site {
  const char* function;
  const char* file;
  int line;
};
template <typename... Parameters, typename... Arguments>
void launch(const Site& site, void (*kernel)(Parameters...), dim3 blocks, dim3 threads, size_t shared_bytes,
            cudaStream_t stream, Arguments... arguments) {
  enqueue_launch(stream, name_of_launch(site.function, site.file, site.line), [=] {
    run_grid({blocks, threads, shared_bytes}, [&] { kernel(arguments...); });
  });
}

// fetch-and-apply; threads are not interrupted in it.
template <typename T, typename Apply>
T fetch(T* address, Apply apply) {
  const T old = *address;
  *address = apply(old);
  return old;
}

}  // namespace polyreme::fake_gpu

#define gridDim (::polyreme::fake_gpu::kernel_grid)
#define blockDim (::polyreme::fake_gpu::kernel_block)
#define blockIdx (::polyreme::fake_gpu::kernel_block_index)
#define threadIdx (::polyreme::fake_gpu::kernel_thread_index)

#define POLYREME_LAUNCH_SHARED(kernel, blocks, threads, shared_bytes, stream, ...)                 \
  ::polyreme::fake_gpu::launch({__PRETTY_FUNCTION__, __FILE__, __LINE__}, kernel, blocks, threads, \
                               shared_bytes, stream, __VA_ARGS__)
#define POLYREME_SHARED(type, name, count) \
  static char name##_key;                  \
  type* const name =                       \
      static_cast<type*>(::polyreme::fake_gpu::shared_array(&name##_key, sizeof(type) * (count)))
#define POLYREME_DYNAMIC_SHARED(type, name) \
  type* const name = static_cast<type*>(::polyreme::fake_gpu::dynamic_shared())

#define __syncthreads() ::polyreme::fake_gpu::sync_threads(__LINE__)
#define __syncthreads_or(value) \
  ::polyreme::fake_gpu::sync_threads_vote(__LINE__, ::polyreme::fake_gpu::Vote::kAny, value)
#define __syncthreads_and(value) \
  ::polyreme::fake_gpu::sync_threads_vote(__LINE__, ::polyreme::fake_gpu::Vote::kAll, value)
#define __syncwarp() (void)::polyreme::fake_gpu::meet_warp(__LINE__, 0xffffffffu, 0)
#define __shfl_sync(mask, value, lane) \
  ::polyreme::fake_gpu::shuffle(       \
      __LINE__, mask, value, [](int, int source) { return source & 31; }, lane)
// Past the end of the warp a lane gets its own value.
#define __shfl_down_sync(mask, value, delta) \
  ::polyreme::fake_gpu::shuffle(             \
      __LINE__, mask, value, [](int self, int far) { return self + far > 31 ? self : self + far; }, delta)
#define __shfl_up_sync(mask, value, delta) \
  ::polyreme::fake_gpu::shuffle(           \
      __LINE__, mask, value, [](int self, int far) { return self < far ? self : self - far; }, delta)
#define __shfl_xor_sync(mask, value, bits) \
  ::polyreme::fake_gpu::shuffle(           \
      __LINE__, mask, value, [](int self, int far) { return self ^ far; }, bits)
#define __ballot_sync(mask, predicate) ::polyreme::fake_gpu::ballot(__LINE__, mask, predicate)
#define __any_sync(mask, predicate) (::polyreme::fake_gpu::ballot(__LINE__, mask, predicate) != 0)
#define __all_sync(mask, predicate) (::polyreme::fake_gpu::ballot(__LINE__, mask, !(predicate)) == 0)

template <typename T>
T atomicAdd(T* address, T value) {
  static_assert(std::is_integral_v<T>, "sums of floating-point numbers have a fixed order");
  return polyreme::fake_gpu::fetch(address, [=](T old) { return static_cast<T>(old + value); });
}
template <typename T>
T atomicMin(T* address, T value) {
  return polyreme::fake_gpu::fetch(address, [=](T old) { return old < value ? old : value; });
}
template <typename T>
T atomicMax(T* address, T value) {
  return polyreme::fake_gpu::fetch(address, [=](T old) { return old > value ? old : value; });
}
template <typename T>
T atomicOr(T* address, T value) {
  return polyreme::fake_gpu::fetch(address, [=](T old) { return old | value; });
}
template <typename T>
T atomicExch(T* address, T value) {
  return polyreme::fake_gpu::fetch(address, [=](T) { return value; });
}
template <typename T>
T atomicCAS(T* address, T expected, T value) {
  return polyreme::fake_gpu::fetch(address, [=](T old) { return old == expected ? value : old; });
}

inline int __float_as_int(float x) {
  int bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float __int_as_float(int bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
inline long long __double_as_longlong(double x) {
  long long bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline double __longlong_as_double(long long bits) {
  double x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
// To nearest, ties to even; out of range the nearest integer there is, NaN gives 0.
inline int __float2int_rn(float x) {
  if (std::isnan(x)) return 0;
  if (x >= 2147483648.0F) return INT32_MAX;
  if (x < -2147483648.0F) return INT32_MIN;
  return static_cast<int>(std::nearbyint(x));
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>((uint64_t{a} * b) >> 32); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x)); }
inline void __threadfence() {}
