// The one exported function of libpolyreme_nccl.so, and the calls behind it.
#include "comm/nccl/nccl_table.h"

#include <nccl.h>

#include <cstdio>
#include <cstring>

#include "base/dtype.h"

static_assert(POLYREME_NCCL_ID_BYTES == NCCL_UNIQUE_ID_BYTES);
static_assert(int{POLYREME_NCCL_CUDA_ERROR} == static_cast<int>(ncclUnhandledCudaError));
static_assert(int{POLYREME_NCCL_REMOTE_ERROR} == static_cast<int>(ncclRemoteError));
static_assert(int{POLYREME_NCCL_IN_PROGRESS} == static_cast<int>(ncclInProgress));

namespace {

using polyreme::DType;

const char* name_of(ncclResult_t result) {
  switch (result) {
    case ncclUnhandledCudaError:
      return "ncclUnhandledCudaError";
    case ncclSystemError:
      return "ncclSystemError";
    case ncclInternalError:
      return "ncclInternalError";
    case ncclInvalidArgument:
      return "ncclInvalidArgument";
    case ncclInvalidUsage:
      return "ncclInvalidUsage";
    case ncclRemoteError:
      return "ncclRemoteError";
    default:
      return "an unknown result of NCCL";
  }
}

// The last error's text is one of the process, and may be of an earlier failure.
PolyremeNcclStatus status_of(ncclResult_t result) {
  PolyremeNcclStatus status{static_cast<int32_t>(result), ""};
  if (result == ncclSuccess || result == ncclInProgress) return status;
  const char* last = ncclGetLastError(nullptr);
  std::snprintf(status.text, sizeof status.text, "%s (%d): %s%s%.350s", name_of(result),
                static_cast<int>(result), ncclGetErrorString(result),
                last != nullptr && *last != '\0' ? "; NCCL says: " : "", last == nullptr ? "" : last);
  return status;
}

ncclDataType_t nccl_dtype(int32_t dtype) {
  switch (static_cast<DType>(dtype)) {
    case DType::kF32:
      return ncclFloat32;
    case DType::kF64:
      return ncclFloat64;
    case DType::kBF16:
      return ncclBfloat16;
    case DType::kF16:
      return ncclFloat16;
    case DType::kI8:
      return ncclInt8;
    case DType::kU8:
    case DType::kBool:
      return ncclUint8;
    case DType::kI32:
      return ncclInt32;
    case DType::kI64:
      return ncclInt64;
  }
  return ncclNumTypes;  // NCCL refuses it
}

// In the order of ReduceOp: sum, product, max, min, average.
ncclRedOp_t nccl_reduction(int32_t dtype, int32_t reduce) {
  constexpr ncclRedOp_t kOps[] = {ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg};
  // 0 and 1 as bytes: any, all, any, all.
  constexpr ncclRedOp_t kBoolOps[] = {ncclMax, ncclMin, ncclMax, ncclMin, ncclNumOps};
  if (reduce < 0 || reduce > 4) return ncclNumOps;  // NCCL refuses it
  return static_cast<DType>(dtype) == DType::kBool ? kBoolOps[reduce] : kOps[reduce];
}

ncclComm_t as_comm(void* comm) { return static_cast<ncclComm_t>(comm); }
cudaStream_t as_stream(void* stream) { return static_cast<cudaStream_t>(stream); }

ncclConfig_t config_of(const char* name) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;  // so that an abort is possible at any time
  config.commName = name;
  return config;
}

PolyremeNcclStatus nccl_version(int32_t* version) { return status_of(ncclGetVersion(version)); }

PolyremeNcclStatus get_unique_id(char* id) {
  ncclUniqueId unique;
  const ncclResult_t result = ncclGetUniqueId(&unique);
  if (result == ncclSuccess) std::memcpy(id, unique.internal, sizeof unique.internal);
  return status_of(result);
}

PolyremeNcclStatus init(int32_t size, const char* id, int32_t rank, const char* name, void** comm) {
  ncclUniqueId unique;
  std::memcpy(unique.internal, id, sizeof unique.internal);
  ncclConfig_t config = config_of(name);
  return status_of(ncclCommInitRankConfig(reinterpret_cast<ncclComm_t*>(comm), size, unique, rank, &config));
}

