#include <new>

#include "base/error.h"
#include "bindings/bindings.h"

namespace py = pybind11;

namespace polyreme::bindings {
namespace {

void raise(const char* name, const std::exception& error) {
  const py::object type = py::module_::import("polyreme.errors").attr(name);
  PyErr_SetString(type.ptr(), error.what());
}

}  // namespace

// The classes are Python's (polyreme.errors), since some have two bases (ValueError, TimeoutError).
void bind_errors(py::module_&) {
  py::register_exception_translator([](std::exception_ptr pointer) {
    if (!pointer) return;
    // A Ctrl-C that came while the call ran is the cause of what it threw, or at least the wish of the user.
    if (PyErr_CheckSignals() != 0) return;
    try {
      std::rethrow_exception(pointer);
    } catch (const InvalidArgument& error) {
      raise("InvalidArgument", error);
    } catch (const NotAvailable& error) {
      raise("NotAvailable", error);
    } catch (const DeviceError& error) {
      raise("DeviceError", error);
    } catch (const OutOfMemory& error) {
      raise("OutOfMemory", error);
    } catch (const NumericError& error) {
      raise("NumericError", error);
    } catch (const PeerLost& error) {
      raise("PeerLost", error);
    } catch (const Timeout& error) {
      raise("Timeout", error);
    } catch (const CollectiveMismatch& error) {
      raise("CollectiveMismatch", error);
    } catch (const CommError& error) {
      raise("CommError", error);
    } catch (const CheckpointCorrupt& error) {
      raise("CheckpointCorrupt", error);
    } catch (const CheckpointError& error) {
      raise("CheckpointError", error);
    } catch (const Error& error) {
      raise("Error", error);
    } catch (const std::bad_alloc& error) {
      raise("OutOfMemory", error);
    }
  });
}

}  // namespace polyreme::bindings
