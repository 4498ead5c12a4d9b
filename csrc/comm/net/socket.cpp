#include "comm/net/socket.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <thread>

#include "base/error.h"
#include "base/interrupt.h"

namespace polyreme {
namespace {

using Clock = std::chrono::steady_clock;
// Of one try of an address: a connection that is not there by then, over lost packets too, will not come.
constexpr auto kTryLimit = std::chrono::seconds(10);

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

AddressList resolve(const std::string& host, int port, int flags) {
  require(port >= 0 && port <= 65535, "port ", port, " is not 0 to 65535");
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  require<CommError>(error == 0, "cannot resolve host '", host, "': ", gai_strerror(error),
                     "; check the address (MASTER_ADDR) and the name service");
  return {found, freeaddrinfo};
}

std::string address_text(const sockaddr* address, socklen_t length) {
  std::array<char, NI_MAXHOST> host{};
  std::array<char, NI_MAXSERV> port{};
  if (getnameinfo(address, length, host.data(), host.size(), port.data(), port.size(),
                  NI_NUMERICHOST | NI_NUMERICSERV) != 0)
    return "unknown address";
  return endpoint_text(host.data(), std::atoi(port.data()));
}

std::string address_text(const addrinfo& address) {
  return address_text(address.ai_addr, address.ai_addrlen);
}

FileDescriptor open_socket(const addrinfo& address) {
  return FileDescriptor(socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

// False at the deadline.
bool wait_ready(int fd, short events, Deadline deadline) {
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    pollfd entry{fd, events, 0};
    const int ready =
        poll(&entry, 1,
             static_cast<int>(std::clamp(left, std::chrono::milliseconds(0), kInterruptInterval).count()));
    if (ready > 0) return true;
    if (ready == 0 && Clock::now() >= deadline) return false;
    if (ready < 0 && errno != EINTR) return false;
    check_interrupt();
  }
}

// While nobody listens at a port of the ephemeral range, the kernel may choose that very port as our
// own and connect the socket to itself, which would also keep rank 0 from binding it.
bool is_connected_to_itself(const FileDescriptor& fd) {
  sockaddr_storage own{}, peer{};
  socklen_t own_length = sizeof(own), peer_length = sizeof(peer);
  return getsockname(fd.get(), reinterpret_cast<sockaddr*>(&own), &own_length) == 0 &&
         getpeername(fd.get(), reinterpret_cast<sockaddr*>(&peer), &peer_length) == 0 &&
         own_length == peer_length && std::memcmp(&own, &peer, own_length) == 0;
}

// 0, or the reason as errno.
int try_connect(const FileDescriptor& fd, const addrinfo& address, Deadline deadline) {
  if (!fd) return errno;
  if (connect(fd.get(), address.ai_addr, address.ai_addrlen) == 0) return 0;
  if (errno != EINPROGRESS) return errno;
  if (!wait_ready(fd.get(), POLLOUT, deadline)) return ETIMEDOUT;
  int error = 0;
  socklen_t length = sizeof(error);
  getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length);
  return error;
}

}  // namespace

FileDescriptor::~FileDescriptor() {
  if (fd_ >= 0) close(fd_);
}

std::string endpoint_text(const std::string& address, int port) {
  const bool is_v6 = address.find(':') != std::string::npos;
  return concat(is_v6 ? "[" : "", address, is_v6 ? "]:" : ":", port);
}

FileDescriptor listen_on(const std::string& host, int port, const char* what, const char* remedy) {
  const AddressList addresses = resolve(host, port, AI_PASSIVE);
  std::string problems;
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    FileDescriptor fd = open_socket(*address);
    const int on = 1;
    // So that the port of a job that just ended can be used again; Linux still refuses a port on
    // which somebody listens.
    if (fd) setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (fd && bind(fd.get(), address->ai_addr, address->ai_addrlen) == 0 && listen(fd.get(), 4096) == 0)
      return fd;
    problems += concat(problems.empty() ? "" : "; ", address_text(*address), ": ", std::strerror(errno));
  }
  throw CommError(concat(what, " at ", host, ":", port, " (", problems, ")", remedy));
}

FileDescriptor adopt_listener(int fd) {
  int listening = 0;
  socklen_t length = sizeof(listening);
  const bool ok = getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &length) == 0 && listening != 0;
  require(ok, "file descriptor ", fd,
          " is not a listening socket; POLYREME_STORE_FD must name the one that the ", "launcher opened");
  FileDescriptor socket(fd);
  require<CommError>(
      fcntl(fd, F_SETFD, FD_CLOEXEC) == 0 && fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK) == 0,
      "fcntl of the store's socket: ", std::strerror(errno));
  return socket;
}

