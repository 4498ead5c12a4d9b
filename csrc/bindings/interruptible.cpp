#include "bindings/interruptible.h"

#include <string>
#include <utility>

namespace py = pybind11;

namespace polyreme::bindings {
namespace {

// What a signal handler raised in the call that this thread makes. An exception of C++ travels in its place:
// the layers between may put it into the text for the other ranks, or throw another one over it. Not freed
// with its thread, which may end after Python.
thread_local py::error_already_set* interrupt = nullptr;

void forget_interrupt() { delete std::exchange(interrupt, nullptr); }

// "KeyboardInterrupt", "SystemExit: 1"
std::string text_of(const py::error_already_set& error) {
  const std::string name = py::cast<std::string>(error.type().attr("__name__"));
  const std::string text = py::cast<std::string>(py::str(error.value()));
  return text.empty() ? name : name + ": " + text;
}

}  // namespace

Interruptible::Interruptible(Communicator* group) : group_(group) {
  forget_interrupt();
  scope_.emplace([this] { check(); });
  release_.emplace();
}

void Interruptible::check() {
  if (interrupt != nullptr) return;  // already on the way out, where something may wait as well
  std::string text;
  {
    const py::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() == 0) return;
    interrupt = new py::error_already_set;
    text = text_of(*interrupt);
  }
  if (group_ != nullptr) group_->abort(text);
  throw CommError(text);
}

bool restore_interrupt() {
  if (interrupt == nullptr) return false;
  interrupt->restore();
  forget_interrupt();
  return true;
}

}  // namespace polyreme::bindings
