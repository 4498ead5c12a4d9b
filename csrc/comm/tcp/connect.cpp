#include "comm/tcp/connect.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <list>

#include "base/error.h"
#include "base/interrupt.h"
#include "comm/tcp/wire.h"

namespace polyreme {
namespace {

using Clock = std::chrono::steady_clock;
using tcp_wire::Channel;

// A stranger costs a greeting's bytes for this long, and there are at most so many of them.
constexpr auto kGreetingLimit = std::chrono::seconds(10);
constexpr size_t kMaxStrangers = 256;
constexpr std::chrono::milliseconds kLookInterval{100};

std::chrono::milliseconds time_left(Deadline deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
  return std::max(left, std::chrono::milliseconds(1));
}

FileDescriptor& socket_of(LinkSockets& link, Channel channel) {
  return channel == Channel::kData ? link.data : link.control;
}

FileDescriptor dial_rank(const ConnectOptions& options, int peer, Channel channel) {
  const PeerAddress& to = options.ranks[static_cast<size_t>(peer)];
  const std::string what = concat(to.who, " does not answer");
  const std::string remedy =
      concat("; this rank is at ", options.interface.text,
             "; check that the hosts reach each other there, or name other interfaces");
  FileDescriptor socket = dial(to.address, to.port,
                               {.limit = time_left(options.deadline),
                                .insist = false,
                                .what = what.c_str(),
                                .remedy = remedy.c_str()});
  const tcp_wire::Claim claim{static_cast<uint32_t>(options.rank), static_cast<uint32_t>(peer),
                              static_cast<uint32_t>(channel)};
  try {
    // The peer may first have to wait for others.
    greet(socket, tcp_wire::kProtocol, options.secret, encode(claim), options.context,
          endpoint_text(to.address, to.port), options.deadline);
  } catch (const CommError& failure) {
    const std::string text = concat(to.who, " did not let this rank in: ", failure.what(),
                                    "; this rank is at ", options.interface.text);
    require<Timeout>(Clock::now() < options.deadline, text);
    throw CommError(text);
  }
  return socket;
}

// Waits for the higher ranks to call, and does not let others get in the way.
class Reception {
 public:
  Reception(const FileDescriptor& listener, const ConnectOptions& options, std::vector<LinkSockets>& links,
            std::atomic<int64_t>& num_refused)
      : listener_(listener), options_(options), links_(links), num_refused_(num_refused) {
    num_missing_ = 2 * (links.size() - static_cast<size_t>(options.rank) - 1);
  }

  void run() {
    while (num_missing_ > 0) {
      if (Clock::now() >= options_.deadline) time_out();
      check_interrupt();
      std::vector<pollfd> polled = {{strangers_.size() < kMaxStrangers ? listener_.get() : -1, POLLIN, 0}};
      for (const Stranger& stranger : strangers_) polled.push_back({stranger.socket.get(), POLLIN, 0});
      const auto limit = std::min(kLookInterval, time_left(options_.deadline)).count();
      poll(polled.data(), polled.size(), static_cast<int>(limit));
      if (Clock::now() >= next_look_) {
        options_.look();
        next_look_ = Clock::now() + kLookInterval;
      }
      size_t i = 1;
      for (auto stranger = strangers_.begin(); stranger != strangers_.end(); ++i)
        stranger = over(*stranger, polled[i].revents != 0) ? strangers_.erase(stranger) : std::next(stranger);
      if (polled[0].revents != 0) accept_all();
    }
  }

 private:
  struct Stranger {
    FileDescriptor socket;
    ServerHandshake handshake{tcp_wire::kProtocol};
    Deadline deadline;
  };

  void accept_all() {
    while (strangers_.size() < kMaxStrangers) {
      FileDescriptor socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket && (errno == ECONNABORTED || errno == EINTR)) continue;
      const bool no_more = !socket && (errno == EAGAIN || errno == EWOULDBLOCK);
      require<CommError>(socket || no_more, "accept at ", options_.interface.text, ": ",
                         std::strerror(errno));
      if (no_more) return;
      set_connection_options(socket);
      Stranger& stranger = strangers_.emplace_back();
      stranger.socket = std::move(socket);
      stranger.deadline = Clock::now() + kGreetingLimit;
    }
  }

  bool over(Stranger& stranger, bool readable) {
    std::string bytes;
    const Deadline now = Clock::now();
    if (readable) {
      const IoResult outcome = receive_some(stranger.socket, bytes, stranger.handshake.wanted(), now);
      if (outcome == IoResult::kClosed) return refuse();
      const std::string reply = stranger.handshake.take(bytes, options_.secret, options_.context);
      // So few bytes always find room.
      if (send_all(stranger.socket, reply, now) != IoResult::kDone) return refuse();
    }
    if (!stranger.handshake.over()) return now >= stranger.deadline && refuse();
    if (stranger.handshake.stage() != ServerHandshake::Stage::kAdmitted) return refuse();
    return admit(stranger) || refuse();
  }

  bool refuse() {
    num_refused_.fetch_add(1, std::memory_order_relaxed);
    return true;
  }

  bool admit(Stranger& stranger) {
    const tcp_wire::Claim claim = tcp_wire::decode_claim(stranger.handshake.claim());
    const bool fits = claim.to == static_cast<uint32_t>(options_.rank) && claim.from > claim.to &&
                      claim.from < links_.size() && claim.channel <= static_cast<uint32_t>(Channel::kControl);
    if (!fits) return false;
    FileDescriptor& socket = socket_of(links_[claim.from], static_cast<Channel>(claim.channel));
    if (socket) return false;
    socket = std::move(stranger.socket);
    --num_missing_;
    return true;
  }

  [[noreturn]] void time_out() const {
    std::string missing;
    for (size_t r = static_cast<size_t>(options_.rank) + 1; r < links_.size(); ++r)
      if (!links_[r].data || !links_[r].control)
        missing += concat(missing.empty() ? "" : ", ", options_.ranks[r].who);
    throw Timeout(concat("group '", options_.group,
                         "': ", options_.ranks[static_cast<size_t>(options_.rank)].who, " waited in vain at ",
                         options_.interface.text, " for the connections of ", missing, "; ",
                         num_refused_.load(), " other connections were refused; check that the hosts reach ",
                         "each other there and have the same job secret"));
  }

  const FileDescriptor& listener_;
  const ConnectOptions& options_;
  std::vector<LinkSockets>& links_;
  std::atomic<int64_t>& num_refused_;
  std::list<Stranger> strangers_;
  Deadline next_look_ = Clock::now() + kLookInterval;
  size_t num_missing_ = 0;
};

}  // namespace

std::vector<LinkSockets> connect_ranks(const FileDescriptor& listener, const ConnectOptions& options,
                                       std::atomic<int64_t>& num_refused) {
  std::vector<LinkSockets> links(options.ranks.size());
  for (int peer = 0; peer < options.rank; ++peer)
    for (const Channel channel : {Channel::kData, Channel::kControl})
      socket_of(links[static_cast<size_t>(peer)], channel) = dial_rank(options, peer, channel);
  Reception(listener, options, links, num_refused).run();
  return links;
}

}  // namespace polyreme
