#include "comm/tcp/wire.h"

#include <algorithm>

#include "base/crc32c.h"
#include "comm/net/bytes.h"

namespace polyreme::tcp_wire {
namespace {

constexpr size_t kCheckedHeaderBytes = kHeaderBytes - 4;

// Of a control frame without the checksum itself.
uint32_t control_checksum(std::string_view head, std::string_view text) {
  const std::string checked = std::string(head.substr(0, 4)) + std::string(text);
  return crc32c(checked.data(), checked.size());
}

}  // namespace

std::string encode(const Claim& claim) {
  std::string bytes;
  append_u32(bytes, claim.from);
  append_u32(bytes, claim.to);
  append_u32(bytes, claim.channel);
  return bytes;
}

Claim decode_claim(std::string_view bytes) {
  return {load_u32(bytes), load_u32(bytes.substr(4)), load_u32(bytes.substr(8))};
}

HeaderBytes encode(const Header& header) {
  HeaderBytes bytes;
  const auto put = [&](size_t at, uint64_t value, size_t count) {
    for (size_t i = 0; i < count; ++i) bytes[at + i] = static_cast<char>(value >> (8 * i) & 0xff);
  };
  put(0, header.sequence, 8);
  put(8, header.num_bytes, 8);
  put(kCheckedHeaderBytes, crc32c(bytes.data(), kCheckedHeaderBytes), 4);
  return bytes;
}

std::optional<Header> decode_header(const HeaderBytes& bytes) {
  const std::string_view view(bytes.data(), bytes.size());
  if (load_u32(view.substr(kCheckedHeaderBytes)) != crc32c(bytes.data(), kCheckedHeaderBytes))
    return std::nullopt;
  return Header{load_u64(view), load_u64(view.substr(8))};
}

std::string encode(const ControlFrame& frame) {
  const std::string text = frame.text.substr(0, kMaxTextBytes);
  std::string bytes;
  bytes.push_back(static_cast<char>(frame.what));
  bytes.push_back(static_cast<char>(frame.kind));
  bytes.push_back(static_cast<char>(text.size() & 0xff));
  bytes.push_back(static_cast<char>(text.size() >> 8));
  append_u32(bytes, control_checksum(bytes, text));
  return bytes + text;
}

std::optional<ControlFrame> take_control_frame(std::string& buffer, bool& malformed) {
  if (buffer.size() < kControlHeadBytes) return std::nullopt;
  const std::string_view view(buffer);
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(view[i]); };
  const size_t length = byte(2) + size_t{256} * byte(3);
  malformed = byte(0) < static_cast<uint8_t>(News::kFailure) ||
              byte(0) > static_cast<uint8_t>(News::kWaits) ||
              byte(1) > static_cast<uint8_t>(FailureKind::kMismatch) || length > kMaxTextBytes;
  if (malformed || buffer.size() < kControlHeadBytes + length) return std::nullopt;
  const std::string_view text = view.substr(kControlHeadBytes, length);
  malformed = load_u32(view.substr(4)) != control_checksum(view, text);
  if (malformed) return std::nullopt;
  ControlFrame frame{static_cast<News>(byte(0)), static_cast<FailureKind>(byte(1)), std::string(text)};
  buffer.erase(0, kControlHeadBytes + length);
  return frame;
}

}  // namespace polyreme::tcp_wire
