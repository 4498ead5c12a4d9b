// How a group over shared memory is split. All ranks exchange their wishes as notes, then the first
// member of each new group makes the memory and tells its name, or why it could not, as a note.

#include <algorithm>
#include <cstring>
#include <map>

#include "comm/shared_memory/notes.h"
#include "comm/shared_memory/shared_transport.h"
#include "comm/split.h"

namespace polyreme {
namespace {

static_assert(sizeof(SplitWish) <= kNoteBytes);

// The memory of a new group as its first member reports it.
struct Offer {
  enum class Outcome : uint32_t { kNotFirst, kMade, kOutOfMemory, kFailed };
  Outcome outcome = Outcome::kNotFirst;
  char text[kNoteBytes - sizeof(Outcome)] = {};  // the name of the memory, or what went wrong
};
static_assert(sizeof(Offer) <= kNoteBytes);

}  // namespace

std::unique_ptr<Transport> SharedTransport::split(const CollectiveCall& call, int color, int key,
                                                  const std::string& name) {
  group_->begin(call, group_->options().timeout);
  const std::vector<SplitWish> wishes = exchange_notes(*group_, SplitWish::of(color, key, name));
  const std::map<int, std::vector<int>> members = members_by_color(wishes);
  if (const std::string conflict = name_conflict(wishes, members); !conflict.empty()) {
    group_->fail(FailureKind::kMismatch, conflict);
    group_->throw_if_failed();
  }

  const std::vector<int> mine = color < 0 ? std::vector<int>{} : members.at(color);
  const int size = static_cast<int>(mine.size());
  Offer offer;
  std::shared_ptr<SharedMemory> memory;
  if (size > 0 && mine.front() == rank()) {
    std::string text;
    try {
      memory = source_->create(static_cast<size_t>(SharedGroup::segment_bytes(size, chunk_bytes_)), &text);
      SharedGroup::format(*memory, size, chunk_bytes_);
      for (int i = 0; i < size; ++i)
        SharedGroup::introduce(*memory, i, group_->identity(mine[static_cast<size_t>(i)]));
      offer.outcome = Offer::Outcome::kMade;
    } catch (const OutOfMemory& failure) {
      offer.outcome = Offer::Outcome::kOutOfMemory;
      text = failure.what();
    } catch (const std::exception& failure) {
      offer.outcome = Offer::Outcome::kFailed;
      text = failure.what();
    }
    text.resize(std::min(text.size(), sizeof(offer.text) - 1));
    std::memcpy(offer.text, text.c_str(), text.size());
  }
  // The name is taken away again whatever happens from here on.
  const SharedName forgotten_at_the_end{source_, offer.outcome == Offer::Outcome::kMade ? offer.text : ""};

  const std::vector<Offer> offers = exchange_notes(*group_, offer);
  for (size_t r = 0; r < offers.size(); ++r) {
    const std::string text =
        concat(group_->where(), ": ", group_->who(static_cast<int>(r)), ": ", offers[r].text);
    require<OutOfMemory>(offers[r].outcome != Offer::Outcome::kOutOfMemory, text);
    require<CommError>(offers[r].outcome != Offer::Outcome::kFailed, text);
  }
  std::unique_ptr<Transport> child;
  if (size > 0) child = join_child(offers[static_cast<size_t>(mine.front())].text, mine, name);
  group_->meet();  // everybody has opened the memory before its name goes
  return child;
}

std::unique_ptr<Transport> SharedTransport::join_child(const std::string& segment_name,
                                                       const std::vector<int>& members,
                                                       const std::string& name) {
  const int size = static_cast<int>(members.size());
  const int child_rank =
      static_cast<int>(std::find(members.begin(), members.end(), rank()) - members.begin());
  auto child = std::make_shared<SharedGroup>(
      source_->attach(segment_name), child_rank, size, chunk_bytes_,
      SharedGroup::Options{
          name, group_->options().timeout, group_->oversubscribed(),
          group_->peer_memory() ? select_peers(group_->options().peer_memory, members) : nullptr});
  group_->add_subgroup(child);
  return std::make_unique<SharedTransport>(std::move(child), source_, chunk_bytes_);
}

}  // namespace polyreme
