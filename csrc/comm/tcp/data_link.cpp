#include "comm/tcp/data_link.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/crc32c.h"
#include "base/error.h"
#include "comm/net/bytes.h"

namespace polyreme {

using tcp_wire::kBlockBytes;
using tcp_wire::kHeaderBytes;
using tcp_wire::kTrailerBytes;

DataLink::DataLink(FileDescriptor socket, std::string self, std::string peer)
    : socket_(std::move(socket)), self_(std::move(self)), peer_(std::move(peer)) {}

void DataLink::clear() {
  for (Queue* queue : {&out_, &in_}) {
    queue->messages.clear();
    queue->at = 0;
  }
}

int64_t DataLink::missing(const Queue& queue) {
  int64_t sum = 0;
  for (size_t i = queue.at; i < queue.messages.size(); ++i) sum += queue.messages[i]->num_bytes;
  if (queue.at == queue.messages.size() || queue.position < kHeaderBytes) return sum;
  const Piece piece = piece_at(queue.position, queue.message().num_bytes);
  const bool in_block = piece.part == Piece::Part::kBlock;
  return sum - piece.block * kBlockBytes - (in_block ? piece.offset : piece.block_bytes);
}

DataLink::Piece DataLink::piece_at(int64_t position, int64_t num_bytes) {
  if (position < kHeaderBytes) return {Piece::Part::kHeader, 0, 0, position, kHeaderBytes - position};
  const int64_t behind = position - kHeaderBytes;
  const int64_t block = behind / (kBlockBytes + kTrailerBytes);
  const int64_t offset = behind % (kBlockBytes + kTrailerBytes);
  const int64_t block_bytes = std::min(kBlockBytes, num_bytes - block * kBlockBytes);
  if (offset < block_bytes) return {Piece::Part::kBlock, block, block_bytes, offset, block_bytes - offset};
  return {Piece::Part::kTrailer, block, block_bytes, offset - block_bytes,
          kTrailerBytes - (offset - block_bytes)};
}

DataLink::Progress DataLink::broken(int64_t result) {
  if (result < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return Progress::kNone;
  error_ = result == 0 ? 0 : errno;
  return Progress::kBroken;
}

DataLink::Progress DataLink::send() {
  const Message& message = out_.message();
  std::array<iovec, 3> pieces;
  size_t count = 0;
  const auto add = [&](const void* data, int64_t num_bytes) {
    pieces[count++] = {const_cast<void*>(data), static_cast<size_t>(num_bytes)};
  };
  Piece piece = piece_at(out_.position, message.num_bytes);
  if (out_.position == 0) {
    out_header_ = tcp_wire::encode(tcp_wire::Header{out_.sequence, static_cast<uint64_t>(message.num_bytes)});
    out_trailer_block_ = -1;
  }
  if (piece.part == Piece::Part::kHeader) {
    add(out_header_.data() + piece.offset, piece.rest);
    if (message.num_bytes > 0) piece = piece_at(kHeaderBytes, message.num_bytes);
  }
  if (piece.part != Piece::Part::kHeader) {
    const char* block = static_cast<const char*>(message.data) + piece.block * kBlockBytes;
    if (out_trailer_block_ != piece.block) {
      const uint32_t sum = block_checksum(block, static_cast<size_t>(piece.block_bytes));
      for (size_t i = 0; i < out_trailer_.size(); ++i)
        out_trailer_[i] = static_cast<char>(sum >> (8 * i) & 0xff);
      out_trailer_block_ = piece.block;
    }
    const bool in_trailer = piece.part == Piece::Part::kTrailer;
    if (!in_trailer) add(block + piece.offset, piece.rest);
    const int64_t trailer_offset = in_trailer ? piece.offset : 0;
    add(out_trailer_.data() + trailer_offset, kTrailerBytes - trailer_offset);
  }
  msghdr request{};
  request.msg_iov = pieces.data();
  request.msg_iovlen = count;
  const ssize_t sent = sendmsg(socket_.get(), &request, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent <= 0) return broken(sent < 0 ? sent : -1);
  out_.position += sent;
  if (out_.done()) out_.next();
  return Progress::kMoved;
}

char* DataLink::destination(const Piece& piece) {
  switch (piece.part) {
    case Piece::Part::kHeader:
      return in_header_.data() + piece.offset;
    case Piece::Part::kBlock:
      return static_cast<char*>(in_.message().data) + piece.block * kBlockBytes + piece.offset;
    default:
      return in_trailer_.data() + piece.offset;
  }
}

// Received bytes of the message in work, which lie where they belong.
void DataLink::advance(int64_t num_bytes) {
  while (num_bytes > 0) {
    const Piece piece = piece_at(in_.position, in_.message().num_bytes);
    const int64_t step = std::min(num_bytes, piece.rest);
    in_.position += step;
    num_bytes -= step;
    if (step < piece.rest) return;
    if (piece.part == Piece::Part::kHeader) check_header();
    if (piece.part == Piece::Part::kTrailer) check_block(piece);
  }
  if (in_.done()) in_.next();
}

bool DataLink::take_ahead() {
  const size_t before = ahead_begin_;
  while (receives() && ahead_begin_ < ahead_end_) {
    const Piece piece = piece_at(in_.position, in_.message().num_bytes);
    const size_t step = std::min(static_cast<size_t>(piece.rest), ahead_end_ - ahead_begin_);
    std::memcpy(destination(piece), ahead_.data() + ahead_begin_, step);
    ahead_begin_ += step;
    advance(static_cast<int64_t>(step));
  }
  return ahead_begin_ != before;
}

DataLink::Progress DataLink::receive() {
  const bool had_some = take_ahead();
  if (!receives()) return Progress::kMoved;
  // Nothing is left ahead. The piece in work, the checksum of a block, and room to read ahead behind
  // a header or the last block.
  const int64_t num_bytes = in_.message().num_bytes;
  Piece piece = piece_at(in_.position, num_bytes);
  std::array<iovec, 3> pieces;
  pieces[0] = {destination(piece), static_cast<size_t>(piece.rest)};
  size_t count = 1;
  int64_t own = piece.rest;
  if (piece.part == Piece::Part::kBlock) {
    pieces[count++] = {in_trailer_.data(), kTrailerBytes};
    own += kTrailerBytes;
  }
  const bool is_last = in_.position + own == tcp_wire::wire_bytes(num_bytes);
  if (piece.part == Piece::Part::kHeader || is_last) pieces[count++] = {ahead_.data(), ahead_.size()};
  msghdr request{};
  request.msg_iov = pieces.data();
  request.msg_iovlen = count;
  const ssize_t received = recvmsg(socket_.get(), &request, MSG_DONTWAIT);
  if (received <= 0) {
    const Progress progress = broken(received);
    return progress == Progress::kNone && had_some ? Progress::kMoved : progress;
  }
  ahead_begin_ = 0;
  ahead_end_ = static_cast<size_t>(std::max<int64_t>(0, received - own));
  advance(std::min<int64_t>(received, own));
  take_ahead();
  return Progress::kMoved;
}

void DataLink::check_header() {
  const auto header = tcp_wire::decode_header(in_header_);
  if (!header || header->sequence != in_.sequence) corrupt("header");
  const int64_t expected = in_.message().num_bytes;
  require<CollectiveMismatch>(header->num_bytes == static_cast<uint64_t>(expected), peer_, " sent ",
                              header->num_bytes, " bytes as its message ", in_.sequence, " to ", self_,
                              ", which expects ", expected, " bytes");
}

void DataLink::check_block(const Piece& piece) {
  const char* block = static_cast<const char*>(in_.message().data) + piece.block * kBlockBytes;
  const uint32_t expected = load_u32({in_trailer_.data(), in_trailer_.size()});
  if (block_checksum(block, static_cast<size_t>(piece.block_bytes)) != expected) corrupt("payload");
}

void DataLink::corrupt(const char* what) const {
  throw PeerLost(concat("data were changed on the way from ", peer_, " to ", self_, ": the ", what,
                        " of message ", in_.sequence,
                        " does not fit its checksum; check the network between the two hosts"));
}

}  // namespace polyreme
