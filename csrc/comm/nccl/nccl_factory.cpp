#include <cstdlib>
#include <cstring>

#include "base/build_info.h"
#include "comm/factory.h"
#include "comm/nccl/nccl_communicator.h"
#include "comm/nccl/nccl_loader.h"
#include "comm/nccl/nccl_table.h"

namespace polyreme {
namespace {

// Two ranks on one GPU would end in NCCL's refusal on some ranks and in silence on others.
void require_own_gpus(const std::vector<RankRecord>& records) {
  for (const RankRecord& a : records)
    for (const RankRecord& b : records)
      require(
          a.rank >= b.rank || a.fields.at("gpu") != b.fields.at("gpu"), "ranks ", a.rank, " and ", b.rank,
          " both use ", a.fields.at("gpu"), " (host ", a.host, ", pids ", a.pid, " and ", b.pid,
          "); NCCL needs a GPU for each rank: give each its own device index, or start fewer ranks per host");
}

std::vector<RankRecord> meet(const PolyremeNcclTable& table, Store& store, const std::string& base, int rank,
                             int size, const CudaDevice& device, std::chrono::milliseconds limit) {
  int32_t version = 0;
  const PolyremeNcclStatus status = table.nccl_version(&version);
  require<NotAvailable>(status.code == POLYREME_NCCL_SUCCESS,
                        "NCCL does not tell its version: ", status.text);
  const ProcessIdentity self = this_process();
  std::vector<RankRecord> records =
      rendezvous(store, {.rank = rank,
                         .world_size = size,
                         .fields = {{"polyreme version", build_info().version},
                                    {"NCCL version", nccl_version_text(version)},
                                    {"gpu", device.uuid()},
                                    {"boot", boot_id()},
                                    {"start", std::to_string(self.start_ticks)},
                                    {"pid_namespace", std::to_string(self.pid_namespace)}},
                         .limit = limit,
                         .name = base});
  require_same_field(records, "polyreme version");
  require_same_field(records, "NCCL version");
  require_own_gpus(records);
  return records;
}

// Rank 0's id, as bytes. If it has none, all ranks say why.
std::string share_id(const PolyremeNcclTable& table, Store& store, const std::string& base, int rank,
                     std::chrono::milliseconds limit) {
  if (rank == 0) {
    std::string id(POLYREME_NCCL_ID_BYTES, '\0');
    const PolyremeNcclStatus status = table.get_unique_id(id.data());
    store.set(base + "/id", status.code == POLYREME_NCCL_SUCCESS ? id : concat("error ", status.text));
  }
  std::string id = store.get(base + "/id", limit);
  require<CommError>(id.size() == POLYREME_NCCL_ID_BYTES, "rank 0 got no id from NCCL: ", id);
  return id;
}

}  // namespace

std::unique_ptr<Communicator> make_nccl_communicator(const PolyremeNcclTable& table, Store& store, int rank,
                                                     int size, CudaDevice& device, const CommOptions& options,
                                                     const NcclOptions& nccl_options) {
  require(size >= 1 && rank >= 0 && rank < size, "group '", options.name, "': rank ", rank, " of ", size,
          "; expected a rank from 0 to size - 1");
  require(options.timeout.count() > 0 && nccl_options.staging_bytes > 0, "group '", options.name,
          "': timeout and staging_bytes are positive numbers");
  const char* blocking = std::getenv("NCCL_COMM_BLOCKING");
  require(blocking == nullptr || std::strcmp(blocking, "0") == 0, "NCCL_COMM_BLOCKING is '",
          blocking == nullptr ? "" : blocking,
          "'; unset it: a communicator that blocks cannot be aborted when a rank is lost");
  // The n-th group of this name; each rank counts for itself, so a key is never used twice.
  const std::string prefix = concat("nccl/", options.name, "/");
  const std::string base = concat(prefix, store.add(concat(prefix, "rank", rank), 1));
  std::vector<RankRecord> records = meet(table, store, base, rank, size, device, options.timeout);
  const std::string id = share_id(table, store, base, rank, options.timeout);

  auto group = std::make_shared<NcclGroup>();
  group->name = options.name;
  group->base = base;
  for (int r = 0; r < size; ++r) group->members.push_back(r);
  group->rank = rank;
  group->timeout = options.timeout;
  auto family =
      std::make_shared<NcclFamily>(NcclFamily::Options{table, device, store, std::move(records), rank, base});
  const CollectiveCall call{.op = CollectiveOp::kAttach};
  {
    const NcclFamily::Issuing issuing(*family);
    family->add(group);
    family->check(table.init(size, id.data(), rank, group->name.c_str(), &group->comm), *group, call);
    family->settle(group->comm, *group, call, options.timeout);
  }
  GroupJournal journal(options.journal, options.name, rank, size);
  return std::make_unique<NcclCommunicator>(std::move(family), std::move(group), options.reduce_mode,
                                            nccl_options, std::move(journal));
}

std::unique_ptr<Communicator> make_nccl_communicator(Store& store, int rank, int size, Device& device,
                                                     const CommOptions& options) {
  return make_nccl_communicator(load_nccl(), store, rank, size, as_cuda(device), options);
}

}  // namespace polyreme
