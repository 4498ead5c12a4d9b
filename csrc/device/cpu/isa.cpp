#include "device/cpu/isa.h"

#include <algorithm>

#include "base/error.h"

namespace polyreme {

const char* isa_name(Isa isa) { return isa == Isa::kAvx2 ? "avx2" : "avx512"; }

std::vector<Isa> supported_isas() {
  std::vector<Isa> result;
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
    result.push_back(Isa::kAvx2);
  if (!result.empty() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    result.push_back(Isa::kAvx512);
  return result;
}

Isa isa_from_name(const std::string& name) {
  const std::vector<Isa> supported = supported_isas();
  require<NotAvailable>(!supported.empty(), "the CPU kernels need AVX2, FMA and F16C, which this CPU lacks; ",
                        "use an x86-64 CPU of 2013 or later (Haswell, Zen)");
  if (name == "auto") return supported.back();
  require(name == "avx2" || name == "avx512", "unknown isa '", name, "'; expected auto, avx2 or avx512");
  const Isa isa = name == "avx2" ? Isa::kAvx2 : Isa::kAvx512;
  require<NotAvailable>(std::find(supported.begin(), supported.end(), isa) != supported.end(), "isa '", name,
                        "' was asked for, but this CPU goes up to ", isa_name(supported.back()),
                        "; use isa='auto' or '", isa_name(supported.back()), "'");
  return isa;
}

}  // namespace polyreme
