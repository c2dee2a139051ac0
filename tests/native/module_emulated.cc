// The CUDA library's operations on an emulated device, for tests on machines without a GPU: the
// functions of module_cuda.cc, and what only an emulated device has.

#include <pybind11/pybind11.h>

#include "cuda/module_device.h"
#include "emulate/cuda.h"

namespace strata {
namespace {

namespace py = pybind11;

constexpr int64_t kMib = int64_t{1} << 20;

py::dict Machine() {
  size_t free_bytes = 0, total_bytes = 0;
  cudaMemGetInfo(&free_bytes, &total_bytes);
  py::dict device;
  device["index"] = 0;
  device["name"] = "emulated";
  device["capability"] = "8.9";
  device["pci_id"] = "0000:00:00.0";
  device["total_mib"] = static_cast<int64_t>(total_bytes) / kMib;
  device["free_mib"] = static_cast<int64_t>(free_bytes) / kMib;
  device["problem"] = py::none();
  device["peers"] = py::list();
  py::list devices;
  devices.append(device);
  py::dict fields;
  fields["driver"] = py::none();
  fields["runtime"] = "emulated";
  fields["problem"] = py::none();
  fields["devices"] = devices;
  return fields;
}

}  // namespace

PYBIND11_MODULE(_native_emulated, module) {
  module.doc() = "CUDA side of strata_jax on an emulated device.";
  module.def("machine", &Machine, "As _native_cuda's: one device.");
  module.def("built_archs", [] { return py::make_tuple("emulated"); });
  BindDevice(module);
  module.def("set_order", &emulate::SetOrder, py::arg("seed"),
             "Order of threads and blocks from now on: 0 natural, 1 reverse, others shuffled.");
  module.def("launches", &emulate::NumLaunches, "Kernels launched since the process began.");
  module.def("set_device_memory", &emulate::SetDeviceMemory, py::arg("bytes"),
             "Size of the device's memory; what is allocated stays.");
  module.def("set_copy_limit", &emulate::SetCopyLimit, py::arg("bytes"),
             "Copies of more bytes fail from now on.");
  module.def("set_capability", &emulate::SetCapability, py::arg("major"),
             "Major number of the device's compute capability; 8 at first.");
  module.def("set_multiprocessors", &emulate::SetMultiprocessors, py::arg("count"),
             "The device's multiprocessors; 4 at first.");
  module.def("device_bytes", &emulate::DeviceBytes, "Device memory in use.");
  module.def("pinned_bytes", &emulate::PinnedBytes, "Page-locked host memory in use.");
}

}  // namespace strata
