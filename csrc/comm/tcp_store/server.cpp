#include "comm/tcp_store/server.h"

#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace polyreme {
namespace {

using store_wire::Operation;
using store_wire::Request;
using store_wire::Status;
using Clock = std::chrono::steady_clock;

// A stranger costs at most a greeting's bytes for this long, and there are at most so many of them.
constexpr auto kGreetingLimit = std::chrono::seconds(10);
constexpr int kMaxStrangers = 1024;
constexpr size_t kMaxStoredBytes = size_t{256} << 20;
// Answers that a client does not fetch.
constexpr size_t kMaxOutputBytes = 2 * store_wire::kMaxFrameBytes;
constexpr size_t kReceiveBytes = size_t{64} << 10;
// How often the watched ranks are looked after, and how long their watches have to go when the store ends.
constexpr auto kLookInterval = std::chrono::milliseconds(100);
constexpr auto kWatchesGoLimit = std::chrono::milliseconds(300);

}  // namespace

StoreServer::StoreServer(FileDescriptor listener, std::string secret)
    : listener_(std::move(listener)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      secret_(std::move(secret)),
      owner_pid_(getpid()) {
  require<CommError>(static_cast<bool>(wake_), "eventfd: ", std::strerror(errno));
  thread_ = std::thread([this] { serve(); });
}

StoreServer::~StoreServer() {
  if (getpid() != owner_pid_) {  // a forked child has no such thread
    thread_.detach();
    return;
  }
  ending_.store(true);
  wake();
  const Deadline now = Clock::now();
  const auto wait_while = [](Deadline last, const auto& condition) {
    while (condition() && Clock::now() < last) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  };
  wait_while(now + kWatchesGoLimit, [this] { return num_watches_.load() > 0 && !told_failure_.load(); });
  wait_while(now + linger_, [this] { return num_admitted_.load() > 0; });
  stopping_.store(true);
  wake();
  thread_.join();
}

void StoreServer::wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof(one));
}

void StoreServer::serve() {
  std::vector<pollfd> polled;
  std::vector<Connection*> owners;
  while (!stopping_.load()) {
    try {
      serve_round(polled, owners);
    } catch (const std::exception&) {  // out of memory: what is there goes on, newcomers wait
      accept_again_ = Clock::now() + std::chrono::milliseconds(200);
    }
  }
}

void StoreServer::serve_round(std::vector<pollfd>& polled, std::vector<Connection*>& owners) {
  const bool accepts = Clock::now() >= accept_again_ && num_strangers_ < kMaxStrangers;
  polled.assign({{wake_.get(), POLLIN, 0}, {accepts ? listener_.get() : -1, POLLIN, 0}});
  owners.clear();
  for (Connection& connection : connections_) {
    const auto events = static_cast<short>(POLLIN | (connection.output.empty() ? 0 : POLLOUT));
    polled.push_back({connection.socket.get(), events, 0});
    owners.push_back(&connection);
  }
  // Greetings that take too long, accepting after a shortage, and watches need no better clock than this.
  const bool timed = num_strangers_ > 0 || !accepts || !roll_.empty();
  if (poll(polled.data(), polled.size(), timed ? kLookInterval.count() : -1) < 0) return;  // EINTR
  awake_.advance(5 * kLookInterval);
  uint64_t wakes = 0;
  if (polled[0].revents != 0) [[maybe_unused]]
    const ssize_t n = read(wake_.get(), &wakes, sizeof(wakes));
  for (size_t i = 0; i < owners.size(); ++i) {
    const short ready = polled[i + 2].revents;
    if ((ready & POLLOUT) != 0) flush(*owners[i]);
    if ((ready & ~POLLOUT) != 0 && !owners[i]->doomed) receive(*owners[i]);
  }
  if (polled[1].revents != 0) accept_all();
  look_after_watches();
  const Deadline now = Clock::now();
  std::erase_if(connections_, [&](const Connection& connection) {
    const bool stranger = !connection.admitted();
    const bool gone = connection.doomed || (stranger && now >= connection.greeting_deadline);
    if (gone && stranger) --num_strangers_;
    if (gone && !stranger) num_admitted_.fetch_sub(1);
    if (gone && connection.watched_rank >= 0) {
      num_watches_.fetch_sub(1);
      roll_.close(connection.watched_rank, awake_.now());
    }
    return gone;
  });
}

