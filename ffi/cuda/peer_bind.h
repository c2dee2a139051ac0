// What Python asks of a peer before there is one.
#pragma once

#include <pybind11/pybind11.h>

namespace strata {

void BindPeer(pybind11::module_& module);

}  // namespace strata
