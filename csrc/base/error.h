#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

namespace polyreme {

// The root of every exception that the library throws. A message names the operation, what was
// expected, what came, and what to do. Python sees the same tree in `polyreme.errors`.
class Error : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// An argument breaks the documented contract. Nothing was changed. Also a ValueError in Python.
class InvalidArgument : public Error {
  using Error::Error;
};
// The feature or backend is not in this build or on this machine; the message has the remedy.
class NotAvailable : public Error {
  using Error::Error;
};
// A device operation failed or broke the ordering rules of streams.
class DeviceError : public Error {
  using Error::Error;
};
// Memory could not be had. Also a MemoryError in Python.
class OutOfMemory : public Error {
  using Error::Error;
};
// A gradient or a loss stopped being a finite number. The weights are as before the step.
class NumericError : public Error {
  using Error::Error;
};

// Anything that goes wrong between ranks.
class CommError : public Error {
  using Error::Error;
};
// A rank died or closed its connection; the message names it.
class PeerLost : public CommError {
  using CommError::CommError;
};
// A deadline passed; the message names who was waited for. Also a TimeoutError in Python.
class Timeout : public CommError {
  using CommError::CommError;
};
// Ranks called different collectives, or the same one with different arguments. No user memory was written.
class CollectiveMismatch : public CommError {
  using CommError::CommError;
};

// A checkpoint could not be written or read; the message names rank, path and reason.
class CheckpointError : public Error {
  using Error::Error;
};
// A checkpoint is not what was written: truncated, damaged, or made by somebody else.
class CheckpointCorrupt : public CheckpointError {
  using CheckpointError::CheckpointError;
};

// Joins its arguments as text: concat("rank ", 3, " of ", 4).
template <typename... Args>
std::string concat(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return std::move(out).str();
}

// Throws `E` with the joined message unless `condition` holds.
template <typename E = InvalidArgument, typename... Args>
void require(bool condition, const Args&... args) {
  if (!condition) [[unlikely]]
    throw E(concat(args...));
}

}  // namespace polyreme
