// What libpolyreme_nccl.so and its loader agree on; as device/cuda/cuda_table.h.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Raised whenever the table or a struct below changes. The loader refuses any other number.
#define POLYREME_NCCL_TABLE_VERSION 1
#define POLYREME_NCCL_TABLE_SYMBOL "polyreme_nccl_table"
#define POLYREME_NCCL_ID_BYTES 128

// ncclResult_t, as far as callers tell results apart.
enum {
  POLYREME_NCCL_SUCCESS = 0,
  POLYREME_NCCL_CUDA_ERROR = 1,
  POLYREME_NCCL_REMOTE_ERROR = 6,
  POLYREME_NCCL_IN_PROGRESS = 7
};

// Outcome of a call: NCCL's number, with its name and the last error's text for people (empty for success and
// "in progress").
struct PolyremeNcclStatus {
  int32_t code;
  char text[508];
};

// Communicators are ncclComm_t and never block: a call may return "in progress", and nothing else may be
// called on that communicator until async_error stops saying so. Not thread-safe: one caller at a time per
// GPU, with the GPU current. dtype is DType, reduce is ReduceOp, counts are elements, streams cudaStream_t.
struct PolyremeNcclTable {
  uint32_t version;
  uint32_t size_bytes;
  // Of the library that was loaded: 10000 * major + 100 * minor + patch.
  struct PolyremeNcclStatus (*nccl_version)(int32_t* version);
  struct PolyremeNcclStatus (*get_unique_id)(char* id);
  struct PolyremeNcclStatus (*init)(int32_t size, const char* id, int32_t rank, const char* name,
                                    void** comm);
  // `child` is written when `comm` is no longer in progress; null for a negative color.
  struct PolyremeNcclStatus (*split)(void* comm, int32_t color, int32_t key, const char* name, void** child);
  struct PolyremeNcclStatus (*async_error)(void* comm);
  // All of them in one group; may block for a moment. They are gone then, whatever it returns.
  struct PolyremeNcclStatus (*abort)(void* const* comms, int32_t num_comms);
  struct PolyremeNcclStatus (*finalize)(void* comm);
  struct PolyremeNcclStatus (*destroy)(void* comm);
  struct PolyremeNcclStatus (*group_start)(void);
  struct PolyremeNcclStatus (*group_end)(void);
  struct PolyremeNcclStatus (*all_reduce)(const void* input, void* output, uint64_t count, int32_t dtype,
                                          int32_t reduce, void* comm, void* stream);
  struct PolyremeNcclStatus (*reduce_scatter)(const void* input, void* output, uint64_t count, int32_t dtype,
                                              int32_t reduce, void* comm, void* stream);
  struct PolyremeNcclStatus (*all_gather)(const void* input, void* output, uint64_t count, int32_t dtype,
                                          void* comm, void* stream);
  struct PolyremeNcclStatus (*broadcast)(void* data, uint64_t count, int32_t dtype, int32_t root, void* comm,
                                         void* stream);
  struct PolyremeNcclStatus (*send)(const void* data, uint64_t count, int32_t dtype, int32_t peer, void* comm,
                                    void* stream);
  struct PolyremeNcclStatus (*receive)(void* data, uint64_t count, int32_t dtype, int32_t peer, void* comm,
                                       void* stream);
};

#ifdef __cplusplus
}
#endif
