// Python's hold on the n-gram table.
#pragma once

#include <pybind11/pybind11.h>

namespace strata {

// Adds the class NgramTable to the module.
void BindNgramTable(pybind11::module_& module);

}  // namespace strata
