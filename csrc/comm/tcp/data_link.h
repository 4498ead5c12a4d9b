#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "comm/messages/endpoint.h"
#include "comm/net/socket.h"
#include "comm/tcp/wire.h"

namespace polyreme {

// The data connection to one peer: moves the messages of one exchange at a time, as far as the socket
// goes without blocking, straight from and into the memory of the messages.
//
// What a message looks like on the wire is a function of its length (tcp_wire), so one *position* in
// the wire's bytes says what comes next. A few bytes are read ahead, so that a small message takes one
// system call; they may belong to a later exchange.
class DataLink {
 public:
  enum class Progress : uint8_t { kNone, kMoved, kBroken };

  // `self` and `peer`: "rank 2 (host a, pid 123)"
  DataLink(FileDescriptor socket, std::string self, std::string peer);

  // `message` lives until the exchange is over.
  void add(const Message& message) { queue(message.kind).messages.push_back(&message); }
  // Forgets the messages of an exchange that is over.
  void clear();
  bool sends() const { return out_.at < out_.messages.size(); }
  bool receives() const { return in_.at < in_.messages.size(); }
  // Of payload, missing in the exchange.
  int64_t bytes_to_send() const { return missing(out_); }
  int64_t bytes_to_receive() const { return missing(in_); }

  // One or a few system calls. kBroken: see error(). `receive` throws CollectiveMismatch if a message
  // has another length than its receive, before any of it is written; PeerLost if its bytes were changed on
  // the way.
  Progress send();
  Progress receive();
  // errno of the broken socket, 0 if the peer closed it.
  int error() const { return error_; }
  const FileDescriptor& socket() const { return socket_; }

 private:
  struct Queue {
    std::vector<const Message*> messages;
    size_t at = 0;          // the message in work
    int64_t position = 0;   // in its bytes on the wire
    uint64_t sequence = 1;  // its number on this link

    const Message& message() const { return *messages[at]; }
    bool done() const { return position == tcp_wire::wire_bytes(message().num_bytes); }
    void next() {
      ++at;
      ++sequence;
      position = 0;
    }
  };
  // The piece of a message at a position, up to the end of the header, the block, or its checksum.
  struct Piece {
    enum class Part : uint8_t { kHeader, kBlock, kTrailer };
    Part part;
    int64_t block;         // number of it
    int64_t block_bytes;   // of the whole block
    int64_t offset, rest;  // in the part
  };
  static Piece piece_at(int64_t position, int64_t num_bytes);
  static int64_t missing(const Queue& queue);

  Queue& queue(Message::Kind kind) { return kind == Message::Kind::kSend ? out_ : in_; }
  char* destination(const Piece& piece);
  void advance(int64_t num_bytes);
  void check_header();
  void check_block(const Piece& piece);
  bool take_ahead();
  Progress broken(int64_t result);
  [[noreturn]] void corrupt(const char* what) const;

  FileDescriptor socket_;
  std::string self_, peer_;
  Queue out_, in_;
  tcp_wire::HeaderBytes out_header_{}, in_header_{};
  std::array<char, tcp_wire::kTrailerBytes> out_trailer_{}, in_trailer_{};
  int64_t out_trailer_block_ = -1;  // the block in work that out_trailer_ is of
  std::array<char, 4096> ahead_{};
  size_t ahead_begin_ = 0, ahead_end_ = 0;
  int error_ = 0;
};

}  // namespace polyreme