void StoreServer::accept_all() {
  while (num_strangers_ < kMaxStrangers) {
    FileDescriptor socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      // Out of file descriptors: the request stays in the queue, so look again later, not at once.
      if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS)
        accept_again_ = Clock::now() + std::chrono::milliseconds(200);
      if (errno != ECONNABORTED && errno != EINTR) return;
      continue;
    }
    set_connection_options(socket);
    Connection& connection = connections_.emplace_back();
    connection.socket = std::move(socket);
    connection.greeting_deadline = Clock::now() + kGreetingLimit;
    ++num_strangers_;
  }
}

void StoreServer::receive(Connection& connection) {
  const bool stranger = !connection.admitted();
  std::string& input = connection.input;
  const size_t before = input.size();
  // A stranger gets no more room than its greeting takes.
  const size_t most = stranger ? connection.handshake.wanted() : kReceiveBytes;
  input.resize(before + most);
  const ssize_t received = recv(connection.socket.get(), input.data() + before, most, 0);
  const int error = errno;
  input.resize(before + static_cast<size_t>(std::max<ssize_t>(received, 0)));
  if (received > 0) {
    if (stranger) return greet(connection, std::exchange(input, {}));
    take_requests(connection);
  } else if (received == 0 || (error != EAGAIN && error != EWOULDBLOCK && error != EINTR)) {
    connection.doomed = true;
  }
}

void StoreServer::greet(Connection& connection, std::string_view bytes) {
  connection.output += connection.handshake.take(bytes, secret_, "");
  if (connection.admitted()) {
    --num_strangers_;
    num_admitted_.fetch_add(1);
  }
  flush(connection);
  if (connection.handshake.stage() == ServerHandshake::Stage::kMalformed) drop_malformed(connection);
  if (connection.handshake.stage() != ServerHandshake::Stage::kRefused) return;
  {
    const std::lock_guard lock(last_refused_mutex_);
    last_refused_ = peer_of(connection.socket);
  }
  num_refused_.fetch_add(1, std::memory_order_relaxed);
  connection.doomed = true;
}

std::string StoreServer::refusals() const {
  const int64_t num = num_refused();
  if (num == 0) return "";
  const std::lock_guard lock(last_refused_mutex_);
  return concat("refused ", num, num == 1 ? " connection that does" : " connections that do",
                " not know the secret of this job, the last from ", last_refused_);
}

void StoreServer::take_requests(Connection& connection) {
  bool malformed = false;
  while (!connection.doomed) {
    const auto payload = store_wire::take_frame(connection.input, malformed);
    if (malformed) return drop_malformed(connection);
    if (!payload) return;
    const auto request = store_wire::decode_request(*payload);
    if (!request) return drop_malformed(connection);
    answer(connection, *request);
  }
}

void StoreServer::answer(Connection& connection, const Request& request) {
  const auto found = values_.find(request.key);
  switch (request.operation) {
    case Operation::kSet:
      return reply(connection, store_value(request.key, request.value) ? Status::kOk : Status::kFull,
                   request.id, "");
    case Operation::kGet:
      if (connection.waits) return drop_malformed(connection);
      if (found != values_.end()) return reply(connection, Status::kOk, request.id, found->second);
      connection.waits = true;
      connection.wanted = request.key;
      connection.wanted_id = request.id;
      return;
    case Operation::kTryGet:
      if (found == values_.end()) return reply(connection, Status::kMissing, request.id, "");
      return reply(connection, Status::kOk, request.id, found->second);
    case Operation::kAdd: {
      const auto amount = store_wire::parse_number(request.value);
      const auto old =
          found == values_.end() ? std::optional<int64_t>(0) : store_wire::parse_number(found->second);
      int64_t sum = 0;
      if (!amount || !old || __builtin_add_overflow(*old, *amount, &sum))
        return reply(connection, Status::kNotANumber, request.id, "");
      const std::string text = std::to_string(sum);
      return reply(connection, store_value(request.key, text) ? Status::kOk : Status::kFull, request.id,
                   text);
    }
    case Operation::kCancel:
      if (!connection.waits || connection.wanted_id != request.id) return;  // the answer is on its way
      connection.waits = false;
      return reply(connection, Status::kCancelled, request.id, "");
    default:
      return answer_watch(connection, request);
  }
}

