// What the CUDA library and its emulated build both offer to Python.
#pragma once

#include <pybind11/pybind11.h>

namespace strata {

void BindDevice(pybind11::module_& module);

}  // namespace strata
