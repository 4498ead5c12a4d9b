#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <string_view>
#include <utility>

namespace polyreme {

// An open file descriptor. Closed with its owner.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~FileDescriptor();

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// CLOCK_MONOTONIC: a change of the wall clock moves no deadline.
using Deadline = std::chrono::steady_clock::time_point;

// All sockets are non-blocking and closed on exec.

// A listening socket on `host`:`port` and nowhere else. Throws CommError naming both, after `what`
// went wrong and before the `remedy`.
FileDescriptor listen_on(const std::string& host, int port, const char* what = "cannot listen",
                         const char* remedy = "");
// Takes over a listening socket. Throws InvalidArgument if `fd` is none.
FileDescriptor adopt_listener(int fd);
int port_of(const FileDescriptor& socket);
// Who is at the other end, as endpoint_text has it; "somebody" if it has gone.
std::string peer_of(const FileDescriptor& socket);
// "127.0.0.1:1234", "[::1]:1234"
std::string endpoint_text(const std::string& address, int port);
// Without a delay for small messages; a peer whose host stopped answering is an error after
// `silent_limit`, at least 1 s; never, if that is 0. (Linux counts a peer that answers but takes no
// data as silent, too: no limit for connections on which much may wait to be read.)
void set_connection_options(const FileDescriptor& socket,
                            std::chrono::milliseconds silent_limit = std::chrono::seconds(10));

struct DialOptions {
  std::chrono::milliseconds limit;
  // Whether an address where nobody listens is tried again, up to the limit. Otherwise throws PeerLost.
  bool insist = true;
  // For messages: what is missing, and what to do.
  const char* what = "nobody answers";
  const char* remedy = "";
  // Told who was tried and what they answered, after `patience` and then at growing intervals.
  std::function<void(const std::string&)> progress;
  std::chrono::milliseconds patience{std::chrono::seconds(5)};
};
// Tries all addresses of `host` until somebody accepts. Throws Timeout naming the addresses and
// what they answered, CommError if the name has none.
FileDescriptor dial(const std::string& host, int port, const DialOptions& options);

enum class IoResult { kDone, kClosed, kTimeout };
// Sends all of `bytes`.
IoResult send_all(const FileDescriptor& socket, std::string_view bytes, Deadline deadline);
// Appends what comes to `buffer`: at least one byte, at most `most`.
IoResult receive_some(const FileDescriptor& socket, std::string& buffer, size_t most, Deadline deadline);

}  // namespace polyreme
