#include "comm/nccl/nccl_loader.h"

#include <exception>

#include "base/error.h"
#include "comm/nccl/nccl_table.h"
#include "device/backend_library.h"

namespace polyreme {
namespace {

constexpr BackendKind kNcclBackend{
    .name = "NCCL",
    .file_name = "libpolyreme_nccl.so",
    .symbol = POLYREME_NCCL_TABLE_SYMBOL,
    .version = POLYREME_NCCL_TABLE_VERSION,
    .size_bytes = sizeof(PolyremeNcclTable),
    .build_remedy = "to join GPUs, install the CUDA toolkit and NCCL (libnccl-dev)",
};

const PolyremeNcclTable* load(NcclProbe& probe) {
  const BackendLibrary library = open_backend(kNcclBackend, probe.library);
  const auto* table = static_cast<const PolyremeNcclTable*>(library.table);
  probe.built = library.built;
  probe.loaded = table != nullptr;
  probe.message = library.message;
  if (table == nullptr) return nullptr;
  const PolyremeNcclStatus status = table->nccl_version(&probe.version);
  probe.message = status.code == 0 ? concat("NCCL ", nccl_version_text(probe.version)) : status.text;
  return table;
}

}  // namespace

std::string nccl_version_text(int version) {
  return concat(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

NcclProbe probe_nccl() noexcept { return probe_nccl(backend_path(kNcclBackend)); }

NcclProbe probe_nccl(const std::string& path) noexcept {
  NcclProbe probe;
  try {
    probe.library = path;
    load(probe);
  } catch (const std::exception& error) {
    probe.message = error.what();
  }
  return probe;
}

const PolyremeNcclTable& load_nccl() {
  NcclProbe probe{.library = backend_path(kNcclBackend)};
  const PolyremeNcclTable* table = load(probe);
  require<NotAvailable>(table != nullptr, probe.message);
  return *table;
}

}  // namespace polyreme
