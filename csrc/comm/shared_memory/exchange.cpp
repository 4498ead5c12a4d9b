#include "comm/shared_memory/exchange.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/math.h"

namespace polyreme {
namespace {

// What is copied at once out of the sender's memory: other messages move in between.
constexpr int64_t kDirectPieceBytes = 1 << 20;

}  // namespace

// The messages of one exchange in one direction of one pair; the first that is not done is in hand.
class Exchange::Flow {
 public:
  Flow(SharedGroup& group, const CallMemory::Part& first, Progress& progress)
      : group_(group),
        sends_(first.kind == Transfer::Kind::kSend),
        peer_(first.peer),
        channel_(sends_ ? group.channel(group.rank(), peer_) : group.channel(peer_, group.rank())),
        mine_(sends_ ? channel_.sender : channel_.receiver),
        theirs_(sends_ ? channel_.receiver : channel_.sender),
        progress_(progress) {}

  void add(const CallMemory::Part& part) { parts_.push_back(&part); }
  bool is(Transfer::Kind kind, int peer) const {
    return sends_ == (kind == Transfer::Kind::kSend) && peer_ == peer;
  }
  int peer() const { return peer_; }
  bool done() const { return next_ == parts_.size(); }

  // Does what can be done now; whether that was anything. `free_lanes` are this rank's.
  bool advance(std::vector<int>& free_lanes) {
    bool any = false;
    while (!done() && step(free_lanes)) any = true;
    return any;
  }

 private:
  enum class Stage { kAnnounce, kCompare, kMove };

  bool step(std::vector<int>& free_lanes) {
    switch (stage_) {
      case Stage::kAnnounce:
        return announce();
      case Stage::kCompare:
        return compare();
      default:
        return sends_ ? fill(free_lanes) : drain();
    }
  }

  bool announce() {
    const CallMemory::Part& part = *parts_[next_];
    const uint64_t number = ++progress_.messages;
    const int64_t num_bytes = part.count * static_cast<int64_t>(dtype_size(part.dtype));
    const PeerMemory* memory = sends_ && num_bytes > 0 ? group_.peer_memory() : nullptr;
    mine_.record[number % 2] = {part.count, part.dtype, memory ? memory->publish(part.data, num_bytes) : 0};
    mine_.announced.store(number, std::memory_order_release);
    group_.ring(peer_);
    stage_ = Stage::kCompare;
    return true;
  }

  bool compare() {
    const uint64_t number = progress_.messages;
    const uint64_t theirs = theirs_.announced.load(std::memory_order_acquire);
    if (theirs < number) return false;
    const CallMemory::Part& part = *parts_[next_];
    const Channel::Record& record = theirs_.record[number % 2];
    // A peer that is further has compared already.
    if (theirs == number && (record.count != part.count || record.dtype != part.dtype))
      mismatch(part, record);
    num_bytes_ = part.count * static_cast<int64_t>(dtype_size(part.dtype));
    moved_ = drained_ = 0;
    first_piece_ = progress_.pieces;
    handle_ = sends_ ? mine_.record[number % 2].handle : record.handle;
    piece_bytes_ = handle_ != 0 ? kDirectPieceBytes : group_.piece_bytes();
    progress_.pieces += static_cast<uint64_t>(ceil_div(num_bytes_, piece_bytes_));
    stage_ = Stage::kMove;
    if (num_bytes_ == 0) end_message();
    return true;
  }

  // The sender's side: fills a slot that is free, or finds that all is drained.
  bool fill(std::vector<int>& free_lanes) {
    const uint64_t drained = theirs_.pieces.load(std::memory_order_acquire) - first_piece_;
    const bool news = drained != drained_;
    drained_ = drained;
    if (first_piece_ + drained == progress_.pieces) {
      if (lane_ >= 0) free_lanes.push_back(std::exchange(lane_, -1));
      end_message();
      return true;
    }
    if (moved_ == num_bytes_ || handle_ != 0) return news;
    if (lane_ < 0) {
      if (free_lanes.empty()) return false;
      lane_ = free_lanes.back();
      free_lanes.pop_back();
      mine_.lane.store(lane_, std::memory_order_relaxed);
    }
    const uint64_t piece = moved_pieces();
    if (piece - drained >= kNumSlots) return news;
    const int64_t length = std::min(piece_bytes_, num_bytes_ - moved_);
    std::memcpy(group_.lane(group_.rank(), lane_, static_cast<int>(piece % kNumSlots)),
                static_cast<const char*>(parts_[next_]->data) + moved_, static_cast<size_t>(length));
    moved_ += length;
    mine_.pieces.store(first_piece_ + piece + 1, std::memory_order_release);
    group_.ring(peer_);
    return true;
  }

