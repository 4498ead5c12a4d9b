#include "comm/tcp_store/wire.h"

#include "comm/net/bytes.h"
#include "comm/tcp_store/roll.h"
#include "fuzz.h"

// Frames of the store's protocol: requests as the server reads them, replies as the clients do.

namespace polyreme::fuzz {
namespace {

struct Stream {
  std::vector<std::string> payloads;
  bool malformed = false;
  std::string rest;
};

Stream read(const std::vector<std::string_view>& pieces) {
  Stream stream;
  for (const std::string_view piece : pieces) {
    stream.rest += piece;
    while (auto payload = store_wire::take_frame(stream.rest, stream.malformed))
      stream.payloads.push_back(std::move(*payload));
    if (stream.malformed) break;
    expect(stream.rest.size() < 4 + store_wire::kMaxFrameBytes, "no more is kept than one frame");
  }
  return stream;
}

std::string framed(std::string_view payload) {
  std::string bytes;
  append_u32(bytes, static_cast<uint32_t>(payload.size()));
  return bytes.append(payload);
}

void decode(std::string_view payload) {
  if (const auto request = store_wire::decode_request(payload)) {
    expect(encode(*request) == framed(payload), "a request is encoded in one way");
    expect(request->key.size() <= store_wire::kMaxKeyBytes, "keys are capped");
    expect(request->value.size() <= store_wire::kMaxValueBytes, "values are capped");
  }
  if (const auto reply = store_wire::decode_reply(payload))
    expect(encode(*reply) == framed(payload), "a reply is encoded in one way");
}

}  // namespace

void try_input(FuzzedDataProvider& input) {
  const bool in_frames = input.ConsumeBool();
  const std::string bytes = input.ConsumeRandomLengthString();
  if (!in_frames) {
    decode(bytes);
    if (const auto number = store_wire::parse_number(bytes))
      expect(store_wire::parse_number(std::to_string(*number)) == number, "a number has a text");
    if (const auto watched = decode_watched(bytes)) {
      const auto again = decode_watched(encode(*watched));
      expect(again && encode(*again) == encode(*watched), "a watched process has a text");
    }
    return;
  }
  const Stream whole = read({bytes});
  const Stream stream = read(cut(bytes, input));
  expect(whole.payloads == stream.payloads && whole.malformed == stream.malformed,
         "frames do not depend on how they arrive");
  expect(whole.malformed || whole.rest == stream.rest, "nor does what is left of them");
  for (const std::string& payload : whole.payloads) decode(payload);
}

std::vector<std::string> seeds() {
  using store_wire::Operation, store_wire::Request, store_wire::Reply, store_wire::Status;
  const std::string set = encode(Request{Operation::kSet, 1, "key", "value"});
  const std::string add = encode(Request{Operation::kAdd, 2, "n", "-12"});
  const std::string reply = encode(Reply{Status::kOk, 2, "value"});
  std::vector<std::string> inputs;
  for (const std::string& payload : {std::string("-12"), set.substr(4), reply.substr(4),
                                     std::string("1000 30000 123 4567 4026531836 1-2-3 host-a")})
    inputs.push_back(payload + '\0');
  for (const char* sizes : {"\x01\x05\x3f", "\x3f\x3f\x3f"})
    for (const std::string& bytes : {set + add, reply + reply})
      inputs.push_back(bytes + "\\-" + sizes + '\1');
  return inputs;
}

}  // namespace polyreme::fuzz
