#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "comm/net/sha256.h"
#include "comm/net/socket.h"

// How two processes of a job meet: each shows that it knows the job's secret before the other reads
// anything else from it. Integers are little-endian.
//
//   client: hello   magic, u32 version, nonce
//   server: hello   magic, u32 version, nonce
//   client: claim, HMAC(secret, "client" nonce_client nonce_server claim context)
//   server: HMAC(secret, "server" nonce_client nonce_server claim context), or it closes
//
// The claim is what the client says of itself; the context is known to both and not sent.

namespace polyreme {

inline constexpr size_t kMagicBytes = 8;
inline constexpr size_t kNonceBytes = 16;
inline constexpr size_t kHelloBytes = kMagicBytes + 4 + kNonceBytes;
inline constexpr size_t kProofBytes = 32;

struct Protocol {
  std::string_view magic;  // kMagicBytes of them
  uint32_t version;
  size_t claim_bytes;
  const char* server;  // "store", for messages
  const char* remedy;  // when something else listens there
};

std::string make_nonce();
std::string encode_hello(const Protocol& protocol, const std::string& nonce);
struct Hello {
  uint32_t version;
  std::string nonce;
};
// Nothing unless `bytes`, at most kHelloBytes of them, start with the magic as far as they go; for
// kHelloBytes bytes, the rest as well.
bool may_be_hello(const Protocol& protocol, std::string_view bytes);
Hello decode_hello(std::string_view bytes);
// `tail`: claim and context.
Digest proof(const std::string& secret, const char* side, const std::string& client_nonce,
             const std::string& server_nonce, const std::string& tail);

// The server's side of one handshake, in whatever pieces the bytes come.
class ServerHandshake {
 public:
  enum class Stage : uint8_t { kHello, kProof, kAdmitted, kRefused, kMalformed };
  explicit ServerHandshake(const Protocol& protocol) : protocol_(&protocol) {}
  Stage stage() const { return stage_; }
  bool over() const { return stage_ >= Stage::kAdmitted; }
  // How many bytes to receive at most.
  size_t wanted() const;
  // Takes at most `wanted` bytes and returns what to send. To a client of another version that is a
  // hello from which it can tell.
  std::string take(std::string_view bytes, const std::string& secret, const std::string& context);
  // Once admitted.
  const std::string& claim() const { return claim_; }

 private:
  std::string take_hello();
  std::string take_proof(const std::string& secret, const std::string& context);

  const Protocol* protocol_;
  Stage stage_ = Stage::kHello;
  std::string input_, client_nonce_, own_nonce_, claim_;
};

// The client's side; blocks until the server has admitted it. `where` is the server's address, for
// messages. Throws CommError if that is not a server of this job, or takes longer than `deadline`.
void greet(const FileDescriptor& socket, const Protocol& protocol, const std::string& secret,
           const std::string& claim, const std::string& context, const std::string& where, Deadline deadline);

}  // namespace polyreme
