// What libpolyreme_cuda.so and its loader agree on: one exported C function that returns a table of
// function pointers. Plain C types only, since the two objects may come from different builds.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Raised whenever the table or a struct below changes. The loader refuses any other number.
#define POLYREME_CUDA_TABLE_VERSION 1
#define POLYREME_CUDA_TABLE_SYMBOL "polyreme_cuda_table"

// Outcome of a call: CUDA's error number (0 = success), with its name and text for people.
struct PolyremeCudaStatus {
  int32_t code;
  char text[252];
};

// What is known of one GPU without making a context on it.
struct PolyremeCudaGpu {
  char name[256];
  int32_t compute_major;
  int32_t compute_minor;
  int32_t multiprocessors;
  int32_t reserved;
  uint64_t total_memory_bytes;
};

// Versions are CUDA's: 1000 * major + 10 * minor.
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
};

#ifdef __cplusplus
}
#endif
