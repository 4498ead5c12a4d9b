// libpolyreme_mpi.so: the only code that knows MPI.

#include "comm/mpi/mpi_table.h"

#include <dlfcn.h>
#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

struct PolyremeMpiBatch {
  struct Piece {
    int32_t peer;
    int32_t sends;
    int32_t may_be_shorter;
    int64_t num_bytes;
  };
  std::vector<MPI_Request> requests;
  std::vector<Piece> pieces;
  std::vector<int> ended;
  std::vector<MPI_Status> statuses;
  int32_t num_left = 0;
};

namespace {

// MPI counts in int; smaller pieces show progress.
constexpr int64_t kPieceBytes = int64_t{64} << 20;

// MPI is one per process, and so is what is known of it.
struct Process {
  std::mutex mutex;  // MPI_THREAD_SERIALIZED: one call at a time
  bool started = false;
  bool given_up = false;
  pid_t pid = 0;
  int32_t next_tag = 0;
  MPI_Comm comm = MPI_COMM_NULL;
  PolyremeMpiWorld world{};
};
Process& process() {
  static Process the_process;
  return the_process;
}

PolyremeMpiStatus outcome(int32_t code, const char* what, const char* why) {
  PolyremeMpiStatus status{};
  status.code = code;
  std::snprintf(status.text, sizeof(status.text), "%s: %s", what, why);
  return status;
}

PolyremeMpiStatus from_mpi(int code, const char* what) {
  if (code == MPI_SUCCESS) return {};
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(code, text, &length);
  return outcome(code, what, text);
}

// Open MPI opens plug-ins that look for its own symbols among the global ones, where a library that was
// opened with RTLD_LOCAL has none.
void show_symbols_of_mpi() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(&MPI_Init_thread), &info) != 0 && info.dli_fname != nullptr)
    dlopen(info.dli_fname, RTLD_NOW | RTLD_GLOBAL | RTLD_NOLOAD);
}

void finish() {
  Process& self = process();
  int finished = 1;
  // A forked child inherits the handler, but not MPI.
  if (self.given_up || getpid() != self.pid) return;
  if (MPI_Finalized(&finished) == MPI_SUCCESS && finished == 0) MPI_Finalize();
}

PolyremeMpiStatus start_mpi() {
  int initialized = 0, finalized = 0, level = MPI_THREAD_SINGLE;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  if (finalized != 0)
    return outcome(POLYREME_MPI_UNUSABLE, "MPI",
                   "it has been finalized in this process and cannot start again");
  if (initialized == 0) {
    show_symbols_of_mpi();
    if (const int code = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &level);
        code != MPI_SUCCESS)
      return from_mpi(code, "MPI_Init_thread");
    std::atexit(finish);
  } else {
    MPI_Query_thread(&level);
  }
  if (level < MPI_THREAD_SERIALIZED)
    return outcome(
        POLYREME_MPI_UNUSABLE, "MPI",
        "it was started without support for threads (MPI_THREAD_SERIALIZED is needed); let polyreme start "
        "it, or pass that level to MPI_Init_thread");
  return {};
}

PolyremeMpiStatus describe_world(Process& self) {
  if (const int code = MPI_Comm_dup(MPI_COMM_WORLD, &self.comm); code != MPI_SUCCESS)
    return from_mpi(code, "MPI_Comm_dup");
  MPI_Comm_set_errhandler(self.comm, MPI_ERRORS_RETURN);
  MPI_Comm_rank(self.comm, &self.world.rank);
  MPI_Comm_size(self.comm, &self.world.size);
  int *max_tag = nullptr, found = 0, length = 0;
  MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &max_tag, &found);
  self.world.max_tag = found != 0 ? *max_tag : 32767;
  char version[MPI_MAX_LIBRARY_VERSION_STRING] = {};
  MPI_Get_library_version(version, &length);
  std::snprintf(self.world.library, sizeof(self.world.library), "%.*s",
                static_cast<int>(std::min(std::strcspn(version, "\n"), sizeof(self.world.library) - 1)),
                version);
  return {};
}

PolyremeMpiStatus start(PolyremeMpiWorld* world) {
  Process& self = process();
  const std::lock_guard lock(self.mutex);
  if (!self.started) {
    self.pid = getpid();
    PolyremeMpiStatus status = start_mpi();
    if (status.code == POLYREME_MPI_SUCCESS) status = describe_world(self);
    if (status.code != POLYREME_MPI_SUCCESS) return status;
    self.started = true;
  }
  *world = self.world;
  return {};
}

void give_up() {
  const std::lock_guard lock(process().mutex);
  process().given_up = true;
}

int32_t reserve_tags(int32_t at_least) {
  const std::lock_guard lock(process().mutex);
  return process().next_tag = std::max(process().next_tag, at_least);
}

