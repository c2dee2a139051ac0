#include "cuda/device_table_bind.h"

#include <pybind11/stl.h>

#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>

#include "cuda/device_table.h"
#include "cuda/table_reader.h"

namespace strata {
namespace {

namespace py = pybind11;

TablePlace PlaceOf(const std::string& name) {
  if (name == "device") return TablePlace::kDevice;
  if (name == "mapped") return TablePlace::kMapped;
  throw std::invalid_argument("ngram_table: place " + name + ", device or mapped expected");
}

void Check(const std::string& wrong) {
  if (!wrong.empty()) throw std::runtime_error("ngram_table: " + wrong);
}

class DeviceTableHandle {
 public:
  static std::unique_ptr<DeviceTableHandle> ReadByHost(int64_t table, int64_t most_rows,
                                                       int64_t timeout_ms) {
    std::unique_ptr<DeviceTableHandle> made(new DeviceTableHandle);
    std::string wrong;
    {
      const py::gil_scoped_release release;
      wrong = DeviceTable::OpenRead(FindTable(table), most_rows, timeout_ms, &made->table_);
    }
    Check(wrong);
    made->slot_ = AddDeviceTable(made->table_);
    return made;
  }
  DeviceTableHandle(const std::string& place, int64_t type, int64_t num_rows, int64_t num_cols,
                    uintptr_t address) {
    const TablePlace where = PlaceOf(place);
    std::string wrong;
    {
      const py::gil_scoped_release release;  // locking memory takes a while
      wrong = DeviceTable::Open(where, FindType(type), num_rows, num_cols,
                                reinterpret_cast<const uint8_t*>(address), &table_);
    }
    Check(wrong);
    slot_ = AddDeviceTable(table_);
  }
  ~DeviceTableHandle() { Close(); }

  void Close() {
    if (slot_ < 0) return;
    RemoveDeviceTable(slot_);
    slot_ = -1;
    std::shared_ptr<DeviceTable> last = std::move(table_);
    const py::gil_scoped_release release;
    last = nullptr;
  }

  // A hold of its own for every call: Close may come from another thread meanwhile.
  std::shared_ptr<DeviceTable> Held() const {
    if (table_ == nullptr) throw std::runtime_error("ngram_table: the table is closed");
    return table_;
  }

  int64_t slot() const { return slot_; }

  int64_t Load(double max_s) {
    const auto table = Held();
    int64_t loaded = 0;
    std::string wrong;
    {
      const py::gil_scoped_release release;
      wrong = table->Load(max_s, &loaded);
    }
    Check(wrong);
    return loaded;
  }

  void Wake() { Reader(Held()).Wake(); }
  std::string Problem() { return Reader(Held()).Problem(); }
  bool Recover() {
    const auto table = Held();
    const py::gil_scoped_release release;
    return Reader(table).Recover();
  }
  void Stall(int64_t milliseconds, int64_t timeout_ms) {
    TableReader& reader = Reader(Held());
    reader.SetTimeout(timeout_ms);
    reader.stall().Ask(std::chrono::milliseconds(milliseconds));
  }

 private:
  DeviceTableHandle() = default;

  static TableReader& Reader(const std::shared_ptr<DeviceTable>& table) {
    if (table->reader() == nullptr) {
      throw std::invalid_argument("ngram_table: the table is in memory, nobody reads it");
    }
    return *table->reader();
  }

  std::shared_ptr<DeviceTable> table_;
  int64_t slot_ = -1;
};

}  // namespace

void BindDeviceTable(py::module_& module) {
  py::class_<DeviceTableHandle>(module, "DeviceTable")
      .def(py::init<const std::string&, int64_t, int64_t, int64_t, uintptr_t>(), py::kw_only(),
           py::arg("place"), py::arg("type"), py::arg("num_rows"), py::arg("num_cols"),
           py::arg("address"))
      .def_static("read_by_host", &DeviceTableHandle::ReadByHost, py::kw_only(), py::arg("table"),
                  py::arg("most_rows"), py::arg("timeout_ms"))
      .def_property_readonly("slot", &DeviceTableHandle::slot)
      .def_property_readonly("row_bytes",
                             [](const DeviceTableHandle& self) { return self.Held()->row_bytes(); })
      .def_property_readonly("num_bytes",
                             [](const DeviceTableHandle& self) { return self.Held()->num_bytes(); })
      .def("load", &DeviceTableHandle::Load, py::arg("max_s"),
           "Copies the next part; bytes of the table that are there so far.")
      .def("wake", &DeviceTableHandle::Wake, "A step is about to come.")
      .def("problem", &DeviceTableHandle::Problem, "Why results mean nothing; empty if they do.")
      .def("recover", &DeviceTableHandle::Recover, "Fit for use again; false: a thread is lost.")
      .def("stall", &DeviceTableHandle::Stall, py::arg("milliseconds"), py::arg("timeout_ms"))
      .def("close", &DeviceTableHandle::Close);
}

}  // namespace strata
