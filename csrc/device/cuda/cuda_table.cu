// The one exported function of libpolyreme_cuda.so, and the calls behind it.
//
// self_test_kernel: shapes out [n], one thread per element in a single block, 4 bytes written per
// element, no accumulation.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstring>

#include "device/cuda/cuda_table.h"
#include "kernels/attention.cuh"
#include "kernels/cross_entropy.cuh"
#include "kernels/elementwise.cuh"
#include "kernels/embedding.cuh"
#include "kernels/fingerprint.cuh"
#include "kernels/gemm.cuh"
#include "kernels/gradient_norm.cuh"
#include "kernels/launch.h"
#include "kernels/norm.cuh"
#include "kernels/optimizer.cuh"
#include "kernels/random.cuh"
#include "kernels/rotary.cuh"
#include "kernels/rows.cuh"
#include "kernels/tree_reduce.cuh"
#include "kernels/whole_param.cuh"

namespace {

constexpr int kSelfTestThreads = 64;
// Not one of CUDA's own numbers.
constexpr int kWrongResult = -1;

// Takes the error that CUDA keeps for the thread along: the next launch must not report it as its own.
PolyremeCudaStatus status_of(cudaError_t error) {
  if (error != cudaSuccess) cudaGetLastError();
  PolyremeCudaStatus status{static_cast<int32_t>(error), ""};
  if (error != cudaSuccess)
    std::snprintf(status.text, sizeof status.text, "%s (%d): %s", cudaGetErrorName(error),
                  static_cast<int>(error), cudaGetErrorString(error));
  return status;
}

PolyremeCudaStatus runtime_version(int32_t* version) { return status_of(cudaRuntimeGetVersion(version)); }

PolyremeCudaStatus driver_version(int32_t* version) { return status_of(cudaDriverGetVersion(version)); }

PolyremeCudaStatus device_count(int32_t* count) {
  *count = 0;
  const cudaError_t error = cudaGetDeviceCount(count);
  if (error != cudaSuccess) *count = 0;
  return status_of(error);
}

PolyremeCudaStatus device_info(int32_t index, PolyremeCudaGpu* gpu) {
  cudaDeviceProp properties;
  const cudaError_t error = cudaGetDeviceProperties(&properties, index);
  if (error != cudaSuccess) return status_of(error);
  *gpu = {};
  static_assert(sizeof gpu->name == sizeof properties.name);
  std::memcpy(gpu->name, properties.name, sizeof gpu->name);
  const auto* id = reinterpret_cast<const unsigned char*>(properties.uuid.bytes);
  std::snprintf(gpu->uuid, sizeof gpu->uuid,
                "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", id[0], id[1],
                id[2], id[3], id[4], id[5], id[6], id[7], id[8], id[9], id[10], id[11], id[12], id[13],
                id[14], id[15]);
  gpu->compute_major = properties.major;
  gpu->compute_minor = properties.minor;
  gpu->multiprocessors = properties.multiProcessorCount;
  gpu->total_memory_bytes = properties.totalGlobalMem;
  return status_of(cudaSuccess);
}

__host__ __device__ uint32_t expected_word(uint32_t i) { return i * 2654435761u + 1u; }

__global__ void self_test_kernel(uint32_t* out) { out[threadIdx.x] = expected_word(threadIdx.x); }

// `words` gets what the kernel wrote.
cudaError_t run_self_test(uint32_t* device_words, uint32_t* words) {
  void (*kernel)(uint32_t*) = &self_test_kernel;
  POLYREME_LAUNCH(kernel, 1, kSelfTestThreads, nullptr, device_words);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  return cudaMemcpy(words, device_words, kSelfTestThreads * sizeof *words, cudaMemcpyDeviceToHost);
}

PolyremeCudaStatus self_test(int32_t index) {
  int previous = 0;
  cudaError_t error = cudaGetDevice(&previous);
  if (error == cudaSuccess) error = cudaSetDevice(index);
  uint32_t* device_words = nullptr;
  uint32_t words[kSelfTestThreads] = {};
  if (error == cudaSuccess) error = cudaMalloc(&device_words, sizeof words);
  if (error == cudaSuccess) error = run_self_test(device_words, words);
  // The first error is the one to report; the clean-up may fail for the same reason.
  if (device_words != nullptr) cudaFree(device_words);
  cudaSetDevice(previous);
  if (error != cudaSuccess) return status_of(error);
  for (uint32_t i = 0; i < kSelfTestThreads; ++i) {
    if (words[i] == expected_word(i)) continue;
    PolyremeCudaStatus status{kWrongResult, ""};
    std::snprintf(status.text, sizeof status.text,
                  "a test kernel wrote 0x%08x at element %u; expected 0x%08x", words[i], i, expected_word(i));
    return status;
  }
  return status_of(cudaSuccess);
}

cudaStream_t as_stream(void* stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t as_event(void* event) { return static_cast<cudaEvent_t>(event); }

PolyremeCudaStatus get_device(int32_t* index) { return status_of(cudaGetDevice(index)); }
PolyremeCudaStatus set_device(int32_t index) { return status_of(cudaSetDevice(index)); }
PolyremeCudaStatus allocate(uint64_t size_bytes, void** address) {
  return status_of(cudaMalloc(address, size_bytes));
}
PolyremeCudaStatus release(void* address) { return status_of(cudaFree(address)); }
PolyremeCudaStatus allocate_pinned(uint64_t size_bytes, void** address) {
  return status_of(cudaMallocHost(address, size_bytes));
}
PolyremeCudaStatus release_pinned(void* address) { return status_of(cudaFreeHost(address)); }
PolyremeCudaStatus create_stream(void** stream) {
  return status_of(cudaStreamCreateWithFlags(reinterpret_cast<cudaStream_t*>(stream), cudaStreamNonBlocking));
}
PolyremeCudaStatus destroy_stream(void* stream) { return status_of(cudaStreamDestroy(as_stream(stream))); }
PolyremeCudaStatus synchronize_stream(void* stream) {
  return status_of(cudaStreamSynchronize(as_stream(stream)));
}
PolyremeCudaStatus create_event(void** event) {
  return status_of(cudaEventCreateWithFlags(reinterpret_cast<cudaEvent_t*>(event), cudaEventDisableTiming));
}
PolyremeCudaStatus destroy_event(void* event) { return status_of(cudaEventDestroy(as_event(event))); }
PolyremeCudaStatus record_event(void* event, void* stream) {
  return status_of(cudaEventRecord(as_event(event), as_stream(stream)));
}
PolyremeCudaStatus wait_event(void* stream, void* event) {
  return status_of(cudaStreamWaitEvent(as_stream(stream), as_event(event), 0));
}
PolyremeCudaStatus query_event(void* event, int32_t* reached) {
  const cudaError_t error = cudaEventQuery(as_event(event));
  *reached = error == cudaSuccess;
  if (error != cudaErrorNotReady) return status_of(error);
  cudaGetLastError();  // as in status_of
  return status_of(cudaSuccess);
}
PolyremeCudaStatus synchronize_event(void* event) { return status_of(cudaEventSynchronize(as_event(event))); }
PolyremeCudaStatus copy(void* to, const void* from, uint64_t size_bytes, void* stream) {
  return status_of(cudaMemcpyAsync(to, from, size_bytes, cudaMemcpyDefault, as_stream(stream)));
}
PolyremeCudaStatus tree_reduce(const PolyremeTreeReduce* reduction, void* stream) {
  return status_of(polyreme::kernels::launch_tree_reduce(*reduction, as_stream(stream)));
}

// A launcher as an entry of the table.
template <auto kLaunch, typename Args>
PolyremeCudaStatus launched(const Args* args, void* stream) {
  return status_of(kLaunch(*args, as_stream(stream)));
}

constexpr PolyremeCudaTable kTable = {
    POLYREME_CUDA_TABLE_VERSION,
    sizeof(PolyremeCudaTable),
    runtime_version,
    driver_version,
    device_count,
    device_info,
    self_test,
    get_device,
    set_device,
    allocate,
    release,
    allocate_pinned,
    release_pinned,
    create_stream,
    destroy_stream,
    synchronize_stream,
    create_event,
    destroy_event,
    record_event,
    wait_event,
    query_event,
    synchronize_event,
    copy,
    tree_reduce,
    launched<polyreme::kernels::launch_adamw>,
    launched<polyreme::kernels::launch_sgd>,
    launched<polyreme::kernels::launch_lion>,
    launched<polyreme::kernels::launch_lamb_moments>,
    launched<polyreme::kernels::launch_lamb_apply>,
    launched<polyreme::kernels::launch_muon_momentum>,
    launched<polyreme::kernels::launch_weighted_sum>,
    launched<polyreme::kernels::launch_gradient_norm>,
    launched<polyreme::kernels::launch_exact_sum>,
    launched<polyreme::kernels::launch_clip_scale>,
    launched<polyreme::kernels::launch_add>,
    launched<polyreme::kernels::launch_gelu_forward>,
    launched<polyreme::kernels::launch_gelu_backward>,
    launched<polyreme::kernels::launch_cast>,
    launched<polyreme::kernels::launch_fill>,
    launched<polyreme::kernels::launch_accumulate>,
    launched<polyreme::kernels::launch_scale>,
    launched<polyreme::kernels::launch_swiglu_forward>,
    launched<polyreme::kernels::launch_swiglu_backward>,
    launched<polyreme::kernels::launch_dropout>,
    launched<polyreme::kernels::launch_fill_normal>,
    launched<polyreme::kernels::launch_round_stochastic>,
    launched<polyreme::kernels::launch_fingerprint>,
    launched<polyreme::kernels::launch_norm_forward>,
    launched<polyreme::kernels::launch_norm_backward_input>,
    launched<polyreme::kernels::launch_accumulate_rows>,
    launched<polyreme::kernels::launch_add_rows>,
    launched<polyreme::kernels::launch_norm_backward_weight>,
    launched<polyreme::kernels::launch_rotary>,
    launched<polyreme::kernels::launch_rotary_table>,
    launched<polyreme::kernels::launch_embedding_forward>,
    launched<polyreme::kernels::launch_embedding_backward>,
    launched<polyreme::kernels::launch_embedding_part_forward>,
    launched<polyreme::kernels::launch_embedding_part_backward>,
    launched<polyreme::kernels::launch_cross_entropy_forward>,
    launched<polyreme::kernels::launch_cross_entropy_backward>,
    launched<polyreme::kernels::launch_vocab_part_max>,
    launched<polyreme::kernels::launch_vocab_part_sums>,
    launched<polyreme::kernels::launch_vocab_part_finish>,
    launched<polyreme::kernels::launch_vocab_part_backward>,
    launched<polyreme::kernels::launch_attention_forward>,
    launched<polyreme::kernels::launch_attention_backward>,
    launched<polyreme::kernels::launch_ordered_gemm>,
};

}  // namespace

extern "C" __attribute__((visibility("default"))) const PolyremeCudaTable* polyreme_cuda_table() {
  return &kTable;
}
