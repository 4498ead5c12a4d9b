#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cerrno>

#include "base/crc32c.h"
#include "bindings/array_view.h"
#include "bindings/bindings.h"
#include "checkpoint/file_ops.h"
#include "checkpoint/save_plan.h"
#include "checkpoint/shard_file.h"
#include "mesh/world.h"

namespace py = pybind11;
using namespace py::literals;

namespace polyreme::bindings {
namespace {

using Bytes = py::array_t<uint8_t, py::array::c_style>;
using Indices = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;

FileFault::Kind fault_kind(const std::string& name) {
  if (name == "kill") return FileFault::Kind::kKill;
  if (name == "error") return FileFault::Kind::kError;
  require(name == "delay", "unknown fault '", name, "'; expected kill, error or delay");
  return FileFault::Kind::kDelay;
}

// (name, dtype, shape)
using EntryTuple = std::tuple<std::string, std::string, std::vector<int64_t>>;

py::tuple write(FileOps& files, const std::string& directory, const std::string& name,
                const std::vector<EntryTuple>& entries, const std::map<std::string, std::string>& metadata,
                const Bytes& data) {
  ShardHeader header{.metadata = metadata, .entries = {}};
  for (const auto& [entry, dtype, shape] : entries)
    header.entries.push_back({.name = entry, .dtype = dtype, .shape = shape});
  const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(data.data()),
                                         static_cast<size_t>(data.nbytes()));
  ShardSummary summary;
  {
    const py::gil_scoped_release release;
    summary = write_shard(files, directory, name, std::move(header), bytes);
  }
  return py::make_tuple(summary.size_bytes, summary.header_crc32c);
}

// reads: rows of (begin, num_bytes, offset in `to`).
void read(const ShardFile& file, const Indices& reads, Bytes& to, bool is_alone) {
  require(reads.ndim() == 2 && reads.shape(1) == 3, "read: rows of (begin, num_bytes, offset) are expected");
  auto* base = reinterpret_cast<std::byte*>(to.mutable_data());
  std::vector<ShardRead> list;
  const auto rows = reads.unchecked<2>();
  for (py::ssize_t i = 0; i < rows.shape(0); ++i) {
    require(rows(i, 1) >= 0 && rows(i, 2) >= 0 && rows(i, 2) <= to.nbytes() - rows(i, 1), "read: row ", i,
            " does not fit the ", to.nbytes(), " bytes of the buffer");
    list.push_back({.begin = rows(i, 0), .num_bytes = rows(i, 1), .to = base + rows(i, 2)});
  }
  const py::gil_scoped_release release;
  file.read(std::move(list), is_alone);
}

py::tuple plan(const std::vector<std::tuple<std::string, int64_t, int64_t>>& tensors,
               const std::vector<Indices>& held, const std::vector<int32_t>& class_of_rank, int32_t rank,
               int64_t min_cut_bytes) {
  std::vector<PlanTensor> list;
  for (const auto& [name, num_elements, item_bytes] : tensors)
    list.push_back({name, num_elements, item_bytes});
  std::vector<std::vector<PlanPiece>> pieces;
  for (const Indices& rows : held) {
    require(rows.ndim() == 2 && rows.shape(1) == 3, "plan_save: rows of (tensor, begin, end) are expected");
    const auto row = rows.unchecked<2>();
    std::vector<PlanPiece>& own = pieces.emplace_back();
    own.reserve(static_cast<size_t>(row.shape(0)));
    for (py::ssize_t i = 0; i < row.shape(0); ++i)
      own.push_back({static_cast<int32_t>(row(i, 0)), row(i, 1), row(i, 2)});
  }
  SavePlan result;
  {
    const py::gil_scoped_release release;
    result = plan_save(list, pieces, class_of_rank, rank, min_cut_bytes);
  }
  Indices rows({static_cast<py::ssize_t>(result.pieces.size()), py::ssize_t{3}});
  auto row = rows.mutable_unchecked<2>();
  for (py::ssize_t i = 0; i < rows.shape(0); ++i) {
    const PlanPiece& piece = result.pieces[static_cast<size_t>(i)];
    row(i, 0) = piece.tensor;
    row(i, 1) = piece.begin;
    row(i, 2) = piece.end;
  }
  return py::make_tuple(rows, result.bytes_of_rank);
}

// The memory of a contiguous array as bytes, which keep the array; and the name of its dtype.
py::tuple array_bytes(const py::object& array, bool writable, const std::string& what) {
  auto* host = new HostArray(host_array(array, writable, what));
  const py::capsule owner(host, [](void* kept) { delete static_cast<HostArray*>(kept); });
  Bytes bytes({host->size_bytes()}, {py::ssize_t{1}}, static_cast<uint8_t*>(host->address), owner);
  if (!writable) bytes.attr("setflags")("write"_a = false);
  return py::make_tuple(dtype_name(host->dtype), bytes);
}

void bind_files(py::module_& m) {
  py::class_<FileOps>(m, "FileOps")
      .def(py::init([](int64_t at, const std::string& kind, int error_number, bool sticky, double delay_s,
                       bool keeps_trace) {
             return std::make_unique<FileOps>(FileFault{at, fault_kind(kind), error_number, sticky, delay_s},
                                              keeps_trace);
           }),
           py::kw_only(), "at"_a = 0, "kind"_a = "kill", "error_number"_a = EIO, "sticky"_a = false,
           "delay_s"_a = 0.0, "keeps_trace"_a = false)
      .def_property_readonly("num_points", &FileOps::num_points)
      .def_property_readonly("trace", &FileOps::trace)
      .def("make_directory", &FileOps::make_directory, "path"_a, py::call_guard<py::gil_scoped_release>())
      .def(
          "write_file",
          [](FileOps& files, const std::string& directory, const std::string& name, const py::bytes& data) {
            const std::string text = data;
            const py::gil_scoped_release release;
            files.write_file(directory, name, [&](int fd, const std::string& path) {
              files.write_at(fd, path, std::as_bytes(std::span(text)), 0);
            });
          },
          "directory"_a, "name"_a, "data"_a)
      .def("sync_directory", &FileOps::sync_directory, "path"_a, py::call_guard<py::gil_scoped_release>())
      .def("rename", &FileOps::rename, "directory"_a, "source"_a, "target"_a,
           py::call_guard<py::gil_scoped_release>())
      .def("exchange", &FileOps::exchange, "directory"_a, "a"_a, "b"_a,
           py::call_guard<py::gil_scoped_release>())
      .def("remove_file", &FileOps::remove_file, "directory"_a, "name"_a,
           py::call_guard<py::gil_scoped_release>())
      .def("remove_directory", &FileOps::remove_directory, "path"_a, py::call_guard<py::gil_scoped_release>())
      .def("write_shard", &write, "directory"_a, "name"_a, "entries"_a, "metadata"_a, "data"_a);
  m.def(
      "read_flat_file",
      [](const std::string& directory, const std::string& name, int64_t max_bytes) {
        std::string text;
        {
          const py::gil_scoped_release release;
          const InputFile file(directory, name);
          require<CheckpointCorrupt>(file.size_bytes() <= max_bytes, "'", file.path(), "' has ",
                                     file.size_bytes(), " bytes; expected at most ", max_bytes);
          text.resize(static_cast<size_t>(file.size_bytes()));
          file.read(text.data(), 0, file.size_bytes());
        }
        return py::bytes(text);
      },
      "directory"_a, "name"_a, "max_bytes"_a);
}

}  // namespace

