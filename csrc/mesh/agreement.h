#pragma once

#include <exception>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace polyreme {

// Something that must be equal on all ranks. `value` is compared; `text` is for people.
struct Fact {
  const char* name;
  int64_t value;
  std::string text;
};
Fact fact(const char* name, const std::string& text);
inline Fact fact(const char* name, int64_t value) { return {name, value, std::to_string(value)}; }

// mine[i] of every rank, rank after rank; as many on each. Waits for them.
std::vector<int64_t> gather_values(Communicator& group, Stream& stream, const std::vector<int64_t>& mine);

// All ranks throw, or none: `refusal` if this rank has one, otherwise InvalidArgument naming the ranks with
// a refusal or with other facts. Returns the sum of `addend` over the ranks. Waits for them.
int64_t agree(Communicator& group, Stream& stream, const std::vector<Fact>& facts,
              const std::exception_ptr& refusal, int64_t addend = 0, const char* axis = "dp");

// Host memory that operations read or write must outlive them, also where an error ends the call.
class WaitAtExit {
 public:
  explicit WaitAtExit(Stream& stream) : stream_(stream) {}
  ~WaitAtExit() {
    try {
      stream_.synchronize();
    } catch (...) {  // the error that ends the call is the one to report
    }
  }
  WaitAtExit(const WaitAtExit&) = delete;
  WaitAtExit& operator=(const WaitAtExit&) = delete;

 private:
  Stream& stream_;
};

}  // namespace polyreme
