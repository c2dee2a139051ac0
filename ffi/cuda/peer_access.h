// Letting kernels of one device read and write another's memory.
#pragma once

#include <string>

namespace strata {

// Enables it for `device` towards `peer`; the current device is left as found. Enabling it again is
// success, and no error state stays behind: the next check of a launch would report it as its own.
// Returns why it cannot be had, or an empty string.
std::string EnablePeerAccess(int device, int peer);

}  // namespace strata
