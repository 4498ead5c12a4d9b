#pragma once

#include <atomic>
#include <functional>
#include <string>
#include <vector>

#include "comm/net/socket.h"

namespace polyreme {

// An address of this host, and how it was found.
struct NetworkInterface {
  std::string address;  // numeric
  std::string text;     // "10.0.0.1 (interface eth0)"
};
// `wanted`: the name of an interface, or an address or name of this host. Where it is empty: the address
// from which this host reaches `store_host`; loopback if that is empty, too. Throws CommError
// with what this host has.
NetworkInterface choose_interface(const std::string& wanted, const std::string& store_host);

struct PeerAddress {
  std::string who;  // "rank 2 (host a, pid 123)"
  std::string address;
  int port = 0;
};
struct LinkSockets {
  FileDescriptor data, control;
};
struct ConnectOptions {
  int rank = 0;
  std::vector<PeerAddress> ranks;  // all of the group, this one included
  std::string group;               // its name, for messages
  std::string context;             // as no other group's: what belongs elsewhere is refused
  std::string secret;
  NetworkInterface interface;
  Deadline deadline;
  // Called every 100 ms or so while this rank waits for higher ones; throws to give up.
  std::function<void()> look;
};
// The connections to all other ranks: dials the lower ones and waits at `listener` for the higher ones.
// Adds to `num_refused` for each connection that was not one of theirs. Throws Timeout naming the
// ranks that are missing, PeerLost if one has gone, CommError if one has another secret.
std::vector<LinkSockets> connect_ranks(const FileDescriptor& listener, const ConnectOptions& options,
                                       std::atomic<int64_t>& num_refused);

}  // namespace polyreme
