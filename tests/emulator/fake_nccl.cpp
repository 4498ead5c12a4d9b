// An NCCL over the streams of fake_cuda.cpp. Communicators are non-blocking ones; calls answer "in progress"
// at random, and a call that comes before the answer is "success" is refused, as NCCL does. Calls that do not
// fit each other hang.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <nccl.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "emulator/fake_gpu.h"

namespace {
struct Clique;
}

struct ncclComm {
  Clique* clique = nullptr;
  int rank = 0, gpu = 0;
  int polls_left = 0;  // that still answer "in progress"
  bool splitting = false;
  bool aborted = false, finalized = false, destroyed = false;
  int num_queued = 0;  // steps in streams
  uint64_t num_collectives = 0, num_splits = 0;
};

namespace {

using namespace polyreme::fake_gpu;

enum class Kind { kAllReduce, kReduceScatter, kAllGather, kBroadcast, kSend, kReceive };

struct Op {
  const char* name;
  Kind kind;
  const void* input;
  void* output;
  size_t count;
  ncclDataType_t dtype;
  ncclRedOp_t reduce;
  int root;  // or peer
  ncclComm* comm;
  cudaStream_t stream;
  uint64_t sequence = 0;
  bool arrived = false, done = false;
};

struct SplitWish {
  ncclComm* parent;
  int color, key;
  ncclComm_t* child;
};

// The ranks of one communicator.
struct Clique {
  int size = 0;
  std::vector<ncclComm*> comms;  // by rank; null until it came
  std::map<uint64_t, std::vector<std::shared_ptr<Op>>> collectives;
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<Op>>> sends, receives;  // by (from, to)
  std::map<uint64_t, std::vector<SplitWish>> splits;
  bool complete() const {
    return std::all_of(comms.begin(), comms.end(), [](const ncclComm* comm) { return comm != nullptr; });
  }
};

struct State {
  std::vector<std::unique_ptr<Clique>> cliques;
  std::map<std::string, Clique*> by_id;
  std::vector<std::unique_ptr<ncclComm>> comms;
  std::vector<std::string> violations;
  std::map<int, std::thread::id> groups_open;  // by GPU
  int num_ids = 0, num_aborts = 0;
};
State& state() {
  static State instance;
  return instance;
}

thread_local int group_depth = 0;
thread_local std::vector<std::shared_ptr<Op>> group_ops;
thread_local std::vector<ncclComm*> group_aborts;

int current_gpu() {
  int index = 0;
  cudaGetDevice(&index);
  return index;
}

bool in_progress(const ncclComm* comm) {
  return !comm->clique->complete() || comm->splitting || comm->polls_left > 0;
}

// What every call on a communicator has to respect.
ncclResult_t enter(ncclComm* comm, const char* function) {
  if (const int code = failure_of(function)) return static_cast<ncclResult_t>(code);
  if (comm->aborted || comm->destroyed) violation(std::string(function) + " on a communicator that is gone");
  if (comm->aborted || comm->destroyed) return ncclInvalidArgument;
  const auto open = state().groups_open.find(comm->gpu);
  if (open != state().groups_open.end() && open->second != std::this_thread::get_id())
    violation(std::string(function) + ": two threads at once on one GPU");
  if (current_gpu() != comm->gpu) violation(std::string(function) + ": another GPU is current");
  if (in_progress(comm)) {
    violation(std::string(function) + " while the communicator is in progress");
    return ncclInvalidArgument;
  }
  return ncclSuccess;
}

size_t size_of(ncclDataType_t dtype) {
  switch (dtype) {
    case ncclInt8:
    case ncclUint8:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    default:
      return 8;
  }
}

template <typename T>
T combine(ncclRedOp_t op, T a, T b) {
  if (op == ncclMax) return a > b ? a : b;
  if (op == ncclMin) return a < b ? a : b;
  if constexpr (std::is_integral_v<T>) {  // wraps
    const auto x = static_cast<uint64_t>(a), y = static_cast<uint64_t>(b);
    return static_cast<T>(op == ncclProd ? x * y : x + y);
  } else {
    return op == ncclProd ? a * b : a + b;
  }
}

float load(__half x) { return __half2float(x); }
float load(__nv_bfloat16 x) { return __bfloat162float(x); }
template <typename T>
T load(T x) {
  return x;
}

// From the last rank to the first, rounded at each step: not as the tree does.
template <typename T>
void run_reduction(const std::vector<std::shared_ptr<Op>>& ops) {
  const bool scatter = ops[0]->kind == Kind::kReduceScatter;
  std::vector<T> result;
  for (size_t i = 0; i < ops[0]->count * (scatter ? ops.size() : 1); ++i) {
    auto sum = load(static_cast<const T*>(ops.back()->input)[i]);
    using A = decltype(sum);
    for (size_t r = ops.size() - 1; r-- > 0;)
      sum = load(static_cast<T>(combine(ops[0]->reduce, sum, load(static_cast<const T*>(ops[r]->input)[i]))));
    if (ops[0]->reduce == ncclAvg) sum = sum / static_cast<A>(ops.size());
    result.push_back(static_cast<T>(sum));
  }
  for (size_t r = 0; r < ops.size(); ++r)
    std::memcpy(ops[r]->output, result.data() + (scatter ? r * ops[r]->count : 0), ops[r]->count * sizeof(T));
}

void run_reduction_of(ncclDataType_t dtype, const std::vector<std::shared_ptr<Op>>& ops) {
  switch (dtype) {
    case ncclFloat32:
      return run_reduction<float>(ops);
    case ncclFloat64:
      return run_reduction<double>(ops);
    case ncclFloat16:
      return run_reduction<__half>(ops);
    case ncclBfloat16:
      return run_reduction<__nv_bfloat16>(ops);
    case ncclInt32:
      return run_reduction<int32_t>(ops);
    case ncclInt64:
      return run_reduction<int64_t>(ops);
    case ncclInt8:
      return run_reduction<int8_t>(ops);
    case ncclUint8:
      return run_reduction<uint8_t>(ops);
    default:
      violation("a reduction of a dtype that NCCL does not have");
  }
}

// All have seen what the others have when it ends.
void note_collective(const std::vector<std::shared_ptr<Op>>& ops) {
  const size_t bytes = ops[0]->count * size_of(ops[0]->dtype);
  const bool scatter = ops[0]->kind == Kind::kReduceScatter, gather = ops[0]->kind == Kind::kAllGather;
  for (const auto& op : ops) count_operation(op->stream);
  for (const auto& op : ops)
    for (const auto& other : ops) see(op->stream, other->stream);
  for (const auto& op : ops) {
    touch(op->stream, op->name, op->input, bytes * (scatter ? ops.size() : 1), false);
    touch(op->stream, op->name, op->output, bytes * (gather ? ops.size() : 1), true);
  }
}

void run_collective(const std::vector<std::shared_ptr<Op>>& ops) {
  note_collective(ops);
  const MemoryAccess access;
  const Op& first = *ops[0];
  const size_t bytes = first.count * size_of(first.dtype);
  if (first.kind == Kind::kBroadcast) {
    for (const auto& op : ops) std::memmove(op->output, ops[static_cast<size_t>(first.root)]->input, bytes);
  } else if (first.kind == Kind::kAllGather) {
    for (const auto& to : ops)
      for (size_t r = 0; r < ops.size(); ++r)
        std::memmove(static_cast<char*>(to->output) + r * bytes, ops[r]->input, bytes);
  } else {
    run_reduction_of(first.dtype, ops);
  }
}

bool is_collective(const Op& op) { return op.kind != Kind::kSend && op.kind != Kind::kReceive; }

void arrive(const std::shared_ptr<Op>& op) {
  op->arrived = true;
  Clique& clique = *op->comm->clique;
  if (op->kind == Kind::kSend) {
    clique.sends[{op->comm->rank, op->root}].push_back(op);
  } else if (op->kind == Kind::kReceive) {
    clique.receives[{op->root, op->comm->rank}].push_back(op);
  } else {
    auto& ops = clique.collectives[op->sequence];
    ops.resize(static_cast<size_t>(clique.size));
    ops[static_cast<size_t>(op->comm->rank)] = op;
  }
}

void match_collective(const Op& op) {
  auto& ops = op.comm->clique->collectives[op.sequence];
  for (const auto& other : ops)
    if (!other || other->comm->aborted || other->kind != op.kind || other->count != op.count ||
        other->dtype != op.dtype || other->reduce != op.reduce ||
        (op.kind == Kind::kBroadcast && other->root != op.root))
      return;
  run_collective(ops);
  for (const auto& other : ops) other->done = true;
}

void match_pair(const Op& op) {
  const auto pair =
      op.kind == Kind::kSend ? std::pair(op.comm->rank, op.root) : std::pair(op.root, op.comm->rank);
  auto &sends = op.comm->clique->sends[pair], &receives = op.comm->clique->receives[pair];
  while (!sends.empty() && !receives.empty()) {
    Op &from = *sends.front(), &to = *receives.front();
    if (from.count != to.count || from.dtype != to.dtype || from.comm->aborted || to.comm->aborted) return;
    const size_t bytes = from.count * size_of(from.dtype);
    count_operation(from.stream);
    count_operation(to.stream);
    see(to.stream, from.stream);
    touch(from.stream, from.name, from.input, bytes, false);
    touch(to.stream, to.name, to.output, bytes, true);
    const MemoryAccess access;
    std::memcpy(to.output, from.input, bytes);
    from.done = to.done = true;
    sends.pop_front();
    receives.pop_front();
  }
}

// One kernel: what a group issues on one communicator.
bool run_step(const std::vector<std::shared_ptr<Op>>& ops) {
  ncclComm* comm = ops[0]->comm;
  if (!comm->aborted) {
    for (const auto& op : ops)
      if (!op->arrived) arrive(op);
    for (const auto& op : ops)
      if (!op->done) is_collective(*op) ? match_collective(*op) : match_pair(*op);
    for (const auto& op : ops)
      if (!op->done) return false;
  }
  --comm->num_queued;
  return true;
}

ncclResult_t maybe_in_progress(ncclComm* comm) {
  comm->polls_left = static_cast<int>(random_below(4));
  return comm->polls_left > 0 ? ncclInProgress : ncclSuccess;
}

ncclResult_t launch_group() {
  std::map<ncclComm*, std::vector<std::shared_ptr<Op>>> by_comm;
  for (const auto& op : group_ops) by_comm[op->comm].push_back(op);
  group_ops.clear();
  ncclResult_t result = ncclSuccess;
  for (auto& [comm, ops] : by_comm) {
    if (gpu_of(ops[0]->stream) != comm->gpu) violation("a stream of another GPU");
    for (const auto& op : ops) {
      if (op->stream != ops[0]->stream) violation("one group on two streams");
      if (is_collective(*op)) op->sequence = ++comm->num_collectives;
    }
    ++comm->num_queued;
    enqueue(ops[0]->stream, [ops = ops] { return run_step(ops); });
    if (maybe_in_progress(comm) == ncclInProgress) result = ncclInProgress;
  }
  return result;
}

ncclResult_t issue(Op op) {
  const Lock lock;
  if (const ncclResult_t result = enter(op.comm, op.name); result != ncclSuccess) return result;
  group_ops.push_back(std::make_shared<Op>(op));
  if (group_depth > 0) {
    state().groups_open[op.comm->gpu] = std::this_thread::get_id();
    return ncclSuccess;
  }
  return launch_group();
}

ncclComm* new_comm(Clique* clique, int rank, int gpu) {
  state().comms.push_back(std::make_unique<ncclComm>());
  ncclComm* comm = state().comms.back().get();
  comm->clique = clique;
  comm->rank = rank;
  comm->gpu = gpu;
  clique->comms[static_cast<size_t>(rank)] = comm;
  return comm;
}

Clique* new_clique(int size) {
  state().cliques.push_back(std::make_unique<Clique>());
  Clique* clique = state().cliques.back().get();
  clique->size = size;
  clique->comms.resize(static_cast<size_t>(size));
  return clique;
}

void finish_split(std::vector<SplitWish>& wishes) {
  std::map<int, std::vector<SplitWish>> by_color;
  for (const SplitWish& wish : wishes) {
    wish.parent->splitting = false;
    *wish.child = nullptr;
    if (wish.color != NCCL_SPLIT_NOCOLOR) by_color[wish.color].push_back(wish);
  }
  for (auto& [color, members] : by_color) {
    std::sort(members.begin(), members.end(), [](const SplitWish& a, const SplitWish& b) {
      return std::pair(a.key, a.parent->rank) < std::pair(b.key, b.parent->rank);
    });
    Clique* clique = new_clique(static_cast<int>(members.size()));
    for (size_t r = 0; r < members.size(); ++r)
      *members[r].child = new_comm(clique, static_cast<int>(r), members[r].parent->gpu);
  }
}

void do_aborts() {
  ++state().num_aborts;
  for (ncclComm* comm : group_aborts) comm->aborted = true;
  group_aborts.clear();
}

}  // namespace

