#include "comm/mp/rank_processes.h"

#include <dirent.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstring>

#include "comm/rank_threads.h"

namespace polyreme {
namespace {

constexpr char kSecret[] = "secret of the test";

void make_pipe(int* read_end, int* write_end) {
  int ends[2];
  require<CommError>(pipe2(ends, O_CLOEXEC) == 0, "pipe2: ", std::strerror(errno));
  *read_end = ends[0];
  *write_end = ends[1];
}

int open_listener(int* port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  require<CommError>(
      bind(fd, generic, length) == 0 && listen(fd, 64) == 0 && getsockname(fd, generic, &length) == 0,
      "listener: ", std::strerror(errno));
  *port = ntohs(address.sin_port);
  return fd;
}

std::string read_to_end(int fd) {
  std::string text;
  char part[512];
  for (ssize_t n = read(fd, part, sizeof(part)); n > 0; n = read(fd, part, sizeof(part)))
    text.append(part, static_cast<size_t>(n));
  return text;
}

}  // namespace

RankProcesses::RankProcesses(int size, const RankMain& rank_main) : ranks_(static_cast<size_t>(size)) {
  const int listener = open_listener(&port_);
  job_id_ = concat("test", getpid(), "x", port_);
  start_ = std::chrono::steady_clock::now();
  std::fflush(nullptr);
  for (int r = 0; r < size; ++r) {
    Child& child = ranks_[static_cast<size_t>(r)];
    make_pipe(&child.outcome_fd, &own_outcome_fd_);
    make_pipe(&child.ready_fd, &own_ready_fd_);
    child.pid = fork();
    if (child.pid == 0) run_child(r, rank_main, listener);
    close(own_outcome_fd_);
    close(own_ready_fd_);
  }
  close(listener);
}

void RankProcesses::run_child(int rank, const RankMain& rank_main, int listener) {
  std::string outcome;
  try {
    TcpStoreOptions options = store_options();
    options.greeting_limit = options.timeout;
    if (rank == 0) {
      options.listen_fd = listener;
    } else {
      close(listener);
    }
    const auto store = rank == 0 ? TcpStore::serve(options) : TcpStore::connect(options);
    // All are there before anything can fail: who comes to a dead store only learns that nobody listens.
    if (store->add("here", 1) == static_cast<int64_t>(ranks_.size())) store->set("all here", "");
    store->get("all here", std::chrono::seconds(30));
    rank_main(*this, *store, rank);
    outcome = ::testing::Test::HasFailure() ? "a check of this process failed, see its output" : "ok";
  } catch (...) {
    outcome = outcome_of(std::current_exception());
  }
  [[maybe_unused]] const ssize_t written = write(own_outcome_fd_, outcome.data(), outcome.size());
  _exit(outcome == "ok" ? 0 : 1);
}

TcpStoreOptions RankProcesses::store_options() const { return {.port = port_, .secret = kSecret}; }

RankProcesses::~RankProcesses() {
  for (Child& child : ranks_) {
    if (child.pid > 0) {
      ::kill(child.pid, SIGKILL);
      waitpid(child.pid, nullptr, 0);
    }
    close(child.outcome_fd);
    close(child.ready_fd);
  }
}

void RankProcesses::kill(int rank, int signal) {
  start_ = std::chrono::steady_clock::now();
  ::kill(pid(rank), signal);
}

void RankProcesses::wait_until_ready(int rank) {
  char byte = 0;
  [[maybe_unused]] const ssize_t n = read(ranks_[static_cast<size_t>(rank)].ready_fd, &byte, 1);
}

void RankProcesses::ready() const { [[maybe_unused]] const ssize_t n = write(own_ready_fd_, "r", 1); }

std::vector<RankResult> RankProcesses::wait(std::chrono::seconds limit) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  std::vector<RankResult> results(ranks_.size());
  size_t left = ranks_.size();
  bool killed = false;
  while (left > 0) {
    for (size_t r = 0; r < ranks_.size(); ++r) {
      Child& child = ranks_[r];
      if (child.pid <= 0 || waitpid(child.pid, &results[r].status, WNOHANG) != child.pid) continue;
      results[r].pid = std::exchange(child.pid, -1);
      results[r].outcome = read_to_end(child.outcome_fd);
      results[r].elapsed =
          std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - start_);
      --left;
    }
    if (!killed && std::chrono::steady_clock::now() > deadline) {
      killed = true;
      for (const Child& child : ranks_)
        if (child.pid > 0) ::kill(child.pid, SIGKILL);
    }
    if (left > 0) usleep(1000);
  }
  return results;
}

std::vector<std::string> segments_left(const std::string& job_id) {
  std::vector<std::string> names;
  DIR* folder = opendir("/dev/shm");
  if (folder == nullptr) return names;
  while (const dirent* entry = readdir(folder))
    if (std::string(entry->d_name).starts_with("polyreme-" + job_id)) names.emplace_back(entry->d_name);
  closedir(folder);
  return names;
}

}  // namespace polyreme
