#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "comm/messages/endpoint.h"
#include "comm/store.h"

namespace polyreme {

struct TcpEndpointOptions {
  std::string name = "world";
  // Where this rank listens while the links are made, and from then on is reached: the name of an
  // interface, or an address or name of this host. Empty: the address from which this host reaches
  // `store_host`; loopback if that is empty, too.
  std::string interface;
  std::string store_host;
  // Shared by the job's processes; admits a connection. Never part of a message. Where it is empty,
  // whoever reaches the port is admitted.
  std::string secret;
  // Of making the links.
  std::chrono::milliseconds init_limit{std::chrono::minutes(5)};
  // How long a peer's host may stay silent before the peer counts as lost. At least 1 s.
  std::chrono::milliseconds peer_timeout{std::chrono::seconds(30)};
};

// Links over TCP. Payloads are checksummed; a change on the way is PeerLost, naming the link.
class TcpEndpoint : public Endpoint {
 public:
  // Connections that were refused while the links were made: strangers, wrong secrets.
  virtual int64_t num_refused() const = 0;
};

// This process as rank `rank` of `size` processes. Collective: the ranks find each other through
// `store`; nothing listens any more when the call returns.
// Throws InvalidArgument for bad arguments, CommError if there is no such interface, or if a rank
// failed or has another secret, PeerLost, and Timeout, with addresses and interface.
std::unique_ptr<TcpEndpoint> make_tcp_endpoint(Store& store, int rank, int size,
                                               const TcpEndpointOptions& options);

}  // namespace polyreme
