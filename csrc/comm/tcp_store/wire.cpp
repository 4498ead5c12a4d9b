#include "comm/tcp_store/wire.h"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>

#include "base/error.h"

namespace polyreme::store_wire {
namespace {

void append_u32(std::string& to, uint32_t value) {
  for (int shift = 0; shift < 32; shift += 8) to.push_back(static_cast<char>(value >> shift & 0xff));
}

uint32_t load_u32(std::string_view from) {
  uint32_t value = 0;
  for (size_t i = 0; i < 4; ++i) value |= uint32_t{static_cast<uint8_t>(from[i])} << (8 * i);
  return value;
}

}  // namespace

std::string make_nonce() {
  std::string nonce(kNonceBytes, '\0');
  require<CommError>(getrandom(nonce.data(), nonce.size(), 0) == static_cast<ssize_t>(nonce.size()),
                     "getrandom: ", std::strerror(errno));
  return nonce;
}

std::string encode_hello(const std::string& nonce) {
  std::string bytes(kMagic, kMagicBytes);
  append_u32(bytes, kVersion);
  return bytes + nonce;
}

bool may_be_hello(std::string_view bytes) {
  const size_t known = std::min(bytes.size(), kMagicBytes);
  return bytes.substr(0, known) == std::string_view(kMagic, known);
}

Hello decode_hello(std::string_view bytes) {
  return {load_u32(bytes.substr(kMagicBytes)), std::string(bytes.substr(kMagicBytes + 4, kNonceBytes))};
}

Digest proof(const std::string& secret, const char* side, const std::string& client_nonce,
             const std::string& store_nonce) {
  return hmac_sha256(secret, side + client_nonce + store_nonce);
}

std::string encode(const Request& request) {
  std::string bytes;
  bytes.reserve(4 + kRequestHeadBytes + request.key.size() + request.value.size());
  append_u32(bytes, static_cast<uint32_t>(kRequestHeadBytes + request.key.size() + request.value.size()));
  bytes.push_back(static_cast<char>(request.operation));
  append_u32(bytes, request.id);
  append_u32(bytes, static_cast<uint32_t>(request.key.size()));
  return bytes.append(request.key).append(request.value);
}

std::string encode(const Reply& reply) {
  std::string bytes;
  append_u32(bytes, static_cast<uint32_t>(kReplyHeadBytes + reply.value.size()));
  bytes.push_back(static_cast<char>(reply.status));
  append_u32(bytes, reply.id);
  return bytes.append(reply.value);
}

std::optional<std::string> take_frame(std::string& buffer, bool& malformed) {
  if (buffer.size() < 4) return std::nullopt;
  const size_t length = load_u32(buffer);
  malformed = length == 0 || length > kMaxFrameBytes;
  if (malformed || buffer.size() < 4 + length) return std::nullopt;
  std::string payload = buffer.substr(4, length);
  buffer.erase(0, 4 + length);
  return payload;
}

std::optional<Request> decode_request(std::string_view payload) {
  if (payload.size() < kRequestHeadBytes) return std::nullopt;
  const auto operation = static_cast<uint8_t>(payload[0]);
  const size_t key_bytes = load_u32(payload.substr(5));
  const std::string_view rest = payload.substr(kRequestHeadBytes);
  const bool valid = operation >= static_cast<uint8_t>(Operation::kSet) &&
                     operation <= static_cast<uint8_t>(Operation::kCancel) && key_bytes <= kMaxKeyBytes &&
                     key_bytes <= rest.size() && rest.size() - key_bytes <= kMaxValueBytes;
  if (!valid) return std::nullopt;
  return Request{static_cast<Operation>(operation), load_u32(payload.substr(1)),
                 std::string(rest.substr(0, key_bytes)), std::string(rest.substr(key_bytes))};
}

std::optional<Reply> decode_reply(std::string_view payload) {
  if (payload.size() < kReplyHeadBytes) return std::nullopt;
  const auto status = static_cast<uint8_t>(payload[0]);
  if (status < static_cast<uint8_t>(Status::kOk) || status > static_cast<uint8_t>(Status::kFull))
    return std::nullopt;
  return Reply{static_cast<Status>(status), load_u32(payload.substr(1)),
               std::string(payload.substr(kReplyHeadBytes))};
}

std::optional<int64_t> parse_number(std::string_view text) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

}  // namespace polyreme::store_wire
