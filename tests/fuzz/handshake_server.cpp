#include "comm/net/handshake.h"
#include "comm/tcp/wire.h"
#include "comm/tcp_store/wire.h"
#include "fuzz.h"

// The server's side of the handshake, against strangers and against clients that know the secret.

namespace polyreme::fuzz {
namespace {

using Stage = ServerHandshake::Stage;

const std::string kSecret = "secret";
const std::string kContext = "context";

// Feeds no more at a time than the handshake wants; returns what it says.
std::string feed(ServerHandshake& handshake, std::string_view piece) {
  std::string said;
  while (!piece.empty() && !handshake.over()) {
    const std::string_view part = piece.substr(0, handshake.wanted());
    expect(!part.empty(), "a handshake that is not over wants bytes");
    said += handshake.take(part, kSecret, kContext);
    piece.remove_prefix(part.size());
  }
  expect(handshake.over() == (handshake.wanted() == 0), "a handshake that is over wants nothing");
  return said;
}

void try_stranger(const Protocol& protocol, FuzzedDataProvider& input) {
  const std::string bytes = input.ConsumeRandomLengthString();
  ServerHandshake whole(protocol), pieces(protocol);
  const std::string said = feed(whole, bytes);
  std::string said_in_pieces;
  for (const std::string_view piece : cut(bytes, input)) said_in_pieces += feed(pieces, piece);
  expect(whole.stage() == pieces.stage(), "the stage does not depend on how the bytes arrive");
  expect(said.size() == said_in_pieces.size() && said.size() <= kHelloBytes,
         "a stranger gets a hello at most");
  expect(whole.stage() != Stage::kAdmitted, "a stranger is not admitted");
}

std::string text_of(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

// A client that may change one byte of its last message.
void try_client(const Protocol& protocol, FuzzedDataProvider& input) {
  const std::string nonce = std::string(kNonceBytes, 'n');
  const uint8_t change = input.ConsumeIntegral<uint8_t>();
  const size_t at = input.ConsumeIntegralInRange<size_t>(0, protocol.claim_bytes + kProofBytes - 1);
  std::string claim = input.ConsumeBytesAsString(protocol.claim_bytes);
  claim.resize(protocol.claim_bytes);

  ServerHandshake handshake(protocol);
  const std::string hello = feed(handshake, encode_hello(protocol, nonce));
  expect(hello.size() == kHelloBytes && may_be_hello(protocol, hello), "the server greets back");
  const std::string server_nonce = decode_hello(hello).nonce;
  const auto proof_of = [&](const char* side) {
    return text_of(proof(kSecret, side, nonce, server_nonce, claim + kContext));
  };
  std::string last = claim + proof_of("client");
  last[at] = static_cast<char>(last[at] ^ change);
  std::string said;
  for (const std::string_view piece : cut(last, input)) said += feed(handshake, piece);
  expect(handshake.stage() == (change == 0 ? Stage::kAdmitted : Stage::kRefused),
         "the right proof is admitted");
  expect(handshake.claim() == (change == 0 ? claim : ""), "a claim counts once it is proven");
  expect(said == (change == 0 ? proof_of("server") : ""), "the server proves itself to nobody else");
}

}  // namespace

void try_input(FuzzedDataProvider& input) {
  const Protocol& protocol = input.ConsumeBool() ? tcp_wire::kProtocol : store_wire::kProtocol;
  if (input.ConsumeBool()) return try_client(protocol, input);
  try_stranger(protocol, input);
}

std::vector<std::string> seeds() {
  std::vector<std::string> inputs = {std::string("twelve bytes\0\0\1\1", 16),
                                     std::string("twelve bytes\3\7\1\1", 16)};
  for (const Protocol* protocol : {&store_wire::kProtocol, &tcp_wire::kProtocol}) {
    const std::string hello = encode_hello(*protocol, std::string(kNonceBytes, 'n'));
    const char choice = protocol == &tcp_wire::kProtocol ? '\1' : '\0';
    const std::string proven(protocol->claim_bytes + kProofBytes, 'p');
    for (const std::string& bytes : {hello, hello + proven})
      inputs.push_back(bytes + "\\-\x05\x01\x20" + std::string(1, '\0') + choice);
  }
  return inputs;
}

}  // namespace polyreme::fuzz
