#include "emulator/happens_before.h"

#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "emulator/fake_gpu.h"

namespace polyreme::fake_gpu {
namespace {

constexpr size_t kPage = 4096;

struct Access {
  std::string name;
  size_t stream = 0;
  uint64_t time = 0;
};
struct Page {
  std::vector<Access> writes;  // the last one, or none
  std::vector<Access> reads;   // behind it, the last one of each stream
};

char* arena = nullptr;
size_t arena_bytes = 0;
std::map<size_t, Page> pages;

// What the handler of faults works on: fixed memory.
enum Touched : uint8_t { kNot, kRead, kWritten };
std::vector<uint8_t> touched;        // by page
std::vector<uint32_t> touched_list;  // pages, each once
size_t num_touched = 0, open_bytes = 0;
thread_local bool is_watching = false;
struct sigaction previous_action;

// An access to a closed page of a thread that runs an operation opens it. Any other fault is as it was
// before.
void on_fault(int, siginfo_t* info, void* context) {
  const auto* at = static_cast<const char*>(info->si_addr);
  if (!is_watching || at < arena || at >= arena + open_bytes) {
    sigaction(SIGSEGV, &previous_action, nullptr);  // the access is repeated, and ends there
    return;
  }
  const auto page = static_cast<size_t>(at - arena) / kPage;
  const bool writes = (static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & 2) != 0;
  if (touched[page] == kNot) touched_list[num_touched++] = static_cast<uint32_t>(page);
  touched[page] = writes ? kWritten : kRead;
  mprotect(arena + page * kPage, kPage, writes ? PROT_READ | PROT_WRITE : PROT_READ);
}

// On a stack of its own: kernels run on small ones.
struct SignalStack {
  std::vector<char> memory = std::vector<char>(size_t{64} << 10);
  stack_t before{};
  SignalStack() {
    const stack_t own{.ss_sp = memory.data(), .ss_flags = 0, .ss_size = memory.size()};
    sigaltstack(&own, &before);
  }
  ~SignalStack() { sigaltstack(&before, nullptr); }
};

bool has_seen(const Operation& operation, const Access& access) {
  return access.stream == operation.stream ||
         (access.stream < operation.clock.size() && operation.clock[access.stream] >= access.time);
}

void check(const Operation& operation, const char* does, const Access& access, const char* did) {
  if (has_seen(operation, access)) return;
  const std::string text = operation.name + " " + does + " memory that " + access.name + " " + did +
                           ", without a wait between them";
  const std::vector<std::string> known = violations();
  if (std::find(known.begin(), known.end(), text) == known.end()) violation(text);
}

void touch_page(const Operation& operation, size_t index, bool writes) {
  Page& page = pages[index];
  for (const Access& write : page.writes) check(operation, writes ? "overwrites" : "reads", write, "writes");
  const Access access{operation.name, operation.stream, operation.clock[operation.stream]};
  if (writes) {
    for (const Access& read : page.reads) check(operation, "overwrites", read, "reads");
    page.writes = {access};
    page.reads.clear();
    return;
  }
  std::erase_if(page.reads, [&](const Access& read) { return read.stream == operation.stream; });
  page.reads.push_back(access);
}

}  // namespace

void merge(Clock& into, const Clock& from) {
  into.resize(std::max(into.size(), from.size()));
  for (size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

void watch_arena(char* memory, size_t bytes) {
  pages.clear();
  if (arena != nullptr) return;
  arena = memory;
  arena_bytes = bytes;
  touched.resize(bytes / kPage);
  touched_list.resize(bytes / kPage);
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &previous_action);
}

void forget_memory(const void* begin, size_t bytes) {
  const auto first = static_cast<size_t>(static_cast<const char*>(begin) - arena) / kPage;
  pages.erase(pages.lower_bound(first), pages.lower_bound(first + (bytes + kPage - 1) / kPage));
}

void touch(const Operation& operation, const void* begin, size_t bytes, bool writes) {
  const auto* at = static_cast<const char*>(begin);
  if (bytes == 0 || at < arena || at >= arena + arena_bytes) return;  // of the host
  const auto offset = static_cast<size_t>(at - arena);
  for (size_t page = offset / kPage; page <= (offset + bytes - 1) / kPage; ++page)
    touch_page(operation, page, writes);
}

void run_watched(const Operation& operation, size_t used_bytes, const std::function<void()>& body) {
  {
    thread_local SignalStack stack;
    open_bytes = used_bytes;
    is_watching = true;
    body();
    is_watching = false;
  }
  if (used_bytes > 0) mprotect(arena, used_bytes, PROT_NONE);
  for (size_t i = 0; i < num_touched; ++i) {
    const uint32_t page = touched_list[i];
    touch_page(operation, page, touched[page] == kWritten);
    touched[page] = kNot;
  }
  num_touched = 0;
}

std::string name_of_launch(const char* function, const char* file, int line) {
  const std::string text = function;
  std::string name;
  if (const size_t begin = text.find("launch_"); begin != std::string::npos)
    name = text.substr(begin, text.find_first_of("<( ", begin) - begin) + " ";
  const char* slash = std::strrchr(file, '/');
  return name + "(" + (slash == nullptr ? file : slash + 1) + ":" + std::to_string(line) + ")";
}

}  // namespace polyreme::fake_gpu
