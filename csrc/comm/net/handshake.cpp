#include "comm/net/handshake.h"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "comm/net/bytes.h"

namespace polyreme {
namespace {

std::string_view text_of(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

bool shows(std::string_view bytes, const Digest& expected) {
  Digest shown;
  std::copy_n(bytes.begin(), shown.size(), shown.begin());
  return equal_in_constant_time(shown, expected);
}

}  // namespace

std::string make_nonce() {
  std::string nonce(kNonceBytes, '\0');
  require<CommError>(getrandom(nonce.data(), nonce.size(), 0) == static_cast<ssize_t>(nonce.size()),
                     "getrandom: ", std::strerror(errno));
  return nonce;
}

std::string encode_hello(const Protocol& protocol, const std::string& nonce) {
  std::string bytes(protocol.magic);
  append_u32(bytes, protocol.version);
  return bytes + nonce;
}

bool may_be_hello(const Protocol& protocol, std::string_view bytes) {
  const size_t known = std::min(bytes.size(), kMagicBytes);
  return bytes.substr(0, known) == protocol.magic.substr(0, known);
}

Hello decode_hello(std::string_view bytes) {
  return {load_u32(bytes.substr(kMagicBytes)), std::string(bytes.substr(kMagicBytes + 4, kNonceBytes))};
}

Digest proof(const std::string& secret, const char* side, const std::string& client_nonce,
             const std::string& server_nonce, const std::string& tail) {
  return hmac_sha256(secret, side + client_nonce + server_nonce + tail);
}

size_t ServerHandshake::wanted() const {
  const size_t whole = stage_ == Stage::kHello ? kHelloBytes : protocol_->claim_bytes + kProofBytes;
  return over() ? 0 : whole - input_.size();
}

std::string ServerHandshake::take(std::string_view bytes, const std::string& secret,
                                  const std::string& context) {
  input_ += bytes;
  if (stage_ == Stage::kHello && !may_be_hello(*protocol_, input_)) stage_ = Stage::kMalformed;
  if (over() || wanted() > 0) return {};
  std::string reply = stage_ == Stage::kHello ? take_hello() : take_proof(secret, context);
  input_.clear();
  return reply;
}

std::string ServerHandshake::take_hello() {
  const Hello hello = decode_hello(input_);
  client_nonce_ = hello.nonce;
  own_nonce_ = make_nonce();
  stage_ = hello.version == protocol_->version ? Stage::kProof : Stage::kMalformed;
  return encode_hello(*protocol_, own_nonce_);
}

std::string ServerHandshake::take_proof(const std::string& secret, const std::string& context) {
  const std::string claim = input_.substr(0, protocol_->claim_bytes);
  const Digest expected = proof(secret, "client", client_nonce_, own_nonce_, claim + context);
  if (!shows(std::string_view(input_).substr(claim.size()), expected)) {
    stage_ = Stage::kRefused;
    return {};
  }
  claim_ = claim;
  stage_ = Stage::kAdmitted;
  return std::string(text_of(proof(secret, "server", client_nonce_, own_nonce_, claim + context)));
}

void greet(const FileDescriptor& socket, const Protocol& protocol, const std::string& secret,
           const std::string& claim, const std::string& context, const std::string& where,
           Deadline deadline) {
  const std::string nonce = make_nonce();
  const std::string server = concat("the ", protocol.server, " at ", where);
  const std::string foreign =
      concat("the program that listens at ", where, " is not our ", protocol.server, ": ");
  require<CommError>(send_all(socket, encode_hello(protocol, nonce), deadline) == IoResult::kDone, foreign,
                     "it closed the connection");
  std::string hello_bytes;
  while (hello_bytes.size() < kHelloBytes) {
    const IoResult outcome = receive_some(socket, hello_bytes, kHelloBytes - hello_bytes.size(), deadline);
    require<CommError>(outcome != IoResult::kTimeout, foreign,
                       "it accepted the connection and stays silent; ", protocol.remedy);
    require<CommError>(outcome != IoResult::kClosed, foreign, "it closed the connection without a greeting");
    require<CommError>(may_be_hello(protocol, hello_bytes), foreign, "it speaks another protocol; ",
                       protocol.remedy);
  }
  const Hello hello = decode_hello(hello_bytes);
  require<CommError>(hello.version == protocol.version, server, " speaks version ", hello.version,
                     " of the protocol, this process version ", protocol.version,
                     "; install the same polyreme on all ranks");

  send_all(socket, claim + std::string(text_of(proof(secret, "client", nonce, hello.nonce, claim + context))),
           deadline);
  std::string shown;
  while (shown.size() < kProofBytes)
    require<CommError>(
        receive_some(socket, shown, kProofBytes - shown.size(), deadline) == IoResult::kDone, server,
        " refused this process: its job secret differs (POLYREME_SECRET); is another job using the port?");
  require<CommError>(shows(shown, proof(secret, "server", nonce, hello.nonce, claim + context)), foreign,
                     "it does not know the secret of this job");
}

}  // namespace polyreme