namespace polyreme::fake_gpu {

void reset_nccl() { state() = State{}; }

int num_open_communicators(int gpu) {
  const Lock lock;
  return static_cast<int>(std::count_if(state().comms.begin(), state().comms.end(), [&](const auto& comm) {
    return comm->gpu == gpu && !comm->aborted && !comm->destroyed;
  }));
}

int num_abort_groups() {
  const Lock lock;
  return state().num_aborts;
}

void violation(const std::string& text) {
  const Lock lock;
  state().violations.push_back(text);
}
std::vector<std::string> violations() {
  const Lock lock;
  return state().violations;
}

}  // namespace polyreme::fake_gpu

extern "C" {

const char* ncclGetErrorString(ncclResult_t) { return "told by the emulator"; }
const char* ncclGetLastError(ncclComm_t) { return "the emulator's last error"; }

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  const Lock lock;
  if (const int code = failure_of("ncclGetUniqueId")) return static_cast<ncclResult_t>(code);
  std::memset(id, 0, sizeof *id);
  std::snprintf(id->internal, sizeof id->internal, "id %d", ++state().num_ids);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  const Lock lock;
  if (const int code = failure_of("ncclCommInitRankConfig")) return static_cast<ncclResult_t>(code);
  if (config->magic != 0xcafebeef || config->blocking != 0) violation("the configuration of a communicator");
  Clique*& clique = state().by_id[id.internal];
  if (clique == nullptr) clique = new_clique(size);
  if (clique->size != size || clique->comms[static_cast<size_t>(rank)] != nullptr)
    violation("a wrong rank or size");
  *comm = new_comm(clique, rank, current_gpu());
  (*comm)->polls_left = 1 + static_cast<int>(random_below(4));
  return ncclInProgress;
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* child, ncclConfig_t* config) {
  const Lock lock;
  if (const ncclResult_t result = enter(comm, "ncclCommSplit"); result != ncclSuccess) return result;
  if (comm->num_queued > 0) violation("ncclCommSplit with operations outstanding");
  if (config->blocking != 0 || config->splitShare != 0) violation("the configuration of a split");
  comm->splitting = true;
  comm->polls_left = 2;
  auto& wishes = comm->clique->splits[comm->num_splits++];
  wishes.push_back({comm, color, key, child});
  if (static_cast<int>(wishes.size()) == comm->clique->size) finish_split(wishes);
  return ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* result) {
  const Lock lock;
  if (const int code = failure_of("ncclCommGetAsyncError")) {
    *result = static_cast<ncclResult_t>(code);
    return ncclSuccess;
  }
  if (comm->aborted || comm->destroyed) violation("ncclCommGetAsyncError on a communicator that is gone");
  *result = in_progress(comm) || (comm->finalized && comm->num_queued > 0) ? ncclInProgress : ncclSuccess;
  if (comm->polls_left > 0 && comm->clique->complete() && !comm->splitting) --comm->polls_left;
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  const Lock lock;
  if (const ncclResult_t result = enter(comm, "ncclCommFinalize"); result != ncclSuccess) return result;
  if (comm->finalized) violation("ncclCommFinalize twice");
  comm->finalized = true;
  return maybe_in_progress(comm);
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  const Lock lock;
  if (const ncclResult_t result = enter(comm, "ncclCommDestroy"); result != ncclSuccess) return result;
  if (!comm->finalized || comm->num_queued > 0)
    violation("ncclCommDestroy before the end of ncclCommFinalize");
  comm->destroyed = true;
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  const Lock lock;
  if (comm->aborted || comm->destroyed) violation("ncclCommAbort on a communicator that is gone");
  const auto open = state().groups_open.find(comm->gpu);
  if (open != state().groups_open.end() && open->second != std::this_thread::get_id())
    violation("ncclCommAbort while another thread is inside");
  group_aborts.push_back(comm);
  if (group_depth == 0) do_aborts();
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  const Lock lock;
  ++group_depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  const Lock lock;
  if (--group_depth > 0) return ncclSuccess;
  std::erase_if(state().groups_open,
                [](const auto& open) { return open.second == std::this_thread::get_id(); });
  if (!group_aborts.empty()) do_aborts();
  if (const int code = failure_of("ncclGroupEnd")) {
    group_ops.clear();
    return static_cast<ncclResult_t>(code);
  }
  std::erase_if(group_ops, [](const auto& op) { return op->comm->aborted; });
  return launch_group();
}