PolyremeNcclStatus split(void* comm, int32_t color, int32_t key, const char* name, void** child) {
  ncclConfig_t config = config_of(name);
  config.splitShare = 0;  // shared resources would share the abort flag too
  return status_of(ncclCommSplit(as_comm(comm), color < 0 ? NCCL_SPLIT_NOCOLOR : color, key,
                                 reinterpret_cast<ncclComm_t*>(child), &config));
}

PolyremeNcclStatus async_error(void* comm) {
  ncclResult_t state = ncclSuccess;
  const ncclResult_t result = ncclCommGetAsyncError(as_comm(comm), &state);
  return status_of(result == ncclSuccess ? state : result);
}

// One group: else the clean-up of one communicator can wait for the kernels of another.
PolyremeNcclStatus abort_all(void* const* comms, int32_t num_comms) {
  ncclResult_t first = ncclGroupStart();
  for (int32_t i = 0; i < num_comms; ++i) {
    const ncclResult_t result = ncclCommAbort(as_comm(comms[i]));
    if (first == ncclSuccess) first = result;
  }
  const ncclResult_t result = ncclGroupEnd();
  return status_of(first == ncclSuccess ? result : first);
}

PolyremeNcclStatus finalize(void* comm) { return status_of(ncclCommFinalize(as_comm(comm))); }
PolyremeNcclStatus destroy(void* comm) { return status_of(ncclCommDestroy(as_comm(comm))); }
PolyremeNcclStatus group_start() { return status_of(ncclGroupStart()); }
PolyremeNcclStatus group_end() { return status_of(ncclGroupEnd()); }

PolyremeNcclStatus all_reduce(const void* input, void* output, uint64_t count, int32_t dtype, int32_t reduce,
                              void* comm, void* stream) {
  return status_of(ncclAllReduce(input, output, count, nccl_dtype(dtype), nccl_reduction(dtype, reduce),
                                 as_comm(comm), as_stream(stream)));
}

PolyremeNcclStatus reduce_scatter(const void* input, void* output, uint64_t count, int32_t dtype,
                                  int32_t reduce, void* comm, void* stream) {
  return status_of(ncclReduceScatter(input, output, count, nccl_dtype(dtype), nccl_reduction(dtype, reduce),
                                     as_comm(comm), as_stream(stream)));
}

PolyremeNcclStatus all_gather(const void* input, void* output, uint64_t count, int32_t dtype, void* comm,
                              void* stream) {
  return status_of(ncclAllGather(input, output, count, nccl_dtype(dtype), as_comm(comm), as_stream(stream)));
}

PolyremeNcclStatus broadcast(void* data, uint64_t count, int32_t dtype, int32_t root, void* comm,
                             void* stream) {
  return status_of(
      ncclBroadcast(data, data, count, nccl_dtype(dtype), root, as_comm(comm), as_stream(stream)));
}

PolyremeNcclStatus send(const void* data, uint64_t count, int32_t dtype, int32_t peer, void* comm,
                        void* stream) {
  return status_of(ncclSend(data, count, nccl_dtype(dtype), peer, as_comm(comm), as_stream(stream)));
}

PolyremeNcclStatus receive(void* data, uint64_t count, int32_t dtype, int32_t peer, void* comm,
                           void* stream) {
  return status_of(ncclRecv(data, count, nccl_dtype(dtype), peer, as_comm(comm), as_stream(stream)));
}

constexpr PolyremeNcclTable kTable = {
    POLYREME_NCCL_TABLE_VERSION,
    sizeof(PolyremeNcclTable),
    nccl_version,
    get_unique_id,
    init,
    split,
    async_error,
    abort_all,
    finalize,
    destroy,
    group_start,
    group_end,
    all_reduce,
    reduce_scatter,
    all_gather,
    broadcast,
    send,
    receive,
};

}  // namespace

extern "C" __attribute__((visibility("default"))) const PolyremeNcclTable* polyreme_nccl_table() {
  return &kTable;
}