void StoreServer::answer_watch(Connection& connection, const Request& request) {
  if (request.operation == Operation::kJoin) {
    const auto rank = store_wire::parse_number(request.key);
    const auto watched = decode_watched(request.value);
    const bool valid = connection.watched_rank < 0 && rank && *rank >= 0 && *rank < INT32_MAX && watched;
    if (!valid || !roll_.join(static_cast<int>(*rank), *watched, awake_.now()))
      return drop_malformed(connection);
    connection.watched_rank = static_cast<int>(*rank);
    num_watches_.fetch_add(1);
    reply(connection, Status::kOk, request.id, encode(this_watched(kLookInterval, kLookInterval)));
    if (told_failure_.load()) reply(connection, Status::kFailed, 0, roll_.failure());
    if (told_end_) reply(connection, Status::kEnded, 0, "");
    return;
  }
  const int rank = connection.watched_rank;
  if (rank < 0) return drop_malformed(connection);
  if (request.operation == Operation::kLeave) return roll_.leave(rank);
  if (request.operation == Operation::kReport) {
    roll_.fail(request.value);
    return reply(connection, Status::kFailed, request.id, roll_.failure());
  }
  const auto stalled = roll_.beat(rank, awake_.now());
  reply(connection, stalled.count() > 0 ? Status::kStalled : Status::kOk, request.id,
        std::to_string(stalled.count()));
}

void StoreServer::tell_watches(Status status, const std::string& text) {
  for (Connection& connection : connections_)
    if (connection.watched_rank >= 0 && !connection.doomed) reply(connection, status, 0, text);
}

// Once per round.
void StoreServer::look_after_watches() {
  if (awake_.now() >= next_look_) {
    roll_.look(awake_.now());
    next_look_ = awake_.now() + kLookInterval / 2;
  }
  if (!roll_.failure().empty() && !told_failure_.exchange(true))
    tell_watches(Status::kFailed, roll_.failure());
  if (ending_.load() && !std::exchange(told_end_, true)) tell_watches(Status::kEnded, "");
}

// False if the store is full. Otherwise whoever waits for the key gets it.
bool StoreServer::store_value(const std::string& key, std::string value) {
  const auto found = values_.find(key);
  const size_t old_bytes = found == values_.end() ? 0 : key.size() + found->second.size();
  const size_t new_bytes = stored_bytes_ - old_bytes + key.size() + value.size();
  if (new_bytes > kMaxStoredBytes) return false;
  stored_bytes_ = new_bytes;
  const std::string& stored = values_[key] = std::move(value);
  for (Connection& connection : connections_) {
    if (!connection.waits || connection.wanted != key) continue;
    connection.waits = false;
    reply(connection, Status::kOk, connection.wanted_id, stored);
  }
  return true;
}

void StoreServer::reply(Connection& connection, Status status, uint32_t id, const std::string& value) {
  connection.output += store_wire::encode(store_wire::Reply{status, id, value});
  flush(connection);
  if (connection.output.size() > kMaxOutputBytes) drop_malformed(connection);
}

void StoreServer::flush(Connection& connection) {
  while (!connection.output.empty() && !connection.doomed) {
    const ssize_t sent =
        send(connection.socket.get(), connection.output.data(), connection.output.size(), MSG_NOSIGNAL);
    if (sent > 0) {
      connection.output.erase(0, static_cast<size_t>(sent));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return;
    } else if (errno != EINTR) {
      connection.doomed = true;
    }
  }
}

void StoreServer::drop_malformed(Connection& connection) {
  num_malformed_.fetch_add(1, std::memory_order_relaxed);
  connection.doomed = true;
}

}  // namespace polyreme
