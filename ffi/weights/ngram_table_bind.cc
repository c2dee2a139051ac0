#include "weights/ngram_table_bind.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cmath>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include "weights/ngram_table.h"

namespace strata {
namespace {

namespace py = pybind11;

using RowNumbers = py::array_t<int64_t, py::array::c_style>;

constexpr const char* kModeNames[] = {"mmap", "ram", "direct"};

TableMode ModeOf(const std::string& name) {
  for (int i = 0; i < 3; ++i) {
    if (name == kModeNames[i]) return static_cast<TableMode>(i);
  }
  throw std::invalid_argument("ngram_table: mode " + name + ", mmap, ram or direct expected");
}

// Text that may name a file. Names need not be UTF-8; Python keeps their bytes as surrogates.
py::str Named(const std::string& text) {
  PyObject* const decoded =
      PyUnicode_DecodeFSDefaultAndSize(text.data(), static_cast<Py_ssize_t>(text.size()));
  if (decoded == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::str>(decoded);
}

void Check(const std::string& wrong) {
  if (wrong.empty()) return;
  PyErr_SetObject(PyExc_RuntimeError, Named("ngram_table: " + wrong).ptr());
  throw py::error_already_set();
}

// Runs a call without the interpreter's lock.
template <typename Call>
auto Unlocked(const Call& call) {
  py::gil_scoped_release release;
  return call();
}

// What a call of Python needs of its table, and the slot that programs name it by.
class TableHandle {
 public:
  TableHandle(const std::string& mode, int64_t type, int64_t num_rows, int64_t num_cols,
              uintptr_t address, const std::string& path, int64_t offset, int depth,
              int64_t cache_bytes, double timeout_s, bool use_uring, const std::string& name) {
    NgramTableOptions options;
    options.mode = ModeOf(mode);
    options.type = FindType(type);
    options.num_rows = num_rows;
    options.num_cols = num_cols;
    options.mapped = reinterpret_cast<const uint8_t*>(address);
    options.path = path;
    options.name = name;
    options.offset = offset;
    options.depth = depth;
    options.cache_bytes = cache_bytes;
    // An hour is as good as for ever, and NaN becomes 0, which Open refuses.
    options.timeout =
        std::chrono::milliseconds(std::lround(std::fmin(std::fmax(0.0, timeout_s), 3600.0) * 1000));
    options.use_uring = use_uring;
    Check(Unlocked([&] { return NgramTable::Open(options, &table_); }));
    slot_ = AddTable(table_);
  }
  ~TableHandle() { Close(); }

  void Close() {
    if (slot_ < 0) return;
    RemoveTable(slot_);
    slot_ = -1;
    std::shared_ptr<NgramTable> last = std::move(table_);
    Unlocked([&] { last = nullptr; });
  }

  // A hold of its own for every call: Close may come from another thread meanwhile.
  std::shared_ptr<NgramTable> Held() const {
    if (table_ == nullptr) throw std::runtime_error("ngram_table: the table is closed");
    return table_;
  }

  int64_t slot() const { return slot_; }
  std::string mode() const { return kModeNames[static_cast<int>(Held()->mode())]; }

  py::array_t<uint8_t> ReadRows(const RowNumbers& rows) {
    const auto table = Held();
    py::array_t<uint8_t> out({rows.size(), table->row_bytes()});
    uint8_t* bytes = out.mutable_data();
    Check(Unlocked([&] { return table->ReadRows(rows.data(), rows.size(), bytes); }));
    return out;
  }

  void Prefetch(const RowNumbers& rows) {
    const auto table = Held();
    Check(Unlocked([&] { return table->Prefetch(rows.data(), rows.size()); }));
  }

  int Lock() {
    const auto table = Held();
    return Unlocked([&] { return table->Lock(); });
  }

  int64_t Load(double max_s) {
    const auto table = Held();
    int64_t loaded = 0;
    Check(Unlocked([&] { return table->Load(max_s, &loaded); }));
    return loaded;
  }

  std::optional<double> Residency() const {
    const auto table = Held();
    const double fraction = Unlocked([&] { return table->Residency(); });
    return fraction < 0 ? std::nullopt : std::optional<double>(fraction);
  }

  py::dict Counters() const {
    const auto table = Held();
    const TableCounters& counters = table->counters();
    py::dict result;
    result["rows"] = counters.rows.load();
    result["repeats"] = counters.repeats.load();
    result["cache_hits"] = counters.cache_hits.load();
    result["awaited"] = counters.awaited.load();
    result["reads"] = counters.reads.load();
    result["bytes_read"] = counters.bytes_read.load();
    result["wait_us"] = counters.wait_us.load();
    result["ahead_rows"] = counters.ahead_rows.load();
    result["ahead_dropped"] = counters.ahead_dropped.load();
    return result;
  }

 private:
  std::shared_ptr<NgramTable> table_;
  int64_t slot_ = -1;
};

}  // namespace

void BindNgramTable(py::module_& module) {
  // Local: the CUDA library has this class, too.
  py::class_<TableHandle>(module, "NgramTable", py::module_local())
      .def(py::init<const std::string&, int64_t, int64_t, int64_t, uintptr_t, const std::string&,
                    int64_t, int, int64_t, double, bool, const std::string&>(),
           "`path` is bytes where it may not be UTF-8; `name` stands for it in a step's errors.",
           py::kw_only(), py::arg("mode"), py::arg("type"), py::arg("num_rows"),
           py::arg("num_cols"), py::arg("address"), py::arg("path"), py::arg("offset"),
           py::arg("depth") = 256, py::arg("cache_bytes") = int64_t{64} << 20,
           py::arg("timeout_s") = 30.0, py::arg("use_uring") = true, py::arg("name") = "")
      .def_property_readonly("slot", &TableHandle::slot)
      .def_property_readonly("mode", &TableHandle::mode, "The mode in use.")
      .def_property_readonly("note",
                             [](const TableHandle& self) { return Named(self.Held()->note()); })
      .def_property_readonly("how", [](const TableHandle& self) { return self.Held()->how(); })
      .def_property_readonly("row_bytes",
                             [](const TableHandle& self) { return self.Held()->row_bytes(); })
      .def_property_readonly("locked",
                             [](const TableHandle& self) { return self.Held()->locked(); })
      .def("read_rows", &TableHandle::ReadRows, py::arg("rows"))
      .def("prefetch", &TableHandle::Prefetch, py::arg("rows"))
      .def("lock", &TableHandle::Lock, "Locks what arrives from now on; an errno.")
      .def("load", &TableHandle::Load, py::arg("max_s"),
           "Brings the next part into memory; bytes of the table that came in so far.")
      .def("residency", &TableHandle::Residency, "Fraction in the page cache, if the system says.")
      .def("counters", &TableHandle::Counters)
      .def("close", &TableHandle::Close);
}

}  // namespace strata
