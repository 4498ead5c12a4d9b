#include "comm/tcp_store/wire.h"

namespace polyreme::store_wire {

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
                     operation <= static_cast<uint8_t>(Operation::kLeave) && key_bytes <= kMaxKeyBytes &&
                     key_bytes <= rest.size() && rest.size() - key_bytes <= kMaxValueBytes;
  if (!valid) return std::nullopt;
  return Request{static_cast<Operation>(operation), load_u32(payload.substr(1)),
                 std::string(rest.substr(0, key_bytes)), std::string(rest.substr(key_bytes))};
}

std::optional<Reply> decode_reply(std::string_view payload) {
  if (payload.size() < kReplyHeadBytes) return std::nullopt;
  const auto status = static_cast<uint8_t>(payload[0]);
  if (status < static_cast<uint8_t>(Status::kOk) || status > static_cast<uint8_t>(Status::kEnded))
    return std::nullopt;
  return Reply{static_cast<Status>(status), load_u32(payload.substr(1)),
               std::string(payload.substr(kReplyHeadBytes))};
}

}  // namespace polyreme::store_wire
