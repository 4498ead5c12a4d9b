#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "comm/failure.h"
#include "comm/net/handshake.h"

// What goes over the wire between two ranks. Integers are little-endian. Each pair has two connections,
// dialled by the higher rank: `data` carries the messages and can be full for as long as a peer
// computes; `control` carries a few short frames, so that a failure always gets through, and shows
// whether the peer's host still answers.
//
// After the handshake (net/handshake.h), whose claim says who calls whom and whose context is the name
// of the group:
//
//   data, per message:  u64 number of the message, from 1 | u64 bytes | u32 crc32c of these 16 bytes
//                       then per block of kBlockBytes, the last one shorter: the block | u32 block_checksum
//   control, per frame: u8 what | u8 FailureKind | u16 bytes of text | u32 crc32c of all the rest | text

namespace polyreme::tcp_wire {

inline constexpr size_t kClaimBytes = 12;
inline constexpr Protocol kProtocol{"PLYPEERS", 1, kClaimBytes, "rank", "is another job using the port?"};

enum class Channel : uint32_t { kData, kControl };
struct Claim {
  uint32_t from = 0;
  uint32_t to = 0;
  uint32_t channel = 0;
};
std::string encode(const Claim& claim);
Claim decode_claim(std::string_view bytes);

// Blocks stay in the cache between being copied and being checked.
inline constexpr int64_t kBlockBytes = int64_t{256} << 10;
inline constexpr int64_t kTrailerBytes = 4;
inline constexpr int64_t kHeaderBytes = 20;
using HeaderBytes = std::array<char, kHeaderBytes>;

struct Header {
  uint64_t sequence = 0;
  uint64_t num_bytes = 0;
};
HeaderBytes encode(const Header& header);
// Nothing if the checksum is wrong.
std::optional<Header> decode_header(const HeaderBytes& bytes);
// Of a message with its header and the checksums of its blocks.
constexpr int64_t wire_bytes(int64_t num_bytes) {
  return kHeaderBytes + num_bytes + (num_bytes + kBlockBytes - 1) / kBlockBytes * kTrailerBytes;
}

inline constexpr size_t kControlHeadBytes = 8;
inline constexpr size_t kMaxTextBytes = 2048;
enum class News : uint8_t { kFailure = 1, kLeft = 2, kWaits = 3 };  // text of kWaits: u32 ranks, for whom
struct ControlFrame {
  News what = News::kLeft;
  FailureKind kind = FailureKind::kNone;  // of a failure
  std::string text;
};
// Cuts the text at kMaxTextBytes.
std::string encode(const ControlFrame& frame);
// Takes one frame off the front of `buffer`; nothing while it is incomplete. `malformed` is set if
// the bytes cannot be one.
std::optional<ControlFrame> take_control_frame(std::string& buffer, bool& malformed);

}  // namespace polyreme::tcp_wire
