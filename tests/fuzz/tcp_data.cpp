#include <numeric>

#include "base/error.h"
#include "comm/tcp/data_link.h"
#include "sockets.h"

// Messages of a data connection: a rank receives what another one sends, changed on the way or not.

namespace polyreme::fuzz {
namespace {

using Progress = DataLink::Progress;
using Buffers = std::vector<std::vector<char>>;  // each of its size, so that a byte too much is noticed

constexpr char kUntouched = '\xee';

std::vector<Message> messages_of(Message::Kind kind, Buffers& buffers) {
  std::vector<Message> messages;
  for (std::vector<char>& buffer : buffers)
    messages.push_back({kind, 1, buffer.data(), static_cast<int64_t>(buffer.size())});
  return messages;
}

// The bytes that a rank sends.
std::string wire_bytes_of(Buffers& buffers) {
  auto [own, peer] = make_connection();
  DataLink link(std::move(own), "rank 1", "rank 0");
  const auto messages = messages_of(Message::Kind::kSend, buffers);
  for (const Message& message : messages) link.add(message);
  std::string bytes;
  while (link.sends()) {
    expect(link.send() != Progress::kBroken, "sending works");
    while (receive_some(peer, bytes, size_t{64} << 10, Deadline()) == IoResult::kDone) continue;
  }
  return bytes;
}

const std::vector<char>& payload() {
  static const std::vector<char> bytes = [] {
    std::vector<char> numbers(static_cast<size_t>(tcp_wire::kBlockBytes) + 300);
    std::iota(numbers.begin(), numbers.end(), '\0');
    return numbers;
  }();
  return bytes;
}

enum class Outcome : uint8_t { kAll, kPart, kMismatch, kCorrupt };

void expect_untouched_end(const Buffers& buffers, int64_t num_bytes) {
  for (auto buffer = buffers.rbegin(); buffer != buffers.rend(); ++buffer)
    for (auto byte = buffer->rbegin(); byte != buffer->rend() && num_bytes > 0; ++byte, --num_bytes)
      expect(*byte == kUntouched, "a message of another length is not written");
}

Outcome receive(const std::vector<std::string_view>& pieces, Buffers& buffers) {
  auto [own, peer] = make_connection();
  DataLink link(std::move(own), "rank 0", "rank 1");
  const auto messages = messages_of(Message::Kind::kReceive, buffers);
  for (const Message& message : messages) link.add(message);
  Progress progress = Progress::kNone;
  const auto receive_all = [&] {
    do {
      if (!link.receives()) return;
      progress = link.receive();
      expect(link.bytes_to_receive() >= 0, "no more is received than expected");
    } while (progress == Progress::kMoved);
  };
  try {
    for (const std::string_view piece : pieces) {
      if (!link.receives()) break;
      expect(send_all(peer, piece, hang_deadline()) == IoResult::kDone, "the link takes all bytes");
      receive_all();
    }
    peer = FileDescriptor();
    receive_all();
  } catch (const CollectiveMismatch&) {
    expect_untouched_end(buffers, link.bytes_to_receive());
    return Outcome::kMismatch;
  } catch (const PeerLost&) {
    return Outcome::kCorrupt;
  }
  if (!link.receives()) return Outcome::kAll;
  expect(progress == Progress::kBroken && link.error() == 0, "the end is noticed");
  return Outcome::kPart;
}

void try_header(FuzzedDataProvider& input) {
  tcp_wire::HeaderBytes bytes{};
  input.ConsumeData(bytes.data(), bytes.size());
  if (const auto header = tcp_wire::decode_header(bytes))
    expect(tcp_wire::encode(*header) == bytes, "a header is encoded in one way");
  const std::string claim(bytes.data(), tcp_wire::kClaimBytes);
  expect(tcp_wire::encode(tcp_wire::decode_claim(claim)) == claim, "a claim is encoded in one way");
}

}  // namespace

void try_input(FuzzedDataProvider& input) {
  enum class Change : uint8_t { kNone, kByte, kEnd, kPatch, kHeader, kMaxValue = kHeader };
  const auto change = input.ConsumeEnum<Change>();
  if (change == Change::kHeader) return try_header(input);
  Buffers sent;
  for (int count = input.ConsumeIntegralInRange(1, 3); count > 0; --count) {
    const bool is_long = sent.empty() && input.ConsumeIntegral<uint8_t>() == 0xff;
    const auto num_bytes =
        input.ConsumeIntegralInRange<ptrdiff_t>(0, 300) + (is_long ? tcp_wire::kBlockBytes - 100 : 0);
    sent.emplace_back(payload().begin() + count, payload().begin() + count + num_bytes);
  }
  std::string bytes = wire_bytes_of(sent);
  const size_t at = input.ConsumeIntegralInRange<size_t>(0, bytes.size() - 1);
  if (change == Change::kByte)
    bytes[at] = static_cast<char>(bytes[at] ^ input.ConsumeIntegralInRange(1, 255));
  if (change == Change::kEnd) bytes.resize(at);
  if (change == Change::kPatch) {
    const std::string patch = input.ConsumeRandomLengthString();
    bytes.replace(at, patch.size(), patch);
  }
  Buffers received;
  for (const auto& buffer : sent) received.emplace_back(buffer.size(), kUntouched);
  const Outcome outcome = receive(cut(bytes, input), received);
  const bool corrupt = outcome == Outcome::kCorrupt || outcome == Outcome::kMismatch;
  if (change == Change::kNone)
    expect(outcome == Outcome::kAll && received == sent, "messages arrive as they were sent");
  if (change == Change::kByte) expect(corrupt, "a changed byte is noticed");
  if (change == Change::kEnd) expect(outcome == Outcome::kPart, "a missing end is noticed");
}

std::vector<std::string> seeds() {
  // From the end: the change, how many messages, whether the first is long, their sizes; where; what.
  const auto numbers = [](std::vector<int> values) {
    std::string text;
    for (auto value = values.rbegin(); value != values.rend(); ++value)
      text.push_back(static_cast<char>(*value));
    return text;
  };
  const tcp_wire::HeaderBytes other_length = tcp_wire::encode(tcp_wire::Header{1, 5});
  const std::string header(other_length.data(), other_length.size());
  std::vector<std::string> inputs = {header + numbers({4}), header + "\\-" + numbers({3, 0, 0, 0, 100, 0})};
  for (const int change : {0, 1, 2}) {
    inputs.push_back(numbers({change, 0, 0, 0, 7, 22, 0, 1, 63, 63, 63}));
    inputs.push_back(numbers({change, 2, 0, 0, 7, 1, 0, 0, 0, 0, 50, 0, 1, 0, 9, 30}));
  }
  inputs.push_back(numbers({0, 0, 0xff, 0, 200, 1, 0, 63, 63, 63}));
  return inputs;
}

}  // namespace polyreme::fuzz
