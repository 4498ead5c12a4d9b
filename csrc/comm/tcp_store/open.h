#pragma once

#include "comm/net/socket.h"
#include "comm/tcp_store.h"

namespace polyreme {

// A connection to the store at options.host and `port`, over which both sides have shown that they know the
// secret. Throws as TcpStore::connect does.
FileDescriptor open_store(const TcpStoreOptions& options, int port);

}  // namespace polyreme
