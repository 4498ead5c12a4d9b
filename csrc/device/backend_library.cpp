#include "device/backend_library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "base/error.h"

namespace polyreme {
namespace {

std::string dlerror_text() {
  const char* text = dlerror();
  return text == nullptr ? "unknown error" : text;
}

}  // namespace

std::string backend_path(const BackendKind& kind) {
  std::error_code failed;
  if (const char* folder = std::getenv("POLYREME_BACKENDS"); folder != nullptr && *folder != '\0') {
    const std::filesystem::path other = std::filesystem::path(folder) / kind.file_name;
    if (std::filesystem::exists(other, failed)) return other.string();
  }
  // Any object of this file tells which shared object (or program) the code is in.
  static const char anchor = 0;
  Dl_info info{};
  if (dladdr(&anchor, &info) == 0 || info.dli_fname == nullptr) return kind.file_name;
  // A program's own name may be relative to a folder that is no longer the current one.
  std::filesystem::path object = info.dli_fname;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", failed);
  if (!failed && program.filename() == object.filename()) object = program;
  return (object.parent_path() / kind.file_name).string();
}

BackendLibrary open_backend(const BackendKind& kind, const std::string& path) {
  BackendLibrary library{.path = path};
  std::error_code ignored;
  library.built = std::filesystem::exists(path, ignored);
  if (!library.built) {
    library.message = concat("the ", kind.name, " backend is not part of this build (no ", path, "); ",
                             kind.build_remedy, " and build polyreme again");
    return library;
  }
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    library.message = concat("the ", kind.name, " backend could not be loaded: ", dlerror_text(),
                             "; install the library that is named, or add its folder to LD_LIBRARY_PATH");
    return library;
  }
  using TableFunction = const void*();
  auto* function = reinterpret_cast<TableFunction*>(dlsym(handle, kind.symbol));
  if (function == nullptr) {
    library.message = concat(path, " is not polyreme's ", kind.name, " backend: ", dlerror_text(),
                             "; install polyreme again");
    return library;
  }
  const void* table = function();
  uint32_t head[2];
  std::memcpy(head, table, sizeof head);
  if (head[0] != kind.version || head[1] != kind.size_bytes) {
    library.message = concat(path, " is of another version of polyreme (table version ", head[0],
                             ", expected ", kind.version, "); install polyreme again");
    return library;
  }
  library.table = table;
  return library;
}

}  // namespace polyreme
