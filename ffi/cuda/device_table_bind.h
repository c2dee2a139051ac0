// Python's hold on the n-gram table of a device.
#pragma once

#include <pybind11/pybind11.h>

namespace strata {

// Adds the class DeviceTable; its signature is in device_table.h.
void BindDeviceTable(pybind11::module_& module);

}  // namespace strata
