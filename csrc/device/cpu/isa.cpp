#include "device/cpu/isa.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "base/error.h"

namespace polyreme {
namespace {

// The CPU has AMX-BF16 with palette 1 and AVX512-BF16, and Linux lets this process use tile data.
bool can_use_tiles() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool has_tiles = (d >> 24 & 1) != 0, has_bf16_tiles = (d >> 22 & 1) != 0;
  if (!has_tiles || !has_bf16_tiles) return false;
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || (a >> 5 & 1) == 0) return false;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace

bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __builtin_cpu_supports("avx") && __get_cpuid(1, &a, &b, &c, &d) != 0 && (c >> 29 & 1) != 0;
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAmx:
      return "amx";
  }
  return "unknown";
}

std::vector<Isa> supported_isas() {
  std::vector<Isa> result;
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c())
    result.push_back(Isa::kAvx2);
  if (!result.empty() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    result.push_back(Isa::kAvx512);
  static const bool has_tiles = can_use_tiles();
  if (result.size() == 2 && has_tiles) result.push_back(Isa::kAmx);
  return result;
}

Isa isa_from_name(const std::string& name) {
  const std::vector<Isa> supported = supported_isas();
  require<NotAvailable>(!supported.empty(), "the CPU kernels need AVX2, FMA and F16C, which this CPU lacks; ",
                        "use an x86-64 CPU of 2013 or later (Haswell, Zen)");
  if (name == "auto") return supported.back();
  constexpr Isa kAll[] = {Isa::kAvx2, Isa::kAvx512, Isa::kAmx};
  const auto* const found = std::ranges::find(kAll, name, isa_name);
  require(found != std::end(kAll), "unknown isa '", name, "'; expected auto, avx2, avx512 or amx");
  const Isa isa = *found;
  require<NotAvailable>(std::find(supported.begin(), supported.end(), isa) != supported.end(), "isa '", name,
                        "' was asked for, but this CPU goes up to ", isa_name(supported.back()),
                        "; use isa='auto' or '", isa_name(supported.back()), "'");
  return isa;
}

}  // namespace polyreme
