#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace polyreme {

// A backend is a shared object of its own that exports one C function; what that returns begins with two
// uint32_t, the version and the size of a table of function pointers.
struct BackendKind {
  const char* name;       // "CUDA"
  const char* file_name;  // "libpolyreme_cuda.so"
  const char* symbol;     // of the function
  uint32_t version;
  size_t size_bytes;
  const char* build_remedy;  // "to use GPUs, install the CUDA toolkit"
};

// What became of opening one. `table` is null unless all is well; `message` says why, with the remedy.
struct BackendLibrary {
  bool built = false;  // the file is there
  const void* table = nullptr;
  std::string path;
  std::string message;
};

// The backend's file: in the folder POLYREME_BACKENDS of the environment if it is there (tests put an
// emulated GPU in the place of a real one), else in that of the object that holds this code: of _core in an
// installed package, of the program otherwise.
std::string backend_path(const BackendKind& kind);
// Opens it; it stays open. Any thread.
BackendLibrary open_backend(const BackendKind& kind, const std::string& path);

}  // namespace polyreme
