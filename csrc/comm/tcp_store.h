#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "comm/store.h"

namespace polyreme {

struct TcpStoreOptions {
  // Name or address of the interface of rank 0: bound there and only there, dialled by the others.
  std::string host = "127.0.0.1";
  int port = 0;        // 0, where rank 0 binds: any free one, see TcpStore::port
  int listen_fd = -1;  // rank 0: a listening socket to take over instead of binding host:port
  // Shared by the job's processes; admits a connection. Never part of a message. Where it is empty,
  // whoever reaches the port is admitted.
  std::string secret;
  // Of connecting, and of each call but get.
  std::chrono::milliseconds timeout{std::chrono::seconds(30)};
  // How long a peer that accepted may stay silent before it counts as a foreign program. A launcher
  // that holds the port from the start (listen_fd) has rank 0 answer only once it runs: pass the
  // whole start-up limit then.
  std::chrono::milliseconds greeting_limit{std::chrono::seconds(3)};
  // Of connecting: "no store at a:29500 yet (tried ...)", when it takes long.
  std::function<void(const std::string&)> progress;
};

// The store of a job over TCP. Rank 0 serves it from a thread of its own and is a client like the
// others; when an error ends rank 0, its destructor gives the others up to a second to read what was
// set last. No byte of a peer is interpreted before both sides have shown that they know the secret
// (HMAC-SHA256 over fresh nonces); requests are capped before memory is taken, and a malformed one
// costs its sender the connection and nobody else.
//
// Not to be used after fork() in the child.
class TcpStore : public Store {
 public:
  // Rank 0. Takes over listen_fd, if given. Throws CommError naming address and port if they cannot
  // be bound, InvalidArgument if listen_fd is not a listening TCP socket.
  static std::unique_ptr<TcpStore> serve(const TcpStoreOptions& options);
  // Other ranks; retries until options.timeout while nobody listens. Throws Timeout naming the
  // addresses tried, CommError if the peer is not a store of this job.
  static std::unique_ptr<TcpStore> connect(const TcpStoreOptions& options);

  virtual int port() const = 0;
  // Serving side: connections refused so far for a wrong secret, and dropped for malformed or
  // excessive input. 0 on clients.
  virtual int64_t num_refused() const = 0;
  virtual int64_t num_malformed() const = 0;
};

}  // namespace polyreme
