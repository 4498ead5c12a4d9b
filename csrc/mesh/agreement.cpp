#include "mesh/agreement.h"

#include "base/hash.h"
#include "device/cpu/dry_device.h"
#include "ops/ops.h"

namespace polyreme {

Fact fact(const char* name, const std::string& text) {
  return {name, static_cast<int64_t>(text_hash(text)), text};
}

std::vector<int64_t> gather_values(Communicator& group, Stream& stream, const std::vector<int64_t>& mine) {
  const auto width = static_cast<int64_t>(mine.size());
  if (is_dry(stream.device())) {  // the other ranks are taken to be as this one
    std::vector<int64_t> same;
    for (int rank = 0; rank < group.size(); ++rank) same.insert(same.end(), mine.begin(), mine.end());
    return same;
  }
  std::vector<int64_t> all(mine.size() * static_cast<size_t>(group.size()));
  const WaitAtExit wait(stream);
  const Tensor gathered = empty(stream.device(), DType::kI64, {group.size() * width}, "facts");
  const Tensor own = gathered.slice(0, group.rank() * width, (group.rank() + 1) * width);
  copy_from_host(stream, mine.data(), own);
  group.all_gather(own, gathered, stream)->wait_on(stream);
  copy_to_host(stream, gathered, all.data());
  stream.synchronize();
  return all;
}

int64_t agree(Communicator& group, Stream& stream, const std::vector<Fact>& facts,
              const std::exception_ptr& refusal, int64_t addend, const char* axis) {
  std::vector<int64_t> mine = {addend, refusal ? 1 : 0};
  for (const Fact& each : facts) mine.push_back(each.value);
  const auto width = static_cast<int64_t>(mine.size());
  const std::vector<int64_t> all = gather_values(group, stream, mine);
  if (refusal) std::rethrow_exception(refusal);
  int64_t sum = 0;
  std::string different;
  for (int r = 0; r < group.size(); ++r) {
    const int64_t* theirs = &all[static_cast<size_t>(r * width)];
    sum += theirs[0];
    require(theirs[1] == 0, axis, " rank ", r,
            " refused this call; its own error says why. Nothing was done");
    for (size_t i = 0; i < facts.size(); ++i)
      if (theirs[i + 2] != facts[i].value)
        different += concat(different.empty() ? "" : "; ", axis, " rank ", r, " has another ", facts[i].name,
                            " (here: ", facts[i].text, ")");
  }
  require(different.empty(), "the ranks disagree: ", different, ". Give every rank the same");
  return sum;
}

}  // namespace polyreme