int port_of(const FileDescriptor& socket) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  if (getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0) return 0;
  if (address.ss_family == AF_INET) return ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);
  if (address.ss_family == AF_INET6) return ntohs(reinterpret_cast<const sockaddr_in6&>(address).sin6_port);
  return 0;
}

std::string peer_of(const FileDescriptor& socket) {
  sockaddr_storage peer{};
  socklen_t length = sizeof(peer);
  auto* address = reinterpret_cast<sockaddr*>(&peer);
  return getpeername(socket.get(), address, &length) == 0 ? address_text(address, length) : "somebody";
}

void set_connection_options(const FileDescriptor& socket, std::chrono::milliseconds silent_limit) {
  const auto set = [&](int level, int option, int value) {
    setsockopt(socket.get(), level, option, &value, sizeof(value));
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  // For data that are not acknowledged, and for probes while there are none; somewhat early, since the
  // error comes with the next probe only.
  const auto silent_ms = static_cast<int>(std::min<int64_t>(silent_limit.count(), INT32_MAX));
  const int probe_s = std::max(1, silent_ms / 3000);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, silent_ms - silent_ms / 20);
  set(IPPROTO_TCP, TCP_KEEPIDLE, probe_s);
  set(IPPROTO_TCP, TCP_KEEPINTVL, probe_s);
  set(SOL_SOCKET, SO_KEEPALIVE, silent_ms > 0 ? 1 : 0);
}

FileDescriptor dial(const std::string& host, int port, const DialOptions& options) {
  const Deadline start = Clock::now(), deadline = start + options.limit;
  const AddressList addresses = resolve(host, port, 0);
  std::map<std::string, int> answers;
  const auto tried = [&] {
    std::string text;
    for (const auto& [address, error] : answers)
      text += concat(text.empty() ? "" : "; ", address, ": ", std::strerror(error));
    return text;
  };
  auto patience = options.patience;
  do {
    for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
      FileDescriptor fd = open_socket(*address);
      // An address that drops what it gets does not keep the others, and the user, waiting.
      const Deadline give_up = Clock::now() + kTryLimit;
      int error = try_connect(fd, *address, options.insist ? std::min(deadline, give_up) : deadline);
      if (error == 0 && is_connected_to_itself(fd)) {
        const linger reset{1, 0};  // frees the port at once
        setsockopt(fd.get(), SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
        error = ECONNREFUSED;
      }
      if (error == 0) {
        set_connection_options(fd);
        return fd;
      }
      answers[address_text(*address)] = error;
    }
    check_interrupt();
    if (options.progress && Clock::now() - start >= patience) {
      options.progress(concat(options.what, " at ", endpoint_text(host, port), " yet (tried ", tried(),
                              "); trying for ", static_cast<double>(options.limit.count()) / 1000, " s",
                              options.remedy));
      patience *= 2;
    }
    if (options.insist) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  } while (options.insist && Clock::now() < deadline);
  const bool late = Clock::now() >= deadline;
  const std::string text = concat(
      options.what, " at ", endpoint_text(host, port),
      late ? concat(" within ", static_cast<double>(options.limit.count()) / 1000, " s") : std::string(),
      " (tried ", tried(), ")", options.remedy);
  require<PeerLost>(late, text);
  throw Timeout(text);
}

IoResult send_all(const FileDescriptor& socket, std::string_view bytes, Deadline deadline) {
  while (!bytes.empty()) {
    const ssize_t sent = send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent > 0) {
      bytes.remove_prefix(static_cast<size_t>(sent));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (!wait_ready(socket.get(), POLLOUT, deadline)) return IoResult::kTimeout;
    } else if (errno != EINTR) {
      return IoResult::kClosed;
    }
  }
  return IoResult::kDone;
}

IoResult receive_some(const FileDescriptor& socket, std::string& buffer, size_t most, Deadline deadline) {
  const size_t before = buffer.size();
  buffer.resize(before + most);
  while (true) {
    const ssize_t received = recv(socket.get(), buffer.data() + before, most, 0);
    const int error = errno;
    if (received > 0) {
      buffer.resize(before + static_cast<size_t>(received));
      return IoResult::kDone;
    }
    const bool would_block = received < 0 && (error == EAGAIN || error == EWOULDBLOCK);
    if (would_block && wait_ready(socket.get(), POLLIN, deadline)) continue;
    if (received < 0 && error == EINTR) continue;
    buffer.resize(before);
    return would_block ? IoResult::kTimeout : IoResult::kClosed;
  }
}

}  // namespace polyreme
