#pragma once

#include <sys/socket.h>

#include <array>
#include <utility>

#include "comm/net/socket.h"
#include "fuzz.h"

namespace polyreme::fuzz {

// A peer that has done nothing for so long hangs.
inline Deadline hang_deadline() { return std::chrono::steady_clock::now() + std::chrono::seconds(10); }

// Two ends of a connection. `type`: SOCK_STREAM, or SOCK_SEQPACKET, which keeps pieces apart.
inline std::pair<FileDescriptor, FileDescriptor> make_connection(int type = SOCK_STREAM) {
  std::array<int, 2> ends{};
  expect(socketpair(AF_UNIX, type | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends.data()) == 0, "socketpair works");
  return {FileDescriptor(ends[0]), FileDescriptor(ends[1])};
}

}  // namespace polyreme::fuzz