void bind_checkpoint(py::module_& m) {
  bind_files(m);
  py::class_<ShardFile>(m, "ShardFile")
      .def(py::init([](const std::string& directory, const std::string& name, int64_t size_bytes,
                       uint32_t header_crc32c, const std::string& generation) {
             const ShardSummary expected{size_bytes, header_crc32c};
             const py::gil_scoped_release release;
             return std::make_unique<ShardFile>(directory, name, size_bytes < 0 ? nullptr : &expected,
                                                generation);
           }),
           "directory"_a, "name"_a, py::kw_only(), "size_bytes"_a = -1, "header_crc32c"_a = 0,
           "generation"_a = "")
      .def_property_readonly("path", &ShardFile::path)
      .def_property_readonly("data_bytes", &ShardFile::data_bytes)
      .def_property_readonly("metadata", [](const ShardFile& file) { return file.header().metadata; })
      .def_property_readonly(
          "entries",
          [](const ShardFile& file) {
            py::list result;
            for (const ShardEntry& e : file.header().entries)
              result.append(py::make_tuple(e.name, e.dtype, py::tuple(py::cast(e.shape)), e.begin, e.end));
            return result;
          })
      .def("read", &read, "reads"_a, "to"_a, py::kw_only(), "is_alone"_a = false);
  m.def("plan_save", &plan, "tensors"_a, "held"_a, "class_of_rank"_a, "rank"_a, "min_cut_bytes"_a = 1 << 20);
  m.def("array_bytes", &array_bytes, "array"_a, "writable"_a, "what"_a);
  m.def(
      "crc32c",
      [](const py::bytes& data) {
        const std::string_view text(data);
        return crc32c(text.data(), text.size());
      },
      "data"_a);
}

}  // namespace polyreme::bindings
