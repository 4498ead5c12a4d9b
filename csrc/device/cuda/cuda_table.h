// What libpolyreme_cuda.so and its loader agree on: one exported C function that returns a table of
// function pointers. Plain C types only, since the two objects may come from different builds.
#pragma once

#include <stdint.h>

#include "device/cuda/kernel_args.h"

#ifdef __cplusplus
extern "C" {
#endif

// Raised whenever the table or a struct below changes. The loader refuses any other number.
#define POLYREME_CUDA_TABLE_VERSION 5
#define POLYREME_CUDA_TABLE_SYMBOL "polyreme_cuda_table"

// Outcome of a call: CUDA's error number (0 = success), with its name and text for people.
struct PolyremeCudaStatus {
  int32_t code;
  char text[252];
};

// What is known of one GPU without making a context on it.
struct PolyremeCudaGpu {
  char name[256];
  char uuid[48];  // "GPU-...", as nvidia-smi prints it
  int32_t compute_major;
  int32_t compute_minor;
  int32_t multiprocessors;
  int32_t reserved;
  uint64_t total_memory_bytes;
};

// A reduction by the tree of comm/tree.h: kernels/tree_reduce.cuh says what it does. Term t is at
// terms + t * stride_bytes, but for the term `own`, which is at own_term.
struct PolyremeTreeReduce {
  int32_t dtype;   // base/dtype.h
  int32_t reduce;  // ReduceOp of comm/communicator.h
  int32_t num_terms;
  int32_t own;
  const void* terms;
  const void* own_term;
  uint64_t stride_bytes;
  int64_t count;
  void* out;
};

// Versions are CUDA's: 1000 * major + 10 * minor. Streams and events are CUDA's handles.
struct PolyremeCudaTable {
  uint32_t version;
  uint32_t size_bytes;
  // The runtime inside the library.
  struct PolyremeCudaStatus (*runtime_version)(int32_t* version);
  // The newest CUDA that the installed driver can run; 0 without a driver.
  struct PolyremeCudaStatus (*driver_version)(int32_t* version);
  struct PolyremeCudaStatus (*device_count)(int32_t* count);
  struct PolyremeCudaStatus (*device_info)(int32_t index, struct PolyremeCudaGpu* gpu);
  // Runs a small kernel on the GPU and checks what it wrote: finds a library without code for this
  // GPU, a broken driver and a GPU that another process holds exclusively.
  struct PolyremeCudaStatus (*self_test)(int32_t index);

  // The calling thread's current device, to which the calls below apply.
  struct PolyremeCudaStatus (*get_device)(int32_t* index);
  struct PolyremeCudaStatus (*set_device)(int32_t index);
  struct PolyremeCudaStatus (*allocate)(uint64_t size_bytes, void** address);
  struct PolyremeCudaStatus (*release)(void* address);
  // Host memory that copies reach without staging.
  struct PolyremeCudaStatus (*allocate_pinned)(uint64_t size_bytes, void** address);
  struct PolyremeCudaStatus (*release_pinned)(void* address);
  struct PolyremeCudaStatus (*create_stream)(void** stream);  // does not order with the default stream
  struct PolyremeCudaStatus (*destroy_stream)(void* stream);
  struct PolyremeCudaStatus (*synchronize_stream)(void* stream);
  struct PolyremeCudaStatus (*create_event)(void** event);
  struct PolyremeCudaStatus (*destroy_event)(void* event);
  struct PolyremeCudaStatus (*record_event)(void* event, void* stream);
  struct PolyremeCudaStatus (*wait_event)(void* stream, void* event);
  // `reached`: whether the recorded point was reached; true for an event that was never recorded.
  struct PolyremeCudaStatus (*query_event)(void* event, int32_t* reached);
  struct PolyremeCudaStatus (*synchronize_event)(void* event);
  // Between any two of host and device; to and from the host asynchronous only with pinned memory.
  struct PolyremeCudaStatus (*copy)(void* to, const void* from, uint64_t size_bytes, void* stream);
  struct PolyremeCudaStatus (*tree_reduce)(const struct PolyremeTreeReduce* reduction, void* stream);

  // Kernels, enqueued on `stream`: kernels/*.cuh.
  struct PolyremeCudaStatus (*adamw)(const struct PolyremeAdamW* args, void* stream);
  struct PolyremeCudaStatus (*sgd)(const struct PolyremeSgd* args, void* stream);
  struct PolyremeCudaStatus (*lion)(const struct PolyremeLion* args, void* stream);
  struct PolyremeCudaStatus (*lamb_moments)(const struct PolyremeLamb* args, void* stream);
  struct PolyremeCudaStatus (*lamb_apply)(const struct PolyremeLamb* args, void* stream);
  struct PolyremeCudaStatus (*muon_momentum)(const struct PolyremeMomentum* args, void* stream);
  struct PolyremeCudaStatus (*weighted_sum)(const struct PolyremeWeightedSum* args, void* stream);
  struct PolyremeCudaStatus (*gradient_norm)(const struct PolyremeGradientNorm* args, void* stream);
  struct PolyremeCudaStatus (*exact_sum)(const struct PolyremeExactSum* args, void* stream);
  struct PolyremeCudaStatus (*clip_scale)(const struct PolyremeClipScale* args, void* stream);
  struct PolyremeCudaStatus (*add)(const struct PolyremeElementwise* args, void* stream);
  struct PolyremeCudaStatus (*gelu_forward)(const struct PolyremeElementwise* args, void* stream);
  struct PolyremeCudaStatus (*gelu_backward)(const struct PolyremeElementwise* args, void* stream);
  struct PolyremeCudaStatus (*cast)(const struct PolyremeCast* args, void* stream);
  struct PolyremeCudaStatus (*fill)(const struct PolyremeFill* args, void* stream);
  struct PolyremeCudaStatus (*accumulate)(const struct PolyremeAccumulate* args, void* stream);
  struct PolyremeCudaStatus (*scale)(const struct PolyremeScale* args, void* stream);
  struct PolyremeCudaStatus (*swiglu_forward)(const struct PolyremeSwiglu* args, void* stream);
  struct PolyremeCudaStatus (*swiglu_backward)(const struct PolyremeSwiglu* args, void* stream);
  struct PolyremeCudaStatus (*dropout)(const struct PolyremeDropout* args, void* stream);
  struct PolyremeCudaStatus (*fill_normal)(const struct PolyremeFillNormal* args, void* stream);
  struct PolyremeCudaStatus (*round_stochastic)(const struct PolyremeRoundStochastic* args, void* stream);
  struct PolyremeCudaStatus (*fingerprint)(const struct PolyremeFingerprint* args, void* stream);
  struct PolyremeCudaStatus (*norm_forward)(const struct PolyremeNormForward* args, void* stream);
  struct PolyremeCudaStatus (*norm_backward_input)(const struct PolyremeNormBackwardInput* args,
                                                   void* stream);
  struct PolyremeCudaStatus (*accumulate_rows)(const struct PolyremeAccumulateRows* args, void* stream);
  struct PolyremeCudaStatus (*add_rows)(const struct PolyremeAddRows* args, void* stream);
  struct PolyremeCudaStatus (*norm_backward_weight)(const struct PolyremeNormBackwardWeight* args,
                                                    void* stream);
  struct PolyremeCudaStatus (*rotary)(const struct PolyremeRotary* args, void* stream);
  struct PolyremeCudaStatus (*rotary_table)(const struct PolyremeRotaryTable* args, void* stream);
  struct PolyremeCudaStatus (*embedding_forward)(const struct PolyremeEmbedding* args, void* stream);
  struct PolyremeCudaStatus (*embedding_backward)(const struct PolyremeEmbedding* args, void* stream);
  struct PolyremeCudaStatus (*embedding_part_forward)(const struct PolyremeEmbeddingPart* args, void* stream);
  struct PolyremeCudaStatus (*embedding_part_backward)(const struct PolyremeEmbeddingPart* args,
                                                       void* stream);
  struct PolyremeCudaStatus (*cross_entropy_forward)(const struct PolyremeCrossEntropy* args, void* stream);
  struct PolyremeCudaStatus (*cross_entropy_backward)(const struct PolyremeCrossEntropy* args, void* stream);
  struct PolyremeCudaStatus (*vocab_part_max)(const struct PolyremeVocabPart* args, void* stream);
  struct PolyremeCudaStatus (*vocab_part_sums)(const struct PolyremeVocabPart* args, void* stream);
  struct PolyremeCudaStatus (*vocab_part_finish)(const struct PolyremeVocabPart* args, void* stream);
  struct PolyremeCudaStatus (*vocab_part_backward)(const struct PolyremeVocabPart* args, void* stream);
  struct PolyremeCudaStatus (*attention_forward)(const struct PolyremeAttention* args, void* stream);
  struct PolyremeCudaStatus (*attention_backward)(const struct PolyremeAttention* args, void* stream);
  struct PolyremeCudaStatus (*ordered_gemm)(const struct PolyremeGemm* args, void* stream);
};

#ifdef __cplusplus
}
#endif
