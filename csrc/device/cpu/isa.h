#pragma once

#include <string>
#include <vector>

namespace polyreme {

// The instruction-set levels that CPU kernels are compiled for, lowest first. fp32 and fp16 results have
// the same bits on all of them, bf16 results on avx2 and avx512; amx, which is avx512 with the tile unit
// AMX-BF16, sums products of bf16 in an order of its own (ops/cpu/kernels/gemm.h).
enum class Isa { kAvx2, kAvx512, kAmx };

const char* isa_name(Isa isa);
// The levels that this CPU can run, lowest first; asks the system for the tile unit, once. Empty without
// AVX2, FMA and F16C.
std::vector<Isa> supported_isas();
// Whether this CPU converts between fp32 and fp16.
bool has_f16c();
// "auto" is the highest supported one. Throws InvalidArgument for an unknown name, NotAvailable
// for a level that this CPU lacks.
Isa isa_from_name(const std::string& name);

}  // namespace polyreme
