#pragma once

#include <string>
#include <vector>

namespace polyreme {

// The instruction-set levels that CPU kernels are compiled for, lowest first. fp32 results have
// the same bits on all of them.
enum class Isa { kAvx2, kAvx512 };

const char* isa_name(Isa isa);
// The levels that this CPU can run, lowest first. Empty without AVX2, FMA and F16C.
std::vector<Isa> supported_isas();
// "auto" is the highest supported one. Throws InvalidArgument for an unknown name, NotAvailable
// for a level that this CPU lacks.
Isa isa_from_name(const std::string& name);

}  // namespace polyreme