  // The receiver's side: empties a slot that is full, or takes a piece out of the sender's memory.
  bool drain() {
    const uint64_t piece = moved_pieces();
    if (handle_ == 0 && theirs_.pieces.load(std::memory_order_acquire) <= first_piece_ + piece) return false;
    const int64_t length = std::min(piece_bytes_, num_bytes_ - moved_);
    char* to = static_cast<char*>(parts_[next_]->data) + moved_;
    if (handle_ != 0) {
      const SharedGroup::Reading reading(group_);
      std::memcpy(to, group_.peer_memory()->find(peer_, handle_, num_bytes_) + moved_,
                  static_cast<size_t>(length));
    } else {
      const int lane = theirs_.lane.load(std::memory_order_relaxed);
      std::memcpy(to, group_.lane(peer_, lane, static_cast<int>(piece % kNumSlots)),
                  static_cast<size_t>(length));
    }
    moved_ += length;
    mine_.pieces.store(first_piece_ + piece + 1, std::memory_order_release);
    if (handle_ == 0 || moved_ == num_bytes_) group_.ring(peer_);
    if (moved_ == num_bytes_) end_message();
    return true;
  }

  uint64_t moved_pieces() const { return static_cast<uint64_t>(ceil_div(moved_, piece_bytes_)); }

  void end_message() {
    ++next_;
    stage_ = Stage::kAnnounce;
  }

  [[noreturn]] void mismatch(const CallMemory::Part& part, const Channel::Record& record) {
    const Channel::Record own{part.count, part.dtype, 0};
    const Channel::Record& sent = sends_ ? own : record;
    const Channel::Record& wanted = sends_ ? record : own;
    const int from = sends_ ? group_.rank() : peer_, to = sends_ ? peer_ : group_.rank();
    group_.fail_and_throw(
        FailureKind::kMismatch,
        concat("message ", progress_.messages, " from rank ", from, " to rank ", to, ": rank ", from,
               " sends ", dtype_name(sent.dtype), "[", sent.count, "], rank ", to, " receives ",
               dtype_name(wanted.dtype), "[", wanted.count, "]"));
  }

  SharedGroup& group_;
  const bool sends_;
  const int peer_;
  Channel& channel_;
  Channel::Side& mine_;
  const Channel::Side& theirs_;
  Progress& progress_;
  std::vector<const CallMemory::Part*> parts_;
  size_t next_ = 0;

  // Of the message in hand.
  Stage stage_ = Stage::kAnnounce;
  int64_t num_bytes_ = 0;
  int64_t moved_ = 0;
  int64_t piece_bytes_ = 1;
  uint64_t handle_ = 0;  // of the sender's memory; 0: the message is staged
  uint64_t first_piece_ = 0;
  uint64_t drained_ = 0;  // pieces that the sender knows to be drained
  int lane_ = -1;
};

// All of one exchange.
class Exchange::Flows final : public Awaited {
 public:
  Flows() {
    for (int lane = 0; lane < kNumLanes; ++lane) free_lanes_.push_back(lane);
  }
  void add(Exchange& exchange, const CallMemory::Part& part) {
    const auto found = std::find_if(flows_.begin(), flows_.end(),
                                    [&](const Flow& flow) { return flow.is(part.kind, part.peer); });
    if (found != flows_.end()) return found->add(part);
    std::vector<Progress>& lines = part.kind == Transfer::Kind::kSend ? exchange.sent_ : exchange.received_;
    flows_.emplace_back(exchange.group_, part, lines[static_cast<size_t>(part.peer)]);
    flows_.back().add(part);
  }

  Outcome poll() override {
    bool any = false;
    for (Flow& flow : flows_) any = flow.advance(free_lanes_) || any;
    if (std::all_of(flows_.begin(), flows_.end(), [](const Flow& flow) { return flow.done(); }))
      return Outcome::kDone;
    return any ? Outcome::kProgress : Outcome::kNothing;
  }
  std::vector<int> missing() override {
    poll();
    std::vector<int> ranks;
    for (const Flow& flow : flows_)
      if (!flow.done()) ranks.push_back(flow.peer());
    std::sort(ranks.begin(), ranks.end());
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
    return ranks;
  }

 private:
  std::vector<Flow> flows_;
  std::vector<int> free_lanes_;
};

void Exchange::run(std::span<const CallMemory::Part> parts) {
  Flows flows;
  for (const CallMemory::Part& part : parts) flows.add(*this, part);
  group_.await_channels(flows);
}

}  // namespace polyreme
