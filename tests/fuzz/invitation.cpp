#include <unistd.h>

#include "comm/factory.h"
#include "comm/shared_memory/process.h"
#include "hostile_store.h"

// The invitation of rank 0 to a group over shared memory, which names host and segment.

namespace polyreme::fuzz {
namespace {

// No segment is called like this, so no invitation can be taken.
const std::string& job_id() {
  static const std::string id = concat("fuzz-", getpid());
  return id;
}

}  // namespace

void try_input(FuzzedDataProvider& input) {
  HostileStore store(input);
  try {
    make_shm_communicator(store, 1, 2, job_id(), CommOptions{});
    expect(false, "there is nobody to meet");
  } catch (const CommError&) {
  }
}

std::vector<std::string> seeds() {
  const std::string choices("\1\1\0", 3);  // from the end: the count is the store's, two gets are the input's
  const std::string ours = concat("ok ", boot_id(), " host-a ");
  return {"ok 1-2-3 host-b /polyreme-x\\-ok\\-" + choices, "error out of memory\\-" + choices,
          ours + "/polyreme-other-1\\-" + choices,
          ours + "/polyreme-" + job_id() + "-1\\-error it left\\-" + choices};
}

}  // namespace polyreme::fuzz