PolyremeMpiStatus post_message(PolyremeMpiBatch& batch, const PolyremeMpiMessage& message) {
  for (int64_t begin = 0; begin < message.num_bytes; begin += kPieceBytes) {
    const int64_t num_bytes = std::min(kPieceBytes, message.num_bytes - begin);
    char* data = static_cast<char*>(message.data) + begin;
    const int peer = message.peer < 0 ? MPI_ANY_SOURCE : message.peer;
    MPI_Request request = MPI_REQUEST_NULL;
    const int code = message.sends != 0 ? MPI_Isend(data, static_cast<int>(num_bytes), MPI_BYTE, peer,
                                                    message.tag, process().comm, &request)
                                        : MPI_Irecv(data, static_cast<int>(num_bytes), MPI_BYTE, peer,
                                                    message.tag, process().comm, &request);
    if (code != MPI_SUCCESS) return from_mpi(code, message.sends != 0 ? "MPI_Isend" : "MPI_Irecv");
    batch.requests.push_back(request);
    batch.pieces.push_back({message.peer, message.sends, message.may_be_shorter, num_bytes});
    ++batch.num_left;
  }
  return {};
}

PolyremeMpiStatus post(const PolyremeMpiMessage* messages, int32_t num_messages, PolyremeMpiBatch** batch) {
  const std::lock_guard lock(process().mutex);
  *batch = new PolyremeMpiBatch;
  for (int32_t i = 0; i < num_messages; ++i)
    if (const PolyremeMpiStatus status = post_message(**batch, messages[i]);
        status.code != POLYREME_MPI_SUCCESS)
      return status;
  (*batch)->ended.resize((*batch)->requests.size());
  (*batch)->statuses.resize((*batch)->requests.size());
  return {};
}

// What a receive brought; compared with what was expected.
PolyremeMpiStatus take(const PolyremeMpiBatch::Piece& piece, const MPI_Status& status, int error,
                       PolyremeMpiProgress* progress) {
  if (piece.sends != 0) return from_mpi(error, "MPI_Isend");
  int error_class = MPI_SUCCESS, count = 0;
  MPI_Error_class(error, &error_class);
  MPI_Get_count(&status, MPI_BYTE, &count);
  progress->peer = status.MPI_SOURCE;
  progress->num_bytes = count;
  const bool is_short = count < piece.num_bytes && piece.may_be_shorter == 0;
  if (error_class != MPI_ERR_TRUNCATE && (error != MPI_SUCCESS || !is_short))
    return from_mpi(error, "MPI_Irecv");
  char text[64];
  std::snprintf(text, sizeof(text), "%s than the %lld expected", is_short ? "fewer bytes" : "more bytes",
                static_cast<long long>(piece.num_bytes));
  return outcome(POLYREME_MPI_WRONG_SIZE, "a message", text);
}

PolyremeMpiStatus test(PolyremeMpiBatch* batch, PolyremeMpiProgress* progress) {
  const std::lock_guard lock(process().mutex);
  *progress = {};
  PolyremeMpiStatus first{};
  if (batch->num_left > 0) {
    int num_ended = 0;
    const int code = MPI_Testsome(static_cast<int>(batch->requests.size()), batch->requests.data(),
                                  &num_ended, batch->ended.data(), batch->statuses.data());
    if (code != MPI_SUCCESS && code != MPI_ERR_IN_STATUS) return from_mpi(code, "MPI_Testsome");
    for (int i = 0; i < num_ended && num_ended != MPI_UNDEFINED; ++i) {
      const MPI_Status& status = batch->statuses[static_cast<size_t>(i)];
      const int error = code == MPI_ERR_IN_STATUS ? status.MPI_ERROR : MPI_SUCCESS;
      --batch->num_left;
      ++progress->num_ended;
      const auto& piece = batch->pieces[static_cast<size_t>(batch->ended[static_cast<size_t>(i)])];
      if (first.code == POLYREME_MPI_SUCCESS) first = take(piece, status, error, progress);
    }
  }
  progress->num_left = batch->num_left;
  return first;
}

void pending(const PolyremeMpiBatch* batch, uint8_t* is_pending) {
  for (size_t i = 0; i < batch->requests.size(); ++i)
    if (batch->requests[i] != MPI_REQUEST_NULL) is_pending[batch->pieces[i].peer] = 1;
}

int32_t end(PolyremeMpiBatch* batch) {
  const std::lock_guard lock(process().mutex);
  int finalized = 0;
  MPI_Finalized(&finalized);
  bool all_ended = true;
  for (size_t i = 0; i < batch->requests.size() && finalized == 0; ++i) {
    MPI_Request& request = batch->requests[i];
    if (request == MPI_REQUEST_NULL) continue;
    if (batch->pieces[i].sends == 0) MPI_Cancel(&request);
    int ended = 0;
    MPI_Test(&request, &ended, MPI_STATUS_IGNORE);
    all_ended = all_ended && ended != 0;
  }
  delete batch;
  return all_ended ? 1 : 0;
}

const PolyremeMpiTable kTable = {
    POLYREME_MPI_TABLE_VERSION,
    sizeof(PolyremeMpiTable),
    start,
    give_up,
    reserve_tags,
    post,
    test,
    pending,
    end,
};

}  // namespace

extern "C" __attribute__((visibility("default"))) const PolyremeMpiTable* polyreme_mpi_table(void) {
  return &kTable;
}
