#include <thread>

#include "base/error.h"
#include "comm/net/handshake.h"
#include "comm/tcp/wire.h"
#include "sockets.h"

// The client's side of the handshake, against foreign programs and against a server whose bytes are changed
// on the way.

namespace polyreme::fuzz {
namespace {

const std::string kSecret = "secret";
const std::string kClaim(tcp_wire::kClaimBytes, 'c');
constexpr Protocol kProtocol = tcp_wire::kProtocol;

void send_in_pieces(const FileDescriptor& to, std::string_view bytes, size_t piece_bytes) {
  for (; !bytes.empty(); bytes.remove_prefix(std::min(piece_bytes, bytes.size())))
    send_all(to, bytes.substr(0, piece_bytes), hang_deadline());
}

// A server that changes the byte at `at` of all that it says.
void serve(const FileDescriptor& connection, size_t at, uint8_t change, size_t piece_bytes) {
  ServerHandshake handshake(kProtocol);
  size_t said = 0;
  std::string bytes;
  while (!handshake.over() &&
         receive_some(connection, bytes, handshake.wanted(), hang_deadline()) == IoResult::kDone) {
    std::string reply = handshake.take(std::exchange(bytes, {}), kSecret, "");
    if (at >= said && at < said + reply.size())
      reply[at - said] = static_cast<char>(reply[at - said] ^ change);
    said += reply.size();
    send_in_pieces(connection, reply, piece_bytes);
  }
}

bool is_admitted(const FileDescriptor& connection) {
  try {
    greet(connection, kProtocol, kSecret, kClaim, "", "here", hang_deadline());
    return true;
  } catch (const CommError&) {
    return false;
  }
}

}  // namespace

void try_input(FuzzedDataProvider& input) {
  const bool foreign = input.ConsumeBool();
  const size_t piece_bytes = input.ConsumeIntegralInRange<size_t>(1, kProofBytes);
  auto [client, server] = make_connection(SOCK_SEQPACKET);
  if (foreign) {
    // Packets as large as the client reads, at most.
    const std::string hello = input.ConsumeBytesAsString(kHelloBytes);
    send_in_pieces(server, hello, piece_bytes);
    send_in_pieces(server, input.ConsumeBytesAsString(kProofBytes), piece_bytes);
    shutdown(server.get(), SHUT_WR);
    expect(!is_admitted(client), "a foreign program is not taken for the server");
    return;
  }
  const uint8_t change = input.ConsumeIntegral<uint8_t>();
  const size_t at = input.ConsumeIntegralInRange<size_t>(0, kHelloBytes + kProofBytes - 1);
  std::thread other([&, connection = std::move(server)] { serve(connection, at, change, piece_bytes); });
  const bool admitted = is_admitted(client);
  client = FileDescriptor();
  other.join();
  expect(admitted == (change == 0), "the server counts as ours exactly if nothing was changed");
}

std::vector<std::string> seeds() {
  const std::string hello = encode_hello(kProtocol, std::string(kNonceBytes, 'n'));
  const auto number = [](int value) { return std::string(1, static_cast<char>(value)); };
  std::vector<std::string> inputs = {hello + number(31) + number(1),
                                     hello + std::string(kProofBytes, 'p') + number(4) + number(1),
                                     "HTTP/1.1 400 Bad Request\r\n" + number(31) + number(1)};
  for (const int change : {0, 1})
    for (const int at : {0, 9, 13, 30}) inputs.push_back(number(at) + number(change) + number(6) + number(0));
  return inputs;
}

}  // namespace polyreme::fuzz
