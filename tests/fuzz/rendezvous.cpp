#include "comm/rendezvous.h"

#include "hostile_store.h"

// What ranks read of each other in the rendezvous: records, the size of the world, the verdict.

namespace polyreme::fuzz {
namespace {

// Any fields arrive as they were given.
void try_fields(FuzzedDataProvider& input) {
  RendezvousOptions options;
  while (input.remaining_bytes() > 0) {
    const std::string name = input.ConsumeRandomLengthString();
    options.fields[name] = input.ConsumeRandomLengthString();
  }
  HostileStore store(input);  // there is nothing left: an honest one
  const auto records = rendezvous(store, options);
  expect(records.size() == 1 && records[0].fields == options.fields, "fields arrive as they were given");
  expect(records[0].pid > 0, "and so does the pid");
}

}  // namespace

void try_input(FuzzedDataProvider& input) {
  if (input.ConsumeBool()) return try_fields(input);
  RendezvousOptions options;
  options.rank = input.ConsumeIntegralInRange(0, 3);
  options.world_size = input.ConsumeIntegralInRange(0, 4);
  options.limit = std::chrono::milliseconds(0);
  HostileStore store(input);
  try {
    const auto records = rendezvous(store, options);
    expect(records.size() == static_cast<size_t>(options.world_size), "all ranks have a record");
    require_same_field(records, "version");
  } catch (const CommError&) {
  } catch (const InvalidArgument&) {
  }
}

std::vector<std::string> seeds() {
  // Numbers from the end: the kind, rank, size; then for each call whether the input answers, or the store.
  const auto job = [](const std::string& answers, const std::string& choices) {
    return answers + std::string(choices.rbegin(), choices.rend());
  };
  const std::string record = "6:host-a3:1237:version1:14:port4:1234\\-";
  const std::string no(1, '\0'), yes(1, '\1'), one_of_two("\0\0\2", 3);
  // Calls: claim, (second claimant: rank), first, world, joined, verdict, rank/0, rank/1.
  return {job("", no + no + yes),
          job("1:a1:b\\-", yes),
          job("2 rank 1\\-+\\-" + record + record, one_of_two + no + no + yes + no + yes + yes + yes),
          job("2 rank 1\\-!two processes\\-", one_of_two + no + no + yes + no + yes),
          job("3 rank 1 (host b, pid 4)\\-+\\-", one_of_two + no + no + yes + no + yes),
          job(record, one_of_two + yes + std::string(1, '\2') + yes)};
}

}  // namespace polyreme::fuzz
