#include <pybind11/numpy.h>

#include "bindings/bindings.h"
#include "data/token_dataset.h"

namespace py = pybind11;
using namespace py::literals;

namespace polyreme::bindings {

void bind_data(py::module_& m) {
  py::class_<TokenDataset>(m, "TokenDataset")
      .def(py::init<const std::string&>(), "path"_a)
      .def_property_readonly("path", &TokenDataset::path)
      .def_property_readonly("num_tokens", &TokenDataset::num_tokens)
      .def_property_readonly("vocab_size", &TokenDataset::vocab_size)
      .def("subset", &TokenDataset::subset, "begin"_a, "end"_a)
      .def("num_samples", &TokenDataset::num_samples, "seq_len"_a)
      .def(
          "read_sample",
          [](const TokenDataset& data, int64_t index, int64_t seq_len) {
            py::array_t<int32_t> tokens(seq_len), targets(seq_len);
            data.read_sample(index, seq_len, data.vocab_size(), tokens.mutable_data(),
                             targets.mutable_data());
            return py::make_tuple(tokens, targets);
          },
          "index"_a, "seq_len"_a);

  py::class_<SampleOrder>(m, "SampleOrder")
      .def(py::init<int64_t, uint64_t, bool>(), "num_samples"_a, "seed"_a, "shuffle"_a)
      .def("__call__", &SampleOrder::operator(), "position"_a);
}

}  // namespace polyreme::bindings
