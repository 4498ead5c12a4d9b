#pragma once

#include <cstddef>
#include <cstdint>

namespace polyreme {

// CRC-32C (Castagnoli, RFC 3720), by the CPU's instruction where it has one.
uint32_t crc32c(const void* data, size_t num_bytes);

// A checksum for long blocks: the CRC-32C of four CRC-32Cs. Of each 32 bytes the first goes over bytes
// 0-7, the second over 8-15, and so on; the last also over what is left at the end. One CRC is a chain
// of instructions that wait for each other; four run at once and are 3x as fast. An error inside one
// 8-byte word of up to 32 bits in a row is always found, as by one CRC; others slip through with
// probability 2^-32.
uint32_t block_checksum(const void* data, size_t num_bytes);

// The CRC-32C of every block of `block_bytes`, the last one possibly shorter, into checksums[0 ..
// ceil(num_bytes / block_bytes)). Four blocks at once: as fast as block_checksum.
void crc32c_of_blocks(const void* data, size_t num_bytes, size_t block_bytes, uint32_t* checksums);

namespace portable {  // the same without the instruction
uint32_t crc32c(const void* data, size_t num_bytes);
uint32_t block_checksum(const void* data, size_t num_bytes);
}  // namespace portable

}  // namespace polyreme
