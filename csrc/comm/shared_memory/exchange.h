#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "comm/shared_memory/group.h"

namespace polyreme {

// One rank's side of the messages between pairs of ranks (see Channel in layout.h).
//
// A message moves only while both its ranks are in an exchange that has it as the next one of its pair: the
// receiver has asked for it, and will drain what is filled. So a lane is never held up by a rank that does
// something else, and a few lanes, taken by turns, serve any number of messages without a deadlock.
class Exchange {
 public:
  explicit Exchange(SharedGroup& group)
      : group_(group), sent_(static_cast<size_t>(group.size())), received_(sent_) {}

  // Between SharedGroup::begin and the next call. Throws what SharedGroup::meet does; CollectiveMismatch
  // names both sides, and comes before the receiver's memory is written.
  void run(std::span<const CallMemory::Part> parts);

 private:
  struct Progress {  // over the life of the group, of one direction of a pair
    uint64_t messages = 0;
    uint64_t pieces = 0;
  };
  class Flow;
  class Flows;

  SharedGroup& group_;
  std::vector<Progress> sent_, received_;
};

}  // namespace polyreme
