#include "comm/tcp_store/server.h"

#include <sys/un.h>

#include <cstddef>

#include "sockets.h"

// A live store: somebody who knows the secret, or not, sends what he likes; the others keep working.

namespace polyreme::fuzz {
namespace {

using store_wire::Operation;
using store_wire::Reply;
using store_wire::Request;
using store_wire::Status;

constexpr const char* kSecret = "secret";

// Unix sockets: as many connections as one likes, where TCP would run out of ports.
struct Address {
  sockaddr_un where{AF_UNIX, {}};
  socklen_t length = sizeof(where.sun_family);  // the kernel chooses a name
};

FileDescriptor make_socket() {
  return FileDescriptor(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

FileDescriptor listen_anywhere(Address& address) {
  FileDescriptor listener = make_socket();
  auto* where = reinterpret_cast<sockaddr*>(&address.where);
  expect(bind(listener.get(), where, address.length) == 0 && listen(listener.get(), 16) == 0,
         "listening works");
  address.length = sizeof(address.where);
  expect(getsockname(listener.get(), where, &address.length) == 0, "getsockname works");
  return listener;
}

FileDescriptor connect_to(const Address& address, bool knows_secret) {
  FileDescriptor connection = make_socket();
  const auto* where = reinterpret_cast<const sockaddr*>(&address.where);
  expect(connect(connection.get(), where, address.length) == 0, "the store listens");
  if (knows_secret) greet(connection, store_wire::kProtocol, kSecret, "", "", "here", hang_deadline());
  return connection;
}

class GoodClient {
 public:
  explicit GoodClient(const Address& address) : connection_(connect_to(address, true)) {}

  void send(const Request& request) {
    expect(send_all(connection_, encode(request), hang_deadline()) == IoResult::kDone,
           "the store takes requests");
  }
  // The reply to the open request.
  Reply receive(uint32_t id) {
    bool malformed = false;
    std::optional<std::string> payload;
    while (!(payload = store_wire::take_frame(input_, malformed))) {
      expect(!malformed, "replies are well-formed");
      expect(receive_some(connection_, input_, 4096, hang_deadline()) == IoResult::kDone,
             "the store answers");
    }
    const auto reply = store_wire::decode_reply(*payload);
    expect(reply && reply->id == id, "each request has one reply");
    return *reply;
  }
  Reply call(const Request& request) {
    send(request);
    return receive(request.id);
  }

 private:
  FileDescriptor connection_;
  std::string input_;
};

// Sends all and reads until the store closes the connection; returns what it said.
std::string misbehave(const FileDescriptor& connection, const std::string& bytes) {
  send_all(connection, bytes, hang_deadline());
  shutdown(connection.get(), SHUT_WR);
  std::string said;
  IoResult outcome = IoResult::kDone;
  while (outcome == IoResult::kDone) outcome = receive_some(connection, said, 4096, hang_deadline());
  expect(outcome == IoResult::kClosed, "the store closes a connection that has ended");
  return said;
}

}  // namespace

void try_input(FuzzedDataProvider& input) {
  const bool knows_secret = input.ConsumeBool();
  Address address;
  FileDescriptor listener = listen_anywhere(address);
  StoreServer server(std::move(listener), kSecret);
  GoodClient good(address);
  good.send({Operation::kGet, 1, "awaited", ""});

  std::string said = misbehave(connect_to(address, knows_secret), input.ConsumeRemainingBytesAsString());
  expect(knows_secret || said.size() <= kHelloBytes, "a stranger gets no more than a greeting");
  bool malformed = false;
  while (const auto payload = knows_secret ? store_wire::take_frame(said, malformed) : std::nullopt)
    expect(store_wire::decode_reply(*payload).has_value(), "replies are well-formed");
  expect(server.num_malformed() + server.num_refused() <= 1, "who is dropped is counted once");

  good.send({Operation::kCancel, 1, "-", ""});
  const Status status = good.receive(1).status;
  expect(status == Status::kOk || status == Status::kCancelled, "a get ends with a value or without");
  expect(good.call({Operation::kSet, 2, "key", "value"}).status == Status::kOk, "the store takes a value");
  expect(good.call({Operation::kGet, 3, "key", ""}).value == "value", "the store gives it back");
}

std::vector<std::string> seeds() {
  const std::string stranger(1, '\0'), friend_(1, '\1');
  const std::string hello = encode_hello(store_wire::kProtocol, std::string(kNonceBytes, 'n'));
  const auto request = [](Operation operation, const char* key, const char* value) {
    return encode(Request{operation, 7, key, value});
  };
  const std::string wait = request(Operation::kGet, "later", ""), add = request(Operation::kAdd, "n", "4");
  const std::string join = request(Operation::kJoin, "1", "1000 30000 123 4567 4026531836 1-2-3 host-a");
  const std::string beat = request(Operation::kBeat, "-", ""), leave = request(Operation::kLeave, "-", "");
  return {hello + stranger,
          join + beat + leave + friend_,
          join + request(Operation::kReport, "-", "out of memory") + beat + friend_,
          hello + std::string(kProofBytes, 'p') + stranger,
          request(Operation::kSet, "awaited", "x") + request(Operation::kTryGet, "awaited", "") + friend_,
          wait + request(Operation::kCancel, "-", "") + friend_,
          wait + wait + friend_,
          wait + request(Operation::kSet, "later", "1") + add + friend_,
          add + add + request(Operation::kSet, "n", "x") + add + friend_};
}

}  // namespace polyreme::fuzz
