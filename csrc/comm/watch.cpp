#include "comm/watch.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "comm/tcp_store/open.h"
#include "comm/tcp_store/roll.h"
#include "comm/tcp_store/wire.h"

namespace polyreme {
namespace {

using std::chrono::duration_cast;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using store_wire::Operation;
using store_wire::Reply;
using store_wire::Status;
using Clock = std::chrono::steady_clock;

constexpr size_t kMaxReportBytes = size_t{4} << 10;
constexpr auto kGoodbyeLimit = std::chrono::seconds(1);
// The process of rank 0 is given this time to end, for the text, after its connection was closed.
constexpr auto kTimeToEnd = milliseconds(200);
// Whoever started the ranks should find the cause before its consequences: after another rank's failure this
// one ends no earlier than this.
constexpr auto kCulpritsTimeToEnd = milliseconds(300);

// Wakes one thread that waits for it. Not a condition variable: to destroy one in a forked child, where its
// waiters do not exist, blocks.
class Alarm {
 public:
  Alarm() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    require<CommError>(static_cast<bool>(fd_), "eventfd: ", std::strerror(errno));
  }
  void ring() const {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = write(fd_.get(), &one, sizeof(one));
  }
  // Until it rings, `socket` (or -1) has input, or `limit` has passed.
  void wait(int socket, nanoseconds limit) const {
    pollfd entries[] = {{socket, POLLIN, 0}, {fd_.get(), POLLIN, 0}};
    const auto left = std::chrono::ceil<milliseconds>(limit).count();
    poll(entries, 2, static_cast<int>(std::clamp<int64_t>(left, 0, 1'000'000)));
    uint64_t rings = 0;
    [[maybe_unused]] const ssize_t n = read(fd_.get(), &rings, sizeof(rings));
  }

 private:
  FileDescriptor fd_;
};

}  // namespace

// The watch's own connection to the store. Belongs to the watch's thread, but for the alarms.
class Watch::Connection {
 public:
  enum class Input { kNone, kReply, kClosed };

  explicit Connection(const WatchOptions& options) : socket_(open_store(options.store, options.store.port)) {
    const Watched self = this_watched(options.heartbeat_interval, options.peer_timeout);
    const Deadline deadline = Clock::now() + options.store.timeout;
    Reply reply;
    Input input = Input::kClosed;
    if (send(Operation::kJoin, std::to_string(options.rank), encode(self)))
      while ((input = take(reply)) == Input::kNone && Clock::now() < deadline) wait(milliseconds(100));
    const auto store = input == Input::kReply ? decode_watched(reply.value) : std::nullopt;
    require<CommError>(store.has_value(), "the store at ", options.store.host, ":", options.store.port,
                       " does not watch rank ", options.rank, "; is another process of this rank there?");
    store_process_ = *store;
    where_ = concat(options.store.host, ":", options.store.port);
  }

  // Until something came, or `wake` rings.
  void wait(nanoseconds limit) { wake.wait(socket_.get(), limit); }
  // The next reply, without waiting.
  Input take(Reply& reply) {
    bool malformed = false;
    while (true) {
      if (const auto payload = store_wire::take_frame(input_, malformed)) {
        auto decoded = store_wire::decode_reply(*payload);
        if (!decoded) return Input::kClosed;
        reply = std::move(*decoded);
        return Input::kReply;
      }
      if (malformed) return Input::kClosed;
      const IoResult result = receive_some(socket_, input_, size_t{64} << 10, Clock::now());
      if (result == IoResult::kTimeout) return Input::kNone;
      if (result == IoResult::kClosed) return Input::kClosed;
    }
  }
  // False if the connection is closed.
  bool send(Operation operation, const std::string& key, const std::string& value) {
    const Deadline deadline = Clock::now() + kGoodbyeLimit;
    return send_all(socket_, store_wire::encode({operation, ++last_id_, key, value}), deadline) ==
           IoResult::kDone;
  }
  void close() { socket_ = FileDescriptor(); }

  std::string store_text() const { return concat("the store of ", watched_text(0, store_process_)); }
  std::string lost_text(const std::string& how) const {
    return concat("lost the store, host of ", watched_text(0, store_process_), ", at ", where_, ": ", how,
                  state_text(store_process_));
  }

  Alarm wake;     // of the watch's thread
  Alarm is_over;  // of the checker

 private:
  FileDescriptor socket_;
  Watched store_process_;
  std::string where_, input_;
  uint32_t last_id_ = 0;
};

Watch::Watch(WatchOptions options)
    : options_(std::move(options)),
      self_text_(
          watched_text(options_.rank, this_watched(options_.heartbeat_interval, options_.peer_timeout))),
      owner_pid_(getpid()) {
  require(options_.heartbeat_interval.count() > 0 && options_.peer_timeout >= 2 * options_.heartbeat_interval,
          "heartbeat interval ", seconds_text(options_.heartbeat_interval), " and peer timeout ",
          seconds_text(options_.peer_timeout), ": expected a timeout of at least two intervals");
  connection_ = std::make_unique<Connection>(options_);
  thread_ = std::thread([this] { run(); });
  try {
    checker_ = std::thread([this] { check_thread(); });
  } catch (...) {
    end_thread();
    throw;
  }
}

void Watch::end_thread() {
  enter(Phase::kLeaving);
  connection_->wake.ring();
  thread_.join();
}

