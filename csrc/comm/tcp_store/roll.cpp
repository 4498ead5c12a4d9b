#include "comm/tcp_store/roll.h"

#include <sstream>
#include <utility>

#include "base/error.h"

namespace polyreme {
namespace {

using std::chrono::duration_cast;
using std::chrono::milliseconds;

constexpr auto kTimeToEnd = milliseconds(200);
constexpr size_t kMaxWordBytes = 256;

}  // namespace

Watched this_watched(milliseconds heartbeat_interval, milliseconds peer_timeout) {
  return {this_process(), boot_id(), host_name(), heartbeat_interval, peer_timeout};
}

std::string encode(const Watched& watched) {
  const auto word = [](const std::string& text) { return text.empty() ? "-" : text; };
  return concat(watched.heartbeat_interval.count(), " ", watched.peer_timeout.count(), " ",
                watched.process.pid, " ", watched.process.start_ticks, " ", watched.process.pid_namespace,
                " ", word(watched.boot_id), " ", word(watched.host));
}

std::optional<Watched> decode_watched(std::string_view text) {
  if (text.size() > 3 * kMaxWordBytes) return std::nullopt;
  std::istringstream words{std::string(text)};
  Watched watched;
  int64_t interval = 0, timeout = 0;
  words >> interval >> timeout >> watched.process.pid >> watched.process.start_ticks >>
      watched.process.pid_namespace >> watched.boot_id >> watched.host;
  constexpr int64_t kMostMs = int64_t{1} << 40;
  const bool valid = !words.fail() && interval > 0 && interval < kMostMs && timeout > 0 &&
                     timeout < kMostMs && watched.boot_id.size() <= kMaxWordBytes &&
                     watched.host.size() <= kMaxWordBytes;
  if (!valid) return std::nullopt;
  watched.heartbeat_interval = milliseconds(interval);
  watched.peer_timeout = milliseconds(timeout);
  return watched;
}

std::string watched_text(int rank, const Watched& watched) {
  return concat("rank ", rank, " (host ", watched.host, ", pid ", watched.process.pid, ")");
}

std::string seconds_text(milliseconds time) {
  return concat(std::chrono::duration<double>(time).count(), " s");
}

std::string state_text(const Watched& watched) {
  if (watched.boot_id != boot_id()) return "";
  switch (process_state(watched.process, this_process())) {
    case 'T':
    case 't':
      return "; the process is stopped";
    case 'D':
      return "; the process waits for a disk or a device";
    case 'Z':
    case 'X':
      return "; the process has ended";
    case '?':
      return "";
    default:
      return "; the process is alive";
  }
}

bool Roll::join(int rank, const Watched& watched, Time now) {
  return ranks_.emplace(rank, Entry{watched, now, std::nullopt}).second;
}

milliseconds Roll::beat(int rank, Time now) {
  const auto found = ranks_.find(rank);
  if (found == ranks_.end()) return milliseconds(0);
  const Time silent = now - std::exchange(found->second.heard, now);
  const bool stalled = silent > 2 * found->second.watched.heartbeat_interval;
  return stalled ? duration_cast<milliseconds>(silent) : milliseconds(0);
}

void Roll::close(int rank, Time now) {
  const auto found = ranks_.find(rank);
  if (found != ranks_.end()) found->second.closed = now;
}

void Roll::look(Time now) {
  if (!failure_.empty()) return;
  std::string text;
  for (const auto& [rank, entry] : ranks_) {
    const bool closed = entry.closed && now - *entry.closed >= kTimeToEnd;
    if (!closed && now - entry.heard <= entry.watched.peer_timeout) continue;
    text += concat(text.empty() ? "lost " : "; ", watched_text(rank, entry.watched), ": ");
    if (closed) {
      text += "its connection to the store was closed";
    } else {
      text += concat("no heartbeat for ", seconds_text(entry.watched.peer_timeout));
    }
    text += state_text(entry.watched);
  }
  fail(text);
}

}  // namespace polyreme