ncclResult_t ncclAllReduce(const void* input, void* output, size_t count, ncclDataType_t dtype,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return issue({"ncclAllReduce", Kind::kAllReduce, input, output, count, dtype, op, 0, comm, stream});
}
ncclResult_t ncclReduceScatter(const void* input, void* output, size_t count, ncclDataType_t dtype,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return issue({"ncclReduceScatter", Kind::kReduceScatter, input, output, count, dtype, op, 0, comm, stream});
}
ncclResult_t ncclAllGather(const void* input, void* output, size_t count, ncclDataType_t dtype,
                           ncclComm_t comm, cudaStream_t stream) {
  return issue({"ncclAllGather", Kind::kAllGather, input, output, count, dtype, ncclSum, 0, comm, stream});
}
ncclResult_t ncclBroadcast(const void* input, void* output, size_t count, ncclDataType_t dtype, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  return issue({"ncclBroadcast", Kind::kBroadcast, input, output, count, dtype, ncclSum, root, comm, stream});
}
ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t dtype, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return issue({"ncclSend", Kind::kSend, data, nullptr, count, dtype, ncclSum, peer, comm, stream});
}
ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t dtype, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return issue({"ncclRecv", Kind::kReceive, nullptr, data, count, dtype, ncclSum, peer, comm, stream});
}

}  // extern "C"
