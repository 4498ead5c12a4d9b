#include "base/crc32c.h"

#include <array>
#include <bit>
#include <cstring>

namespace polyreme {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr uint32_t kPolynomial = 0x82f63b78;  // bits reversed

// kTables[k][b]: the CRC of byte b followed by k zero bytes ("slicing by 8").
constexpr auto kTables = [] {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t crc = b;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    tables[0][b] = crc;
  }
  for (size_t k = 1; k < 8; ++k)
    for (size_t b = 0; b < 256; ++b)
      tables[k][b] = (tables[k - 1][b] >> 8) ^ tables[0][tables[k - 1][b] & 0xff];
  return tables;
}();

// How to go on from a state, the inverted CRC, over 8 bytes or one.
struct TableStep {
  static uint64_t word(uint64_t state, uint64_t value) {
    value ^= state;
    uint32_t next = 0;
    for (size_t i = 0; i < 8; ++i) next ^= kTables[7 - i][value >> (8 * i) & 0xff];
    return next;
  }
  static uint64_t byte(uint64_t state, uint8_t value) {
    return (state >> 8) ^ kTables[0][(state ^ value) & 0xff];
  }
};

#if defined(__x86_64__)
// Written as assembly since intrinsics could not be inlined into code for every CPU.
struct InstructionStep {
  static uint64_t word(uint64_t state, uint64_t value) {
    asm("crc32q %1, %0" : "+r"(state) : "rm"(value));
    return state;
  }
  static uint64_t byte(uint64_t state, uint8_t value) {
    asm("crc32b %1, %k0" : "+r"(state) : "rm"(value));
    return state;
  }
};
const bool kHasInstruction = __builtin_cpu_supports("sse4.2") != 0;
#else
using InstructionStep = TableStep;
constexpr bool kHasInstruction = false;
#endif

constexpr uint64_t kStart = 0xffffffff;

uint64_t load_word(const uint8_t* from) {
  uint64_t word = 0;
  std::memcpy(&word, from, sizeof(word));
  return word;
}

template <typename Step>
uint32_t finish(uint64_t state, const uint8_t* at, size_t num_bytes) {
  for (; num_bytes >= 8; num_bytes -= 8, at += 8) state = Step::word(state, load_word(at));
  for (; num_bytes > 0; --num_bytes, ++at) state = Step::byte(state, *at);
  return ~static_cast<uint32_t>(state);
}

template <typename Step>
uint32_t checksum(const void* data, size_t num_bytes) {
  const auto* at = static_cast<const uint8_t*>(data);
  uint64_t a = kStart, b = kStart, c = kStart, d = kStart;
  for (; num_bytes >= 32; num_bytes -= 32, at += 32) {
    a = Step::word(a, load_word(at));
    b = Step::word(b, load_word(at + 8));
    c = Step::word(c, load_word(at + 16));
    d = Step::word(d, load_word(at + 24));
  }
  const std::array<uint32_t, 4> lanes = {~static_cast<uint32_t>(a), ~static_cast<uint32_t>(b),
                                         ~static_cast<uint32_t>(c), finish<Step>(d, at, num_bytes)};
  return finish<Step>(kStart, reinterpret_cast<const uint8_t*>(lanes.data()), sizeof(lanes));
}

// Whole blocks at data, data + block_bytes, ...: four chains at once.
template <typename Step>
void four_blocks(const uint8_t* data, size_t block_bytes, uint32_t* checksums) {
  uint64_t a = kStart, b = kStart, c = kStart, d = kStart;
  size_t at = 0;
  for (; at + 8 <= block_bytes; at += 8) {
    a = Step::word(a, load_word(data + at));
    b = Step::word(b, load_word(data + block_bytes + at));
    c = Step::word(c, load_word(data + 2 * block_bytes + at));
    d = Step::word(d, load_word(data + 3 * block_bytes + at));
  }
  const std::array<uint64_t, 4> states = {a, b, c, d};
  for (size_t i = 0; i < 4; ++i)
    checksums[i] = finish<Step>(states[i], data + i * block_bytes + at, block_bytes - at);
}

}  // namespace

void crc32c_of_blocks(const void* data, size_t num_bytes, size_t block_bytes, uint32_t* checksums) {
  const auto* at = static_cast<const uint8_t*>(data);
  while (kHasInstruction && num_bytes >= 4 * block_bytes) {
    four_blocks<InstructionStep>(at, block_bytes, checksums);
    at += 4 * block_bytes;
    num_bytes -= 4 * block_bytes;
    checksums += 4;
  }
  while (num_bytes > 0) {
    const size_t size = num_bytes < block_bytes ? num_bytes : block_bytes;
    *checksums++ = crc32c(at, size);
    at += size;
    num_bytes -= size;
  }
}

uint32_t crc32c(const void* data, size_t num_bytes) {
  if (!kHasInstruction) return portable::crc32c(data, num_bytes);
  return finish<InstructionStep>(kStart, static_cast<const uint8_t*>(data), num_bytes);
}

uint32_t block_checksum(const void* data, size_t num_bytes) {
  return kHasInstruction ? checksum<InstructionStep>(data, num_bytes) : checksum<TableStep>(data, num_bytes);
}

uint32_t portable::crc32c(const void* data, size_t num_bytes) {
  return finish<TableStep>(kStart, static_cast<const uint8_t*>(data), num_bytes);
}

uint32_t portable::block_checksum(const void* data, size_t num_bytes) {
  return checksum<TableStep>(data, num_bytes);
}

}  // namespace polyreme
