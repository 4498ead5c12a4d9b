#include "comm/tcp_store.h"

#include <exception>
#include <mutex>

#include "base/error.h"
#include "comm/net/handshake.h"
#include "comm/tcp_store/open.h"
#include "comm/tcp_store/server.h"
#include "comm/tcp_store/wire.h"

namespace polyreme {
namespace {

using store_wire::Operation;
using store_wire::Reply;
using store_wire::Request;
using store_wire::Status;
using Clock = std::chrono::steady_clock;

// After a get has run out of time: how long the store may take to confirm that.
constexpr auto kCancelLimit = std::chrono::seconds(1);
// When an error ends rank 0, the others may be about to ask what went wrong.
constexpr auto kLinger = std::chrono::seconds(1);

class Client final : public TcpStore {
 public:
  Client(const TcpStoreOptions& options, int port, std::unique_ptr<StoreServer> server)
      : timeout_(options.timeout),
        port_(port),
        where_(endpoint_text(options.host, port)),
        server_(std::move(server)),
        socket_(open_store(options, port)) {}
  ~Client() override {
    socket_ = FileDescriptor();
    if (server_ && std::uncaught_exceptions() > exceptions_at_birth_) server_->set_linger(kLinger);
  }

  void set(const std::string& key, const std::string& value) override {
    require(value.size() <= store_wire::kMaxValueBytes, "the value of store key '", key, "' has ",
            value.size(), " bytes; at most ", store_wire::kMaxValueBytes);
    call(Operation::kSet, key, value);
  }
  std::string get(const std::string& key, std::chrono::milliseconds limit) override;
  std::optional<std::string> try_get(const std::string& key) override {
    Reply reply = call(Operation::kTryGet, key, "");
    if (reply.status == Status::kMissing) return std::nullopt;
    return std::move(reply.value);
  }
  int64_t add(const std::string& key, int64_t amount) override {
    const Reply reply = call(Operation::kAdd, key, std::to_string(amount));
    require(reply.status != Status::kNotANumber, "store key '", key, "' does not hold a number that ", amount,
            " can be added to");
    if (const auto sum = store_wire::parse_number(reply.value)) return *sum;
    const std::lock_guard lock(mutex_);
    lose("it sent a malformed reply");
  }

  int port() const override { return port_; }
  std::string refusals() const override { return server_ ? server_->refusals() : ""; }
  int64_t num_refused() const override { return server_ ? server_->num_refused() : 0; }
  int64_t num_malformed() const override { return server_ ? server_->num_malformed() : 0; }

 private:
  Reply call(Operation operation, const std::string& key, const std::string& value);
  void send(const Request& request, Deadline deadline);
  std::optional<Reply> receive_reply(uint32_t id, Deadline deadline);
  [[noreturn]] void lose(const char* how);
  void check_usable(const std::string& key) const;

  std::chrono::milliseconds timeout_;
  int port_;
  std::string where_;
  std::unique_ptr<StoreServer> server_;  // on rank 0
  FileDescriptor socket_;
  int exceptions_at_birth_ = std::uncaught_exceptions();
  std::mutex mutex_;
  bool lost_ = false;
  uint32_t last_id_ = 0;
  std::string input_;
};

void Client::lose(const char* how) {
  lost_ = true;
  throw PeerLost(concat("store lost, host rank 0 at ", where_, ": ", how));
}

void Client::check_usable(const std::string& key) const {
  require(!key.empty() && key.size() <= store_wire::kMaxKeyBytes, "a store key has 1 to ",
          store_wire::kMaxKeyBytes, " bytes, got ", key.size());
  require<PeerLost>(!lost_, "store lost, host rank 0 at ", where_, ": an earlier call failed");
}

void Client::send(const Request& request, Deadline deadline) {
  switch (send_all(socket_, store_wire::encode(request), deadline)) {
    case IoResult::kDone:
      return;
    case IoResult::kClosed:
      lose("the connection was closed");
    case IoResult::kTimeout:
      lose("it does not take requests any more");
  }
}

// The reply to `id`, or nothing at the deadline. Replies to earlier requests that were given up are
// passed over.
std::optional<Reply> Client::receive_reply(uint32_t id, Deadline deadline) {
  bool malformed = false;
  while (true) {
    while (const auto payload = store_wire::take_frame(input_, malformed)) {
      auto reply = store_wire::decode_reply(*payload);
      if (!reply) lose("it sent a malformed reply");
      if (reply->id == id) return reply;
    }
    if (malformed) lose("it sent a malformed reply");
    const IoResult outcome = receive_some(socket_, input_, size_t{64} << 10, deadline);
    if (outcome == IoResult::kClosed) lose("the connection was closed");
    if (outcome == IoResult::kTimeout) return std::nullopt;
  }
}

Reply Client::call(Operation operation, const std::string& key, const std::string& value) {
  const std::lock_guard lock(mutex_);
  check_usable(key);
  const Deadline deadline = Clock::now() + timeout_;
  const uint32_t id = ++last_id_;
  send({operation, id, key, value}, deadline);
  auto reply = receive_reply(id, deadline);
  if (!reply) lose("it does not answer");
  require<CommError>(reply->status != Status::kFull, "the store at ", where_, " is full: no room for key '",
                     key, "'");
  return std::move(*reply);
}

std::string Client::get(const std::string& key, std::chrono::milliseconds limit) {
  const std::lock_guard lock(mutex_);
  check_usable(key);
  const Deadline deadline = Clock::now() + limit;
  const uint32_t id = ++last_id_;
  send({Operation::kGet, id, key, ""}, std::max(deadline, Clock::now() + kCancelLimit));
  auto reply = receive_reply(id, deadline);
  if (!reply) {
    // Ask, so that a silent store is told apart from a missing key; the key may still come first.
    const Deadline last = Clock::now() + kCancelLimit;
    send({Operation::kCancel, id, "-", ""}, last);
    reply = receive_reply(id, last);
    if (!reply) lose("it does not answer");
  }
  require<Timeout>(reply->status == Status::kOk, "store key '", key, "' did not appear within ",
                   static_cast<double>(limit.count()) / 1000, " s");
  return std::move(reply->value);
}

}  // namespace

FileDescriptor open_store(const TcpStoreOptions& options, int port) {
  const Deadline deadline = Clock::now() + options.timeout;
  FileDescriptor socket = dial(options.host, port,
                               {.limit = options.timeout,
                                .what = "no store",
                                .remedy = "; did rank 0 start, and can this host reach it?",
                                .progress = options.progress});
  // `deadline` is of the start-up; a foreign program is recognised earlier.
  greet(socket, store_wire::kProtocol, options.secret, "", "", endpoint_text(options.host, port),
        std::min(deadline, Clock::now() + options.greeting_limit));
  return socket;
}

std::unique_ptr<TcpStore> TcpStore::serve(const TcpStoreOptions& options) {
  FileDescriptor listener =
      options.listen_fd >= 0
          ? adopt_listener(options.listen_fd)
          : listen_on(options.host, options.port, "rank 0 cannot open the store",
                      "; choose another MASTER_PORT, and for MASTER_ADDR an address of this host");
  const int port = port_of(listener);
  return std::make_unique<Client>(options, port,
                                  std::make_unique<StoreServer>(std::move(listener), options.secret));
}

std::unique_ptr<TcpStore> TcpStore::connect(const TcpStoreOptions& options) {
  require(options.port >= 1 && options.port <= 65535, "the port of the store is ", options.port,
          "; expected 1 to 65535");
  return std::make_unique<Client>(options, options.port, nullptr);
}

}  // namespace polyreme
