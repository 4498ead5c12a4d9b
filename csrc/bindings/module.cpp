#include "bindings/bindings.h"

PYBIND11_MODULE(_core, m) {
  m.doc() = "The C++ core of polyreme. Private: use the polyreme package.";
  namespace bindings = polyreme::bindings;
  bindings::bind_errors(m);
  bindings::bind_system(m);
  bindings::bind_world(m);
  bindings::bind_mesh(m);
  bindings::bind_group(m);
  bindings::bind_checkpoint(m);
  bindings::bind_data(m);
  bindings::bind_engine(m);
  bindings::bind_ops(m);
  bindings::bind_optim(m);
  bindings::bind_schedule(m);
}
