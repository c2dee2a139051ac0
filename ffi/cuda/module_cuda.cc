// The CUDA library. It is loaded where a device is wanted, never by _native.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cuda/devices.h"
#include "cuda/module_device.h"

namespace strata {
namespace {

namespace py = pybind11;

py::object VersionOrNone(int version) {
  if (version == 0) return py::none();
  return py::str(std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10));
}

py::object TextOrNone(const std::string& text) {
  if (text.empty()) return py::none();
  return py::str(text);
}

py::dict Describe(const CudaDevice& device) {
  py::dict fields;
  fields["index"] = device.index;
  fields["name"] = device.name;
  fields["capability"] = std::to_string(device.major) + "." + std::to_string(device.minor);
  fields["pci_id"] = device.pci_id;
  fields["total_mib"] = device.total_mib;
  fields["free_mib"] = device.free_mib;
  fields["problem"] = TextOrNone(device.problem);
  fields["peers"] = device.peers;
  return fields;
}

py::dict Machine() {
  CudaMachine machine;
  {
    py::gil_scoped_release release;  // contexts take a while to create
    machine = ExamineMachine();
  }
  py::list devices;
  for (const CudaDevice& device : machine.devices) devices.append(Describe(device));
  py::dict fields;
  fields["driver"] = VersionOrNone(machine.driver_version);
  fields["runtime"] = VersionOrNone(machine.runtime_version);
  fields["problem"] = TextOrNone(machine.problem);
  fields["devices"] = devices;
  return fields;
}

}  // namespace

PYBIND11_MODULE(_native_cuda, module) {
  module.doc() = "CUDA side of strata_jax.";
  module.def("machine", &Machine,
             "Versions, devices and what keeps each from being used; see _native_cuda.pyi.");
  module.def("built_archs", &BuiltArchs, "Architectures this build has code for.");
  BindDevice(module);
}

}  // namespace strata
