#include "comm/tcp/control_links.h"
#include "sockets.h"

// Frames of a control connection: failures and departures, as ranks read them.

namespace polyreme::fuzz {
namespace {

using State = ControlLinks::State;
using tcp_wire::ControlFrame;
using tcp_wire::News;

struct Outcome {
  State state = State::kOpen;
  std::optional<std::string> failure;  // the first one, encoded
};

// As the frames say.
Outcome read_frames(std::string bytes) {
  Outcome outcome;
  bool malformed = false;
  while (true) {
    const std::string before = bytes;
    const auto frame = tcp_wire::take_control_frame(bytes, malformed);
    if (!frame) break;
    expect(encode(*frame) + bytes == before, "a frame is encoded in one way");
    expect(frame->text.size() <= tcp_wire::kMaxTextBytes, "texts are capped");
    if (frame->what == News::kLeft) outcome.state = State::kLeft;
    if (frame->what == News::kFailure && !outcome.failure) outcome.failure = encode(*frame);
  }
  if (malformed) outcome.state = State::kClosed;
  return outcome;
}

// As a rank sees it.
Outcome read_link(const std::vector<std::string_view>& pieces) {
  auto [own, peer] = make_connection();
  std::vector<FileDescriptor> sockets(2);
  sockets[1] = std::move(own);
  ControlLinks links(std::move(sockets));
  Outcome outcome;
  for (const std::string_view piece : pieces) {
    if (links.state(1) == State::kClosed) break;
    expect(send_all(peer, piece, hang_deadline()) == IoResult::kDone, "the link takes all bytes");
    const auto failure = links.read();
    if (failure && !outcome.failure) outcome.failure = encode(*failure);
  }
  outcome.state = links.state(1);
  peer = FileDescriptor();
  links.read();
  const State last = links.state(1);
  expect(last == (outcome.state == State::kLeft ? State::kLeft : State::kClosed), "the end is noticed");
  return outcome;
}

}  // namespace

void try_input(FuzzedDataProvider& input) {
  const std::string bytes = input.ConsumeRandomLengthString();
  const Outcome expected = read_frames(bytes), seen = read_link(cut(bytes, input));
  expect(expected.state == seen.state && expected.failure == seen.failure,
         "news do not depend on how they arrive");
}

std::vector<std::string> seeds() {
  const std::string failure = encode(ControlFrame{News::kFailure, FailureKind::kTimeout, "rank 2 is late"});
  const std::string left = encode(ControlFrame{News::kLeft, FailureKind::kNone, ""});
  const std::string longest =
      encode(ControlFrame{News::kFailure, FailureKind::kPeerLost, std::string(tcp_wire::kMaxTextBytes, 'x')});
  const std::string end = "\\-\x02\x08\x20";
  return {failure + end,       left + end,   failure + left + end, left + failure + failure + end,
          failure + "x" + end, longest + end};
}

}  // namespace polyreme::fuzz