Watch::~Watch() {
  if (getpid() != owner_pid_) {  // a forked child has no such threads
    thread_.detach();
    checker_.detach();
    return;
  }
  end_thread();
  checker_.join();
  if (!failure_.empty() && failure_ != report_)
    std::this_thread::sleep_until(failed_at_ + kCulpritsTimeToEnd);
}

void Watch::report(const std::string& text) noexcept try {
  if (getpid() != owner_pid_) return;
  std::unique_lock lock(mutex_);
  if (phase_ != Phase::kWatching || !report_.empty()) return;
  report_ = text.substr(0, kMaxReportBytes);
  connection_->wake.ring();
  over_.wait_for(lock, kGoodbyeLimit, [this] { return phase_ != Phase::kWatching; });
} catch (const std::exception&) {  // out of memory: the others will miss this rank
}

std::string Watch::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

// False if the watch was not watching any more.
bool Watch::enter(Phase phase) {
  {
    const std::lock_guard lock(mutex_);
    if (phase_ != Phase::kWatching) return false;
    phase_ = phase;
  }
  over_.notify_all();
  connection_->is_over.ring();
  return true;
}

void Watch::fail(const std::string& text) {
  {
    const std::lock_guard lock(mutex_);
    if (phase_ != Phase::kWatching || !failure_.empty()) return;
    failure_ = text;
    failed_at_ = Clock::now();
  }
  if (options_.journal) options_.journal->note(JournalEvent::kFailure, text);
  if (options_.on_failure) options_.on_failure(text);
  enter(Phase::kOver);
}

void Watch::note_stall(const std::string& text, nanoseconds silent) {
  num_stalls_.fetch_add(1, std::memory_order_relaxed);
  if (options_.journal) options_.journal->note(JournalEvent::kStall, text, silent.count());
}

void Watch::run() try {
  AwakeClock awake;
  beaten_ = -options_.heartbeat_interval;
  while (true) {
    if (frozen_.load()) {
      connection_->wake.wait(-1, milliseconds(20));
      const std::lock_guard lock(mutex_);
      if (phase_ != Phase::kWatching) return;
      continue;
    }
    const nanoseconds now = awake.advance(options_.heartbeat_interval * 3 / 2);
    num_rounds_.fetch_add(1, std::memory_order_relaxed);
    if (options_.journal) options_.journal->set_heard();
    if (!take_replies(now) || !speak(now)) return;
    connection_->wait(options_.heartbeat_interval - (now - beaten_));
  }
} catch (const std::exception&) {  // out of memory: check_thread finds that nothing runs any more
}

bool Watch::take_replies(nanoseconds now) {
  Reply reply;
  while (true) {
    const Connection::Input input = connection_->take(reply);
    if (input == Connection::Input::kNone) return true;
    if (input == Connection::Input::kClosed) {
      std::this_thread::sleep_for(kTimeToEnd);
      fail(connection_->lost_text("the connection was closed"));
      return false;
    }
    if (reply.status == Status::kFailed) fail(reply.value);
    if (reply.status == Status::kEnded) {
      enter(Phase::kOver);
      connection_->close();  // the store waits for it
    }
    if (reply.status == Status::kFailed || reply.status == Status::kEnded) return false;
    const milliseconds unheard(
        reply.status == Status::kStalled ? store_wire::parse_number(reply.value).value_or(0) : 0);
    const nanoseconds unanswered = now - std::exchange(heard_, now);
    if (unheard.count() > 0)
      note_stall(concat(self_text_, " was not heard for ", seconds_text(unheard)), unheard);
    if (unanswered > 2 * options_.heartbeat_interval && unheard.count() == 0)
      note_stall(concat(connection_->store_text(), " did not answer for ",
                        seconds_text(duration_cast<milliseconds>(unanswered))),
                 unanswered);
  }
}

bool Watch::speak(nanoseconds now) {
  bool leaves = false;
  std::string report;
  {
    const std::lock_guard lock(mutex_);
    leaves = phase_ != Phase::kWatching;
    if (!std::exchange(reported_, !report_.empty())) report = report_;
  }
  if (leaves) {
    connection_->send(Operation::kLeave, "", "");
    return false;
  }
  if (!report.empty()) connection_->send(Operation::kReport, "", report);
  if (now - beaten_ >= options_.heartbeat_interval) {
    connection_->send(Operation::kBeat, "", "");  // a closed connection is noticed when reading
    beaten_ = now;
  }
  if (now - heard_ < options_.peer_timeout) return true;
  fail(connection_->lost_text(concat("no answer for ", seconds_text(options_.peer_timeout))));
  return false;
}

// The thread makes a round in every interval, of which a timeout has at least two: so in every second quarter
// of a timeout. A process that was stopped is no matter: this thread was stopped as well.
void Watch::check_thread() try {
  const auto quarter = options_.peer_timeout / 4;
  uint64_t seen = 0;
  for (int same = 0; same < 7;) {
    connection_->is_over.wait(-1, quarter);
    {
      const std::lock_guard lock(mutex_);
      if (phase_ != Phase::kWatching) return;
    }
    const uint64_t rounds = num_rounds_.load(std::memory_order_relaxed);
    same = rounds == std::exchange(seen, rounds) ? same + 1 : 0;
  }
  fail(concat(self_text_, ": its own watch has not run for ", seconds_text(7 * quarter)));
} catch (const std::exception&) {  // out of memory: the others notice that this rank is silent
}

}  // namespace polyreme
