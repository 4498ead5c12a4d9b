// Transfers between single ranks. A tensor is an Opening, which says what it is and holds it if it is small,
// and otherwise a message with its bytes. The receiver looks at the opening before it lets the bytes into
// user memory; so what is sent to one peer goes in *waves*, one tensor for each peer and direction at a time.

#include <map>

#include "comm/messages/algorithms.h"
#include "comm/messages/slices.h"

namespace polyreme {
namespace {

using Part = CallMemory::Part;

int64_t bytes_of(const Part& part) { return part.count * static_cast<int64_t>(dtype_size(part.dtype)); }
bool is_sent(const Part& part) { return part.kind == Transfer::Kind::kSend; }

std::vector<std::vector<const Part*>> waves_of(std::span<const Part> parts) {
  std::vector<std::vector<const Part*>> waves;
  std::map<std::pair<bool, int>, size_t> next;  // by direction and peer
  for (const Part& part : parts) {
    const size_t wave = next[{is_sent(part), part.peer}]++;
    if (wave == waves.size()) waves.emplace_back();
    waves[wave].push_back(&part);
  }
  return waves;
}

CollectiveCall call_of(const CollectiveCall& call, const Part& part) {
  return {.sequence = call.sequence, .count = part.count, .op = call.op, .dtype = part.dtype};
}

void require_equal(MessageGroup& group, const CollectiveCall& call, const Part& part) {
  const Opening& opening = group.received(part.peer);
  const CollectiveCall expected = call_of(call, part);
  CollectiveCall sent = opening.call;
  sent.sequence = expected.sequence;  // numbered apart on each rank
  const bool known = opening.magic == Opening::kMagic;
  if (known && sent == expected) return;
  const auto text = [](const CollectiveCall& transfer) {
    return concat(dtype_name(transfer.dtype), "[", transfer.count, "]");
  };
  std::string sent_text = "something that is not known here";
  if (known) sent_text = sent.op == call.op ? text(sent) : "the opening of " + sent.to_string();
  group.fail_and_throw(FailureKind::kMismatch,
                       concat(group.who(part.peer), " sent ", sent_text, " where rank ", group.rank(),
                              " receives ", text(expected)));
}

void run_wave(MessageGroup& group, const CollectiveCall& call, const std::vector<const Part*>& wave) {
  Batch batch;
  for (const Part* part : wave) {
    if (is_sent(*part)) {
      Opening& opening = group.sent(part->peer);
      opening.call = call_of(call, *part);
      if (bytes_of(*part) <= Opening::kPayloadBytes) copy_bytes(opening.payload, part->data, bytes_of(*part));
      batch.send(part->peer, &opening, sizeof(Opening));
    } else {
      batch.receive(part->peer, &group.received(part->peer), sizeof(Opening));
    }
  }
  batch.run(group);
  for (const Part* part : wave) {
    if (!is_sent(*part)) require_equal(group, call, *part);
    if (bytes_of(*part) > Opening::kPayloadBytes) {
      if (is_sent(*part)) {
        batch.send(part->peer, part->data, bytes_of(*part));
      } else {
        batch.receive(part->peer, part->data, bytes_of(*part));
      }
    }
  }
  for (const Part* part : wave)
    if (!is_sent(*part) && bytes_of(*part) <= Opening::kPayloadBytes)
      copy_bytes(part->data, group.received(part->peer).payload, bytes_of(*part));
  batch.run(group);
}

}  // namespace

void run_exchange(MessageGroup& group, const CollectiveCall& call, std::span<const CallMemory::Part> parts) {
  for (const std::vector<const Part*>& wave : waves_of(parts)) run_wave(group, call, wave);
}

}  // namespace polyreme
