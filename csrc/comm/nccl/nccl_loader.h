#pragma once

#include <string>

struct PolyremeNcclTable;

namespace polyreme {

// What became of looking for NCCL. `message` is one line for people: what is missing and the remedy, or which
// version there is.
struct NcclProbe {
  bool built = false;   // libpolyreme_nccl.so is there
  bool loaded = false;  // and could be loaded, NCCL with it
  std::string library;  // where it was looked for
  std::string message;
  int version = 0;  // of NCCL, 10000 * major + 100 * minor + patch
};

// Loads libpolyreme_nccl.so (it stays loaded), beside the object that holds this code. Whether a GPU is there
// is another question: probe_cuda. Any thread.
NcclProbe probe_nccl() noexcept;
NcclProbe probe_nccl(const std::string& path) noexcept;

// The calls of NCCL. Throws NotAvailable with the remedy.
const PolyremeNcclTable& load_nccl();

// "2.28.9" of 22809.
std::string nccl_version_text(int version);

}  // namespace polyreme
