#pragma once

#include <string>

namespace polyreme {

// How this library was built; `polyreme doctor` shows it. A backend that was not found has an
// empty version, and `*_absent` says why with the remedy.
struct BuildInfo {
  std::string version;       // "0.1.0"
  std::string git_describe;  // at configure time; empty outside a checkout
  std::string compiler;      // "GNU 12.2.0"
  std::string cxx_flags;
  std::string build_type;  // "Release"
  std::string sanitizers;  // "address,undefined", or empty
  std::string isas;        // "avx2 avx512"
  std::string cuda_version;
  std::string cuda_architectures;  // "80-real 90-real ..."
  std::string cuda_absent;
  std::string nccl_version;
  std::string nccl_absent;
  std::string mpi_version;  // "3.1, mpirun (Open MPI) 4.1.4"
  std::string mpi_absent;
};

const BuildInfo& build_info();

}  // namespace polyreme
