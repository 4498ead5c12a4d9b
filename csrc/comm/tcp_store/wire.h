#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "comm/net/bytes.h"
#include "comm/net/handshake.h"

// What goes over the wire between a store and its clients, after the handshake (net/handshake.h)
// without claim and context. Integers are little-endian.
//
//   client: requests      u32 bytes | u8 operation | u32 id | u32 key bytes | key | value
//   store:  replies       u32 bytes | u8 status | u32 id | value
//
// A client has one request open, except that kCancel follows a kGet with the same id: the store
// then answers that id at once, if it has not done so already.
//
// A watch (watch.h) has a connection of its own: kJoin first, with its rank as the key and a line about its
// process as the value, answered by the line of the store's own process; then kBeat in every interval,
// kReport with the text of a failure, kLeave at the end. A beat is answered by kOk, or by kStalled with the
// milliseconds for which the store had not heard of the rank; a report by kFailed with the text of the
// job's first failure. To the others kFailed comes unasked, with id 0, and so does kEnded, when the store
// ends in order.

namespace polyreme::store_wire {

inline constexpr Protocol kProtocol{"PLYSTORE", 1, 0, "store", "choose another MASTER_PORT"};

inline constexpr size_t kMaxKeyBytes = size_t{1} << 10;
inline constexpr size_t kMaxValueBytes = size_t{1} << 20;
inline constexpr size_t kRequestHeadBytes = 1 + 4 + 4;
inline constexpr size_t kReplyHeadBytes = 1 + 4;
inline constexpr size_t kMaxFrameBytes = kRequestHeadBytes + kMaxKeyBytes + kMaxValueBytes;

enum class Operation : uint8_t {
  kSet = 1,
  kGet = 2,
  kTryGet = 3,
  kAdd = 4,
  kCancel = 5,
  kJoin = 6,
  kBeat = 7,
  kReport = 8,
  kLeave = 9
};
enum class Status : uint8_t {
  kOk = 1,
  kMissing = 2,
  kCancelled = 3,
  kNotANumber = 4,
  kFull = 5,
  kStalled = 6,
  kFailed = 7,
  kEnded = 8
};

struct Request {
  Operation operation;
  uint32_t id;
  std::string key;
  std::string value;  // of kAdd: the amount in decimal
};
struct Reply {
  Status status;
  uint32_t id;
  std::string value;
};

std::string encode(const Request& request);
std::string encode(const Reply& reply);

// Takes one frame off the front of `buffer`: its payload, or nothing while it is incomplete.
// `malformed` is set if the announced length is impossible.
std::optional<std::string> take_frame(std::string& buffer, bool& malformed);
// Nothing if the payload is malformed.
std::optional<Request> decode_request(std::string_view payload);
std::optional<Reply> decode_reply(std::string_view payload);

using polyreme::parse_number;  // of kAdd

}  // namespace polyreme::store_wire
