#pragma once

#include <pybind11/pybind11.h>

// One function per area; each adds its classes to the extension module.

namespace polyreme::bindings {

void bind_errors(pybind11::module_& m);
void bind_system(pybind11::module_& m);
void bind_world(pybind11::module_& m);
void bind_mesh(pybind11::module_& m);
void bind_group(pybind11::module_& m);
void bind_checkpoint(pybind11::module_& m);
void bind_data(pybind11::module_& m);
void bind_engine(pybind11::module_& m);
void bind_ops(pybind11::module_& m);
void bind_optim(pybind11::module_& m);
void bind_schedule(pybind11::module_& m);

}  // namespace polyreme::bindings
