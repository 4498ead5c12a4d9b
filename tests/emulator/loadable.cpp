// The emulator as the backends that the core opens on demand (libpolyreme_cuda.so and libpolyreme_nccl.so,
// one file under two names, since they share the GPUs): for tests of what stands above them, Python's too.
//
// POLYREME_EMULATED_GPUS (default 2) GPUs; POLYREME_EMULATED_SEED says in which order streams advance.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>

#include "emulator/fake_gpu.h"

namespace {

uint64_t number(const char* variable, uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

struct Start {
  Start() {
    polyreme::fake_gpu::reset(static_cast<int>(number("POLYREME_EMULATED_GPUS", 2)),
                              number("POLYREME_EMULATED_SEED", 1));
  }
} start;

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// What was broken so far, a line each, as far as it fits; returns how many there are.
EXPORT int polyreme_emulated_violations(char* text, int size) {
  std::string all;
  const auto violations = polyreme::fake_gpu::violations();
  for (const std::string& violation : violations) all += violation + "\n";
  const size_t length = std::min(all.size(), static_cast<size_t>(size) - 1);
  std::memcpy(text, all.data(), length);
  text[length] = '\0';
  return static_cast<int>(violations.size());
}

EXPORT void polyreme_emulated_break_gpu(int index) { polyreme::fake_gpu::break_gpu(index); }
