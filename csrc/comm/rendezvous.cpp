#include "comm/rendezvous.h"

#include <unistd.h>

#include "base/error.h"
#include "comm/collective.h"
#include "comm/net/bytes.h"
#include "comm/shared_memory/process.h"

// Keys, below the name of the rendezvous:
//   claim/<r>   how many processes said that they are rank r
//   rank/<r>    the record of rank r
//   joined      how many ranks have a record
//   world       who came first and its WORLD_SIZE; first/<..> decides who that is
//   verdict     "+" when all have joined, "<kind><text>" when it failed; written once (`judged`)

namespace polyreme {
namespace {

using Clock = std::chrono::steady_clock;
constexpr char kJoined = '+', kInvalid = '!', kTimedOut = 't';
constexpr const char* kMalformed =
    "what another rank wrote into the store is malformed; install the same polyreme on all ranks";

void append_field(std::string& to, const std::string& text) { to += concat(text.size(), ":", text); }

std::string take_field(const std::string& from, size_t& at) {
  const size_t colon = from.find(':', at);
  const auto length = parse_number(std::string_view(from).substr(at, colon - at));
  require<CommError>(colon != std::string::npos && length && *length >= 0 &&
                         static_cast<uint64_t>(*length) <= from.size() - colon - 1,
                     kMalformed);
  at = colon + 1 + static_cast<size_t>(*length);
  return from.substr(colon + 1, at - colon - 1);
}

std::string encode_record(const RankRecord& record) {
  std::string text;
  append_field(text, record.host);
  append_field(text, std::to_string(record.pid));
  for (const auto& [name, value] : record.fields) {
    append_field(text, name);
    append_field(text, value);
  }
  return text;
}

RankRecord decode_record(int rank, const std::string& text) {
  RankRecord record{.rank = rank};
  size_t at = 0;
  record.host = take_field(text, at);
  const auto pid = parse_number(take_field(text, at));
  require<CommError>(pid.has_value(), kMalformed);
  record.pid = *pid;
  while (at < text.size()) {
    const std::string name = take_field(text, at);
    record.fields[name] = take_field(text, at);
  }
  return record;
}

class Meeting {
 public:
  Meeting(Store& store, const RendezvousOptions& options)
      : store_(store), options_(options), deadline_(Clock::now() + options.limit) {
    self_ = {.rank = options.rank, .host = host_name(), .pid = getpid(), .fields = options.fields};
  }

  std::vector<RankRecord> run() {
    join();
    wait_for_verdict();
    std::vector<RankRecord> records;
    for (int r = 0; r < options_.world_size; ++r)
      records.push_back(decode_record(r, store_.get(key("rank/", r), time_left())));
    return records;
  }

 private:
  template <typename... Parts>
  std::string key(const Parts&... parts) const {
    return concat(options_.name, "/", parts...);
  }
  std::chrono::milliseconds time_left() const {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline_ - Clock::now());
    return std::max(left, std::chrono::milliseconds(1000));
  }
  std::string self_text() const {
    return concat("rank ", self_.rank, " (host ", self_.host, ", pid ", self_.pid, ")");
  }

  void judge(char kind, const std::string& text) {
    if (store_.add(key("judged"), 1) == 1) store_.set(key("verdict"), kind + text);
  }

  void join() {
    // The record comes before the claim is checked, so that a second claimant finds the first.
    const bool first_claim = store_.add(key("claim/", self_.rank), 1) == 1;
    if (!first_claim) {
      const RankRecord other = decode_record(self_.rank, store_.get(key("rank/", self_.rank), time_left()));
      return judge(kInvalid, concat("two processes have RANK=", self_.rank, ": host ", other.host, ", pid ",
                                    other.pid, ", and host ", self_.host, ", pid ", self_.pid,
                                    "; give each process its own RANK"));
    }
    store_.set(key("rank/", self_.rank), encode_record(self_));
    if (store_.add(key("first"), 1) == 1)
      store_.set(key("world"), concat(options_.world_size, " ", self_text()));
    const std::string world = store_.get(key("world"), time_left());
    const size_t blank = world.find(' ');
    if (world.substr(0, blank) != std::to_string(options_.world_size))
      return judge(kInvalid, concat("WORLD_SIZE differs: ", options_.world_size, " on ", self_text(), ", ",
                                    world.substr(0, blank), " on ", world.substr(blank + 1),
                                    "; start all ranks with the same value"));
    if (store_.add(key("joined"), 1) == options_.world_size) judge(kJoined, "");
  }

  void wait_for_verdict() {
    while (true) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline_ - Clock::now());
      const auto slice = std::min(left, options_.progress_interval);
      std::string verdict;
      try {
        verdict = store_.get(key("verdict"), std::max(slice, std::chrono::milliseconds(1)));
      } catch (const Timeout&) {
        report_or_time_out();
        continue;
      }
      return obey(verdict);
    }
  }

  void obey(const std::string& verdict) const {
    require<CommError>(!verdict.empty(), kMalformed);
    if (verdict.front() == kJoined) return;
    const std::string text = concat("rendezvous of ", self_text(), ": ", verdict.substr(1));
    if (verdict.front() == kTimedOut) throw Timeout(text);
    throw InvalidArgument(text);
  }

  void report_or_time_out() {
    std::vector<int> missing;
    for (int r = 0; r < options_.world_size; ++r)
      if (!store_.try_get(key("rank/", r))) missing.push_back(r);
    const int num_joined = options_.world_size - static_cast<int>(missing.size());
    std::string list = ranks_text(missing);
    list = list.substr(list.find(' ') + 1);
    std::string state = concat(num_joined, "/", options_.world_size, " joined, waiting for rank(s) ", list);
    if (const std::string refusals = store_.refusals(); !refusals.empty())
      state += concat("; the store ", refusals);
    if (Clock::now() >= deadline_) {
      judge(kTimedOut, concat(state, "; gave up after ", static_cast<double>(options_.limit.count()) / 1000,
                              " s. Were all ranks started, and can they reach rank 0?"));
      return obey_late();
    }
    if (options_.progress && !missing.empty()) options_.progress("rendezvous: " + state);
  }

  // At the deadline somebody has judged; the verdict is there or about to be.
  void obey_late() { obey(store_.get(key("verdict"), std::chrono::seconds(2))); }

  Store& store_;
  const RendezvousOptions& options_;
  Clock::time_point deadline_;
  RankRecord self_;
};

}  // namespace

std::vector<RankRecord> rendezvous(Store& store, const RendezvousOptions& options) {
  require(options.world_size >= 1, "WORLD_SIZE is ", options.world_size, "; expected at least 1");
  require(options.rank >= 0 && options.rank < options.world_size, "RANK is ", options.rank,
          "; expected 0 to WORLD_SIZE - 1 = ", options.world_size - 1);
  return Meeting(store, options).run();
}

void require_same_field(const std::vector<RankRecord>& records, const std::string& name) {
  std::map<std::string, std::vector<int>> ranks_of;
  for (const RankRecord& record : records) {
    const auto found = record.fields.find(name);
    ranks_of[found == record.fields.end() ? "(none)" : found->second].push_back(record.rank);
  }
  if (ranks_of.size() <= 1) return;
  std::string text;
  for (const auto& [value, ranks] : ranks_of)
    text += concat(text.empty() ? "" : "; ", ranks_text(ranks), ": ", value);
  throw InvalidArgument(concat("the ranks differ in ", name, ": ", text));
}

}  // namespace polyreme
